"""``< signal , e >``: the gradient of the weights, read from a stored entry."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import Coordinates, OpUse, is_complex
from .._executor import Vector, dot
from .contraction import by_group, finite
from .coordinates import is_plain, mapped_over_added, without_added
from .entries import is_by_sample, transport
from .lanes import anywhere
from .storage import Entry, States, Stored, by_state, one_lane

FUSED_STREAMS = 4  # lanes times states that are summed in one expression, which XLA fuses


def solve(
    op: OpUse, coords: Coordinates, signal: Vector, old: Stored, weights: Entry, groups: int = 0
) -> Entry:
    """``< signal , e >`` of one entry, summed over states and lanes; of so many groups of lanes
    apart.
    """
    some = next((x for x in signal if x is not None), None)
    if some is None:
        zeros = {n: jnp.zeros(a.shape, a.dtype) for n, a in op.weight_avals.items()}
        return jax.tree.map(lambda z: jnp.stack([z] * groups) if groups else z, zeros)
    moved = transport(op, coords)
    own = op.primitive.optional_rule('solve_drtrl')

    def rule(signal, entry):
        return _real(op, moved(signal, entry))

    def of_lanes(signal, numbers):
        if own is not None:
            return _by_own_rule(op, coords, signal, numbers, weights)
        total = dot(signal, by_state(numbers), rule)
        return {n: _summed(op, coords, g) for n, g in total.items()}

    def all_at_once():
        return of_lanes(signal, old.numbers)

    def lane_by_lane():
        def of_lane(b):
            total = dot(one_lane(signal, b), by_state(old.lane(b).numbers), rule)
            return {n: g[0] for n, g in total.items()}

        states = sum(x is not None for x in signal)
        return _sum_over_lanes(of_lane, some.shape[0], max(1, FUSED_STREAMS // states))

    if groups:
        return by_group(groups, of_lanes, 0, signal, old.numbers)
    if is_by_sample(op, coords) and some.ndim and some.shape[0]:
        return _jax.platform_dependent(cpu=lane_by_lane, default=all_at_once)
    return all_at_once()


def has_reader(op: OpUse, coords: Coordinates) -> bool:
    """Whether a platform may have code of its own that reads this entry."""
    return bool(op.primitive.trace_reader) and is_plain(op, coords)


def solve_onto(
    onto: Entry,
    op: OpUse,
    coords: Coordinates,
    signal: Vector,
    old: Stored,
    weights: Entry,
    groups: int = 0,
) -> Entry:
    """``onto + < signal , e >`` by the op's own code on platforms that have it."""
    if all(x is None for x in signal):
        return onto

    def default(onto, signal, entry, alive):
        def read():
            found = solve(op, coords, signal, Stored(entry, alive, old.dtype), weights, groups)
            return {n: g.astype(onto[n].dtype) for n, g in found.items()}

        return jax.tree.map(operator.add, onto, read() if groups else if_any(alive, read))

    def by(reader):
        def run(*operands):
            return {**default(*operands), **reader(*operands, **op.params)}

        return run

    operands = onto, signal, old.entry, old.alive
    if groups:
        return default(*operands)
    readers = {platform: by(reader) for platform, reader in op.primitive.trace_reader.items()}
    return _jax.platform_dependent(*operands, default=default, **readers)


def if_any(alive: jax.Array, read: Callable):
    """``read()``, which gives zeros while no lane has a past; on a CPU it is skipped then."""

    def skipped():
        shapes = jax.eval_shape(read)
        none = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)  # noqa: E731
        return jax.lax.cond(anywhere(alive), read, none)

    return _jax.platform_dependent(cpu=skipped, default=read)


def _by_own_rule(
    op: OpUse, coords: Coordinates, signal: Vector, numbers: States, weights: Entry
) -> Entry:
    """The gradient by the primitive's ``solve_drtrl``, whose layout is not the parameter's."""
    own, weights = op.primitive.bound_rule('solve_drtrl', op.params, 'D_RTRL'), finite(op, weights)
    axis = coords.axis
    rule = mapped_over_added(lambda d, e: _real(op, own(d, e, weights)), (coords.added, 0), axis)
    total = dot(signal, by_state(numbers), rule)
    return {n: g.sum(tuple(range(coords.added))) for n, g in total.items()}


def _real(op: OpUse, entry: Entry) -> Entry:
    """A product of a signal and an entry: the real part of it for a real weight."""
    avals = op.weight_avals
    return {n: e if is_complex(avals[n]) else jnp.real(e) for n, e in entry.items()}


def _summed(op: OpUse, coords: Coordinates, x: jax.Array) -> jax.Array:
    """An entry, summed over its lanes and over added axes to the parameter's shape."""
    x = without_added(coords, x)
    return x.sum(0) if op.primitive.batched else x


def _sum_over_lanes(of_lane: Callable, lanes: int, fused: int):
    """``sum_b of_lane(b)``, so many lanes in one expression: lanes often begin at the same place of
    a processor's cache, so that few of them can be read at once.
    """
    plus = functools.partial(jax.tree.map, operator.add)

    of_lane = jax.jit(of_lane, inline=True)  # traced once

    def block(start, number):
        return functools.reduce(plus, [of_lane(start + jnp.int32(b)) for b in range(number)])

    # the lanes that fill no block, then a loop over blocks
    whole, rest = divmod(lanes, fused)
    first = block(whole * fused, rest) if rest else block(0, fused)
    blocks = jnp.arange(0 if rest else 1, whole, dtype=jnp.int32)
    if not blocks.size:
        return first
    return jax.lax.scan(
        lambda total, i: (plus(total, block(i * fused, fused)), None), first, blocks
    )[0]
