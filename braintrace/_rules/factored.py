"""A trace of two factors for each pair of a relation and a group: ``x`` of the input's size, and
``f`` of the output's, the states of the group in its last axis.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._executor import Vector
from .contraction import as_represented
from .coordinates import Pair, by_pair
from .entries import zeros_pp
from .lanes import where_lanes
from .rule import Network, Trace
from .storage import entry_dtype


def empty_factors(pair: Pair) -> dict[str, jax.Array]:
    """The two factors before the first step; an op without x has ``f`` alone."""
    op, coords = as_represented(pair.op), pair.coords
    f = zeros_pp(pair.op, coords, pair.group.num_state)
    slots = {'f': f.astype(entry_dtype(f.dtype, pair.group.dtype))}
    if op.x is not None:
        lanes = coords.shape[: int(pair.has_lanes_added)]
        slots['x'] = jnp.zeros((*op.repeats, *lanes, *op.x_aval.shape), op.x_aval.dtype)
    return slots


def states_of(f: jax.Array) -> Vector:
    """An array with the states in its last axis as a vector."""
    return tuple(f[..., s] for s in range(f.shape[-1]))


def apart(trace: Trace) -> Trace:
    """The slots with one f for each state."""
    return _with_f(trace, states_of)


def joined(slots: Trace) -> Trace:
    """The inverse of :func:`apart`."""
    return _with_f(slots, lambda f: jnp.stack(f, -1))


def _with_f(trace: Trace, change: Callable) -> Trace:
    return {
        key: {g: {**slots, 'f': change(slots['f'])} for g, slots in by_group.items()}
        for key, by_group in trace.items()
    }


def alive(network: Network, slots: Trace, flags: jax.Array) -> Trace:
    """The slots, zero in lanes without a past."""

    def one(pair: Pair):
        front = len(pair.op.repeats)
        return jax.tree.map(lambda e: where_lanes(flags, pair.laned, e, front), pair.of(slots))

    return by_pair(network.graph, one)


def at_entries(pair: Pair, by_group: dict[str, Vector]) -> Vector:
    """The group's vector at the relation's coordinates, with axes for the loops around the op."""
    front = tuple(range(len(pair.op.repeats)))
    return jax.tree.map(lambda s: jnp.expand_dims(s, front), pair.gathered(by_group))
