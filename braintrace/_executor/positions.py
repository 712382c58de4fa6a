"""Arrays at a group's positions, brought to the coordinates of a relation's entries."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

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
            return jnp.concatenate([of(v) for of in pieces], -1)
        if not v.size:
            return jnp.zeros(coords.shape, v.dtype)
        if times is None:
            return v.reshape(-1)[coords.positions]
        wide = jnp.broadcast_to(jnp.expand_dims(v, axis), (*v.shape[:axis], times, *v.shape[axis:]))
        return wide.reshape(coords.shape)

    return jax.tree.map(leaf, tree)


@functools.lru_cache(maxsize=256)
def _pieces(coords: Coordinates) -> tuple[Callable, ...] | None:
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
        of = piece(positions[..., start:stop], tuple(coords.group_shape))
        if of is None or len(found) == MOST_PIECES:
            return None
        found.append(of)
        start = stop
    return tuple(found)


def piece(positions: np.ndarray, group: tuple[int, ...]) -> Callable | None:
    """What brings an array of a group to a block of entries whose positions are a part of the
    group, its axes in another order and some of them repeated: no list of positions is needed.
    None where they are no such block.
    """
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
    used: dict[int, tuple[int, int]] = {}  # axis of the group that stays -> its size and its place
    for at, (stride, n) in enumerate(zip(strides, shape, strict=True)):
        if not stride:
            continue
        # the first axis of the group that has this stride
        axis = 0
        while axis < len(group) and (group[axis] < 2 or math.prod(group[axis + 1 :]) != stride):
            axis += 1
        if axis == len(group) or axis in used:
            return None
        used[axis] = n, at
    # the group's shape with some neighbouring axes as one, from the last axis to the first
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
    order = [len(joined) - kept[place] for place in places]  # the axes that stay
    gone = [k for k in range(len(joined)) if k not in order]

    def of(v: jax.Array) -> jax.Array:
        part = jax.lax.slice(v.reshape(joined), start, limit)
        part = part.transpose((*gone, *order)).reshape([part.shape[k] for k in order])
        return jax.lax.broadcast_in_dim(part, shape, places)

    return of


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
