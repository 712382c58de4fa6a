"""Cotangents in the D pass, as labels: what one new state sends back to old states and to ops.

A sweep begins at a new state, where each element is labelled with its own position, and goes
through the equations backwards. It cuts an equation that merges positions of old states, or moves
them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ..equations import labels as lb
from ..equations.equation import BEGIN, END, Equation, is_complex, is_inexact
from ..equations.labels import backward
from ..program import dataflow as flow
from ..program.control_flow import MustUnroll
from ..stacked_states.unstacking import split_in_parts
from .d_pass import OLD, OTHERS, DPass, Y
from .following import Following, every_row

UNROLLED_TO_COMPARE = 32  # movement in a loop may cancel over its iterations
# why an equation is cut
MERGES, MOVES = 'merges', 'moves'
MERGES_RESULT = 'merges-result'

Received = dict[int, dict[tuple[int, int], np.ndarray]]


@dataclass
class Sweep:
    """The labels that one new state sends to old states and to the y of ops.

    ``received``: the labels that a value got, by (equation, operand). ``visited``: all equations on
    the way. ``clocks``: old states without a label that the new one reads, and that no parameter
    reaches.
    """

    received: Received
    old: dict[int, np.ndarray] = field(default_factory=dict)
    y: dict[int, np.ndarray] = field(default_factory=dict)
    visited: set[int] = field(default_factory=set)
    clocks: set[int] = field(default_factory=set)

    def send(self, value: int, source: tuple[int, int], labels: lb.Labels) -> bool:
        """Note the labels that operand ``source`` sends; whether that is news."""
        if not lb.has(labels):
            return False
        parts = self.received.setdefault(value, {})
        before = parts.get(source)
        parts[source] = labels
        return before is None or before is not labels and not np.array_equal(before, labels)

    def total(self, value: int, without: int | None = None) -> lb.Labels:
        """The labels of a value's cotangent, without those sent by equation ``without``."""
        found = None
        for (i, _), lab in self.received.get(value, {}).items():
            if i != without:
                found = lb.merge(found, lab)
        return found


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


