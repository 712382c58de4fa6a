"""Between the positions of a group and the coordinates of a relation's entries.

Where an element of y feeds several positions of the state, it has an entry for each of them, along
axes that are added to those of y; the op's rules are mapped over these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._compiler import Coordinates, ETraceGraph, HiddenGroup, OpUse, Relation, is_complex
from .._executor import gathered


class Pair(NamedTuple):
    """A relation and one of its groups: where one entry of the trace belongs."""

    relation: Relation
    group: HiddenGroup
    coords: Coordinates
    laned: bool  # axis 0 of the coordinates is the lanes

    @property
    def op(self) -> OpUse:
        return self.relation.op

    @property
    def has_lanes_added(self) -> bool:
        """Whether the lanes are an added axis: an op without a batch beside a state with one."""
        return self.laned and self.coords.added > 0 and self.coords.axis == 0

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


def is_plain(op: OpUse, coords: Coordinates) -> bool:
    """Whether one entry stands at each of y's positions."""
    return not op.repeats and not coords.added and coords.positions is None


def mapped_over_added(fn: Callable, layout: tuple[int, int], in_axes) -> Callable:
    """``fn`` mapped over added axes; ``layout``: their number, and where the result has them."""
    added, axis = layout
    for _ in range(added):
        fn = jax.vmap(fn, in_axes=in_axes, out_axes=axis)
    return fn


def without_added(coords: Coordinates, x: jax.Array, behind: int = 0) -> jax.Array:
    """The sum over the axes that coordinates have beside those of y, ``behind`` others in front."""
    start = behind + coords.axis
    return x.sum(tuple(range(start, start + coords.added))) if coords.added else x


def to_y(pair: Pair, d: jax.Array) -> jax.Array:
    """A cotangent at a relation's coordinates, summed to y's shape; that of a real y is real."""
    d = d if is_complex(pair.op.y_aval) else jnp.real(d)
    return without_added(pair.coords, d, len(pair.op.repeats))


def folded(array: jax.Array | None, shape) -> jax.Array | None:
    """An array with all axes in front of ``shape`` (time, loops around the op) folded into one."""
    if array is None:
        return None
    return array.reshape(math.prod(array.shape[: array.ndim - len(shape)]), *shape)
