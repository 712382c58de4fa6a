"""The D pass, and which elements feed which on the way back along it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from .. import equations as lb
from ..equations import BEGIN, END, Equation, Loop, backward, moved_operands, sources
from ..program import dataflow as flow
from ..program.program import Program

# the D pass ---------------------------------------------------------------------------------------
#
# What the analyses of the D pass share.
#
# The D pass is the step in which every cut equation reads constants and the y of every op is a free
# variable.


# What a value depends on: old states, the y of ops, old states that no parameter reaches; from
# OTHERS on there is a bit for each old state.
OLD, Y, CLOCK, OTHERS = 1, 2, 4, 3


class DPass:
    """States are numbered as in ``program.hidden``.

    ``old``, ``new``, ``shapes``: each state's value before and after the step, and its shape.
    ``untaught``: states that no parameter ever reaches. ``depends``: the bits of each value, see
    above. ``mixing``: the reason for each cut so far.
    """

    def __init__(self, program: Program):
        self.program = program
        self.old = [program.carry[c] for c in program.hidden]
        self.new = program.new_states
        self.shapes = [program.avals[v].shape for v in self.old]
        # the reader of a taught state is taught at the next step; others are as a clock
        params = {program.params[i]: 1 for i in program.trainable}
        taught = flow.over_steps(program, params, program.hidden)
        self.untaught = {s for s, v in enumerate(self.new) if not taught[v]}
        start = dict.fromkeys((o for i in program.ops for o in program.equations[i].outs), Y)
        for s, v in enumerate(self.old):
            kind = CLOCK if s in self.untaught else OLD
            start[v] = start.get(v, 0) | kind | 1 << OTHERS + s
        stops = program.op_set | program.blocks
        self.depends = flow.forward(program, start, lambda i, found: 0 if i in stops else found)
        self.mixing: dict[int, str] = {}

    def known(self, i: int) -> list:
        return [self.program.constants.get(v) for v in self.program.equations[i].ins]


class Queue:
    """Equations to visit, the last one first."""

    def __init__(self, program):
        self.program, self.heap = program, []

    def push(self, values: Iterable[int]) -> None:
        for v in values:
            if v in self.program.producer:
                heapq.heappush(self.heap, -self.program.producer[v])

    def pop(self) -> int:
        i = heapq.heappop(self.heap)
        while self.heap and self.heap[0] == i:
            heapq.heappop(self.heap)
        return -i


# pairs --------------------------------------------------------------------------------------------
#
# Sets of positions that go back along the D pass, where labels say only that there are several.
#
# A pair of an element and a position that it feeds is one number, ``element * number of positions +
# position``; the pairs of a value are ascending. The positions are the elements of the value at
# which the way begins.


Pairs = np.ndarray


class WayBack:
    """From one value back to values that depend on one of ``wanted``, bits of ``DPass.depends``.

    ``found``: the pairs of old states and of the y of ops, up to ops and cuts. ``mixing``:
    equations that combine elements which feed several positions, or whose elements are not known to
    have one source; ``lost``: the positions that are fed through these.
    """

    def __init__(self, d_pass: DPass, start: int, wanted: int):
        self.d_pass, self.program, self.wanted = d_pass, d_pass.program, wanted
        self.size = math.prod(self.program.avals[start].shape)
        positions = np.arange(self.size)
        got: dict[int, Pairs] = {start: positions * self.size + positions}
        self.mixing: set[int] = set()
        self.lost = np.zeros(self.size, bool)
        queue = Queue(self.program)
        queue.push([start])
        while queue.heap:
            i = queue.pop()
            if i in self.program.op_set or i in d_pass.mixing or i in self.program.blocks:
                continue
            eqn = self.program.equations[i]
            outs = [got.get(o) for o in eqn.outs]
            for v, pairs in self._back(i, eqn, outs):
                if d_pass.depends[v] & wanted:
                    before = got.get(v, positions[:0])
                    merged = ascending(np.concatenate([before, pairs])) if len(before) else pairs
                    if len(merged) > len(before):
                        got[v] = merged
                        queue.push([v])
        ends = got.keys() & {*d_pass.old, *map(self.program.y_of, self.program.ops)}
        self.found = {v: got[v] for v in ends}

    def _back(self, i: int, eqn: Equation, outs: Sequence) -> list[tuple[int, Pairs]]:
        """The pairs that an equation's operands get from those of its results."""
        if eqn.loop is not None:
            return self._through_marker(i, eqn, eqn.loop, outs)
        if eqn.does.elementwise:
            return [(v, outs[0]) for v in eqn.ins]
        # by the element that was moved to each element of a result, or else by the result's element
        # that each operand's element feeds, if it is one
        operands, avals, known = moved_operands(eqn), self.program.avals, self.d_pass.known(i)
        relevant = [bool(self.d_pass.depends[v] & self.wanted) for v in eqn.ins]
        by_index = any(wanted for k, wanted in enumerate(relevant) if k not in operands)
        moved = sources(eqn, avals, known) if operands and not by_index else None
        found = []
        for k, pairs in enumerate(outs):
            if pairs is None:
                continue
            if moved is not None:
                source, starts = moved[0][k], moved[1]
                for at, first, end in zip(operands, starts, starts[1:], strict=False):
                    (result,) = np.nonzero((source >= first) & (source < end))
                    element = source[result] - first
                    found.append((eqn.ins[at], self._joined(element, result, pairs)))
                continue
            labels: list = [None] * len(outs)
            labels[k] = lb.identity(avals[eqn.outs[k]].shape)
            ins = backward(eqn, avals, labels, known, relevant)
            for at, (v, fed) in enumerate(zip(eqn.ins, ins, strict=True)):
                if fed is None:
                    continue
                one_each = lb.reads(eqn, avals, at).get(eqn.outs[k]) if lb.meet(fed) else None
                if one_each is not None and not lb.meet(one_each):
                    # each element of the result reads one element, which may feed several
                    (result,) = np.nonzero(one_each.reshape(-1) >= 0)
                    element, fed = one_each.reshape(-1)[result], one_each
                else:
                    (element,) = np.nonzero(fed.reshape(-1) >= 0)
                    result = fed.reshape(-1)[element]
                # a result that feeds several positions must not read several elements
                positions = np.bincount(pairs // self.size, minlength=labels[k].size)
                elements = np.bincount(result, minlength=labels[k].size)
                if lb.meet(fed) or ((positions > 1) & (elements > 1)).any():
                    self.mixing.add(i)
                    self.lost[pairs % self.size] = True
                else:
                    found.append((v, self._joined(element, result, pairs)))
        return found

    def _joined(self, element: np.ndarray, result: np.ndarray, pairs: Pairs) -> Pairs:
        """The pairs of an operand, ``element[n]`` of which feeds ``result[n]``, which has these."""
        # how many pairs each element of the result has, and the first of them
        counts = np.bincount(pairs // self.size, minlength=int(result.max(initial=-1)) + 1)
        first, number = (np.cumsum(counts) - counts)[result], counts[result]
        within = np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
        position = pairs[np.repeat(first, number) + within] % self.size
        return ascending(np.repeat(element, number) * self.size + position)

    def _through_marker(
        self, i: int, eqn: Equation, loop: Loop, outs: Sequence
    ) -> list[tuple[int, Pairs]]:
        """Cross the border of a loop, slot by slot; all iterations are taken together."""
        avals, found = self.program.avals, []
        for k, (v, pairs) in enumerate(zip(eqn.ins, outs, strict=True)):
            if pairs is None:
                continue
            if k >= loop.num_carry and eqn.primitive is END:  # a sequence, made of slices
                pairs = ascending(pairs % (max(1, avals[v].size) * self.size))
            elif k >= loop.num_carry:
                rows = np.arange(loop.length)[:, None] * (avals[eqn.outs[k]].size * self.size)
                pairs = (rows + pairs).reshape(-1)
            found.append((v, pairs))
        if eqn.primitive is BEGIN:
            turns = zip(self.program.feedback(i), outs, strict=False)
            found += [(last, pairs) for (_, last), pairs in turns if pairs is not None]
        return found


def ascending(pairs: np.ndarray) -> Pairs:
    """Each of these numbers once, in order; mostly they are already."""
    if (pairs[1:] > pairs[:-1]).all():
        return pairs
    pairs = np.sort(pairs, kind='stable')
    return pairs[np.append(True, pairs[1:] != pairs[:-1])]


def read_positions(d_pass: DPass, value: int, old: Collection[int]) -> lb.Labels:
    """For each element of a value the position that it reads of these old states."""
    wanted = flow.bits(OTHERS + s for s, v in enumerate(d_pass.old) if v in old)
    way, shape = WayBack(d_pass, value, wanted), d_pass.program.avals[value].shape
    found = None
    for v in old:
        if v in way.found:
            position, element = np.divmod(way.found[v], way.size)
            found = lb.merge(found, lb.transposed(position, element, shape))
    if way.lost.any():
        found = np.where(way.lost.reshape(shape), lb.MANY, lb.NONE if found is None else found)
    return found


def own_positions(d_pass: DPass, value: int, state: int) -> np.ndarray | None:
    """For each element of a value, its own position: labels that agree with it were not moved.

    It is the position that the value reads of old states shaped like ``state``. A value of the
    state's shape that reads several or none has its own places.
    """
    own, shape = d_pass.program.avals[value].shape, d_pass.shapes[state]
    if value in d_pass.old:
        return lb.identity(own)
    alike = [v for v, s in zip(d_pass.old, d_pass.shapes, strict=True) if s == shape]
    found = read_positions(d_pass, value, alike)
    if lb.has(found) and not lb.meet(found):
        return found
    return lb.identity(own) if own == shape else None
