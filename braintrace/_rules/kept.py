"""Between the hidden numbers of a step and those that an entry of a trace keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import ETraceGraph
from .._executor import Executor, Numbers
from .coordinates import Pair, by_pair, pairs

Flows = dict[str, Any]  # by carrier, with the relation in front where entries have rows


def flow(pair: Pair) -> str:
    """The name of what moves by one transition."""
    name = pair.group.name
    return name if pair.group.kept.rows is None else f'{pair.relation.key} -> {name}'


def derivatives(executor: Executor, at: tuple) -> tuple[Flows, dict[str, dict]]:
    """D of each flow, and D_f of each pair, of the step ``at``."""
    graph = executor.graph
    scope, numbers = graph.scope, Numbers.of(graph)
    uncut = executor.uncut(*at)
    m = int(scope.colours.max(initial=-1)) + 1
    ones = numbers.split(np.eye(m)[:, scope.colours])
    basis = [jnp.asarray(b, h.dtype) for b, h in zip(ones, uncut.new, strict=True)]
    old, to_y = jax.vmap(uncut.pull)(basis)
    old = numbers.joined(old)
    d: Flows = {}
    for pair in pairs(graph):
        if flow(pair) not in d:
            d[flow(pair)] = _transition(graph, pair, old)
    return d, by_pair(graph, lambda pair: _fed(graph, numbers, pair, to_y, uncut.along))


def _transition(graph: ETraceGraph, pair: Pair, old: jax.Array) -> jax.Array:
    """D of a carrier from the VJPs ``old`` of each colour."""
    scope, own = graph.scope, pair.group.kept
    if own.rows is None:
        at = own.numbers
        found = jnp.moveaxis(old[scope.colours[at]], 0, -2)[..., at]
        return jnp.where(scope.reads[np.ix_(at, at)], found, 0)
    rows = np.moveaxis(own.rows, -1, 0)
    new, past = np.broadcast_arrays(rows[:, None], rows[None])
    there = (new >= 0) & (past >= 0) & scope.reads[new, past]
    lanes = _lanes(pair)
    found = old[
        (scope.colours[new][:, :, None], lanes, past[:, :, None])
        if lanes is not None
        else (scope.colours[new], past)
    ]
    return jnp.where(there[:, :, None] if lanes is not None else there, found, 0)


def _lanes(pair: Pair) -> np.ndarray | None:
    """The number of each lane, before the axes of y in a lane."""
    if not pair.laned:
        return None
    lanes, *others = pair.coords.shape
    return np.arange(lanes).reshape(lanes, *(1 for _ in others))


def _fed(
    graph: ETraceGraph, numbers: Numbers, pair: Pair, to_y: dict, along: Callable
) -> jax.Array:
    """D_f of a pair: ``(K, *coords)``."""
    scope, own, key = graph.scope, pair.group.kept, pair.relation.key
    if pair.laned and key not in scope.laned:
        rows = _fed_in_each_lane(graph, numbers, pair, along(key))
    else:
        rows = to_y[key][scope.colours]
    if own.rows is None:
        rows, there = rows[own.numbers], scope.feeds[key][own.numbers]
    else:
        slots = np.moveaxis(own.rows, -1, 0)
        at = np.indices(slots.shape)[1:]
        there = (slots >= 0) & scope.feeds[key][(slots, *at)]
        lanes = _lanes(pair)
        if lanes is not None:
            rows = rows[(slots[:, None], lanes, *(a[:, None] for a in at))]
        else:
            rows = rows[(slots, *at)]
    return jnp.where(there[:, None] if pair.laned else there, rows, 0)


def _fed_in_each_lane(
    graph: ETraceGraph, numbers: Numbers, pair: Pair, along: Callable
) -> jax.Array:
    """``(N, lanes, *y)`` of a y without lanes, of one element after the other."""
    shape = pair.op.y_aval.shape
    each = np.eye(int(np.prod(shape))).reshape(-1, *shape)
    real = jnp.finfo(pair.op.y_aval.dtype).dtype
    found = jax.vmap(along)(jnp.asarray(each, real))
    rows = numbers.joined([found[c] for c in graph.states])
    return jnp.moveaxis(rows, 0, -1).swapaxes(0, 1).reshape(-1, *numbers.front, *shape)


def kept(graph: ETraceGraph, of_groups: dict) -> Flows:
    """Signals by group and state at the numbers of each own."""
    numbers = Numbers.of(graph)
    of_state = {
        c: s for g in graph.hidden_groups for c, s in zip(g.states, of_groups[g.name], strict=True)
    }
    avals = [graph.program.avals[graph.program.carry[c]] for c in graph.states]
    every = numbers.joined(
        [
            jnp.zeros(a.shape, a.dtype) if of_state[c] is None else of_state[c]
            for c, a in zip(graph.states, avals, strict=True)
        ]
    )
    return {flow(pair): _kept(pair, every) for pair in pairs(graph)}


def _kept(pair: Pair, every: jax.Array) -> jax.Array:
    """A signal at all hidden numbers, at those that a pair keeps."""
    own = pair.group.kept
    if own.rows is None:
        return every[..., own.numbers]
    slots, lanes = np.moveaxis(own.rows, -1, 0), _lanes(pair)
    found = every[slots] if lanes is None else every[lanes, slots[:, None]]
    return jnp.where(slots >= 0 if lanes is None else slots[:, None] >= 0, found, 0)
