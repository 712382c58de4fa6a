"""Where the entries of a trace sit, also of an op whose elements feed several positions of a
state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from .. import equations as lb
from ..graph import Coordinates, OpUse
from .pairs import Pairs, ascending
from .sweeps import Sweep

MOST_COLOURS = 8  # elements of y that one position reads, each with a derivative of its own
MOST_TURNS = 64  # of the search for elements of one colour


def fanned_out(
    sweeps: Iterable[Sweep], op: OpUse, group_shape: tuple[int, ...]
) -> Coordinates | None:
    """Coordinates with an entry for each pair of an element of y and a position of one of these
    states; None where a position reads too many elements.
    """
    y_shape, size, found = op.y_aval.shape, math.prod(group_shape), []
    for sweep in sweeps:
        sent = sweep.y[op.equation]
        if lb.meet(sent):
            # nothing, over an empty batch
            found.append(sweep.way.found.get(op.y, np.arange(0)))
        else:
            # one position for each element: the labels say it
            (element,) = np.nonzero(sent.reshape(-1) != lb.NONE)
            found.append(element * size + sent.reshape(-1)[element])
    pairs = ascending(np.concatenate(found))
    element, position = np.divmod(pairs, size)
    colour = _coloured(pairs, op.y_aval.size, size)
    if colour is None:
        return None
    # the k-th position of each element, in row k
    first = np.searchsorted(element, element)
    row, rows = np.arange(len(element)) - first, int(np.bincount(element, minlength=1).max())
    placed = np.full((rows, op.y_aval.size), lb.NONE, np.int64)
    placed[row, element] = position
    # behind the batch of y, if it has one
    axis = int(op.primitive.batched and op.primitive.original is None)
    added = (rows,) if axis else _lanes_apart(placed, group_shape)
    shape = (*added, *y_shape)
    placed = np.moveaxis(placed.reshape(shape), 0, axis) if axis else placed.reshape(shape)
    colour = np.expand_dims(colour.reshape(y_shape), tuple(range(axis, axis + len(added))))
    colours = np.where(placed == lb.NONE, lb.NONE, colour)
    plain = not colours.any()
    return placed_at(placed, group_shape, len(added), axis, None if plain else colours)


def placed_at(
    positions: np.ndarray,
    group_shape: tuple[int, ...],
    added: int = 0,
    axis: int = 0,
    colours: np.ndarray | None = None,
) -> Coordinates:
    """Coordinates whose entries sit at these positions; ``NONE``: no state reads an entry."""
    shape = positions.shape
    if shape == tuple(group_shape) and lb.in_place(positions):
        return Coordinates(shape, group_shape, None, added, axis, colours)
    # an entry that no state reads gets the first position of its own lane
    unread = np.zeros(shape, np.int64)
    if shape and shape[:1] == group_shape[:1]:
        first = np.arange(shape[0]) * math.prod(group_shape[1:])
        unread = first.reshape(-1, *[1] * (len(shape) - 1))
    positions = np.where(positions == lb.NONE, unread, positions)
    return Coordinates(shape, group_shape, positions, added, axis, colours)


def _lanes_apart(placed: np.ndarray, group_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of the added axes: the first axis of the state is one of its own where every
    element feeds all its rows alike.
    """
    rows, lanes = len(placed), group_shape[0]
    inside = math.prod(group_shape[1:])
    if not lanes or rows % lanes or not inside:
        return (rows,)
    of_row = np.arange(rows)[:, None] // (rows // lanes)
    if ((placed != lb.NONE) & (placed // inside != of_row)).any():
        return (rows,)
    return (lanes,) if rows == lanes else (lanes, rows // lanes)


def _coloured(pairs: Pairs, elements: int, size: int) -> np.ndarray | None:
    """A colour for each element, so that no position reads two of one colour."""
    element, position = np.divmod(pairs, size)
    colour, turns = np.full(elements, lb.NONE), 0
    read = int(np.bincount(position, minlength=1).max())  # elements by one position
    if read <= 1:
        colour[element] = 0
        return colour
    if read > MOST_COLOURS:
        return None
    # by a fixed shuffle, since neighbours that wait for each other would take many turns
    rank = np.random.default_rng(0).permutation(elements)
    left = np.ones(len(element), bool)
    for c in range(MOST_COLOURS):
        open_ = left.copy()
        while open_.any():
            turns += 1
            if turns > MOST_TURNS:
                return None
            e, p = element[open_], position[open_]
            best = np.full(size, elements)
            np.minimum.at(best, p, rank[e])
            late = np.zeros(elements, bool)
            late[e[rank[e] > best[p]]] = True
            chosen = np.setdiff1d(e, np.flatnonzero(late))
            colour[chosen] = c
            taken = np.zeros(size, bool)
            taken[p[np.isin(e, chosen)]] = True
            near = np.zeros(elements, bool)
            near[e[taken[p]]] = True
            open_ &= ~near[element]
            left &= colour[element] == lb.NONE
        if not left.any():
            return colour
    return None
