"""Ops that are found: where weights act in an unmarked step."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import RuleContractError
from ._operands import drawn, shape_of
from .conv import DEFAULTS, bind_conv, etp_conv_p
from .dense import embedding
from .einsums import FORMS, bound
from .elemwise import element_wise

# places of weights --------------------------------------------------------------------------------
#
# The element of y that each entry of a trainable feeds, found from an op's function alone.


# Factors of the random weights at which an op is tried. An op that clips its weights, or takes one
# sign of them alone, has a derivative of zero at some weights; another scale may show the entry.
SCALES = (1.0, -1.0, 0.1, -0.1, 0.01, -0.01, 10.0, -10.0)


@dataclasses.dataclass(frozen=True)
class Places:
    """The shapes of one sample of x and of y, and the element of y that each entry of a trainable
    feeds; hashable by value.

    ``at`` has a row for each trainable: its name, its shape, and either the axes of the trainable
    that are y's axes, in y's order, or the flat indices into y as bytes.
    """

    x: tuple[int, ...]
    y: tuple[int, ...]
    at: tuple[tuple[str, tuple[int, ...], tuple[int, ...] | bytes], ...] = ()

    def spread(self, name: str, d: jax.Array) -> jax.Array:
        """Turn factors at y, with any axes in front, into factors at the entries of a trainable."""
        lead = d.ndim - len(self.y)
        _, shape, where = next(row for row in self.at if row[0] == name)
        if isinstance(where, bytes):
            return d.reshape(*d.shape[:lead], math.prod(self.y))[
                ..., np.frombuffer(where, np.int32).reshape(shape)
            ]
        d = jnp.transpose(d, (*range(lead), *(lead + int(i) for i in np.argsort(where))))
        return jnp.expand_dims(d, [lead + axis for axis in range(len(shape)) if axis not in where])


@functools.lru_cache(maxsize=256)
def places_of(
    op: str, fn: Callable, x, weights: tuple[tuple[str, jax.ShapeDtypeStruct], ...], params, find
) -> Places:
    """The places of ``fn(x, *weights, **params)`` for one sample of these shapes.

    ``weights`` are pairs (name, shape and dtype). Where ``find`` is False, ``at`` stays empty.
    Raises ``RuleContractError`` if ``fn`` is not linear in x, or if an entry of a trainable feeds
    several elements of y.
    """
    call, avals = functools.partial(fn, **dict(params)), [aval for _, aval in weights]
    y = shape_of(op, call, x, *avals)
    if not isinstance(y, jax.ShapeDtypeStruct):
        raise RuleContractError(f'{op}: fn returned a {type(y).__name__}, expected one array.')
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        # linear in x: the same at a combination of two random x as the combination of both
        one, another, *values = (drawn(rng, aval) for aval in (x, x, *avals))
        together = call(2 * one - 3 * another, *values)
        apart = 2 * call(one, *values) - 3 * call(another, *values)
        if not _close(together, apart, 1e-4).all():
            raise RuleContractError(
                f'{op}: fn is not linear in x, so its traces are not those of a product. Make the '
                'op of its impl with `kit.new_etp_primitive`, whose trace is right for any '
                'function.'
            )
        if not find:
            return Places(tuple(x.shape), tuple(y.shape))
        # The integers name the elements of y. The random numbers tell one element from several.
        names = 1.0 + np.arange(math.prod(y.shape)).reshape(y.shape)
        probes = [np.ones(y.shape), names, rng.normal(size=y.shape)]
        responses = _responses(call, rng, x, avals, probes)
    rows = []
    for (name, _), (ones, named, other) in zip(weights, responses, strict=True):
        # An entry that feeds the element k alone answers the probes with ``g``, ``g (k + 1)`` and
        # ``g random[k]``. So the ratio of the first two is the integer k + 1, to within one
        # rounding, and the third confirms it: an entry that feeds several elements gives a mean of
        # integers, at whose place the random number is another one. An entry that feeds nothing
        # gets the index 0.
        random = probes[-1]
        ratio = np.divide(named, ones, out=np.ones_like(ones), where=ones != 0)
        index = np.clip(np.rint(np.real(ratio)).astype(int) - 1, 0, max(random.size - 1, 0))
        expected = ones * random.ravel()[index] if random.size else ones
        wrong = np.argwhere(~_close(other, expected, 1e-8))
        if len(wrong):
            raise RuleContractError(
                f'{op}: entry {[int(k) for k in wrong[0]]} of {name!r} feeds several elements of '
                "y, so a trace of the parameter's shape is not exact. Make the op with "
                "trace='position' or, if it is a product, trace='effective'."
            )
        axes = _axes(index, y.shape)
        rows.append((name, index.shape, index.astype(np.int32).tobytes() if axes is None else axes))
    return Places(tuple(x.shape), tuple(y.shape), tuple(rows))


def _responses(
    call: Callable, rng: np.random.Generator, x, avals: list, probes: list[np.ndarray]
) -> list[np.ndarray]:
    """The gradient of each weight for each probe as y's cotangent: arrays ``(probes, *weight)``."""
    value, *values = (drawn(rng, aval) for aval in (x, *avals))

    def at_scale(scale: float) -> list[np.ndarray]:
        y, pull = jax.vjp(lambda ws: call(value, *ws), [scale * w for w in values])
        pulled = [pull(jnp.asarray(probe, y.dtype))[0] for probe in probes]
        return [np.stack([np.asarray(g) for g in gs]) for gs in zip(*pulled, strict=True)]

    # a gradient that is zero is taken from the first scale of the weights at which it is not
    found = at_scale(SCALES[0])
    for scale in SCALES[1:]:
        if all((response[0] != 0).all() for response in found):
            break
        found = [
            np.where((old[0] == 0) & np.isfinite(new), new, old)
            for new, old in zip(at_scale(scale), found, strict=True)
        ]
    return found


