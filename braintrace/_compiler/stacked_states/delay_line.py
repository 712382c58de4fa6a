"""Rows that move through an array of the carry from step to step: a delay line."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from ..primitives import NONE
from ..program.elements import Elements
from ..program.program import Program
from ..program.stacked_leaf import Split, grid

LONGEST = 64  # steps after which an element must have left its line


def delay_line(program: Program, elements: Elements, leaf: int) -> Split | None:
    """A leaf in which whole rows become other rows at the next step, split into these rows.

    Each row has the shape of the value that enters the line, so that all rows are states of one
    group. None for any other leaf.
    """
    old, new = program.carry[leaf], program.new_carry[leaf]
    aval, ids = program.avals[new], elements.moved.get(new)
    if ids is None or not ids.size or (ids == NONE).any() or old not in elements.base_of:
        return None
    # for each element of the new leaf, the element of the old leaf that it was, or itself
    flat, own = ids.reshape(-1), elements.of(old).reshape(-1)
    itself = np.arange(flat.size)
    source = np.where((flat >= own[0]) & (flat <= own[-1]), flat - own[0], itself)
    if (source == itself).all():
        return None
    # go back to the entrance of each element; an element without an entrance goes round
    root = itself
    for _ in range(LONGEST):
        root = source[root]
    if (source[root] != root).any():
        return None
    # follow each row that enters to the end of the line; it must stay whole
    places = []
    for entering in _entering(elements, ids, root):
        row = entering
        while row is not None:
            places.append(row)
            row, torn = _next(source, row)
            if torn:
                return None
    # the rows of all lines must fill the leaf, each element once
    whole = np.sort(np.concatenate([p.reshape(-1) for p in places]))
    if not np.array_equal(whole, itself):
        return None
    return Split(aval, tuple(sorted(places, key=lambda p: int(p.min()))))


def _entering(elements: Elements, ids: np.ndarray, root: np.ndarray) -> Iterator[np.ndarray]:
    """The flat positions of each value that enters a leaf, in the value's shape."""
    at, flat = np.unique(root), ids.reshape(-1)
    owners = np.array([bisect_right(elements.bases, int(e)) - 1 for e in flat[at]])
    for k in np.unique(owners):
        mine = at[owners == k]
        offsets, shape = flat[mine] - elements.bases[k], elements.avals[elements.owners[k]].shape
        once = len(np.unique(offsets)) == mine.size == np.prod(shape)
        yield mine[np.argsort(offsets)].reshape(shape) if once else grid(mine, ids.shape)


def _next(source: np.ndarray, row: np.ndarray) -> tuple[np.ndarray | None, bool]:
    """Where a row stands at the next step, None if nowhere; and whether it was torn."""
    at = row.reshape(-1)
    moved = np.flatnonzero(np.isin(source, at) & (source != np.arange(source.size)))
    if not moved.size:
        return None, False
    if moved.size != at.size or len(np.unique(source[moved])) != at.size:
        return None, True
    order = np.empty(source.size, np.int64)
    order[source[moved]] = moved
    return order[at].reshape(row.shape), False
