"""Arrays at a group's positions, brought to the coordinates of a relation's entries."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import Coordinates, compressed

MOST_RUNS = 32  # slices of an axis, beyond which its elements are picked one by one


def gathered(coords: Coordinates, tree):
    """Arrays at a group's positions, gathered to a relation's coordinates.

    Axis by axis: an axis of the group is cut into slices where the entries run along it, as for
    gates that are beside each other in one product, and repeated along the axes of entries on
    which it does not depend. A list of all positions would be as long as the result.
    """
    if coords.positions is None:
        return tree
    axes = _by_axes(coords)

    def leaf(v):
        if not v.size or not math.prod(coords.shape):
            return jnp.zeros(coords.shape, v.dtype)
        v = v.reshape([size for size, _ in axes])
        for k, (size, index) in enumerate(axes):
            flat = index.reshape(-1)
            runs = np.split(flat, np.flatnonzero(np.diff(flat) != 1) + 1)
            if len(runs) > MOST_RUNS:
                v = jnp.take(v, flat, k, mode='clip')
            elif len(runs) > 1 or flat.size < size:
                slices = [jax.lax.slice_in_dim(v, run[0], run[-1] + 1, axis=k) for run in runs]
                v = jnp.concatenate(slices, k)
        # each axis that is there now is one of the entries', or some of them
        places = [k for _, index in axes for k, n in enumerate(index.shape) if n > 1]
        v = v.reshape([coords.shape[k] for k in places]).transpose(np.argsort(places).tolist())
        return jax.lax.broadcast_in_dim(v, coords.shape, sorted(places))

    return jax.tree.map(leaf, tree)


@functools.lru_cache(maxsize=256)
def _by_axes(coords: Coordinates) -> list[tuple[int, np.ndarray]]:
    """The axes of the group, each with its size and the index that each entry has along it."""
    found: list[tuple[int, np.ndarray]] = []
    for k, size in enumerate(coords.group_shape):
        index = coords.along(k)
        # neighbours through which one axis of the entries runs are one
        while found and any(m > 1 < n for m, n in zip(found[-1][1].shape, index.shape)):
            outer, before = found.pop()
            size, index = outer * size, compressed(before * size + index)
        found.append((size, index))
    # an axis of the entries that runs along two others: all are one
    if any(sum(n > 1 for n in sizes) > 1 for sizes in zip(*(index.shape for _, index in found))):
        return [(math.prod(coords.group_shape), np.asarray(coords.positions))]
    return found
