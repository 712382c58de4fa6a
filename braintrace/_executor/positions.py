"""Arrays at a group's positions, brought to the coordinates of a relation's entries."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import Coordinates

__all__ = ['gathered']


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
