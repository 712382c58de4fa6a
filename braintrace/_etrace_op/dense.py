"""Dense products: ``y = x @ W (+ b)``.

``y_o = sum_i x_i W_io + b_o``, so ``dy_o/dW_io = x_i`` and ``dy_o/db_o = 1``, and an entry reaches
one element of y. In the trace ``e = D e' + D_f dy/dw`` of a sample a step so adds ``D_f,o x_i`` to
``e_io``, and ``D_o`` multiplies column o. At a signal g, ``dL/dW_io = sum_b x_bi g_bo``.
"""

from __future__ import annotations

import jax

from .._signatures import refuses
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
from ._rule_parts import add_bias, bias_at, output_trace, over_columns, parameter_trace, vjp_of
from ._spec import ETPPrimitiveSpec, register_both_forms, register_primitive_spec


def _impl(x, weight, *bias, has_bias: bool = False):
    y = x @ weight
    return add_bias(y, bias[0]) if has_bias else y


def _yw_to_w(hidden_dim, trace, *, has_bias: bool = False):
    return over_columns(hidden_dim, trace)


def _register(batched: bool) -> ETPPrimitive:
    trainable_invars = bias_at(2, weight=1)
    return register_primitive_spec(
        ETPPrimitiveSpec(
            'etp_mm' if batched else 'etp_mv',
            _impl,
            _yw_to_w,
            vjp_of(_impl, trainable_invars),
            parameter_trace(batched),
            output_trace,
            trainable_invars,
            batched=batched,
        )
    )


etp_mm_p, etp_mv_p = register_both_forms(_register)


def check_features(op: str, x) -> None:
    """Refuse an x that is neither ``(in,)`` nor ``(batch, in)``."""
    hint = 'Give x a feature axis.'
    if x.ndim > 2:
        hint = (
            'Of a whole sequence, give one step: `xs[0]`. Map other axes with `jax.vmap`, or '
            'reshape x to two axes: `x.reshape(-1, x.shape[-1])`.'
        )
    check_rank(op, 'x', x.shape, {1: '(in,)', 2: '(batch, in)'}, hint)


@refuses(
    'matmul',
    weight_fn='Write `matmul(x, fn(weight), bias)`.',
    bias_fn='Write `matmul(x, weight, fn(bias))`.',
)
def matmul(x, weight, bias=None) -> jax.Array:
    """Multiply by a traced matrix: ``y = x @ weight (+ bias)``.

    ``x`` is ``(in,)`` or ``(batch, in)``, ``weight`` ``(in, out)`` and ``bias`` ``(out,)``; y is
    ``(out,)`` or ``(batch, out)`` with the unit of x times the unit of the weight. A bias of that
    dimension is rescaled to it. An x of booleans or integers is cast to the weight's dtype.

    Raises ``EtpShapeError``, ``EtpDtypeError`` or ``EtpUnitError`` for an operand that does not
    fit.

    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.matmul(jnp.ones((2, 3)), jnp.ones((3, 2)), bias=jnp.array([0., 1.]))
    Array([[3., 4.],
           [3., 4.]], dtype=float32)
    """
    op = 'matmul'
    weight, weight_unit = trainable_operand(op, 'weight', weight)
    x, x_unit = input_operand(op, 'x', x, weight.dtype)
    check_features(op, x)
    check_rank(op, 'weight', weight.shape, {2: '(in, out)'}, 'Reshape it to a matrix.')
    why = f'x of shape {x.shape} has {x.shape[-1]} features'
    check_shape(op, 'weight', weight.shape, (x.shape[-1], weight.shape[1]), why)
    unit = unit_product(x_unit, weight_unit)
    bias = bias_operands(op, bias, weight.shape[1:], unit)
    primitive = etp_mm_p if x.ndim == 2 else etp_mv_p
    return with_unit(primitive.bind(x, weight, *bias, has_bias=bool(bias)), unit)
