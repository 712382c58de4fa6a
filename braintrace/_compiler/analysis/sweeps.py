"""Sweeps over a program that follow elements back to states and ops."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from .. import equations as lb
from ..equations import BEGIN, Equation, Loop, backward, is_complex, is_inexact
from ..program import dataflow as flow
from ..program.control_flow import MustUnroll
from ..stacked_states import split_in_parts
from .pairs import OLD, OTHERS, DPass, Queue, WayBack, Y, own_positions

# sweeps -------------------------------------------------------------------------------------------
#
# Cotangents in the D pass, as labels: what one new state sends back to old states and to ops.
#
# A sweep begins at a new state, where each element is labelled with its own position, and goes
# through the equations backwards. It cuts an equation that merges positions of old states, or moves
# them.


UNROLLED_TO_COMPARE = 32  # movement in a loop may cancel over its iterations
# why an equation is cut
MERGES, MOVES = 'merges', 'moves'
MERGES_RESULT = 'merges-result'


class Sweep:
    """The labels that one new state sends to old states and to the y of ops.

    ``received``: the labels that a value got, by (equation, operand). ``visited``: all equations on
    the way. ``clocks``: old states without a label that the new one reads, and that no parameter
    reaches.
    """

    def __init__(self, d_pass: DPass, state: int):
        self.d_pass, self.program = d_pass, d_pass.program
        self.state, self.start = state, d_pass.new[state]
        labels = lb.identity(d_pass.shapes[state])
        self.received: dict[int, dict[tuple[int, int], np.ndarray]] = {}
        self.received[self.start] = {(-1, 0): labels}
        self.old: dict[int, np.ndarray] = {}
        self.y: dict[int, np.ndarray] = {}
        self.visited: set[int] = set()
        self.clocks: set[int] = set()

    @cached_property
    def way(self) -> WayBack:
        """The way back to every y, for elements that feed several positions."""
        return WayBack(self.d_pass, self.start, Y)

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

    def run(self) -> bool:
        """Whether no equation had to be cut on the way; a cut is noted in the D pass.

        An equation is visited after all readers of its results. Only the begin of a loop sends
        labels back to its end, until none is news.
        """
        d_pass, program, before = self.d_pass, self.program, len(self.d_pass.mixing)
        queue = Queue(program)
        queue.push([self.start])
        while queue.heap:
            i = queue.pop()
            self.visited.add(i)
            eqn = program.equations[i]
            out_labels = [self._combine(o) for o in eqn.outs]
            if len(d_pass.mixing) > before:
                return False  # labels of a clash that was cut say nothing
            if i in program.op_set:
                self.y[i] = out_labels[eqn.primitive.y_outvar_index]
            elif eqn.loop is not None:
                # at its begin labels go round to its end, so the loop is visited again
                queue.push(self._through_marker(i, eqn, eqn.loop, out_labels))
            elif i not in d_pass.mixing and any(map(lb.has, out_labels)):
                ins = self._step_back(i, eqn, out_labels)
                sent = enumerate(zip(eqn.ins, ins, strict=True))
                queue.push([v for k, (v, lab) in sent if self.send(v, (i, k), lab)])
            if len(d_pass.mixing) > before:
                return False
        # what arrived at the old states
        for r, v in enumerate(d_pass.old):
            if v in self.received:
                labels = self._combine(v)
                # a state that no parameter reaches joins a group, but carries no trace to it
                taught = r not in d_pass.untaught
                if labels is not None and (taught or self.couples(r, labels)):
                    self.old[r] = labels
        read = set(flow.members(d_pass.depends[self.start] >> OTHERS))
        self.clocks = (read - self.old.keys()) & d_pass.untaught
        return len(d_pass.mixing) == before

    def couples(self, r: int, labels: lb.Labels) -> bool:
        """Whether the new state reads the old state ``r`` position by position."""
        alike = self.d_pass.shapes[self.state] == self.d_pass.shapes[r]
        return alike and lb.has(labels) and lb.in_place(labels)

    # ---- one equation ----

    def _step_back(self, i: int, eqn: Equation, out_labels) -> list:
        """Labels of an equation's operands; it is cut if positions of old states meet in it."""
        depends = self.d_pass.depends
        relevant = [bool(depends[v]) for v in eqn.ins]
        self._keep_holomorphic(eqn, relevant)
        ins = backward(eqn, self.program.avals, out_labels, self.d_pass.known(i), relevant)
        several = {v for v, lab in zip(eqn.ins, ins, strict=True) if lb.meet(lab)}
        if not several:
            return ins
        if any(map(lb.meet, out_labels)):
            # They met before, on the path of a y: its positions may meet, as it may be smaller than
            # the state. Values that read old states and no y part from that path here.
            parting = (v for v in several if depends[v] & OLD and not depends[v] & Y)
            makers = (self.program.producer.get(v) for v in parting)
            for j in makers:
                if j is not None:
                    # the border of a loop is no equation that could be cut
                    k = j if self.program.equations[j].loop is None else i
                    self.d_pass.mixing[k] = MERGES
        else:
            # A value that reads a y, and old states of other shapes only, waits: its positions can
            # not agree with this state in any case. A cut here would cut y as well, so the path of
            # the old state is cut where it leaves the path of y.
            shapes = self.d_pass.shapes
            alike = flow.bits(r for r, shape in enumerate(shapes) if shape == shapes[self.state])
            alike &= ~flow.bits(self.d_pass.untaught)
            for v in several:
                foreign = not (depends[v] >> OTHERS) & alike
                if depends[v] & OLD and not (foreign and depends[v] & Y):
                    self.d_pass.mixing[i] = MERGES
        # values that read clocks alone have no trace
        return [
            None if v in several and not depends[v] & (OLD | Y) else lab
            for v, lab in zip(eqn.ins, ins, strict=True)
        ]

    def _keep_holomorphic(self, eqn: Equation, relevant) -> None:
        """A complex state has a complex derivative if every equation on the way from complex
        numbers has one; else it becomes two real states.
        """
        avals, program = self.program.avals, self.program
        if not is_complex(avals[self.start]):
            return
        reads = any(is_complex(avals[v]) for v, r in zip(eqn.ins, relevant, strict=True) if r)
        makes_real = any(is_inexact(avals[o]) and not is_complex(avals[o]) for o in eqn.outs)
        if reads and (makes_real or not eqn.does.holomorphic):
            split_in_parts(program, [program.hidden[self.state]], eqn.where)

    # ---- where paths meet ----

    def _combine(self, value: int) -> lb.Labels:
        """Sum of the cotangents of one value; where they disagree, the misplaced ones are cut."""
        parts, total = self.received.get(value, {}), self.total(value)
        clash = len(parts) > 1 and lb.meet(total) and not any(map(lb.meet, parts.values()))
        if clash and self.d_pass.depends[value] & OLD:
            # Every path came with single positions, but with different ones. The value's own
            # positions tell which of them moved; without any, all are cut.
            own = own_positions(self.d_pass, value, self.state)
            for (i, k), lab in list(parts.items()):
                if own is None or lb.disagree(lab, own):
                    loop, before = self.program.equations[i].loop, len(self.d_pass.mixing)
                    if loop is None:
                        self.d_pass.mixing[i] = MOVES
                        continue
                    # At the border of a loop, an equation inside is cut; if none is to blame, the
                    # loop is unrolled.
                    if own is not None:
                        outside = self.program.equations[i].outs[k]
                        self.cut_what_moves(outside, own)
                    if len(self.d_pass.mixing) == before:
                        raise MustUnroll(loop)
        return total

    # ---- loops ----

    def _through_marker(self, i: int, eqn: Equation, loop: Loop, out_labels) -> list[int]:
        """Cross the border of a loop, slot by slot; returns values with news."""
        found = []
        for k, (v, lab) in enumerate(zip(eqn.ins, out_labels, strict=True)):
            if k >= loop.num_carry and lab is not None:
                # a sequence has the iterations as a first axis, a slice lacks it
                if eqn.primitive is BEGIN:
                    lab = np.broadcast_to(lab, self.program.avals[v].shape)
                elif len(lab) and (lab != lab[0]).any():
                    raise MustUnroll(loop)  # iterations with different labels
                else:
                    lab = lab[0] if len(lab) else lb.nothing(lab.shape[1:])
            if self.send(v, (i, k), lab):
                found.append(v)
        if eqn.primitive is BEGIN:
            # the iteration before made the carry that this one reads
            for k, (first, last) in enumerate(self.program.feedback(i)):
                if lb.has(out_labels[k]):
                    own = self.total(last, without=i)  # of the last iteration, after the loop
                    if own is not None and not lb.meet(own) and lb.disagree(own, out_labels[k]):
                        # something moves positions of the carry between iterations
                        if loop.length <= UNROLLED_TO_COMPARE:
                            raise MustUnroll(loop)
                        self.cut_what_moves(first, own)
                    if self.send(last, (i, k), out_labels[k]):
                        found.append(last)
        return found

    # ---- what moves positions ----

    def cut_what_moves(self, value: int, own: np.ndarray) -> None:
        """Follow misplaced labels from a value to the first equation that moves them, and cut it.

        ``own``: the positions that the value should get. The way leads from the old state towards
        the new one, as long as an equation's result has the same misplaced labels as its operand.
        """
        seen, todo = {value}, [value]
        while todo:
            value = todo.pop()
            for (i, k), lab in self.received.get(value, {}).items():
                if i < 0 or not lb.disagree(lab, own):
                    continue
                eqn = self.program.equations[i]
                results = eqn.outs if eqn.loop is None else [eqn.outs[k]]
                out = next((o for o in results if o in self.received), value)
                sent = self.total(out)
                if out != value and sent is not None and np.array_equal(sent, lab):
                    # misplaced before this equation: look further
                    todo += {out} - seen
                    seen.add(out)
                elif eqn.loop is not None:
                    raise MustUnroll(eqn.loop)
                else:
                    self.d_pass.mixing[i] = MOVES
