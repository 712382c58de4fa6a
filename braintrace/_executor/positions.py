"""Arrays at a group's positions, brought to the coordinates of a relation's entries."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import Coordinates

MOST_PIECES = 32


def gathered(coords: Coordinates, tree):
    """Arrays at a group's positions, gathered to a relation's coordinates."""
    if coords.positions is None:
        return tree
    axis, times = _tiled(coords)
    pieces = None if times else _pieces(coords)

    def leaf(v):
        if pieces is not None:
            return jnp.concatenate([piece.of(v) for piece in pieces], -1)
        if not v.size:
            return jnp.zeros(coords.shape, v.dtype)
        if times is None:
            return v.reshape(-1)[coords.positions]
        wide = jnp.broadcast_to(jnp.expand_dims(v, axis), (*v.shape[:axis], times, *v.shape[axis:]))
        return wide.reshape(coords.shape)

    return jax.tree.map(leaf, tree)


def compressed(a: np.ndarray) -> np.ndarray:
    """The array with size 1 along axes on which it does not depend."""
    for axis in range(a.ndim):
        if (a == a.take([0], axis)).all():
            a = a.take([0], axis)
    return a


class Piece(NamedTuple):
    """A block of entries whose positions are a part of the group, its axes in another order and
    some of them repeated: no list of positions is needed.
    """

    joined: tuple[int, ...]  # the group's shape with some neighbouring axes as one
    start: tuple[int, ...]
    limit: tuple[int, ...]
    order: tuple[int, ...]  # the axes that stay, in their new order
    places: tuple[int, ...]  # where these come in ``shape``
    shape: tuple[int, ...]

    def of(self, v: jax.Array) -> jax.Array:
        part = jax.lax.slice(v.reshape(self.joined), self.start, self.limit)
        gone = tuple(k for k in range(part.ndim) if k not in self.order)
        part = part.transpose((*gone, *self.order)).reshape([part.shape[k] for k in self.order])
        return jax.lax.broadcast_in_dim(part, self.shape, self.places)


@functools.lru_cache(maxsize=256)
def _pieces(coords: Coordinates) -> tuple[Piece, ...] | None:
    """The entries as pieces along their last axis, where a few are enough."""
    positions, found, start = coords.positions, [], 0
    if positions is None or not positions.ndim or not positions.size:
        return None
    # entries along the last axis that move by one stride are a piece
    last = positions.shape[-1]
    steps = np.diff(positions.reshape(-1, last), axis=-1)
    uniform = (steps == steps[:1]).all(0)
    while start < last:
        stop = start + 1
        while stop < last and uniform[stop - 1] and steps[0, stop - 1] == steps[0, start]:
            stop += 1
        piece = _piece(positions[..., start:stop], tuple(coords.group_shape))
        if piece is None or len(found) == MOST_PIECES:
            return None
        found.append(piece)
        start = stop
    return tuple(found)


def _piece(positions: np.ndarray, group: tuple[int, ...]) -> Piece | None:
    shape, first = positions.shape, int(positions.flat[0])
    # the stride of the positions along each axis; they must be that everywhere
    strides = [
        int(np.diff(positions.take([0, 1], k), axis=k).flat[0]) if n > 1 else 0
        for k, n in enumerate(shape)
    ]
    wanted = first + sum(
        s * np.arange(n).reshape([-1 if j == k else 1 for j in range(len(shape))])
        for k, (s, n) in enumerate(zip(strides, shape, strict=True))
    )
    if not np.array_equal(np.broadcast_to(wanted, shape), positions):
        return None
    # each axis that is not repeated is one axis of the group, or some neighbours as one
    used: dict[int, tuple[int, int]] = {}
    for place, (stride, n) in enumerate(zip(strides, shape, strict=True)):
        # the last axis of the group that has this stride
        axes = (
            k for k in range(len(group)) if group[k] > 1 and math.prod(group[k + 1 :]) == stride
        )
        axis = next(axes, None) if stride else None
        if stride and (axis is None or axis in used):
            return None
        if axis is not None:
            used[axis] = n, place
    return _with_axes(group, used, first, shape)


def _with_axes(
    group: tuple[int, ...], used: dict[int, tuple[int, int]], first: int, shape: tuple[int, ...]
) -> Piece | None:
    """``used``: the group's axes that stay, each with its size and its place."""
    # from the last axis of the group to the first
    joined: list[int] = []
    start: list[int] = []
    limit: list[int] = []
    kept: dict[int, int] = {}  # place -> axis counted from the end of the joined ones
    k = len(group) - 1
    while k >= 0:
        size, inside = group[k], math.prod(group[k + 1 :])
        n, place = used.get(k, (1, None))
        while n > size and k > 0 and k - 1 not in used:
            k -= 1
            size *= group[k]
        at = first // inside % size if size else 0
        if at + n > size:
            return None
        joined, start, limit = [size, *joined], [at, *start], [at + n, *limit]
        if place is not None:
            kept[place] = len(joined)
        k -= 1
    places = tuple(sorted(kept))
    order = tuple(len(joined) - kept[place] for place in places)
    return Piece(tuple(joined), tuple(start), tuple(limit), order, places, shape)


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
