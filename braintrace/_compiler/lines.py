"""Rows that move through an array of the carry from step to step: a delay line."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from .copies import MISSING, Elements
from .program import Program
from .split import Split, grid

__all__ = ['delay_line', 'moved_elements']

LONGEST = 64  # steps after which an element must have left its line


def moved_elements(program: Program) -> Elements:
    """Where the elements of every value come from that moves elements only."""
    elements = Elements(program)
    for eqn in program.equations:
        elements.moved.update(elements.moved_by(eqn))
    return elements


def delay_line(program: Program, elements: Elements, leaf: int) -> Split | None:
    """A leaf of which whole rows become other rows at the next step, split into these rows.

    Each row has the shape of the value that enters the line, so that all of a line are states of
    one group. None for a leaf that is no such line.
    """
    old, new = program.carry[leaf], program.new_carry[leaf]
    aval, ids = program.avals[new], elements.moved.get(new)
    if ids is None or not ids.size or (ids == MISSING).any() or old not in elements.base_of:
        return None
    flat, own = ids.reshape(-1), elements.of(old).reshape(-1)
    itself = np.arange(flat.size)
    source = np.where((flat >= own[0]) & (flat <= own[-1]), flat - own[0], itself)
    if (source == itself).all():
        return None
    root = itself
    for _ in range(LONGEST):
        root = source[root]
    if (source[root] != root).any():
        return None
    places = []
    for entering in _entering(elements, ids, root):
        row = entering
        while row is not None:
            places.append(row)
            row, torn = _next(source, row)
            if torn:
                return None
    whole = np.sort(np.concatenate([p.reshape(-1) for p in places]))
    if not np.array_equal(whole, itself):
        return None
    return Split(aval, tuple(sorted(places, key=lambda p: int(p.min()))))


def _entering(elements: Elements, ids: np.ndarray, root: np.ndarray) -> Iterator[np.ndarray]:
    """The flat positions of each value that enters a leaf, in the shape of that value."""
    at, flat = np.unique(root), ids.reshape(-1)
    owners = np.array([bisect_right(elements.bases, int(e)) - 1 for e in flat[at]])
    for k in np.unique(owners):
        mine = at[owners == k]
        offsets, shape = flat[mine] - elements.bases[k], elements.avals[elements.owners[k]].shape
        once = len(np.unique(offsets)) == mine.size == np.prod(shape)
        yield mine[np.argsort(offsets)].reshape(shape) if once else grid(mine, ids.shape)


def _next(source: np.ndarray, row: np.ndarray) -> tuple[np.ndarray | None, bool]:
    """Where a row stands at the next step, None if nowhere; and whether only a part of it does."""
    at = row.reshape(-1)
    moved = np.flatnonzero(np.isin(source, at) & (source != np.arange(source.size)))
    if not moved.size:
        return None, False
    if moved.size != at.size or len(np.unique(source[moved])) != at.size:
        return None, True
    order = np.empty(source.size, np.int64)
    order[source[moved]] = moved
    return order[at].reshape(row.shape), False
