"""Ops whose result feeds several positions of a state: which element feeds which positions.

The labels of a sweep say of such an element only that its positions are several. Here the sets of
positions go back along the D pass, from a new state to the y of every op.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from .. import equations as lb
from ..equations import BEGIN, END, Equation, Loop, backward, moved, moved_operands
from ..graph import Coordinates
from .sweeps import DPass, Queue, Y

MOST_COLOURS = 8  # elements of y that one position reads, each with a derivative of its own
MOST_TURNS = 64  # of the search for elements of one colour

# Pairs of an element and a position that it feeds: ``element * size of the state + position``,
# ascending.
Pairs = np.ndarray


class FanOut:
    """The pairs of every op with every new state, kept as long as there are ``cuts`` cut
    equations.
    """

    def __init__(self, d_pass: DPass):
        self.d_pass, self.program = d_pass, d_pass.program
        self.known: dict[int, tuple[dict[int, Pairs], set[int]]] = {}
        self.cuts = 0

    def pairs(self, op: int, labels: Mapping[int, np.ndarray]) -> Pairs:
        """The pairs of an op's y with any of some states of one shape, which sent it labels."""
        found = []
        for state, sent in labels.items():
            if lb.meet(sent):
                # nothing, over an empty batch
                found.append(self._of(state)[0].get(op, np.arange(0)))
            else:
                # one position for each element: the labels say it
                (element,) = np.nonzero(sent.reshape(-1) != lb.NONE)
                size = math.prod(self.d_pass.shapes[state])
                found.append(element * size + sent.reshape(-1)[element])
        return _ascending(np.concatenate(found))

    def mixing(self, state: int) -> set[int]:
        """Equations that combine elements which feed several positions, or whose elements are not
        known to have one source.
        """
        return self._of(state)[1]

    def _of(self, state: int) -> tuple[dict[int, Pairs], set[int]]:
        if self.cuts != len(self.d_pass.mixing):
            self.known.clear()
            self.cuts = len(self.d_pass.mixing)
        if state not in self.known:
            self.known[state] = _WayBack(self.d_pass, state).run()
        return self.known[state]


