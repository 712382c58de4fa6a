"""Low-rank products: ``y = alpha x @ B @ A (+ b)``.

``dy_o/dA_ro = alpha (x B)_r``: a dense product that reads ``x B``. ``dy_o/dB_ir = alpha x_i A_ro``:
B reaches every output through A, and a trace of its own would have an entry for each. So its slot
holds that of the effective weight ``W = B A``, whose entries feed one output each, ``e_io = D_o
e_io' + alpha D_f,o x_i``, and its gradient is pulled back through A on demand: ``dL/dB_ir = sum_o
dL/dW_io A_ro``. That is exact as long as A stays as it is.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from .._signatures import refuses
from ..errors import EtpDtypeError
from ._operands import (
    bias_operands,
    check_rank,
    check_shape,
    input_operand,
    trainable_operand,
    unit_product,
    with_unit,
)
from ._primitive import ETPPrimitive
from ._rule_parts import add_bias, bias_at, output_trace, over_columns, vjp_of, zeros_trace
from ._spec import ETPPrimitiveSpec, register_both_forms, register_primitive_spec
from .dense import check_features


def _impl(x, lora_b, lora_a, *bias, alpha=1.0, has_bias: bool = False):
    y = alpha * (x @ lora_b @ lora_a)
    return add_bias(y, bias[0]) if has_bias else y


def _yw_to_w(hidden_dim, trace, *, alpha=1.0, has_bias: bool = False):
    return over_columns(hidden_dim, trace)


def _instant(batched: bool):
    def instant_drtrl(x, hidden_dim, weights, *, alpha=1.0, has_bias: bool = False):
        x, d = (x, hidden_dim) if batched else (x[None], hidden_dim[None])
        entry = {'lora_b': alpha * (x.T @ d), 'lora_a': alpha * ((x @ weights['lora_b']).T @ d)}
        entry |= {'bias': d.sum(0)} if has_bias else {}
        return {name: value.astype(weights[name].dtype) for name, value in entry.items()}

    return instant_drtrl


def _solve(batched: bool):
    def solve_drtrl(signal, trace, weights, *, alpha=1.0, has_bias: bool = False):
        scaled = over_columns(signal, trace)
        summed = {name: value.sum(0) if batched else value for name, value in scaled.items()}
        return {**summed, 'lora_b': summed['lora_b'] @ weights['lora_a'].T}

    return solve_drtrl


def _init_drtrl(batched: bool):
    def init_drtrl(x_var, y_var, weight_vars, num_hidden_state):
        batch = x_var.aval.shape[:1] if batched else ()
        shapes = {name: var.aval.shape for name, var in weight_vars.items()}
        shapes['lora_b'] = (*shapes['lora_b'][:-1], shapes['lora_a'][-1])
        return {
            name: zeros_trace((*batch, *shapes[name]), var, num_hidden_state)
            for name, var in weight_vars.items()
        }

    return init_drtrl


def _register(batched: bool) -> ETPPrimitive:
    trainable_invars = bias_at(3, lora_b=1, lora_a=2)
    return register_primitive_spec(
        ETPPrimitiveSpec(
            'etp_lora_mm' if batched else 'etp_lora_mv',
            _impl,
            _yw_to_w,
            vjp_of(_impl, trainable_invars),
            _init_drtrl(batched),
            output_trace,
            trainable_invars,
            batched=batched,
            instant_drtrl=_instant(batched),
            solve_drtrl=_solve(batched),
        )
    )


etp_lora_mm_p, etp_lora_mv_p = register_both_forms(_register)


def _static_number(alpha) -> float | complex:
    if isinstance(alpha, np.generic | np.ndarray | jax.Array) and alpha.ndim == 0:
        with contextlib.suppress(jax.errors.ConcretizationTypeError):
            alpha = alpha.item()
    if isinstance(alpha, bool) or not isinstance(alpha, int | float | complex):
        raise EtpDtypeError(
            f'lora_matmul: alpha is a {type(alpha).__name__}, expected a Python number, fixed when '
            'the function is traced. Multiply x by a scale that varies or has a unit.'
        )
    return complex(alpha) if isinstance(alpha, complex) else float(alpha)


@refuses(
    'lora_matmul',
    b_fn='Write `lora_matmul(x, fn(B), A)`.',
    a_fn='Write `lora_matmul(x, B, fn(A))`.',
    bias_fn='Write `lora_matmul(x, B, A, bias=fn(bias))`.',
)
def lora_matmul(x, B, A, *, alpha=1.0, bias=None) -> jax.Array:
    """Multiply by a traced matrix of low rank: ``y = alpha * x @ B @ A (+ bias)``.

    ``x`` is ``(in,)`` or ``(batch, in)``, ``B`` ``(in, rank)``, ``A`` ``(rank, out)``, ``bias``
    ``(out,)`` and ``alpha`` a Python number; y is ``(out,)`` or ``(batch, out)`` with the product
    of the units of x, B and A.

    Raises ``EtpShapeError``, ``EtpDtypeError`` or ``EtpUnitError`` for an operand that does not
    fit.

    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.lora_matmul(jnp.ones((1, 3)), jnp.ones((3, 2)), jnp.ones((2, 4)), alpha=0.5)
    Array([[3., 3., 3., 3.]], dtype=float32)
    """
    op = 'lora_matmul'
    lora_b, b_unit = trainable_operand(op, 'B', B)
    lora_a, a_unit = trainable_operand(op, 'A', A)
    x, x_unit = input_operand(op, 'x', x, jnp.result_type(lora_b, lora_a))
    check_features(op, x)
    check_rank(op, 'B', lora_b.shape, {2: '(in, rank)'}, 'Reshape it to a matrix.')
    check_rank(op, 'A', lora_a.shape, {2: '(rank, out)'}, 'Reshape it to a matrix.')
    rank, why = lora_b.shape[1], f'x of shape {x.shape} has {x.shape[-1]} features'
    check_shape(op, 'B', lora_b.shape, (x.shape[-1], rank), why)
    check_shape(op, 'A', lora_a.shape, (rank, lora_a.shape[1]), f'B has rank {rank}')
    unit = unit_product(x_unit, b_unit, a_unit)
    bias = bias_operands(op, bias, lora_a.shape[1:], unit)
    primitive = etp_lora_mm_p if x.ndim == 2 else etp_lora_mv_p
    alpha = _static_number(alpha)
    y = primitive.bind(x, lora_b, lora_a, *bias, alpha=alpha, has_bias=bool(bias))
    return with_unit(y, unit)
