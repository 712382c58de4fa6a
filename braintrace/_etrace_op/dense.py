"""Products with matrices: dense ones, tables read by index, and matrices of low rank."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import Tracer
from .._signatures import refuses
from ..errors import EtpDtypeError, EtpShapeError
from ._layouts import add_bias, bias_at, over_columns, parameter_trace, zeros_trace
from ._operands import (
    check_rank,
    product_operands,
    split,
    trainable_operand,
    with_unit,
)
from ._primitive import register_both_forms
from ._spec import ETPPrimitiveSpec

FEATURES = 'in', 'batch in'  # the axes of an x that is one sample, or a batch

# dense products -----------------------------------------------------------------------------------
#
# ``y_o = sum_i x_i W_io + b_o``, so ``dy_o/dW_io = x_i`` and ``dy_o/db_o = 1``, and an entry
# reaches one element of y. In the trace ``e = D e' + D_f dy/dw`` of a sample a step so adds ``D_f,o
# x_i`` to ``e_io``, and ``D_o`` multiplies column o. At a signal g, ``dL/dW_io = sum_b x_bi g_bo``.


def _dense(x, weight, *bias, has_bias: bool = False):
    y = x @ weight
    return add_bias(y, bias[0]) if has_bias else y


etp_mm_p, etp_mv_p = register_both_forms(
    lambda batched: ETPPrimitiveSpec(
        'etp_mm' if batched else 'etp_mv',
        _dense,
        yw_to_w=over_columns,
        init_drtrl=parameter_trace(batched),
        trainable_invars_fn=bias_at(2, weight=1),
        batched=batched,
    )
)


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
    own = {'weight': (weight, 'in out')}
    x, weights, bias, unit = product_operands('matmul', x, FEATURES, own, bias, 'out')
    form = etp_mm_p if x.ndim == 2 else etp_mv_p
    return with_unit(form.bind(x, *weights, *bias, has_bias=bool(bias)), unit)


# rows of a table by index -------------------------------------------------------------------------
#
# In ES_D_RTRL's factor of the input an index means its one-hot vector, whose dense product
# with the table is y. The rules take both.


def _one_hot(indices, weights):
    table = weights['weight']
    return jax.nn.one_hot(indices, table.shape[-2], dtype=table.dtype)


def _is_index(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer)


def _embedding(x, weight):
    if not _is_index(x):
        return x @ weight
    return jnp.take(weight, jnp.where(x < 0, len(weight), x), axis=0, mode='fill')


def _embedding_gradient(x, hidden_dim, weights):
    table, d = weights['weight'], hidden_dim.astype(weights['weight'].dtype)
    if _is_index(x) and x.size > 1:
        return {'weight': jnp.zeros_like(table).at[x].add(d, mode='drop')}
    x, d = (jnp.atleast_2d(a) for a in (_one_hot(x, weights) if _is_index(x) else x, d))
    return {'weight': x.T * d if len(x) == 1 else x.T @ d}


etp_embed_mm_p, etp_embed_mv_p = register_both_forms(
    lambda batched: ETPPrimitiveSpec(
        'etp_embed_mm' if batched else 'etp_embed_mv',
        _embedding,
        yw_to_w=over_columns,
        xy_to_dw=_embedding_gradient,
        init_drtrl=parameter_trace(batched),
        batched=batched,
    )
)
etp_embed_mm_p.represent = etp_embed_mv_p.represent = _one_hot


@refuses('embedding', weight_fn='Write `embedding(indices, fn(weight))`.')
def embedding(indices, weight) -> jax.Array:
    """Look up rows of a traced table: ``y = weight[indices]``.

    ``indices`` are integers, ``()`` or ``(batch,)``, ``weight`` is ``(rows, features)``; y is
    ``(features,)`` or ``(batch, features)`` with the unit of the weight. The result equals
    :func:`matmul` of one-hot vectors, which are not made. An index that is known only at run time
    gives a row of NaN if it is out of range. As with every op, the table has a trace where y
    reaches a hidden state element by element, as in ``h = tanh(embedding(i, E) + matmul(h, R))``;
    read through another weight, the table has the current step's gradient only.

    Raises ``EtpDtypeError`` for indices that are no integers, ``EtpShapeError`` for a wrong rank or
    a known index out of range.

    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.embedding(jnp.array([2, 0]), jnp.array([[0., 1.], [2., 3.], [4., 5.]]))
    Array([[4., 5.],
           [0., 1.]], dtype=float32)
    """
    op = 'embedding'
    if jnp.issubdtype(getattr(weight, 'dtype', float), jnp.integer):
        raise EtpDtypeError(
            f'{op}: weight has dtype {weight.dtype}, which can not be trained; the order is '
            'embedding(indices, weight).'
        )
    table, unit = trainable_operand(op, 'weight', weight)
    x, x_unit = split(op, 'indices', indices)
    if not _is_index(x) or not x_unit.is_unitless:
        raise EtpDtypeError(
            f'{op}: indices have dtype {x.dtype} and unit {x_unit}, expected plain integers. '
            'Multiply vectors with `braintrace.matmul`.'
        )
    if x.dtype.itemsize < 4:  # the number of rows need not fit into a byte
        x = x.astype(jnp.int32)
    hint = 'Map the leading axes with `jax.vmap`, or use `indices.ravel()`.'
    check_rank(op, 'indices', x.shape, {0: '()', 1: '(batch,)'}, hint)
    check_rank(op, 'weight', table.shape, {2: '(rows, features)'}, 'Reshape it to a matrix.')
    known = np.zeros(0, int) if isinstance(x, Tracer) else np.asarray(x)
    if known.size and not (known.min() >= 0 and known.max() < len(table)):
        raise EtpShapeError(
            f'{op}: indices go from {known.min()} to {known.max()}, but the weight of shape '
            f'{table.shape} has rows 0 to {len(table) - 1}.'
        )
    return with_unit((etp_embed_mm_p if x.ndim else etp_embed_mv_p).bind(x, table), unit)


# products of low rank -----------------------------------------------------------------------------
#
# ``y = alpha x @ B @ A (+ b)``: ``dy_o/dA_ro = alpha (x B)_r`` is that of a dense product that
# reads ``x B``. ``dy_o/dB_ir = alpha x_i A_ro``: B reaches every output through A, and a trace of
# its own would have an entry for each. So its slot holds that of the effective weight ``W = B A``,
# whose entries feed one output each, ``e_io = D_o e_io' + alpha D_f,o x_i``, and its gradient is
# pulled back through A on demand: ``dL/dB_ir = sum_o dL/dW_io A_ro``. That is exact as long as A
# stays as it is.


def _lora(x, lora_b, lora_a, *bias, alpha=1.0, has_bias: bool = False):
    y = alpha * (x @ lora_b @ lora_a)
    return add_bias(y, bias[0]) if has_bias else y


def _lora_instant(x, hidden_dim, weights, *, alpha=1.0, has_bias: bool = False):
    x, d = (a if a.ndim == 2 else a[None] for a in (x, hidden_dim))
    entry = {'lora_b': alpha * (x.T @ d), 'lora_a': alpha * ((x @ weights['lora_b']).T @ d)}
    entry |= {'bias': d.sum(0)} if has_bias else {}
    return {name: value.astype(weights[name].dtype) for name, value in entry.items()}


def _lora_solve(signal, trace, weights, **params):
    scaled = over_columns(signal, trace)
    summed = {name: value.sum(0) if signal.ndim > 1 else value for name, value in scaled.items()}
    return {**summed, 'lora_b': summed['lora_b'] @ weights['lora_a'].T}


def _lora_init(x_var, y_var, weight_vars, num_hidden_state):
    batch = x_var.aval.shape[:-1]
    shapes = {name: var.aval.shape for name, var in weight_vars.items()}
    shapes['lora_b'] = (*shapes['lora_b'][:-1], shapes['lora_a'][-1])
    return {
        name: zeros_trace((*batch, *shapes[name]), var, num_hidden_state)
        for name, var in weight_vars.items()
    }


etp_lora_mm_p, etp_lora_mv_p = register_both_forms(
    lambda batched: ETPPrimitiveSpec(
        'etp_lora_mm' if batched else 'etp_lora_mv',
        _lora,
        yw_to_w=over_columns,
        init_drtrl=_lora_init,
        instant_drtrl=_lora_instant,
        solve_drtrl=_lora_solve,
        trainable_invars_fn=bias_at(3, lora_b=1, lora_a=2),
        batched=batched,
    )
)


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

    The trace holds the derivative by ``B @ A``, from which the gradient of B is made with the
    present A: that is the gradient at the weights of all earlier steps while A stays as it is.

    Raises ``EtpShapeError``, ``EtpDtypeError`` or ``EtpUnitError`` for an operand that does not
    fit.

    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.lora_matmul(jnp.ones((1, 3)), jnp.ones((3, 2)), jnp.ones((2, 4)), alpha=0.5)
    Array([[3., 3., 3., 3.]], dtype=float32)
    """
    own = {'B': (B, 'in rank'), 'A': (A, 'rank out')}
    x, factors, bias, unit = product_operands('lora_matmul', x, FEATURES, own, bias, 'out')
    # the static parameter alpha is a Python number: a concrete scalar array becomes one
    if isinstance(alpha, np.generic | np.ndarray | jax.Array) and alpha.ndim == 0:
        with contextlib.suppress(jax.errors.ConcretizationTypeError):
            alpha = alpha.item()
    if isinstance(alpha, bool) or not isinstance(alpha, int | float | complex):
        raise EtpDtypeError(
            f'lora_matmul: alpha is a {type(alpha).__name__}, expected a Python number, fixed when '
            'the function is traced. Multiply x by a scale that varies or has a unit.'
        )
    primitive = etp_lora_mm_p if x.ndim == 2 else etp_lora_mv_p
    alpha = complex(alpha) if isinstance(alpha, complex) else float(alpha)
    y = primitive.bind(x, *factors, *bias, alpha=alpha, has_bias=bool(bias))
    return with_unit(y, unit)
