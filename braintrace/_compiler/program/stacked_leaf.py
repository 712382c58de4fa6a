"""An array of the carry that holds several hidden states, and where each stands in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, eq=False)
class Split:
    """``places``: for each piece, and in its shape, the flat positions of its elements."""

    aval: Any
    places: tuple[np.ndarray, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each piece."""
        return tuple(map(str, range(len(self.places))))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each piece."""
        return tuple(places.shape for places in self.places)

    @property
    def dtype(self):
        """The dtype of the pieces."""
        return self.aval.dtype

    def apart(self, leaf) -> list:
        return [self.piece(leaf, k) for k in range(len(self.places))]

    def piece(self, leaf, k: int):
        at, places = self._boxes[k], self.places[k]
        # a block of the leaf is a slice, which costs less than picking elements
        if at is None:
            return _picked(leaf, places)
        return jax.lax.slice(leaf, [s.start for s in at], [s.stop for s in at]).reshape(
            places.shape
        )

    def together(self, pieces: Sequence):
        if self._axis is None:
            return _picked(jnp.concatenate([jnp.ravel(p) for p in pieces]), self._order)
        shapes = [[s.stop - s.start for s in at] for at in self._boxes if at is not None]
        return jnp.concatenate(
            [jnp.reshape(p, shape) for p, shape in zip(pieces, shapes, strict=True)], self._axis
        )

    def lane_axis(self) -> int | None:
        """The axis of the leaf that is axis 0 of every piece."""
        found = {_axis_of(self.aval.shape, places) for places in self.places}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def _boxes(self) -> list[tuple[slice, ...] | None]:
        """For each piece, the block of the leaf that it fills in order, if any."""
        return [
            _box(places, self.aval.shape) if (np.diff(places.reshape(-1)) > 0).all() else None
            for places in self.places
        ]

    @cached_property
    def _axis(self) -> int | None:
        """The axis along which the pieces lie one after the other, if any."""
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
        """For each element of the leaf, its place when all pieces lie flat, one after another."""
        return np.argsort(np.concatenate([places.reshape(-1) for places in self.places])).reshape(
            self.aval.shape
        )


@dataclass(frozen=True, eq=False)
class Parts:
    """Complex numbers as two pieces: real parts and imaginary parts."""

    aval: Any
    names = 're', 'im'

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.aval.shape, self.aval.shape

    @property
    def dtype(self):
        return np.empty(0, self.aval.dtype).real.dtype

    def apart(self, leaf) -> list:
        return [jnp.real(leaf), jnp.imag(leaf)]

    def piece(self, leaf, k: int):
        return self.apart(leaf)[k]

    def together(self, pieces: Sequence):
        return jax.lax.complex(*pieces)

    def lane_axis(self) -> int | None:
        return 0


def _picked(x, places: np.ndarray):
    return jnp.ravel(x).at[places].get(mode='promise_in_bounds', unique_indices=True)


def _box(places: np.ndarray, shape) -> tuple[slice, ...] | None:
    """The block of an array that these flat positions fill, if any."""
    found = tuple(
        slice(int(i.min()), int(i.max()) + 1) for i in np.unravel_index(places.reshape(-1), shape)
    )
    return found if np.prod([s.stop - s.start for s in found]) == places.size else None


def grid(places: np.ndarray, shape) -> np.ndarray:
    """Ascending flat positions as an array of the rows and columns that they fill.

    Positions that fill no such block stay flat. An axis along which the block has one place of
    several is left out.
    """
    # how many different indices there are along each axis; a block has all combinations
    sizes = [len(np.unique(i)) for i in np.unravel_index(places, shape)]
    if np.prod(sizes) != places.size:
        return places
    return places.reshape([k for k, n in zip(sizes, shape, strict=True) if k > 1 or n == 1])


def _axis_of(shape, places: np.ndarray) -> int | None:
    """The axis of an array that axis 0 of a piece runs along, index by index."""
    for axis, index in enumerate(np.unravel_index(places, shape)):
        rows = index.reshape(len(index), -1) if index.ndim else np.empty((0, 0))
        if len(rows) == shape[axis] and (rows == np.arange(len(rows))[:, None]).all():
            return axis
    return None
