"""JAX's primitives: one table with a row for each, read by every analysis.

A primitive without a row, or with an empty one, is known by its derivative rule: labels are
followed through the equations of that rule, and an equation there that the table does not describe
mixes all positions. So an unknown primitive can cost a trace, with its name in the report, but
never give a wrong one.

A property belongs here if an analysis asks for it. How JAX represents a primitive (the parameters
of a ``scan``, the body of a call) belongs to ``_jax``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

NONE = -1  # in an array of numbers of elements: an element that comes from nowhere
Arrays = list[np.ndarray]
Shapes = Sequence[tuple[int, ...]]


class Moves(NamedTuple):
    """How a primitive moves elements.

    ``operands``: the positions of the operands whose elements it moves, None for all; the others
    are indices, or a constant that fills gaps. ``by(arrays, params)`` moves NumPy arrays likewise;
    None: the equation itself is evaluated.
    """

    operands: tuple[int, ...] | None
    by: Callable[[Arrays, Mapping[str, Any]], Arrays] | None = None


# For each value the names of its axes, None for an axis that lines up with no other.
Names = list[list]
Axes = Callable[[Mapping[str, Any], Shapes, Shapes], tuple[Names, Names]]


@dataclass(frozen=True, kw_only=True)
class Properties:
    """What a primitive does.

    - ``elementwise``: element k of the result reads element k of each operand.
    - ``gradient``: a gradient passes it.
    - ``linear``: ``(which operands vary) -> bool``, whether the result is linear in these together;
      None: never, or nothing asks.
    - ``holomorphic``: of complex numbers, it is known to have a complex derivative.
    - ``passes``: result k is operand k.
    - ``reduces``: it combines elements along ``params['axes']``.
    - ``moves``: it moves elements and computes nothing.
    - ``assembles``: every element of the operands that it moves is in the result, so that a
      step can put several states together with it.
    - ``takes_part``: the result is a part of the operand.
    - ``repeats``: an element may be in several places of the result.
    - ``beside``: it puts elements of several operands beside each other in one array.
    - ``updates``: operand 2 changes operand 0 at the places that operand 1 names.
    - ``sums``: it adds two values.
    - ``finite``: its derivative is finite at every finite number, also where it is not linear.
    - ``rounds``: ``(params) -> bool``, whether it rounds values, and what comes back, to fewer bits
      than numbers have that one computes with.
    - ``neutral``: the number that changes nothing as one of its two operands.
    - ``quick``: an element is computed in less time than it is stored and read.
    - ``alone``: it can not be run for many steps at once: it would run branches that are not taken,
      or draw other numbers.
    - ``apart``: ``(params, operands) -> function or None`` of the same result, element by element
      and by movement, where it combines nothing.
    - ``mixes``: each element of the result may read every element of the operands.
    - ``whole``: its parameters are about the whole array, so it can not act on a part.
    - ``retypes``: it changes what the type of a value says about the mesh, never the value.
    - ``axes``: ``(params, shapes of operands, of results) -> names`` of their axes: those of one
      name line up. None: not known.
    - ``zeros``: which zeros of the operands make zeros of the result; the kinds are at ``ZEROS``.
      Empty: not known.
    - ``key_data``: the operands that are the numbers of a random key.
    - ``op``: the kind of ETP op that does the same with a weight, a key of ``AUTOMATIC``.
    - ``option``: of control flow, and of calls with a derivative rule of their own, the policy's
      option that may refuse it; ``decision``: how it is lowered, empty where nothing lowers it;
      ``instead``: what the user can write.
    """

    elementwise: bool = False
    gradient: bool = True
    linear: Callable[[Sequence[bool]], bool] | None = None
    holomorphic: bool = True
    passes: bool = False
    reduces: bool = False
    moves: Moves | None = None
    assembles: bool = False
    takes_part: bool = False
    repeats: bool = False
    beside: bool = False
    updates: bool = False
    sums: bool = False
    finite: bool = False
    rounds: Callable[[Mapping[str, Any]], bool] | None = None
    neutral: float | None = None
    quick: bool = False
    alone: bool = False
    apart: Callable[[Mapping[str, Any], Sequence], Callable | None] | None = None
    mixes: bool = False
    whole: bool = False
    retypes: bool = False
    axes: Axes | None = None
    zeros: str = ''
    key_data: tuple[int, ...] = ()
    op: str = ''
    option: str = ''
    decision: str = ''
    instead: str = ''


class ByName(dict[str, Properties]):
    """What primitives do, by name; one without a row is told by its own derivative rule alone."""

    def __missing__(self, name: str) -> Properties:
        return BY_ITS_OWN_RULE


# ---- in which operands a primitive is linear ----


Linear = Callable[[Sequence[bool]], bool]  # of which operands vary
IN_ALL: Linear = lambda varying: True
IN_ONE: Linear = lambda varying: sum(varying) == 1
IN_THE_FIRST: Linear = lambda varying: not any(varying[1:])
IN_THE_REST: Linear = lambda varying: not varying[0]
BUT_FOR_PLACES: Linear = lambda varying: not varying[1]


# ---- what rounds ----

MANTISSA = 7  # bits of bfloat16, the least that one computes with


def _to_few_bits(p: Mapping) -> bool:
    return p['mantissa_bits'] < MANTISSA


def _to_a_small_type(p: Mapping) -> bool:
    dtype = p['new_dtype']
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).nmant < MANTISSA


# ---- what combines nothing ----


def _outer_product(p: Mapping, operands: Sequence) -> Callable | None:
    """A product without a sum: no axis is contracted, or one of size 1."""
    contracted, batch = p['dimension_numbers']
    if any(operands[0].shape[k] != 1 for k in contracted[0]):
        return None
    free = [
        [k for k in range(len(x.shape)) if k not in gone and k not in kept]
        for x, gone, kept in zip(operands, contracted, batch, strict=True)
    ]
    dtype = p['preferred_element_type'] or operands[0].dtype

    def product(a, b):
        a, b = (
            x.squeeze(gone).transpose([k - sum(g < k for g in gone) for k in (*kept, *axes)])
            for x, gone, kept, axes in zip((a, b), contracted, batch, free, strict=True)
        )
        a = a.reshape(*a.shape, *(1 for _ in free[1]))
        b = b.reshape(*b.shape[: len(batch[1])], *(1 for _ in free[0]), *b.shape[len(batch[1]) :])
        return a.astype(dtype) * b.astype(dtype)

    return product


# ---- how elements move ----


def _reshape(arrays: Arrays, p: Mapping) -> Arrays:
    first = arrays[0] if p['dimensions'] is None else arrays[0].transpose(p['dimensions'])
    return [first.reshape(p['new_sizes'])]


def _slice(arrays: Arrays, p: Mapping) -> Arrays:
    strides = p['strides'] or (1,) * len(p['start_indices'])
    bounds = zip(p['start_indices'], p['limit_indices'], strides, strict=True)
    return [arrays[0][tuple(slice(*b) for b in bounds)]]


def _broadcast(arrays: Arrays, p: Mapping) -> Arrays:
    shape = [1] * len(p['shape'])
    for axis, n in zip(p['broadcast_dimensions'], arrays[0].shape, strict=True):
        shape[axis] = n
    return [np.broadcast_to(arrays[0].reshape(shape), p['shape'])]


def _pad(arrays: Arrays, p: Mapping) -> Arrays:
    array = arrays[0]
    for axis, (low, high, interior) in enumerate(p['padding_config']):
        moved = np.moveaxis(array, axis, 0)
        n = moved.shape[0]
        size = n + max(n - 1, 0) * interior
        wide = np.full((max(low, 0) + size + max(high, 0), *moved.shape[1:]), NONE, array.dtype)
        wide[max(low, 0) : max(low, 0) + size : interior + 1] = moved
        wide = wide[max(-low, 0) : wide.shape[0] - max(-high, 0)]  # a negative width takes away
        array = np.moveaxis(wide, 0, axis)
    return [array]


FIRST = (0,)
RESHAPE = Moves(FIRST, _reshape)
SQUEEZE = Moves(FIRST, lambda arrays, p: [arrays[0].squeeze(tuple(p['dimensions']))])
COPY = Moves(FIRST, lambda arrays, p: arrays[:1])
TRANSPOSE = Moves(FIRST, lambda arrays, p: [arrays[0].transpose(p['permutation'])])
REVERSE = Moves(FIRST, lambda arrays, p: [np.flip(arrays[0], p['dimensions'])])
TILE = Moves(FIRST, lambda arrays, p: [np.tile(arrays[0], p['reps'])])
CONCATENATE = Moves(None, lambda arrays, p: [np.concatenate(arrays, p['dimension'])])
STACK = Moves(None, lambda arrays, p: [np.stack(arrays, p['axis'])])
UNSTACK = Moves(FIRST, lambda arrays, p: list(np.moveaxis(arrays[0], p['axis'], 0)))
SPLIT = Moves(FIRST, lambda arrays, p: np.split(arrays[0], np.cumsum(p['sizes'])[:-1], p['axis']))
# by indices, so the equation is evaluated
TAKEN, SCATTERED, OVERWRITTEN = Moves(FIRST), Moves((0, 2)), Moves((0, 1))


# ---- how axes line up ----


def same_axes(p: Mapping, ins: Shapes, outs: Shapes) -> tuple[Names, Names]:
    """Values of one rank have the same axes."""

    def by_rank(shapes: Shapes) -> Names:
        return [[(len(shape), k) for k in range(len(shape))] for shape in shapes]

    return by_rank(ins), by_rank(outs)


def paired_axes(p: Mapping, ins: Shapes, outs: Shapes) -> tuple[Names, Names]:
    """Result k has the axes of operand k."""

    def by_place(shapes: Shapes) -> Names:
        return [[(n, k) for k in range(len(shape))] for n, shape in enumerate(shapes)]

    return by_place(ins), by_place(outs)


def of_one(lined_up: Callable[[Mapping, Sequence[int], Sequence[int]], list]) -> Axes:
    """Axes of one operand and one result; ``lined_up(params, shape, shape of the result)`` is for
    each axis of the result an axis of the operand.
    """

    def names(p: Mapping, ins: Shapes, outs: Shapes) -> tuple[Names, Names]:
        return [[*range(len(ins[0]))]], [lined_up(p, ins[0], outs[0])]

    return names


def reshaped_axes(p: Mapping, a: Sequence[int], b: Sequence[int]) -> list:
    """An axis is kept where as many elements are in front of it as before."""
    kept: list = [None] * len(b)
    j = k = 0
    before_a = before_b = 1
    while j < len(a) and k < len(b):
        if before_a == before_b and a[j] == b[k]:
            kept[k] = j
        # go on along the shape that has fewer elements behind, or both
        ahead_a, ahead_b = before_a * a[j], before_b * b[k]
        if ahead_a <= ahead_b:
            before_a, j = ahead_a, j + 1
        if ahead_b <= ahead_a:
            before_b, k = ahead_b, k + 1
    return kept


def broadcast_axes(p: Mapping, a: Sequence[int], b: Sequence[int]) -> list:
    places = {k: j for j, k in enumerate(p['broadcast_dimensions'])}
    return [places.get(k) for k in range(len(b))]


def stacked_axes(p: Mapping, parts: Shapes, wholes: Shapes) -> tuple[Names, Names]:
    every = [[*range(len(part))] for part in parts]
    axis = p['axis'] % len(wholes[0])
    return every, [[*every[0][:axis], None, *every[0][axis:]]]


def axes_of_convolution(p: Mapping, ins: Shapes, outs: Shapes) -> tuple[Names, Names]:
    """The batch alone: features are contracted, and places in space move."""
    dims = p['dimension_numbers']
    names: Names = [[None] * len(ins[0]), [None] * len(outs[0])]
    names[0][dims.lhs_spec[0]] = names[1][dims.out_spec[0]] = 'batch'
    return names[:1], names[1:]


def axes_of_product(p: Mapping, ins: Shapes, outs: Shapes) -> tuple[Names, Names]:
    """Batch axes, then the free axes of both operands; contracted axes run together."""
    contracted, batch = p['dimension_numbers']
    (a, b), _ = paired_axes(p, ins, ())
    for of_a, of_b in (contracted, batch):
        for j, k in zip(of_a, of_b, strict=True):
            b[k] = a[j]
    beside = [a[j] for j in (*contracted[0], *batch[0])]
    return [a, b], [[*(a[j] for j in batch[0]), *(n for n in (*a, *b) if n not in beside)]]


def gathered_axes(p: Mapping, ins: Shapes, outs: Shapes) -> tuple[Names, Names]:
    """Whole axes of the operand lie at the offsets, axes of the indices in the other places."""
    dims, (operand, indices), (out,) = p['dimension_numbers'], *paired_axes(p, ins, outs)
    gone = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    whole = (n for j, n in enumerate(operand) if j not in gone)
    places = iter(indices)
    out = [next(whole if k in dims.offset_dims else places) for k in range(len(out))]
    pairs = zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True)
    for j, k in pairs:
        operand[j] = indices[k]
    return [operand, indices], [out]


TRANSPOSED = of_one(lambda p, a, b: [*p['permutation']])
REDUCED = of_one(lambda p, a, b: [k for k in range(len(a)) if k not in p['axes']])
SQUEEZED = of_one(lambda p, a, b: [k for k in range(len(a)) if k not in p['dimensions']])
# operands behind the first are indices and updates
OF_THE_FIRST: Axes = lambda p, ins, outs: same_axes(p, ins[:1], outs)
UNSTACKED: Axes = lambda p, ins, outs: stacked_axes(p, outs, ins)[::-1]


# ---- the table ----

BY_ITS_OWN_RULE = Properties(holomorphic=False)
ELEMENTWISE = Properties(elementwise=True, axes=same_axes)
CAST = replace(ELEMENTWISE, linear=IN_ALL, quick=True)  # a value of the same elements
DISCRETE = replace(ELEMENTWISE, gradient=False, quick=True)  # makes integers or booleans
NOT_HOLOMORPHIC = replace(ELEMENTWISE, holomorphic=False)
REDUCTION = Properties(reduces=True, axes=REDUCED)
DISCRETE_REDUCTION = replace(REDUCTION, gradient=False)
ASSEMBLY = Properties(assembles=True, linear=IN_ALL)
PART = Properties(takes_part=True, linear=IN_ALL)
UPDATE = Properties(updates=True, axes=OF_THE_FIRST)
MIXING = Properties(mixes=True)
ALONG_AN_AXIS = Properties(mixes=True, axes=same_axes)  # a result has the axes of its operand
SOURCE = Properties(gradient=False)  # reads no values of the model


def _rows(names: str, properties: Properties) -> dict[str, Properties]:
    return dict.fromkeys(names.split(), properties)


ROWS: dict[str, Properties] = {
    # element by element
    **_rows(
        """acos acosh asin atan2 atanh cbrt digamma erf_inv igamma igamma_grad_a igammac lgamma log
        log1p log2 nextafter polygamma polynomial pow regularized_incomplete_beta tan zeta""",
        ELEMENTWISE,
    ),
    **_rows('integer_pow one_minus_square rem rsqrt sqrt', replace(ELEMENTWISE, quick=True)),
    **_rows(
        """asinh atan bessel_i0e bessel_i1e cos cosh erf erfc exp exp2 expm1 logistic sin sinh
        tanh""",
        replace(ELEMENTWISE, finite=True),
    ),
    **_rows('ceil floor round square', replace(ELEMENTWISE, finite=True, quick=True)),
    **_rows('abs clamp max min sign', replace(NOT_HOLOMORPHIC, finite=True, quick=True)),
    **_rows('complex name neg stage sub', CAST),
    'convert_element_type': replace(CAST, rounds=_to_a_small_type),
    'reduce_precision': replace(ELEMENTWISE, finite=True, quick=True, rounds=_to_few_bits),
    **_rows('add add_any', replace(CAST, sums=True, neutral=0.0)),
    **_rows('conj imag real', replace(CAST, holomorphic=False)),
    'mul': replace(ELEMENTWISE, linear=IN_ONE, finite=True, quick=True, neutral=1.0),
    'div': replace(ELEMENTWISE, linear=IN_THE_FIRST, quick=True),
    'select_n': replace(ELEMENTWISE, linear=IN_THE_REST, finite=True, quick=True),
    # the same value elsewhere, or with another type on a mesh
    'copy': replace(CAST, moves=COPY, assembles=True),
    'device_put': replace(CAST, whole=True),
    'pvary': replace(CAST, retypes=True),
    'reshard': replace(CAST, retypes=True, whole=True),
    # JAX maps none over time on a mesh with explicit axes
    'sharding_constraint': replace(CAST, retypes=True, whole=True, alone=True),
    **_rows('preduced reduced_vary_cast reduced_vary_cast_p', Properties(retypes=True)),
    'optimization_barrier': Properties(passes=True, linear=IN_ALL, axes=paired_axes),
    # no gradient passes
    **_rows(
        """and clz eq eq_to ge gt is_finite le le_to lt lt_to mulhi ne not or population_count
        shift_left shift_right_arithmetic shift_right_logical xor zeros_like""",
        DISCRETE,
    ),
    'stop_gradient': replace(CAST, gradient=False),
    **_rows(
        """after_all axis_index bitcast_convert_type create_token empty2 iota random_bits
        random_fold_in random_seed random_split random_unwrap""",
        SOURCE,
    ),
    'random_wrap': replace(SOURCE, key_data=(0,)),
    'threefry2x32': replace(SOURCE, key_data=(0, 1)),
    'rng_bit_generator': replace(SOURCE, key_data=(0,), alone=True),
    # along axes that they combine
    'reduce_sum': replace(REDUCTION, linear=IN_ALL),
    **_rows('reduce_max reduce_min reduce_prod', REDUCTION),
    **_rows('argmax argmin reduce_and reduce_or reduce_xor', DISCRETE_REDUCTION),
    # moved, nothing lost
    'reshape': replace(ASSEMBLY, moves=RESHAPE, axes=of_one(reshaped_axes)),
    'squeeze': replace(ASSEMBLY, moves=SQUEEZE, axes=SQUEEZED),
    'transpose': replace(ASSEMBLY, moves=TRANSPOSE, axes=TRANSPOSED),
    'rev': replace(ASSEMBLY, moves=REVERSE, axes=same_axes),
    'broadcast_in_dim': replace(
        ASSEMBLY, moves=Moves(FIRST, _broadcast), repeats=True, axes=of_one(broadcast_axes)
    ),
    'tile': replace(ASSEMBLY, moves=TILE, repeats=True, axes=same_axes),
    'concatenate': replace(ASSEMBLY, moves=CONCATENATE, beside=True, axes=same_axes),
    'stack': replace(ASSEMBLY, moves=STACK, beside=True, axes=stacked_axes),
    'scatter': replace(ASSEMBLY, moves=SCATTERED, beside=True, axes=OF_THE_FIRST),
    'dynamic_update_slice': replace(ASSEMBLY, moves=OVERWRITTEN, beside=True, axes=same_axes),
    # moved, a part of it
    'slice': replace(PART, moves=Moves(FIRST, _slice), axes=same_axes),
    'dynamic_slice': replace(PART, moves=TAKEN, axes=same_axes, op='rows'),
    'gather': replace(PART, moves=TAKEN, axes=gathered_axes, op='rows'),
    'split': replace(PART, moves=SPLIT, axes=same_axes),
    'unstack': replace(PART, moves=UNSTACK, axes=UNSTACKED),
    'pad': Properties(moves=Moves(FIRST, _pad), linear=IN_ALL, axes=same_axes),
    # changed at some places
    'scatter-add': replace(UPDATE, linear=BUT_FOR_PLACES, beside=True),
    'scatter-sub': replace(UPDATE, linear=BUT_FOR_PLACES),
    'scatter-mul': replace(UPDATE, linear=IN_THE_FIRST),
    **_rows('scatter-max scatter-min', UPDATE),
    # all positions meet
    'dot_general': replace(
        MIXING,
        linear=IN_ONE,
        axes=axes_of_product,
        op='product',
        apart=_outer_product,
    ),
    'conv_general_dilated': replace(
        MIXING, linear=IN_ONE, axes=axes_of_convolution, op='convolution'
    ),
    'sort': replace(MIXING, axes=paired_axes),
    **_rows('cumlogsumexp cummax cummin cumprod top_k', ALONG_AN_AXIS),
    'cumsum': replace(ALONG_AN_AXIS, linear=IN_ALL),
    **_rows(
        """approx_top_k cholesky eig eigh hessenberg householder_product lu qr reduce
        reduce_window reduce_window_max reduce_window_min schur select_and_gather_add
        select_and_scatter svd tridiagonal tridiagonal_solve""",
        MIXING,
    ),
    **_rows('fft reduce_window_sum', replace(MIXING, linear=IN_ALL)),
    'select_and_scatter_add': replace(MIXING, linear=IN_THE_FIRST),
    'triangular_solve': replace(MIXING, linear=IN_THE_REST),
    # control flow, and calls with a derivative rule of their own
    'cond': replace(
        MIXING,
        option='cond',
        decision='select',
        instead='jnp.where, or compute both branches',
        alone=True,
    ),
    'scan': replace(MIXING, option='scan', decision='descend', instead='a Python loop'),
    'while': replace(
        MIXING,
        option='while_loop',
        instead='lax.fori_loop with a static number of steps',
    ),
    'shard_map': Properties(option='shard_map', decision='vmap', instead='the step for one shard'),
    **_rows(
        'custom_jvp_call custom_vjp_call',
        replace(
            BY_ITS_OWN_RULE,
            option='custom_rule',
            instead='the op outside of the function',
            finite=True,
        ),
    ),
    # their own rules tell: calls, collectives, references to mutable arrays
    **_rows(
        """all_gather all_to_all call closed_call custom_lin custom_linear_solve dce_sink eval_jaxpr
        get jit pmax pmin ppermute psum ragged_all_to_all random_gamma remat2 swap""",
        BY_ITS_OWN_RULE,
    ),
    'rng_uniform': replace(BY_ITS_OWN_RULE, alone=True),
}

# ---- where a result is zero ----

ZEROS = {
    # where the same element of the operand is, of the first operand, or of all
    'same': """abs asin asinh atan cbrt conj convert_element_type copy expm1 imag log1p neg
        pvary real reduce_precision sharding_constraint sign sin sinh sqrt
        square stop_gradient tan tanh""",
    'first': 'div',
    'sum': 'add add_any complex max min sub',
    # where the equation of 0 and 1, at other zeros than these, is: for products, and for what moves
    # and sums elements
    'product': 'conv_general_dilated dot_general mul',
    'moved': """broadcast_in_dim concatenate cumsum pad reduce_max reduce_sum reduce_window_sum
        reshape rev slice split squeeze stack tile transpose unstack""",
    # the same, where the indices are known
    'chosen': 'select_n',
    'taken': 'dynamic_slice',
    'put': 'dynamic_update_slice',
    'indexed': 'gather scatter scatter-add',
}
TABLE = ByName(ROWS)
TABLE.update(
    (name, replace(ROWS[name], zeros=kind))
    for kind, names in ZEROS.items()
    for name in names.split()
)
