"""Ops that are found: the op that does what an equation of JAX does with a weight, for marking a
program that has none.

A builder takes the equation's parameters, the place of the weight among its operands, and the
shapes and dtypes of these. It returns the function of the operands, or None where no op does that.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .conv import DEFAULTS, bind_conv, etp_conv_p
from .dense import embedding
from .einsums import FORMS, bound
from .elemwise import element_wise


def at_positions(shape: tuple[int, ...]) -> Callable:
    """The function that uses a weight element by element, as the operand of a result of ``shape``.

    It is broadcast before the op: then each element of the result has its own entry of the trace.
    """
    return lambda weight: element_wise(jnp.broadcast_to(weight, shape))


def _product(params: Mapping[str, Any], weight: int, avals: Sequence) -> Callable | None:
    """A ``dot_general`` of any dimension numbers; the first free axis of x is the batch."""
    if params.get('out_sharding') is not None:
        return None
    x_axes, w_axes, y_axes = _letters(params['dimension_numbers'], weight, avals)
    if not params['dimension_numbers'][0][0]:
        return _position_by_position(params, weight, (x_axes, w_axes, y_axes))
    free = [a for a in x_axes if a not in w_axes]
    lead = free[:1]
    x_order, y_order = ([*lead, *(a for a in axes if a not in lead)] for axes in (x_axes, y_axes))
    equation = f'{"".join(x_order)},{"".join(w_axes)}->{"".join(y_order)}'
    numbers = {name: params[name] for name in ('precision', 'preferred_element_type')}

    def apply(*operands):
        x = _transposed(operands[1 - weight], x_axes, x_order)
        y = bound('einsum', FORMS, equation, x, operands[weight], **numbers)
        return _transposed(y, y_order, y_axes)

    return apply


def _position_by_position(params: Mapping[str, Any], weight: int, axes: Sequence) -> Callable:
    """A ``dot_general`` that sums nothing; as a product it would cut a recurrence through x."""
    x_axes, w_axes, y_axes = axes

    def among(array, own: list[str]):
        array = _transposed(array, own, [a for a in y_axes if a in own])
        return jnp.expand_dims(array, [k for k, a in enumerate(y_axes) if a not in own])

    def apply(*operands):
        dtype = params['preferred_element_type'] or jnp.result_type(*operands)
        x, w = among(operands[1 - weight], x_axes), among(operands[weight], w_axes)
        shape = jnp.broadcast_shapes(x.shape, w.shape)
        return jnp.broadcast_to(x, shape).astype(dtype) * at_positions(shape)(w).astype(dtype)

    return apply


def _letters(dimension_numbers, weight: int, avals: Sequence) -> tuple[list, list, list]:
    """A letter for each axis of x, of the weight and of the result."""
    contracting, batch = dimension_numbers
    letters = iter(string.ascii_letters)
    axes = [[next(letters) for _ in aval.shape] for aval in avals]
    # axes that meet have one letter
    for left, right in zip((*batch[0], *contracting[0]), (*batch[1], *contracting[1])):
        axes[1][right] = axes[0][left]
    lead, summed = ([axes[0][k] for k in kind[0]] for kind in (batch, contracting))
    free = [a for own in axes for a in own if a not in (*lead, *summed)]
    return axes[1 - weight], axes[weight], [*lead, *free]


def _transposed(array, axes: list[str], order: list[str]):
    return array if axes == order else jnp.transpose(array, [axes.index(a) for a in order])


def _convolution(params: Mapping[str, Any], weight: int, avals: Sequence) -> Callable | None:
    if weight != 1 or params['batch_group_count'] != 1 or len(avals[1].shape) < 3:
        return None
    product = ('precision', 'preferred_element_type')
    options = {name: params[name] for name in (*DEFAULTS, *product) if name in params}
    options |= {'strides': params['window_strides']}
    return lambda x, kernel: bind_conv(etp_conv_p, 'conv', x, kernel, **options)


def _rows(params: Mapping[str, Any], weight: int, avals: Sequence) -> Callable | None:
    """A ``gather`` or ``dynamic_slice`` of whole rows of a table."""
    table = avals[0].shape
    if weight or not table or tuple(params['slice_sizes']) != (1, *table[1:]) or 0 in table:
        return None
    if 'dimension_numbers' not in params:
        return lambda table, start, *rest: _looked_up(table, start, 'clip')[None]
    numbers, mode = params['dimension_numbers'], params['mode']
    indices = avals[1].shape
    collapsed = tuple(numbers.collapsed_slice_dims)
    trailing = tuple(range(len(indices) - 1, len(indices) - 1 + len(table) - len(collapsed)))
    fills = mode == jax.lax.GatherScatterMode.FILL_OR_DROP
    fits = (
        mode != jax.lax.GatherScatterMode.ONE_HOT
        and collapsed in ((), (0,))
        and tuple(numbers.start_index_map)[:1] == (0,)
        and tuple(numbers.offset_dims) == trailing
        and not numbers.operand_batching_dims
    )
    # a start after the first is 0 where starts are clipped, and may be out of bounds elsewhere
    value = params['fill_value']
    is_nan = value is None or bool(value != value)
    if not fits or fills and (indices[-1] > 1 or not is_nan):
        return None

    def apply(table, at):
        rows = _looked_up(table, at[..., 0], 'fill' if fills else 'clip')
        return rows if collapsed else jnp.expand_dims(rows, at.ndim - 1)

    return apply


def _looked_up(table, at, mode: str):
    """Rows of a table of any rank, at indices of any rank; the first axis of these is the batch."""
    if mode == 'clip':
        at = jnp.clip(at, 0, len(table) - 1)
    rows = embedding
    for _ in range(at.ndim - 1):
        rows = jax.vmap(rows, (1, None), 1)
    found = rows(at, table.reshape(len(table), -1))
    return found.reshape(*at.shape, *table.shape[1:])


# what an equation does with a weight -> the builder
AUTOMATIC: dict[str, Callable[[Mapping[str, Any], int, Sequence], Callable | None]] = {
    'product': _product,
    'convolution': _convolution,
    'rows': _rows,
}