def _close(a, b, tolerance: float) -> np.ndarray:
    """Where two arrays agree, relative to the largest number in them."""
    largest = np.abs(np.stack([a, b])).max(initial=0)
    return np.isclose(a, b, rtol=tolerance, atol=tolerance * largest)


def _axes(index: np.ndarray, y: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes of a weight that are y's axes, in y's order, if its index array says no more."""
    # An axis along which the index moves is one of y's; an axis of size 1 may stand for one of y's.
    moving = [
        a for a in range(index.ndim) if index.shape[a] > 1 and (index != index.take([0], a)).any()
    ]
    ones = [a for a in range(index.ndim) if index.shape[a] == 1]
    for extra in itertools.combinations(ones, max(0, len(y) - len(moving))):
        for axes in itertools.permutations([*moving, *extra]):
            if tuple(index.shape[a] for a in axes) == y:
                flat = np.arange(math.prod(y)).reshape(y).transpose(np.argsort(axes))
                others = [a for a in range(index.ndim) if a not in axes]
                if (index == np.expand_dims(flat, others)).all():
                    return tuple(axes)
    return None


# automatic marks ----------------------------------------------------------------------------------
#
# The op that does what an equation of JAX does with a weight, for marking a program that has none.
#
# A builder takes the equation's parameters, the place of the weight among its operands, and the
# shapes and dtypes of these. It returns the function of the operands, or None where no op does
# that.


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
    axes: list[dict[int, str]] = [{}, {}]
    shared = [[], []]
    for kind, pairs in zip(shared, (batch, contracting), strict=True):
        for left, right in zip(*pairs, strict=True):
            axes[0][left] = axes[1][right] = next(letters)
            kind.append(axes[0][left])
    free: list[list[str]] = [[], []]
    for side, aval in enumerate(avals):
        for k in range(len(aval.shape)):
            if k not in axes[side]:
                axes[side][k] = next(letters)
                free[side].append(axes[side][k])
    of = [[found[k] for k in sorted(found)] for found in axes]
    return of[1 - weight], of[weight], [*shared[0], *free[0], *free[1]]


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
    behind = tuple(range(len(indices) - 1, len(indices) - 1 + len(table) - len(collapsed)))
    fills = mode == jax.lax.GatherScatterMode.FILL_OR_DROP
    fits = (
        mode != jax.lax.GatherScatterMode.ONE_HOT
        and collapsed in ((), (0,))
        and tuple(numbers.start_index_map)[:1] == (0,)
        and tuple(numbers.offset_dims) == behind
        and not numbers.operand_batching_dims
    )
    # a start behind the first is 0 where starts are clipped, and may be out of bounds elsewhere
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
