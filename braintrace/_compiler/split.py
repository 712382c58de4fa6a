"""One array of the carry as several hidden states: where each of them stands in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ['Split', 'grid']


@dataclass(frozen=True, eq=False)
class Split:
    """A leaf of the carry in pieces.

    ``places`` holds, for each piece and in its shape, the flat positions of its elements.
    """

    aval: Any
    places: tuple[np.ndarray, ...]

    def apart(self, leaf) -> list:
        """The pieces of a leaf."""
        return [self.piece(leaf, k) for k in range(len(self.places))]

    def piece(self, leaf, k: int):
        """One piece of a leaf."""
        at, places = self._boxes[k], self.places[k]
        if at is None:
            return _picked(leaf, places)
        return jax.lax.slice(leaf, [s.start for s in at], [s.stop for s in at]).reshape(
            places.shape
        )

    def together(self, pieces: Sequence):
        """The leaf of which these are the pieces."""
        if self._axis is None:
            return _picked(jnp.concatenate([jnp.ravel(p) for p in pieces]), self._order)
        shapes = [[s.stop - s.start for s in at] for at in self._boxes if at is not None]
        return jnp.concatenate(
            [jnp.reshape(p, shape) for p, shape in zip(pieces, shapes, strict=True)], self._axis
        )

    def lane_axis(self) -> int | None:
        """The axis of the leaf that is axis 0 of every piece, or None."""
        found = {_axis_of(self.aval.shape, places) for places in self.places}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def _boxes(self) -> list[tuple[slice, ...] | None]:
        return [
            _box(places, self.aval.shape) if (np.diff(places.reshape(-1)) > 0).all() else None
            for places in self.places
        ]

    @cached_property
    def _axis(self) -> int | None:
        """The axis along which the pieces lie one after the other, if they do."""
        if any(at is None for at in self._boxes):
            return None
        for axis in range(len(self.aval.shape)):
            edges = [at[axis] for at in self._boxes if at is not None]
            starts, stops = [e.start for e in edges], [e.stop for e in edges]
            if starts == [0, *stops[:-1]] and stops[-1] == self.aval.shape[axis]:
                return axis
        return None

    @cached_property
    def _order(self) -> np.ndarray:
        """For each element of the leaf, where it stands among those of all pieces."""
        return np.argsort(np.concatenate([places.reshape(-1) for places in self.places])).reshape(
            self.aval.shape
        )


def _picked(x, places: np.ndarray):
    """The elements of an array at flat positions."""
    return jnp.ravel(x).at[places].get(mode='promise_in_bounds', unique_indices=True)


def _box(places: np.ndarray, shape) -> tuple[slice, ...] | None:
    """The block of an array that these flat positions fill, if they fill one."""
    found = tuple(
        slice(int(i.min()), int(i.max()) + 1) for i in np.unravel_index(places.reshape(-1), shape)
    )
    return found if np.prod([s.stop - s.start for s in found]) == places.size else None


def grid(places: np.ndarray, shape) -> np.ndarray:
    """Ascending flat positions in the shape of the rows and columns that they fill, if they do.

    Others stay along one axis. An axis along which they have one place of several is left out.
    """
    sizes = [len(np.unique(i)) for i in np.unravel_index(places, shape)]
    if np.prod(sizes) != places.size:
        return places
    return places.reshape([k for k, n in zip(sizes, shape, strict=True) if k > 1 or n == 1])


def _axis_of(shape, places: np.ndarray) -> int | None:
    """The axis of an array along which axis 0 of a piece runs, index by index."""
    for axis, index in enumerate(np.unravel_index(places, shape)):
        rows = index.reshape(len(index), -1) if index.ndim else np.empty((0, 0))
        if len(rows) == shape[axis] and (rows == np.arange(len(rows))[:, None]).all():
            return axis
    return None
