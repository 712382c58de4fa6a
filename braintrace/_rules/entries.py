"""A trace entry, and how steps make it with the rules of the op's own primitive.

A fresh entry comes from ``init_drtrl`` with the states in a last axis; a trace stores one array for
each state, which XLA can write in place. In between an entry is a vector of the algebra of D: for
each state its arrays by trainable name, multiplied by ``yw_to_w``. Factors stand at a relation's
coordinates.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from .._compiler import Coordinates, OpUse, abstract, depends
from .._errors import RuleContractError
from .._executor import Transition, Vector, add, apply
from .contraction import finite, in_parts, op_gradient, outside_loops
from .coordinates import Pair, folded, mapped_over_added
from .storage import Entry, States

# the empty trace -----------------------------------------------------------------------------


def zeros(op: OpUse, coords: Coordinates, num_state: int) -> Entry:
    """The empty entry of D-RTRL, states in a last axis: ``init_drtrl``, repeated over added
    axes.
    """
    entry = _init(op, 'init_drtrl', 'D_RTRL', num_state)
    entry = {n: _repeated(coords, e) for n, e in entry.items()}
    _check_layout(op, coords, entry, num_state)
    return entry


def zeros_pp(op: OpUse, coords: Coordinates, num_state: int) -> jax.Array:
    """The empty output trace of ES-D-RTRL: ``init_pp``, repeated over added axes."""
    zero = _repeated(coords, _init(op, 'init_pp', 'ES_D_RTRL', num_state))
    return jnp.broadcast_to(zero, (*op.repeats, *zero.shape)) if op.repeats else zero


def apart(entry: Entry) -> States:
    """An entry as one array for each state."""
    return {n: tuple(e[..., s] for s in range(e.shape[-1])) for n, e in entry.items()}


def _repeated(coords: Coordinates, zero: jax.Array) -> jax.Array:
    """Zeros, repeated over the added axes."""
    at, behind = coords.axis, coords.axis + coords.added
    sizes = *zero.shape[:at], *coords.shape[at:behind], *zero.shape[at:]
    return jnp.broadcast_to(jnp.expand_dims(zero, range(at, behind)), sizes)


def _init(op: OpUse, slot: str, algorithm: str, num_state: int):
    x = None if op.x is None else _variable(op.x_aval)
    weights = {n: _variable(a) for n, a in op.weight_avals.items()}
    rule = op.primitive.bound_rule(slot, op.params, algorithm)
    return rule(x, _variable(op.y_aval), weights, num_state)


def _variable(aval):
    return SimpleNamespace(aval=jax.ShapeDtypeStruct(aval.shape, aval.dtype))


def _check_layout(op: OpUse, coords: Coordinates, entry: Entry, num_state: int) -> None:
    """Refuse an ``init_drtrl`` whose arrays have other shapes than the entries of one step."""
    op = outside_loops(op)
    d = (jax.ShapeDtypeStruct(coords.shape, op.y_aval.dtype),)

    def one(x, d, weights):
        return instant(op.empty(), coords, x, d, weights)

    # without the axes of a mesh that the step was traced under
    x, weights = jax.tree.map(abstract, (op.x_aval, op.weight_avals))
    (fresh,) = jax.eval_shape(one, x, d, weights)
    wanted = {n: (*fresh[n].shape, num_state) for n in entry}
    wrong = {n: (e.shape, wanted[n]) for n, e in entry.items() if e.shape != wanted[n]}
    if wrong:
        text = ', '.join(
            f'{n!r}: {list(a)} from init_drtrl, {list(b)} from one step'
            for n, (a, b) in wrong.items()
        )
        raise RuleContractError(
            f'{op.where}: the trace of {op.primitive.name} has two layouts: {text}. init_drtrl '
            'must return zeros of the batch axis (if batched), the layout of one sample, and the '
            'state axis last.'
        )


# one step, and many ----------------------------------------------------------------------------


def instant(op: OpUse, coords: Coordinates, x, df: Vector, weights: Entry) -> Vector:
    """One step's entry ``D_f (x) x``, sample by sample, summed over the turns of loops around the
    op.
    """
    weights = finite(op, weights)
    if op.repeats:
        return accumulate(op, coords, x, df, weights)
    rule = _instant_rule(op, coords)
    return _each(op, lambda d: rule(x, d.astype(op.y_aval.dtype), weights), df)


def _instant_rule(op: OpUse, coords: Coordinates) -> Callable:
    """``fn(x, d, weights)``: one step's entry."""
    root = op.primitive.root
    slot = 'xy_to_dw' if root.optional_rule('instant_drtrl') is None else 'instant_drtrl'
    if op.primitive.structure:  # its parameters are arrays
        return _lane_by_lane(root.bound_rule(slot, op.params, 'D_RTRL'), op, coords, 0)
    params = tuple(op.params.items())
    return _traced_once(op.primitive, slot, root.rule(slot), params, coords.layout)


