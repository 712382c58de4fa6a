"""The D pass, statically: which states form a group, which op reaches which group, and which equations mix positions."""
from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .._errors import NotSupportedError
from . import flow
from . import labels as lb
from .control_flow import MustUnroll
from .program import BEGIN, END, Equation, Program, is_inexact

__all__ = ['Positions', 'find_positions']

UNROLLED_TO_COMPARE = 32     # movement in a loop may cancel over its iterations
NOT_HOLOMORPHIC = {'conj', 'real', 'imag', 'abs', 'sign', 'max', 'min', 'clamp'}


Received = dict[int, dict[tuple[int, int], np.ndarray]]
# what a value depends on: old states, the y of ops, old states that no parameter reaches, and from
# OTHERS on a bit for each old state
OLD, Y, CLOCK, OTHERS = 1, 2, 4, 3


@dataclass
class Sweep:
    """Cotangent labels that one new state sends, in the D pass, to old states and to the y of ops.

    ``received``: for each value, what each (equation, operand) sends to it. ``merged``: equations where positions of a y meet.
    ``clocks``: old states that it reads and no parameter reaches, where no labels are sent to them.
    """
    received: Received
    old: dict[int, np.ndarray] = field(default_factory=dict)
    y: dict[int, np.ndarray] = field(default_factory=dict)
    merged: set[int] = field(default_factory=set)
    visited: set[int] = field(default_factory=set)
    clocks: set[int] = field(default_factory=set)


@dataclass
class Positions:
    """Result of the analysis; states are numbered as in ``program.hidden``, ops and cuts are equation numbers."""
    program: Program
    groups: list[tuple[int, ...]]
    sweeps: list[Sweep]
    mixing: dict[int, str]

    @cached_property
    def group_of(self) -> dict[int, int]:
        return {s: g for g, states in enumerate(self.groups) for s in states}


