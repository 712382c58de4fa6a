"""Between the positions of a group and the coordinates of a relation's entries.

Where y lacks axes of the state (``expanded``), an entry stands at each position of the group: an
op that acts element by element is called on weights of the expanded shape, and any other has its
rules mapped over the added axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import Coordinates, ETraceGraph, HiddenGroup, OpUse, Relation, is_complex

__all__ = [
    'Pair',
    'added_axes',
    'by_pair',
    'folded',
    'gathered',
    'gathered_once',
    'is_plain',
    'is_widened',
    'mapped',
    'pairs',
    'to_y',
]


class Pair(NamedTuple):
    """A relation and one of its groups: where one entry of the trace belongs."""

    relation: Relation
    group: HiddenGroup
    coords: Coordinates
    laned: bool  # axis 0 of the coordinates is the lanes

    @property
    def op(self) -> OpUse:
        return self.relation.op

    def of(self, by_relation: dict):
        """This pair's value in a dict relation -> group -> value."""
        return by_relation[self.relation.key][self.group.name]

    def gathered(self, by_group: dict, rows: bool = False):
        """The group's vector or transition at the relation's coordinates; ``rows``: with axes in
        front for rows and for the loops around the op.
        """
        values = gathered(self.coords, by_group[self.group.name])
        front = (1,) * (1 + len(self.op.repeats)) if rows else ()
        return jax.tree.map(lambda v: v.reshape(front + v.shape), values)


def pairs(graph: ETraceGraph) -> Iterator[Pair]:
    """Every relation with each of its groups."""
    for relation in graph.hidden_param_op_relations:
        for group, coords in zip(relation.groups, relation.coordinates, strict=True):
            yield Pair(relation, group, coords, coords.has_lanes(graph.lanes_of(group)))


def by_pair(graph: ETraceGraph, fn: Callable) -> dict[str, dict]:
    """``fn(pair)`` of every pair, as a dict relation -> group -> value."""
    found: dict[str, dict] = {r.key: {} for r in graph.hidden_param_op_relations}
    for pair in pairs(graph):
        found[pair.relation.key][pair.group.name] = fn(pair)
    return found


def gathered(coords: Coordinates, tree):
    """Arrays at a group's positions, gathered to a relation's coordinates."""
    if coords.positions is None:
        return tree
    axis, times = _tiled(coords)

    def leaf(v):
        if times is None:
            return v.reshape(-1)[coords.positions]
        wide = jnp.broadcast_to(jnp.expand_dims(v, axis), (*v.shape[:axis], times, *v.shape[axis:]))
        return wide.reshape(coords.shape)

    return jax.tree.map(leaf, tree)


def gathered_once(graph: ETraceGraph, flag: jax.Array, values: dict[str, dict]) -> dict[str, dict]:
    """Values by pair, where a flag is set that XLA does not know, and zeros elsewhere: as a branch
    the gathered ones are computed once, where XLA would gather them for each number of a trace.
    """
    moved = {
        (pair.relation.key, pair.group.name)
        for pair in pairs(graph)
        if pair.coords.positions is not None
    }
    chosen = {at: values[at[0]][at[1]] for at in moved}
    if not chosen:
        return values
    made = jax.lax.cond(flag, lambda: chosen, lambda: jax.tree.map(jnp.zeros_like, chosen))
    return by_pair(
        graph,
        lambda pair: made.get((pair.relation.key, pair.group.name), pair.of(values)),
    )


def _tiled(coords: Coordinates) -> tuple[int, int | None]:
    """``(axis, times)`` where the coordinates repeat the group's positions along one axis, as gates
    in one product do; ``times`` is None elsewhere.
    """
    shape, group = tuple(coords.shape), tuple(coords.group_shape)
    longer = [i for i, (a, b) in enumerate(zip(shape, group, strict=False)) if a != b]
    if len(shape) != len(group) or len(longer) != 1:
        return 0, None
    axis = longer[0]
    if not group[axis] or shape[axis] % group[axis]:
        return 0, None
    times = shape[axis] // group[axis]
    repeated = np.concatenate([np.arange(math.prod(group)).reshape(group)] * times, axis)
    same = np.array_equal(np.asarray(coords.positions).reshape(shape), repeated)
    return (axis, times) if same else (0, None)


def added_axes(op: OpUse, coords: Coordinates) -> int:
    """The number of leading axes that the op's rules are mapped over."""
    return len(coords.shape) - op.y_aval.ndim if coords.expanded and not op.pointwise else 0


def is_plain(op: OpUse, coords: Coordinates) -> bool:
    """Whether one entry stands at each of y's positions."""
    return not op.repeats and not coords.expanded and coords.positions is None


def is_widened(op: OpUse, coords: Coordinates) -> bool:
    """Whether the op is called on weights of the expanded shape."""
    return coords.expanded and op.pointwise


def mapped(fn: Callable, times: int, in_axes) -> Callable:
    """``fn`` under so many ``vmap``."""
    for _ in range(times):
        fn = jax.vmap(fn, in_axes=in_axes)
    return fn


def to_y(op: OpUse, d: jax.Array) -> jax.Array:
    """A cotangent at a relation's coordinates, summed to y's shape; that of a real y is real."""
    shape, d = op.y_aval.shape, d if is_complex(op.y_aval) else jnp.real(d)
    if d.shape == (*op.repeats, *shape):
        return d
    d = d.sum(tuple(range(d.ndim - len(shape))))
    return d.sum(tuple(i for i, n in enumerate(shape) if n != d.shape[i]), keepdims=True)


def folded(array: jax.Array | None, shape) -> jax.Array | None:
    """An array with all axes in front of ``shape`` (time, loops around the op) folded into one."""
    if array is None:
        return None
    return array.reshape(math.prod(array.shape[: array.ndim - len(shape)]), *shape)