@functools.lru_cache(maxsize=256)
def _traced_once(primitive, slot: str, rule: Callable, params: tuple, layout: tuple) -> Callable:
    """The rule of a kind of op, which is traced once for each shape: a write asks for each row and
    state, and a stack of layers for each layer. ``rule`` is a key: another may be registered.
    """
    fn = primitive.root.bound_rule(slot, dict(params), 'D_RTRL')
    fn = primitive.by_lane(fn, dict(params), 0)
    return jax.jit(mapped_over_added(fn, layout, (None, layout[1], None)), inline=True)


def accumulate(op: OpUse, coords: Coordinates, xs, pushes: Vector, weights: Entry) -> Vector:
    """``sum_t x_t (x) push_t`` over a leading time axis: one contraction where the entry has the
    parameter's layout.
    """
    weights = finite(op, weights)
    if op.repeats:  # the turns of loops are summed as steps of time are
        xs = folded(xs, () if op.x is None else op.x_aval.shape)
        pushes = jax.tree.map(lambda a: folded(a, coords.shape), pushes)
        return accumulate(outside_loops(op), coords, xs, pushes, weights)
    if op.x is None:
        return instant(op, coords, None, jax.tree.map(lambda a: a.sum(0), pushes), weights)
    root = op.primitive.root
    if root.optional_rule('instant_drtrl') is None:
        contract = functools.partial(op_gradient, dataclasses.replace(op, primitive=root))
        rule = _lane_by_lane(contract, op, coords, 1)
        return _each(op, lambda d: rule(xs, d, weights), pushes)

    # another layout (conv, lora) has no contraction over time: step by step
    def plus(total, step):
        x, push = step
        return jax.tree.map(jnp.add, total, instant(op, coords, x, push, weights)), None

    first = jax.tree.map(lambda a: a[0], (xs, pushes))
    shapes = jax.eval_shape(lambda x, push: instant(op, coords, x, push, weights), *first)
    empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return jax.lax.scan(plus, empty, (xs, pushes))[0]


def carry(op: OpUse, coords: Coordinates, d: Transition, entry: Vector) -> Vector:
    """``D e``: for state s the sum over states r of ``yw_to_w(D[s][r], e_r)``."""
    return apply(d, entry, transport(op, coords))


def added(a: Vector, b: Vector) -> Vector:
    """The sum of two entries, state by state."""
    return tuple(add(*pair) for pair in zip(a, b, strict=True))


def transport(op: OpUse, coords: Coordinates) -> Callable:
    """``yw_to_w``: the product of values at y's positions with one state of an entry."""
    rule = op.primitive.bound_rule('yw_to_w', op.params, 'D_RTRL')
    return mapped_over_added(rule, coords.layout, coords.axis)


def _each(op: OpUse, fn: Callable, vector: Vector) -> Vector:
    return tuple(None if x is None else in_parts(op, fn, x) for x in vector)


def _lane_by_lane(fn: Callable, op: OpUse, coords: Coordinates, lane: int) -> Callable:
    """``fn(x, d, weights)`` of the root, mapped over the axes that must not be summed: the added
    axes, the axes of ``vmap``, and the batch (axis ``lane``).
    """
    over_batch = op.primitive.by_lane(fn, op.params, lane)
    return mapped_over_added(over_batch, coords.layout, (None, lane + coords.axis, None))


# what the layout of an entry allows ------------------------------------------------------------


def is_by_sample(op: OpUse, coords: Coordinates) -> bool:
    """Whether an entry is the parameter's layout for each sample, so that lanes can be taken one at
    a time.
    """
    root = op.primitive.root
    own = root.optional_rule('instant_drtrl') or root.optional_rule('solve_drtrl')
    plain = op.primitive.batched and op.primitive.original is None and own is None
    return plain and op.x is not None and not op.repeats and not coords.added


def reads_weights(pair: Pair) -> bool:
    """Whether the entry of one step is made with the weights."""
    op, coords = outside_loops(pair.op), pair.coords

    def one(values, x, d):
        weights = dict(zip(op.weight_avals, values, strict=True))
        return sum(e.sum() for e in jax.tree.leaves(instant(op.empty(), coords, x, (d,), weights)))

    d = jax.ShapeDtypeStruct(coords.shape, op.y_aval.dtype)
    return any(depends(one, list(op.weight_avals.values()), op.x_aval, d))
