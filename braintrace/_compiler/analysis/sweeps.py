"""Sweeps over a program that follow elements to states and ops."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from .. import equations as lb
from ..equations import BEGIN, END, Equation, Loop, backward, forward, is_complex, is_inexact
from ..program import dataflow as flow
from ..program.control_flow import MustUnroll
from ..program.program import Program
from ..stacked_states import split_in_parts

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
        untaught = _untaught(program)
        self.untaught = {s for s, c in enumerate(program.hidden) if c in untaught}
        start = dict.fromkeys((o for i in program.ops for o in program.equations[i].outs), Y)
        for s, v in enumerate(self.old):
            kind = CLOCK if s in self.untaught else OLD
            start[v] = start.get(v, 0) | kind | 1 << OTHERS + s
        stops = program.op_set | program.blocks
        self.depends = flow.forward(program, start, lambda i, found: 0 if i in stops else found)
        self.mixing: dict[int, str] = {}

    def cut(self, i: int, why: str) -> None:
        self.mixing[i] = why

    def known(self, i: int) -> list:
        return [self.program.constants.get(v) for v in self.program.equations[i].ins]


def _untaught(program: Program) -> set[int]:
    """Hidden states (positions in the carry) that no parameter ever reaches, as a clock."""
    found = set(program.hidden)
    while True:
        # the reader of a taught state is taught at the next step
        start = {program.params[i]: 1 for i in program.trainable}
        start |= {program.carry[c]: 1 for c in program.hidden if c not in found}
        taught = flow.forward(program, start, flow.gradients(program))
        rest = {c for c in found if not taught[program.new_carry[c]]}
        if rest == found:
            return found
        found = rest


# following ----------------------------------------------------------------------------------------
#
# Labels that travel forward along the D pass, from old states.
#
# They tell which of two disagreeing paths moved positions. For anything else they are unsound: a
# value may be zero where its derivative is not.


class Following:
    """Forward labels."""

    def __init__(self, d_pass: DPass):
        self.d_pass, self.program = d_pass, d_pass.program

    def own_positions(self, value: int, state: int) -> np.ndarray | None:
        """For each element of a value, its own position: labels that agree with it were not moved.

        It is the position that the value reads of old states shaped like ``state``. A value of the
        state's shape that reads several or none has its own places.
        """
        d_pass = self.d_pass
        if value in d_pass.old:
            return lb.identity(self.program.avals[value].shape)
        shape = d_pass.shapes[state]
        alike = (v for v, s in zip(d_pass.old, d_pass.shapes, strict=True) if s == shape)
        found = self.follow({v: lb.identity(shape) for v in alike}, value)
        if lb.has(found) and not lb.meet(found):
            return found
        own = self.program.avals[value].shape
        return lb.identity(own) if own == shape else None

    def follow(self, sources: dict[int, np.ndarray], target: int) -> np.ndarray | None:
        env = dict(sources)
        stops = self.program.op_set | self.d_pass.mixing.keys()
        order = flow.slice_behind(self.program, target, stops)
        at = 0
        while at < len(order):
            i = order[at]
            eqn = self.program.equations[i]
            at += 1
            if eqn.loop is None:
                self._pass(i, eqn, env)
            elif self._cross(i, eqn, eqn.loop, env):
                # labels came round: go through the loop once more
                at = bisect.bisect_right(order, self.program.begin_of[i])
        return env.get(target)

    def _pass(self, i: int, eqn: Equation, env: dict[int, np.ndarray]) -> None:
        if any(v in env for v in eqn.ins):
            outs = forward(
                eqn,
                self.program.avals,
                [env.get(v) for v in eqn.ins],
                self.d_pass.known(i),
                linear=False,
                smooth=lambda eqn: self._keeps_positions(i, eqn),
            )
            env.update({o: lab for o, lab in zip(eqn.outs, outs, strict=True) if lb.has(lab)})

    def _cross(self, i: int, eqn: Equation, loop: Loop, env: dict[int, np.ndarray]) -> bool:
        """Cross the border of a loop; whether the loop must be followed once more."""
        ending = eqn.primitive is END
        for k, (v, o) in enumerate(zip(eqn.ins, eqn.outs, strict=True)):
            lab = env.get(v)
            if lab is None:
                continue
            # a sequence has the iterations as a first axis, a slice lacks it
            if k >= loop.num_carry and ending:
                lab = np.broadcast_to(lab, self.program.avals[o].shape)
            elif k >= loop.num_carry:
                lab = every_row(loop, lab)
            env[o] = lab if ending else lb.merge(env.get(o), lab)
        again = False
        # the next iteration reads the carry that this one made
        for first, last in self.program.feedback(i) if ending else ():
            merged = lb.merge(env.get(first), env.get(last))
            if merged is not None and not (first in env and np.array_equal(env[first], merged)):
                env[first], again = merged, True
        return again

    def _keeps_positions(self, i: int, eqn: Equation) -> bool:
        """Whether a function with a derivative rule of its own acts element by element."""
        avals = self.program.avals
        control = eqn.does.control
        if control is None or control.option != 'custom_rule':
            return False
        shape = avals[eqn.outs[0]].shape
        if any(avals[v].shape != shape for v in (*eqn.ins, *eqn.outs) if is_inexact(avals[v])):
            return False
        out = [lb.identity(avals[o].shape) if is_inexact(avals[o]) else None for o in eqn.outs]
        ins = backward(eqn, avals, out, self.d_pass.known(i), [True] * len(eqn.ins))
        return all(lab is None or lb.in_place(lab) for lab in ins)


def every_row(loop: Loop, labels: np.ndarray) -> np.ndarray:
    """Labels of one iteration's slice; iterations with different labels have to be unrolled."""
    if len(labels) and (labels != labels[0]).any():
        raise MustUnroll(loop)
    return labels[0] if len(labels) else lb.nothing(labels.shape[1:])


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
                # at its begin labels go round to its end, so the loop is visited again
                queue.push(self._through_marker(i, eqn, eqn.loop, out_labels, result))
            elif i not in d_pass.mixing and any(map(lb.has, out_labels)):
                ins = self._step_back(i, eqn, out_labels, result, state)
                sent = enumerate(zip(eqn.ins, ins, strict=True))
                queue.push([v for k, (v, lab) in sent if result.send(v, (i, k), lab)])
            if len(d_pass.mixing) > before:
                return None
        # what arrived at the old states
        for r, v in enumerate(d_pass.old):
            if v in result.received:
                labels = self._combine(v, result, state)
                # a state that no parameter reaches joins a group, but carries no trace to it
                taught = r not in d_pass.untaught
                if labels is not None and (taught or coupled(d_pass, state, r, labels)):
                    result.old[r] = labels
        read = set(flow.members(d_pass.depends[start] >> OTHERS))
        result.clocks = (read - result.old.keys()) & d_pass.untaught
        return result if len(d_pass.mixing) == before else None

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
            makers = (self.program.producer.get(v) for v in parting)
            for j in makers:
                if j is not None:
                    # the border of a loop is no equation that could be cut
                    self.d_pass.cut(j if self.program.equations[j].loop is None else i, MERGES)
        else:
            # A value that reads a y, and old states of other shapes only, waits: its positions can
            # not agree with this state in any case. A cut here would cut y as well, so the path of
            # the old state is cut where it leaves the path of y.
            shapes, untaught = self.d_pass.shapes, self.d_pass.untaught
            alike = flow.bits(
                r for r, shape in enumerate(shapes) if shape == shapes[state] and r not in untaught
            )
            for v in several:
                foreign = not (depends[v] >> OTHERS) & alike
                if depends[v] & OLD and not (foreign and depends[v] & Y):
                    self.d_pass.cut(i, MERGES)
        # values that read clocks alone have no trace
        return [
            None if v in several and not depends[v] & (OLD | Y) else lab
            for v, lab in zip(eqn.ins, ins, strict=True)
        ]

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
                    loop, before = self.program.equations[i].loop, len(self.d_pass.mixing)
                    if loop is None:
                        self.d_pass.cut(i, MOVES)
                        continue
                    # At the border of a loop, an equation inside is cut; if none is to blame, the
                    # loop is unrolled.
                    if own is not None:
                        outside = self.program.equations[i].outs[k]
                        cut_what_moves(self.d_pass, outside, own, result)
                    if len(self.d_pass.mixing) == before:
                        raise MustUnroll(loop)
        return total

    # ---- loops ----

    def _through_marker(
        self, i: int, eqn: Equation, loop: Loop, out_labels, result: Sweep
    ) -> list[int]:
        """Cross the border of a loop, slot by slot; returns values with news."""
        found = []
        for k, (v, lab) in enumerate(zip(eqn.ins, out_labels, strict=True)):
            if k >= loop.num_carry and lab is not None:
                # a sequence has the iterations as a first axis, a slice lacks it
                if eqn.primitive is END:
                    lab = every_row(loop, lab)
                else:
                    lab = np.broadcast_to(lab, self.program.avals[v].shape)
            if result.send(v, (i, k), lab):
                found.append(v)
        if eqn.primitive is BEGIN:
            # the iteration before made the carry that this one reads
            for k, (first, last) in enumerate(self.program.feedback(i)):
                if lb.has(out_labels[k]):
                    own = result.total(last, without=i)  # of the last iteration, after the loop
                    if own is not None and not lb.meet(own) and lb.disagree(own, out_labels[k]):
                        # something moves positions of the carry between iterations
                        if loop.length <= UNROLLED_TO_COMPARE:
                            raise MustUnroll(loop)
                        cut_what_moves(self.d_pass, first, own, result)
                    if result.send(last, (i, k), out_labels[k]):
                        found.append(last)
        return found


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
        if out is not None and sent is not None and sent.shape == lab.shape and (sent == lab).all():
            # misplaced before this equation: look further
            if out not in seen:
                cut_what_moves(d_pass, out, own, result, seen)
        elif eqn.loop is not None:
            raise MustUnroll(eqn.loop)
        else:
            d_pass.cut(i, MOVES)