class Sweeper:
    """Makes sweeps, and notes the cuts that they need in the D pass."""

    def __init__(self, d_pass: DPass, following: Following):
        self.d_pass, self.following, self.program = d_pass, following, d_pass.program

    def sweep(self, state: int) -> Sweep | None:
        """The sweep of one new state; None if an equation had to be cut on the way.

        An equation is visited after all readers of its results. Only the begin of a loop sends
        labels back to its end, until none is news.
        """
        d_pass, program, before = self.d_pass, self.program, len(self.d_pass.mixing)
        start = d_pass.new[state]
        result = Sweep({start: {(-1, 0): lb.identity(d_pass.shapes[state])}})
        queue = Queue(program)
        queue.push([start])
        while queue.heap:
            i = queue.pop()
            result.visited.add(i)
            eqn = program.equations[i]
            out_labels = [self._combine(o, result, state) for o in eqn.outs]
            if len(d_pass.mixing) > before:
                return None  # labels of a clash that was cut say nothing
            if i in program.op_set:
                result.y[i] = out_labels[eqn.primitive.y_outvar_index]
            elif eqn.loop is not None:
                queue.push(self._through_marker(i, eqn, out_labels, result))
            elif i not in d_pass.mixing and any(map(lb.has, out_labels)):
                ins = self._step_back(i, eqn, out_labels, result, state)
                sent = enumerate(zip(eqn.ins, ins, strict=True))
                queue.push([v for k, (v, lab) in sent if result.send(v, (i, k), lab)])
            if len(d_pass.mixing) > before:
                return None
        self._arrive(result, state)
        return result if len(d_pass.mixing) == before else None

    def _arrive(self, result: Sweep, state: int) -> None:
        d_pass = self.d_pass
        for r, v in enumerate(d_pass.old):
            if v in result.received:
                labels = self._combine(v, result, state)
                # a state that no parameter reaches joins a group, but carries no trace to it
                if r not in d_pass.untaught or coupled(d_pass, state, r, labels):
                    result.old[r] = labels
        read = set(flow.members(d_pass.depends[d_pass.new[state]] >> OTHERS))
        result.clocks = (read - result.old.keys()) & d_pass.untaught

    # ---- one equation ----

    def _step_back(self, i: int, eqn: Equation, out_labels, result: Sweep, state: int) -> list:
        """Labels of an equation's operands; it is cut if positions of old states meet in it."""
        depends = self.d_pass.depends
        relevant = [bool(depends[v]) for v in eqn.ins]
        self._keep_holomorphic(eqn, relevant, state)
        ins = backward(eqn, self.program.avals, out_labels, self.d_pass.known(i), relevant)
        several = {v for v, lab in zip(eqn.ins, ins, strict=True) if lb.meet(lab)}
        if not several:
            return ins
        if any(map(lb.meet, out_labels)):
            # They met before, on the path of a y: its positions may meet, as it may be smaller than
            # the state. Values that read old states and no y part from that path here.
            parting = (v for v in several if depends[v] & OLD and not depends[v] & Y)
            self._cut_in_front(i, parting)
        elif any(depends[v] & OLD and not self._parts_later(v, state) for v in several):
            self.d_pass.cut(i, MERGES)
        # values that read clocks alone have no trace
        return [
            None if v in several and not depends[v] & (OLD | Y) else lab
            for v, lab in zip(eqn.ins, ins, strict=True)
        ]

    def _parts_later(self, value: int, state: int) -> bool:
        """Whether a value reads a y, and old states of other shapes than ``state`` only.

        Their positions can not agree with ``state`` in any case. A cut here would cut y as well, so
        the path of the old state is cut where it leaves the path of y.
        """
        d_pass = self.d_pass
        others = flow.members(d_pass.depends[value] >> OTHERS)
        foreign = all(
            d_pass.shapes[r] != d_pass.shapes[state] or r in d_pass.untaught for r in others
        )
        return foreign and bool(d_pass.depends[value] & Y)

    def _cut_in_front(self, i: int, values: Iterable[int]) -> None:
        """Cut the equations that make these operands of equation ``i``."""
        for v in values:
            j = self.program.producer.get(v)
            if j is not None:
                # the border of a loop is no equation that could be cut
                self.d_pass.cut(j if self.program.equations[j].loop is None else i, MERGES)

    def _keep_holomorphic(self, eqn: Equation, relevant, state: int) -> None:
        """A complex state has a complex derivative if every equation on the way from complex
        numbers has one; else it becomes two real states.
        """
        avals, program = self.program.avals, self.program
        if not is_complex(avals[self.d_pass.new[state]]):
            return
        reads = any(is_complex(avals[v]) for v, r in zip(eqn.ins, relevant, strict=True) if r)
        makes_real = any(is_inexact(avals[o]) and not is_complex(avals[o]) for o in eqn.outs)
        if reads and (makes_real or not eqn.does.holomorphic):
            split_in_parts(program, [program.hidden[state]], eqn.where)

    # ---- where paths meet ----

    def _combine(self, value: int, result: Sweep, state: int) -> lb.Labels:
        """Sum of the cotangents of one value; where they disagree, the misplaced ones are cut."""
        parts, total = result.received.get(value, {}), result.total(value)
        clash = len(parts) > 1 and lb.meet(total) and not any(map(lb.meet, parts.values()))
        if clash and self.d_pass.depends[value] & OLD:
            # Every path came with single positions, but with different ones. The value's own
            # positions tell which of them moved; without any, all are cut.
            own = self.following.own_positions(value, state)
            for (i, k), lab in list(parts.items()):
                if own is None or lb.disagree(lab, own):
                    self._misplaces(i, k, own, result)
        return total

    def _misplaces(self, i: int, k: int, own: lb.Labels, result: Sweep) -> None:
        """Cut an equation whose operand ``k`` gets labels of other positions.

        At the border of a loop, an equation inside is cut; if none is to blame, the loop is
        unrolled.
        """
        loop, before = self.program.equations[i].loop, len(self.d_pass.mixing)
        if loop is None:
            self.d_pass.cut(i, MOVES)
        elif own is not None:
            cut_what_moves(self.d_pass, self.program.equations[i].outs[k], own, result)
        if len(self.d_pass.mixing) == before and loop is not None:
            raise MustUnroll(loop)

    # ---- loops ----

    def _through_marker(self, i: int, eqn: Equation, out_labels, result: Sweep) -> list[int]:
        """Cross the border of a loop, slot by slot; returns values with news."""
        found = []
        for k, (v, lab) in enumerate(zip(eqn.ins, out_labels, strict=True)):
            if k >= eqn.loop.num_carry and lab is not None:
                # a sequence has the iterations as a first axis, a slice lacks it
                if eqn.primitive is END:
                    lab = every_row(eqn.loop, lab)
                else:
                    lab = np.broadcast_to(lab, self.program.avals[v].shape)
            if result.send(v, (i, k), lab):
                found.append(v)
        if eqn.primitive is BEGIN:
            # the iteration before made the carry that this one reads
            for k, (first, last) in enumerate(self.program.feedback(i)):
                if lb.has(out_labels[k]):
                    self._check_turn(i, first, last, out_labels[k], result)
                    if result.send(last, (i, k), out_labels[k]):
                        found.append(last)
        return found

    def _check_turn(self, i: int, first: int, last: int, labels, result: Sweep) -> None:
        """Cut equations that move positions of a loop's carry between iterations."""
        own = result.total(last, without=i)  # of the last iteration, after the loop
        if own is not None and not lb.meet(own) and lb.disagree(own, labels):
            loop = self.program.equations[i].loop
            if loop.length <= UNROLLED_TO_COMPARE:
                raise MustUnroll(loop)
            cut_what_moves(self.d_pass, first, own, result)


def coupled(d_pass: DPass, s: int, r: int, labels: lb.Labels) -> bool:
    """Whether the new state ``s`` reads the old state ``r`` position by position."""
    return d_pass.shapes[s] == d_pass.shapes[r] and lb.has(labels) and lb.in_place(labels)


def cut_what_moves(
    d_pass: DPass, value: int, own: np.ndarray, result: Sweep, seen: set[int] | None = None
) -> None:
    """Follow misplaced labels from a value to the first equation that moves them, and cut it.

    ``own``: the positions that the value should get. The way leads from the old state towards the
    new one, as long as an equation's result has the same misplaced labels as its operand.
    """
    seen = set() if seen is None else seen
    seen.add(value)
    for (i, k), lab in list(result.received.get(value, {}).items()):
        if i < 0 or not lb.disagree(lab, own):
            continue
        eqn = d_pass.program.equations[i]
        results = eqn.outs if eqn.loop is None else [eqn.outs[k]]
        out = next((o for o in results if o in result.received), None)
        sent = None if out is None else result.total(out)
        if sent is not None and sent.shape == lab.shape and (sent == lab).all():
            # misplaced before this equation: look further
            if out not in seen:
                cut_what_moves(d_pass, out, own, result, seen)
        elif eqn.loop is not None:
            raise MustUnroll(eqn.loop)
        else:
            d_pass.cut(i, MOVES)