class _Analysis:
    def __init__(self, program: Program):
        self.program, self.mixing = program, {}
        self.old = [program.carry[c] for c in program.hidden]
        self.new = [program.new_carry[c] for c in program.hidden]
        self.old_index = {v: s for s, v in enumerate(self.old)}
        self.shapes = [program.avals[v].shape for v in self.old]
        self.ops = set(program.ops)
        self.untaught = untaught_states(program)
        start = dict.fromkeys((o for i in self.ops for o in program.equations[i].outs), Y)
        for s, (v, c) in enumerate(zip(self.old, program.hidden, strict=True)):
            start[v] = start.get(v, 0) | (CLOCK if c in self.untaught else OLD) | 1 << OTHERS + s
        self.depends = flow.forward(program, start, self.passes)
        self.sweeps: list[Sweep | None] = [None] * len(self.new)
        self.y_sources: dict[tuple[int, int], np.ndarray | None] = {}

    def passes(self, i: int, found: int) -> int:
        return 0 if i in self.ops or i in self.program.blocks else found

    def known(self, eqn: Equation) -> list:
        return [self.program.constants.get(i) for i in eqn.ins]

    def cut(self, i: int, why: str) -> None:
        self.mixing[i] = why
        self.y_sources.clear()
        self.sweeps = [None if s is not None and i in s.visited else s for s in self.sweeps]

    # one sweep ----------------------------------------------------------------------------------

    def sweep(self, state: int) -> Sweep | None:
        """Labels of the cotangents of one new state; None if an equation had to be cut on the way."""
        program, before = self.program, len(self.mixing)
        result = Sweep({self.new[state]: {(-1, 0): lb.identity(self.shapes[state])}})
        queue: list[int] = []
        self.push(queue, [self.new[state]])
        while queue:
            i = -heapq.heappop(queue)
            while queue and queue[0] == -i:
                heapq.heappop(queue)
            result.visited.add(i)
            eqn = program.equations[i]
            out_labels = [self.combine(o, result, state) for o in eqn.outs]
            if len(self.mixing) > before:
                return None                 # labels of a clash that was cut say nothing
            if i in self.ops:
                result.y[i] = out_labels[eqn.primitive.y_outvar_index]
            elif eqn.loop is not None:
                self.push(queue, self.through_marker(i, eqn, out_labels, result))
            elif i not in self.mixing and any(map(lb.has, out_labels)):
                ins = self.step_back(i, eqn, out_labels, result, state)
                self.push(queue, [v for k, (v, lab) in enumerate(zip(eqn.ins, ins, strict=True)) if self.send(v, (i, k), lab, result)])
            if len(self.mixing) > before:
                return None
        for r, v in enumerate(self.old):
            if v in result.received:
                labels = self.combine(v, result, state)
                if self.program.hidden[r] not in self.untaught or self.coupled(state, r, labels):
                    result.old[r] = labels
        read = set(flow.members(self.depends[self.new[state]] >> OTHERS))
        result.clocks = {r for r in read - result.old.keys()
                         if self.program.hidden[r] in self.untaught}
        return result if len(self.mixing) == before else None

    def push(self, queue: list[int], values: Iterable[int]) -> None:
        for v in values:
            if v in self.program.producer:
                heapq.heappush(queue, -self.program.producer[v])

    @staticmethod
    def send(value: int, source: tuple[int, int], labels, result: Sweep) -> bool:
        """Note what an operand's cotangent carries; whether that is news."""
        if not lb.has(labels):
            return False
        parts = result.received.setdefault(value, {})
        news = source not in parts or parts[source] is not labels and not np.array_equal(parts[source], labels)
        parts[source] = labels
        return news

    def through_marker(self, i: int, eqn: Equation, out_labels, result: Sweep) -> list[int]:
        """Labels through the border of a loop, slot by slot; values whose labels are new."""
        found = []
        for k, (v, lab) in enumerate(zip(eqn.ins, out_labels, strict=True)):
            if k >= eqn.loop.num_carry and lab is not None:
                lab = _every_row(eqn.loop, lab) if eqn.primitive is END else np.broadcast_to(lab, self.program.avals[v].shape)
            if self.send(v, (i, k), lab, result):
                found.append(v)
        if eqn.primitive is BEGIN:
            for k, (first, last) in enumerate(self.program.feedback(i)):
                if lb.has(out_labels[k]):
                    self.check_turn(i, first, last, out_labels[k], result)
                    if self.send(last, (i, k), out_labels[k], result):
                        found.append(last)
        return found

    def check_turn(self, i: int, first: int, last: int, labels, result: Sweep) -> None:
        """Cut what moves a loop's carry to other positions from one iteration to the next."""
        own = None
        for source, lab in result.received.get(last, {}).items():
            if source[0] != i:
                own = lb.merge(own, lab)
        if own is not None and not (own == lb.MANY).any() and (lb.merge(own, labels) == lb.MANY).any():
            if self.program.equations[i].loop.length <= UNROLLED_TO_COMPARE:
                raise MustUnroll(self.program.equations[i].loop)
            self.blame(first, own, result, set())

    def step_back(self, i: int, eqn: Equation, out_labels, result: Sweep, state: int) -> list:
        relevant = [bool(self.depends[v]) for v in eqn.ins]
        self.refuse_not_holomorphic(eqn, relevant)
        ins = lb.backward(eqn, self.program.avals, out_labels, self.known(eqn), relevant)
        many = {v for v, lab in zip(eqn.ins, ins, strict=True)
                if lab is not None and (lab == lb.MANY).any()}
        if not many:
            return ins
        if any(lab is not None and (lab == lb.MANY).any() for lab in out_labels):
            self.part(i, [v for v in many if self.depends[v] & OLD and not self.depends[v] & Y])
        elif any(self.depends[v] & OLD and not self.parts_later(v, state) for v in many):
            self.cut(i, 'merges positions')
        elif any(self.depends[v] & Y for v in many):
            result.merged.add(i)
        return [None if v in many and not self.depends[v] & (OLD | Y) else lab
                for v, lab in zip(eqn.ins, ins, strict=True)]

    def parts_later(self, value: int, state: int) -> bool:
        """Whether a value reads a y, and old states of other shapes than ``state`` alone."""
        others = flow.members(self.depends[value] >> OTHERS)
        foreign = all(self.shapes[r] != self.shapes[state]
                      or self.program.hidden[r] in self.untaught for r in others)
        return foreign and bool(self.depends[value] & Y)

    def part(self, i: int, values: list[int]) -> None:
        """Cut the way of old states in front of equation ``i``, where that of a y goes on."""
        for v in values:
            j = self.program.producer.get(v)
            if j is not None:
                self.cut(j if self.program.equations[j].loop is None else i, 'merges positions')

    def refuse_not_holomorphic(self, eqn: Equation, relevant) -> None:
        avals = self.program.avals
        read = [v for v, r in zip(eqn.ins, relevant, strict=True) if r]
        kinds = {np.issubdtype(avals[v].dtype, np.complexfloating) for v in (*read, *eqn.outs) if is_inexact(avals[v])}
        if any(relevant) and (len(kinds) == 2 or True in kinds and eqn.primitive.name in NOT_HOLOMORPHIC):
            raise NotSupportedError(
                f'{eqn.where}: {eqn.primitive.name} takes complex values to a hidden state and is not holomorphic, so its trace would be '
                'wrong. Keep real and imaginary parts as two real hidden states.')

    def combine(self, value: int, result: Sweep, state: int) -> np.ndarray | None:
        """Sum of the cotangents of one value; where they disagree, the misplaced ones are cut."""
        parts = result.received.get(value, {})
        total = None
        for lab in parts.values():
            total = lb.merge(total, lab)
        clash = len(parts) > 1 and (total == lb.MANY).any() and not any((lab == lb.MANY).any() for lab in parts.values())
        if clash and self.depends[value] & OLD:
            own = self.own_positions(value, state)
            for (i, k), lab in list(parts.items()):
                if own is None or (lb.merge(lab, own) == lb.MANY).any():
                    self.misplaces(i, k, own, result)
        elif clash and self.depends[value] & Y:
            result.merged.update(i for (i, _), lab in parts.items() if i >= 0 and (lb.merge(
                lab, lb.identity(lab.shape)) == lb.MANY).any())
        return total

    def misplaces(self, i: int, k: int, own, result: Sweep) -> None:
        """Cut an equation whose operand ``k`` gets labels of other positions, or what does so in the loop that it borders."""
        loop, before = self.program.equations[i].loop, len(self.mixing)
        if loop is None:
            self.cut(i, 'moves values to other positions')
        elif own is not None:
            self.blame(self.program.equations[i].outs[k], own, result, set())
        if len(self.mixing) == before and loop is not None:
            raise MustUnroll(loop)

    def own_positions(self, value: int, state: int) -> np.ndarray | None:
        """The positions (of states shaped like ``state``) that a value reads; where that is not one each, its own if it has that shape."""
        if value in self.old_index:
            return lb.identity(self.shapes[self.old_index[value]])
        sources = {v: lb.identity(s) for v, s in zip(self.old, self.shapes, strict=True) if s == self.shapes[state]}
        found = self.follow(sources, value)
        if lb.has(found) and not (found == lb.MANY).any():
            return found
        shape = self.program.avals[value].shape
        return lb.identity(shape) if shape == self.shapes[state] else None

    def follow(self, sources: dict[int, np.ndarray], target: int) -> np.ndarray | None:
        """Forward labels of ``target`` along the D pass."""
        env = dict(sources)
        order = flow.slice_behind(self.program, target, self.ops | self.mixing.keys())
        at = 0
        while at < len(order):
            i = order[at]
            eqn = self.program.equations[i]
            if eqn.loop is not None:
                again = self.follow_marker(i, eqn, env)
                at = bisect.bisect_right(order, self.program.begin_of[i]) if again else at + 1
                continue
            if any(v in env for v in eqn.ins):
                outs = lb.forward(eqn, self.program.avals, [env.get(v) for v in eqn.ins], self.known(eqn), linear=False,
                                  smooth=self.keeps_positions)
                env.update({o: lab for o, lab in zip(eqn.outs, outs, strict=True) if lb.has(lab)})
            at += 1
        return env.get(target)

    def follow_marker(self, i: int, eqn: Equation, env: dict[int, np.ndarray]) -> bool:
        """Labels across the border of a loop; whether the loop must be followed once more."""
        for k, (v, o) in enumerate(zip(eqn.ins, eqn.outs, strict=True)):
            lab = env.get(v)
            if lab is not None and k >= eqn.loop.num_carry:
                lab = np.broadcast_to(lab, self.program.avals[o].shape) if eqn.primitive is END else _every_row(eqn.loop, lab)
            if lab is not None:
                env[o] = lab if eqn.primitive is END else lb.merge(env.get(o), lab)
        again = False
        for first, last in self.program.feedback(i) if eqn.primitive is END else ():
            merged = lb.merge(env.get(first), env.get(last))
            if merged is not None and not (first in env and np.array_equal(env[first], merged)):
                env[first], again = merged, True
        return again

    def keeps_positions(self, eqn: Equation) -> bool:
        """Whether an equation with a derivative rule of its own acts element by element."""
        avals = self.program.avals
        if not any(k in eqn.primitive.name for k in ('custom_jvp', 'custom_vjp')):
            return False
        out = [lb.identity(avals[o].shape) if is_inexact(avals[o]) else None for o in eqn.outs]
        if any(avals[v].shape != avals[eqn.outs[0]].shape for v in (*eqn.ins, *eqn.outs) if is_inexact(avals[v])):
            return False
        ins = lb.backward(eqn, avals, out, self.known(eqn), [True] * len(eqn.ins))
        return all(lab is None or not (lb.merge(lab, lb.identity(lab.shape)) == lb.MANY).any() for lab in ins)

    # all sweeps ---------------------------------------------------------------------------------

    def run(self) -> Positions:
        """Sweep from every state until no further equation has to be cut; a cut sends back only the sweeps that passed it."""
        while True:
            for s in range(len(self.new)):
                while self.sweeps[s] is None:
                    self.sweeps[s] = self.sweep(s)
            if any(s is None for s in self.sweeps):
                continue
            sweeps = list(self.sweeps)
            groups = self.group(sweeps)
            if not (self.misplaced(sweeps, groups) or self.unexpandable(sweeps)):
                return Positions(self.program, groups, sweeps, self.mixing)

    def coupled(self, s: int, r: int, labels: np.ndarray) -> bool:
        return self.shapes[s] == self.shapes[r] and lb.has(labels) and not (lb.merge(
            labels, lb.identity(labels.shape)) == lb.MANY).any()

    def group(self, sweeps: list[Sweep]) -> list[tuple[int, ...]]:
        leader = list(range(len(self.new)))

        def find(s: int) -> int:
            while leader[s] != s:
                s = leader[s]
            return s

        for s, sweep in enumerate(sweeps):
            for r, labels in sweep.old.items():
                if self.coupled(s, r, labels):
                    leader[max(find(s), find(r))] = min(find(s), find(r))
        heads = sorted({find(s) for s in leader})
        return [tuple(s for s in range(len(leader)) if find(s) == h) for h in heads]

    def misplaced(self, sweeps: list[Sweep], groups) -> bool:
        """Cut the equations through which a group's new state reads another position of the group's old states."""
        before = len(self.mixing)
        for states in groups:
            for s in states:
                for r in states:
                    labels = sweeps[s].old.get(r)
                    if lb.has(labels) and not self.coupled(s, r, labels):
                        self.blame(self.old[r], lb.identity(self.shapes[r]), sweeps[s], set())
        return len(self.mixing) > before

    def blame(self, value: int, own: np.ndarray, result: Sweep, seen: set[int]) -> None:
        """Follow misplaced labels from a value to the first equation that moves them, and cut it."""
        seen.add(value)
        for (i, k), lab in list(result.received.get(value, {}).items()):
            if i < 0 or not (lb.merge(lab, own) == lb.MANY).any():
                continue
            eqn = self.program.equations[i]
            out = next((o for o in (eqn.outs if eqn.loop is None else [eqn.outs[k]]) if o in result.received), None)
            sent = None
            for part in result.received.get(out, {}).values():
                sent = lb.merge(sent, part)
            if sent is not None and sent.shape == lab.shape and (sent == lab).all():
                if out not in seen:
                    self.blame(out, own, result, seen)
            elif eqn.loop is not None:
                raise MustUnroll(eqn.loop)
            else:
                self.cut(i, 'moves values to other positions')

    def unexpandable(self, sweeps: list[Sweep]) -> bool:
        """Cut what merges positions of a y, where y can not be expanded over the axes that it lacks."""
        before = len(self.mixing)
        for s, sweep in enumerate(sweeps):
            for op, labels in sweep.y.items():
                if labels is not None and (labels == lb.MANY).any() and self.read_once(op, s) is None:
                    y = self.program.equations[op].outs[self.program.equations[op].primitive.y_outvar_index]
                    behind = flow.reach(self.program, y, self.ops)
                    guilty = [i for i in sweep.merged if not behind.isdisjoint(self.program.equations[i].ins)]
                    for i in guilty:
                        self.cut(i, 'merges positions of the result of an op')
        return len(self.mixing) > before

    def read_once(self, op: int, state: int) -> np.ndarray | None:
        """Which element of y each position of a state reads (``NONE``: none), or None where one reads several."""
        key = (op, state)
        if key not in self.y_sources:
            eqn = self.program.equations[op]
            y = eqn.outs[eqn.primitive.y_outvar_index]
            found = self.follow({y: lb.identity(self.program.avals[y].shape)}, self.new[state])
            self.y_sources[key] = None if found is None or (found == lb.MANY).any() else found
        return self.y_sources[key]


def _every_row(loop, labels: np.ndarray) -> np.ndarray:
    """Labels of one iteration's slice, where all iterations have the same; else the loop has to be unrolled."""
    if len(labels) and (labels != labels[0]).any():
        raise MustUnroll(loop)
    return labels[0] if len(labels) else np.full(labels.shape[1:], lb.NONE)


def untaught_states(program: Program) -> set[int]:
    """Hidden states (positions in the carry) that no parameter ever reaches, as a clock."""
    found = set(program.hidden)
    while True:
        start = {program.params[i]: 1 for i in program.trainable}
        start |= {program.carry[c]: 1 for c in program.hidden if c not in found}
        taught = flow.forward(program, start, flow.gradients(program))
        rest = {c for c in found if not taught[program.new_carry[c]]}
        if rest == found:
            return found
        found = rest


def find_positions(program: Program) -> tuple[Positions, _Analysis]:
    """Analyse a program; also returns the analysis, which answers ``read_once``."""
    analysis = _Analysis(program)
    return analysis.run(), analysis