class _WayBack:
    """From one new state back to every y; ``size`` is the number of its positions."""

    def __init__(self, d_pass: DPass, state: int):
        self.d_pass, self.program = d_pass, d_pass.program
        self.start, self.size = d_pass.new[state], math.prod(d_pass.shapes[state])
        self.found: dict[int, Pairs] = {}
        self.mixing: set[int] = set()

    def run(self) -> tuple[dict[int, Pairs], set[int]]:
        positions = np.arange(self.size)
        got: dict[int, Pairs] = {self.start: positions * self.size + positions}
        queue = Queue(self.program)
        queue.push([self.start])
        while queue.heap:
            i = queue.pop()
            eqn = self.program.equations[i]
            if i in self.program.op_set:
                self.found[i] = got.get(self.program.y_of(i), positions[:0])
            elif i not in self.d_pass.mixing and i not in self.program.blocks:
                outs = [got.get(o) for o in eqn.outs]
                for v, pairs in self._back(i, eqn, outs):
                    if not self.d_pass.depends[v] & Y:
                        continue
                    before = got.get(v, positions[:0])
                    merged = _ascending(np.concatenate([before, pairs])) if len(before) else pairs
                    if len(merged) > len(before):
                        got[v] = merged
                        queue.push([v])
        return self.found, self.mixing

    def _back(self, i: int, eqn: Equation, outs: Sequence) -> list[tuple[int, Pairs]]:
        if eqn.loop is not None:
            return self._through_marker(i, eqn, eqn.loop, outs)
        if eqn.does.elementwise:
            return [(v, outs[0]) for v in eqn.ins]
        operands = moved_operands(eqn)
        others = (v for k, v in enumerate(eqn.ins) if k not in operands)
        if operands and not any(self.d_pass.depends[v] & Y for v in others):
            sources = self._sources(i, eqn, operands)
            if sources is not None:
                return self._moved(eqn, operands, sources, outs)
        return self._by_labels(i, eqn, outs)

    def _sources(self, i: int, eqn: Equation, operands: Sequence[int]) -> list | None:
        """The moved operands' elements, counted one after the other, in their new places."""
        numbers: list = [None] * len(eqn.ins)
        start = 0
        for k in operands:
            shape = self.program.avals[eqn.ins[k]].shape
            numbers[k] = lb.identity(shape) + start
            start += numbers[k].size
        return moved(eqn, numbers, self.d_pass.known(i))

    def _moved(self, eqn: Equation, operands, sources, outs) -> list[tuple[int, Pairs]]:
        found, start = [], 0
        for k in operands:
            size = self.program.avals[eqn.ins[k]].size
            for source, pairs in zip(sources, outs, strict=True):
                if pairs is not None:
                    element, position = np.divmod(pairs, self.size)
                    element = source.reshape(-1)[element] - start
                    here = (element >= 0) & (element < size)
                    moved_pairs = (element * self.size + position)[here]
                    found.append((eqn.ins[k], _ascending(moved_pairs)))
            start += size
        return found

    def _by_labels(self, i: int, eqn: Equation, outs: Sequence) -> list[tuple[int, Pairs]]:
        """By the result's element that each operand's element feeds, if it is one."""
        avals, found = self.program.avals, []
        relevant = [bool(self.d_pass.depends[v] & Y) for v in eqn.ins]
        for k, pairs in enumerate(outs):
            if pairs is None:
                continue
            labels: list = [None] * len(outs)
            labels[k] = lb.identity(avals[eqn.outs[k]].shape)
            ins = backward(eqn, avals, labels, self.d_pass.known(i), relevant)
            for v, fed in zip(eqn.ins, ins, strict=True):
                if fed is None:
                    continue
                # a result that feeds several positions must not read several elements
                fed, results = fed.reshape(-1), labels[k].size
                positions = np.bincount(pairs // self.size, minlength=results)
                elements = np.bincount(fed[fed >= 0], minlength=results)
                if lb.meet(fed) or ((positions > 1) & (elements > 1)).any():
                    self.mixing.add(i)
                else:
                    found.append((v, self._joined(fed, pairs, results)))
        return found

    def _joined(self, fed: np.ndarray, pairs: Pairs, results: int) -> Pairs:
        """The pairs of the operand, each of whose elements feeds one element of the result."""
        bounds = np.searchsorted(pairs // self.size, np.arange(results + 1))
        (element,) = np.nonzero(fed >= 0)
        first, number = bounds[fed[element]], np.diff(bounds)[fed[element]]
        within = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
        position = pairs[np.repeat(first, number) + within] % self.size
        return np.repeat(element, number) * self.size + position

    def _through_marker(
        self, i: int, eqn: Equation, loop: Loop, outs: Sequence
    ) -> list[tuple[int, Pairs]]:
        """Cross the border of a loop, slot by slot; all iterations are taken together."""
        avals, found = self.program.avals, []
        for k, (v, pairs) in enumerate(zip(eqn.ins, outs, strict=True)):
            if pairs is None:
                continue
            if k >= loop.num_carry and eqn.primitive is END:  # a sequence, made of slices
                pairs = _ascending(pairs % (max(1, avals[v].size) * self.size))
            elif k >= loop.num_carry:
                rows = np.arange(loop.length)[:, None] * (avals[eqn.outs[k]].size * self.size)
                pairs = (rows + pairs).reshape(-1)
            found.append((v, pairs))
        if eqn.primitive is BEGIN:
            turns = zip(self.program.feedback(i), outs, strict=False)
            found += [(last, pairs) for (_, last), pairs in turns if pairs is not None]
        return found


def _ascending(pairs: np.ndarray) -> Pairs:
    """Each of these numbers once, in order; mostly they are already."""
    if (pairs[1:] > pairs[:-1]).all():
        return pairs
    pairs = np.sort(pairs, kind='stable')
    return pairs[np.append(True, pairs[1:] != pairs[:-1])]


# ---- where the entries of a trace sit ----


def fanned_out(pairs: Pairs, op, group_shape: tuple[int, ...]) -> Coordinates | None:
    """Coordinates with an entry for each pair of an element of y and a position; None where a
    position reads too many elements.
    """
    y_shape, size = op.y_aval.shape, math.prod(group_shape)
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
