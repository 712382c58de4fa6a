"""Rows of a table by index: ``y = weight[indices]``.

In ES_D_RTRL's factor of the input an index stands for its one-hot vector, whose dense product with
the table is y. The rules take both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import Tracer
from .._signatures import refuses
from ..errors import EtpDtypeError, EtpShapeError
from ._operands import check_rank, split, trainable_operand, with_unit
from ._primitive import ETPPrimitive
from ._rule_parts import output_trace, over_columns, parameter_trace
from ._spec import ETPPrimitiveSpec, register_both_forms, register_primitive_spec


def _one_hot(indices, weights):
    table = weights['weight']
    return jax.nn.one_hot(indices, table.shape[-2], dtype=table.dtype)


def _is_index(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer)


def _impl(x, weight):
    if not _is_index(x):
        return x @ weight
    return jnp.take(weight, jnp.where(x < 0, len(weight), x), axis=0, mode='fill')


def _xy_to_dw(x, hidden_dim, weights):
    table, d = weights['weight'], hidden_dim.astype(weights['weight'].dtype)
    if _is_index(x) and x.size > 1:
        return {'weight': jnp.zeros_like(table).at[x].add(d, mode='drop')}
    x, d = (jnp.atleast_2d(a) for a in (_one_hot(x, weights) if _is_index(x) else x, d))
    return {'weight': x.T * d if len(x) == 1 else x.T @ d}


def _yw_to_w(hidden_dim, trace):
    return over_columns(hidden_dim, trace)


def _register(batched: bool) -> ETPPrimitive:
    primitive = register_primitive_spec(
        ETPPrimitiveSpec(
            'etp_embed_mm' if batched else 'etp_embed_mv',
            _impl,
            _yw_to_w,
            _xy_to_dw,
            parameter_trace(batched),
            output_trace,
            lambda params: {'weight': 1},
            batched=batched,
        )
    )
    primitive.represent = _one_hot
    return primitive


etp_embed_mm_p, etp_embed_mv_p = register_both_forms(_register)


@refuses('embedding', weight_fn='Write `embedding(indices, fn(weight))`.')
def embedding(indices, weight) -> jax.Array:
    """Look up rows of a traced table: ``y = weight[indices]``.

    ``indices`` are integers, ``()`` or ``(batch,)``, ``weight`` is ``(rows, features)``; y is
    ``(features,)`` or ``(batch, features)`` with the unit of the weight. The result equals
    :func:`matmul` of one-hot vectors, which are not made. An index that is known only at run time
    gives a row of NaN if it is out of range. As with every op, the table has a trace where y
    reaches a hidden state position by position, as in ``h = tanh(embedding(i, E) + matmul(h, R))``;
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
