"""Leaves of the carry, and those in which several states stand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import _jax
from ...errors import StructureError
from ..equations import is_inexact

# leaves -------------------------------------------------------------------------------------------
#
# The leaves of parameters, carry and inputs: their paths, names, shapes and dtypes.


def describe_aval(aval) -> str:
    """Dtype and shape, as in messages."""
    return f'{aval.dtype}{list(aval.shape)}'


def path_key(path) -> tuple[str, ...]:
    """A pytree key path as strings; a key that is itself a tuple counts as several."""
    parts: list[str] = []
    for key in path:
        value = next((getattr(key, n) for n in ('key', 'name', 'idx') if hasattr(key, n)), key)
        parts.extend(map(str, value if isinstance(value, tuple) else (value,)))
    return tuple(parts)


def path_name(key: tuple[str, ...], bare: str = '.') -> str:
    """The printed form of a path; ``bare`` where the tree is one array."""
    return '/'.join(p.replace('~', '~0').replace('/', '~1') for p in key) or bare


def param_name(path) -> str:
    return path_name(path_key(path), 'params')


def check_arrays(tree, what: str) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not hasattr(leaf, 'dtype') and not isinstance(leaf, bool | int | float | complex):
            raise StructureError(
                f'{what} leaf {path_name(path_key(path), what)!r} is {type(leaf).__name__}, not an '
                f'array. Keep Python objects out of {what}, or close over them.'
            )
        given_away = isinstance(leaf, jax.Array) and not isinstance(leaf, _jax.Tracer)
        if given_away and leaf.is_deleted():
            raise StructureError(
                f'{what} leaf {path_name(path_key(path), what)!r} was given away to a call before, '
                'which wrote into its memory (`donate_argnums`). Go on with what it returned.'
            )


def abstract(leaf):
    """Shape and dtype of a leaf, without the traces of an outer transformation."""
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct | _jax.ShapedArray) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, 'weak_type', False))


def leaves_of(tree, what: str) -> tuple[tuple[tuple[str, ...], ...], list, Any]:
    """The paths of the leaves, the leaves and the tree; refuses two leaves of one path, and leaves
    that are no arrays.
    """
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    keys = tuple(path_key(p) for p, _ in with_paths)
    if len(set(keys)) != len(keys):
        twice = sorted({path_name(k, what) for k in keys if keys.count(k) > 1})
        raise StructureError(
            f'two leaves of {what} have the same path: {twice}. Give them different keys.'
        )
    check_arrays(tree, what)
    return keys, [leaf for _, leaf in with_paths], treedef


def select(predicate, names, avals) -> tuple[int, ...]:
    """Positions of the leaves of inexact dtype that ``predicate(path, leaf)`` chooses."""
    return tuple(
        i
        for i, (n, a) in enumerate(zip(names, avals, strict=True))
        if is_inexact(a) and predicate(n, a)
    )


# a leaf of several states -------------------------------------------------------------------------
#
# An array of the carry that holds several hidden states, and where each is in it.


@dataclass(frozen=True, eq=False)
class Split:
    """``places``: for each piece, and in its shape, the flat positions of its elements."""

    aval: Any
    places: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, aval, places: Iterable[np.ndarray]) -> Split:
        """The pieces in the order in which they are in the leaf."""
        return cls(aval, tuple(sorted(places, key=lambda p: int(p.min()))))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, range(len(self.places))))

    @property
    def numbers(self) -> np.ndarray:
        """For each element of the leaf the number of its piece."""
        found = np.empty(self.aval.size, np.int64)
        for k, places in enumerate(self.places):
            found[places.reshape(-1)] = k
        return found.reshape(self.aval.shape)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(places.shape for places in self.places)

    @property
    def dtype(self):
        return self.aval.dtype

    def piece(self, leaf, k: int):
        at, places = self._boxes[k], self.places[k]
        # a block of the leaf is a slice, which costs less than picking elements
        if at is None:
            return _picked(leaf, places)
        block = jax.lax.slice(leaf, [s.start for s in at], [s.stop for s in at])
        return block.reshape(places.shape)

    def together(self, pieces: Sequence):
        if self._axis is None:
            # the place of each element of the leaf when all pieces lie flat, one after another
            order = np.argsort(np.concatenate([places.reshape(-1) for places in self.places]))
            flat = jnp.concatenate([jnp.ravel(p) for p in pieces])
            return _picked(flat, order.reshape(self.aval.shape))
        shapes = [[s.stop - s.start for s in at] for at in self._boxes if at is not None]
        blocks = [jnp.reshape(p, shape) for p, shape in zip(pieces, shapes, strict=True)]
        return jnp.concatenate(blocks, self._axis)

    def leaf_axis(self, axis: int) -> int | None:
        """The axis of the leaf that is this axis of every piece, index by index."""
        shape = self.aval.shape

        def runs_along(own: int, index: np.ndarray) -> bool:
            rows = np.moveaxis(index, axis, 0).reshape(index.shape[axis], -1)
            return len(rows) == shape[own] and bool((rows == np.arange(len(rows))[:, None]).all())

        indices = [list(enumerate(np.unravel_index(places, shape))) for places in self.places]
        found = {next((a for a, index in each if runs_along(a, index)), None) for each in indices}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def _boxes(self) -> list[tuple[slice, ...] | None]:
        """For each piece, the block of the leaf that it fills in order, if any."""
        found: list[tuple[slice, ...] | None] = []
        for flat in (places.reshape(-1) for places in self.places):
            axes = np.unravel_index(flat, self.aval.shape)
            box = tuple(slice(int(i.min()), int(i.max()) + 1) for i in axes)
            filled = np.prod([s.stop - s.start for s in box]) == flat.size
            found.append(box if filled and (np.diff(flat) > 0).all() else None)
        return found

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


class ComplexParts:
    """Complex numbers as two pieces: real parts and imaginary parts."""

    names = 're', 'im'

    def __init__(self, aval):
        self.aval = aval

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.aval.shape, self.aval.shape

    @property
    def dtype(self):
        return np.empty(0, self.aval.dtype).real.dtype

    def piece(self, leaf, k: int):
        return jnp.imag(leaf) if k else jnp.real(leaf)

    def together(self, pieces: Sequence):
        return jax.lax.complex(*pieces)

    def leaf_axis(self, axis: int) -> int | None:
        return axis


def _picked(x, places: np.ndarray):
    return jnp.ravel(x).at[places].get(mode='promise_in_bounds', unique_indices=True)


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
