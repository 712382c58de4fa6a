"""The D pass, statically: which states form a group, which op reaches which group, and which equations mix positions."""
from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .._errors import NotSupportedError
from . import labels as lb
from .program import Equation, Program, is_inexact

__all__ = ['Positions', 'find_positions']

CONTROL_FLOW = {'scan', 'while', 'cond', 'remat', 'remat2', 'checkpoint', 'shard_map'}

NOT_HOLOMORPHIC = {'conj', 'real', 'imag', 'abs', 'sign', 'max', 'min', 'clamp'}


@dataclass
class Sweep:
    """Cotangent labels that one new state sends, in the D pass, to old states and to the y of ops."""
    old: dict[int, np.ndarray] = field(default_factory=dict)
    y: dict[int, np.ndarray] = field(default_factory=dict)
    merged: set[int] = field(default_factory=set)


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
        self.shapes = [program.avals[v].shape for v in self.old]
        self.ops = set(program.ops)
        self.from_old = self.descendants(self.old)
        self.from_y = self.descendants([o for i in self.ops for o in program.equations[i].outs])
        self.y_sources: dict[tuple[int, int], np.ndarray | None] = {}

    def descendants(self, sources: Iterable[int]) -> set[int]:
        """Values that depend on the sources without passing an op."""
        found = set(sources)
        for i, eqn in enumerate(self.program.equations):
            if i not in self.ops and not found.isdisjoint(eqn.ins):
                found.update(eqn.outs)
        return found

    def known(self, eqn: Equation) -> list:
        return [self.program.constants.get(i) for i in eqn.ins]

    def cut(self, i: int, why: str) -> None:
        self.mixing[i] = why

    # one sweep ----------------------------------------------------------------------------------

    def sweep(self, state: int) -> Sweep | None:
        """Labels of the cotangents of one new state; None if an equation had to be cut on the way."""
        program, result = self.program, Sweep()
        self.before, self.split = len(self.mixing), set()
        received: dict[int, list[tuple[int, np.ndarray]]] = {self.new[state]: [(-1, lb.identity(self.shapes[state]))]}
        queue = [-program.producer[self.new[state]]] if self.new[state] in program.producer else []
        queued = set(queue)
        while queue:
            i = -heapq.heappop(queue)
            eqn = program.equations[i]
            out_labels = [self.combine(o, received, state) for o in eqn.outs]
            if i in self.ops:
                result.y[i] = out_labels[eqn.primitive.y_outvar_index]
                continue
            if i in self.mixing or not any(map(lb.has, out_labels)):
                continue
            for v, lab in zip(eqn.ins, self.step_back(i, eqn, out_labels, result), strict=True):
                if lb.has(lab):
                    received.setdefault(v, []).append((i, lab))
                    if v in program.producer and -program.producer[v] not in queued:
                        queued.add(-program.producer[v])
                        heapq.heappush(queue, -program.producer[v])
        for r, v in enumerate(self.old):
            if v in received:
                result.old[r] = self.combine(v, received, state)
        self.received = received
        result.merged |= self.split
        return result if len(self.mixing) == self.before else None

    def step_back(self, i: int, eqn: Equation, out_labels, result: Sweep) -> list:
        relevant = [v in self.from_old or v in self.from_y for v in eqn.ins]
        self.refuse_not_holomorphic(eqn, relevant)
        if any(relevant) and eqn.primitive.name in CONTROL_FLOW:
            raise NotSupportedError(
                f'{eqn.where}: {eqn.primitive.name} lies between a hidden state or the result of an ETP op and a new hidden '
                'state. Write this part as straight-line code (jnp.where instead of cond, an unrolled loop instead of scan).')
        ins = lb.backward(eqn, self.program.avals, out_labels, self.known(eqn), relevant)
        many = [lab is not None and (lab == lb.MANY).any() for lab in ins]
        if any(many) and not any(lab is not None and (lab == lb.MANY).any() for lab in out_labels):
            if any(m and v in self.from_old for m, v in zip(many, eqn.ins, strict=True)):
                self.cut(i, 'merges positions')
            else:
                result.merged.add(i)
        return ins

    def refuse_not_holomorphic(self, eqn: Equation, relevant) -> None:
        avals = self.program.avals
        read = [v for v, r in zip(eqn.ins, relevant, strict=True) if r]
        kinds = {np.issubdtype(avals[v].dtype, np.complexfloating) for v in (*read, *eqn.outs) if is_inexact(avals[v])}
        if any(relevant) and (len(kinds) == 2 or True in kinds and eqn.primitive.name in NOT_HOLOMORPHIC):
            raise NotSupportedError(
                f'{eqn.where}: {eqn.primitive.name} on the way to a complex hidden state is not holomorphic, so its trace would be wrong. '
                'Keep real and imaginary parts as two real hidden states.')

    def combine(self, value: int, received, state: int) -> np.ndarray | None:
        """Sum of the cotangents of one value; where they disagree, the misplaced ones are cut."""
        total = None
        for _, lab in received.get(value, ()):
            total = lb.merge(total, lab)
        parts = received.get(value, ())
        clash = total is not None and (total == lb.MANY).any() and not any((lab == lb.MANY).any() for _, lab in parts)
        if clash and value in self.from_old:
            own = self.own_positions(value, state)
            for i, lab in parts:
                if own is None or (lb.merge(lab, own) == lb.MANY).any():
                    self.cut(i, 'moves values to other positions')
        elif clash:
            self.split.update(i for i, lab in parts if lab.size != total.size or (lb.merge(
                lab, lb.identity(lab.shape)) == lb.MANY).any())
        return total

    def own_positions(self, value: int, state: int) -> np.ndarray | None:
        """The positions (of states shaped like ``state``) that a value reads, or None where that is not one each."""
        if value in self.old:
            return lb.identity(self.shapes[self.old.index(value)])
        sources = {v: lb.identity(s) for v, s in zip(self.old, self.shapes, strict=True) if s == self.shapes[state]}
        found = self.follow(sources, value)
        return found if lb.has(found) and not (found == lb.MANY).any() else None

    def follow(self, sources: dict[int, np.ndarray], target: int) -> np.ndarray | None:
        """Forward labels of ``target`` along the D pass."""
        env = dict(sources)
        last = self.program.producer.get(target, -1)
        for i, eqn in enumerate(self.program.equations[:last + 1]):
            if i not in self.ops and i not in self.mixing and any(v in env for v in eqn.ins):
                outs = lb.forward(eqn, self.program.avals, [env.get(v) for v in eqn.ins], self.known(eqn), linear=False,
                                  smooth=self.keeps_positions)
                env.update({o: lab for o, lab in zip(eqn.outs, outs, strict=True) if lb.has(lab)})
        return env.get(target)

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
        """Sweep from every state until no further equation has to be cut; every round but the last cuts at least one."""
        while True:
            self.y_sources.clear()
            sweeps = self.sweep_all()
            if sweeps is None:
                continue
            groups = self.group(sweeps)
            if not (self.misplaced(sweeps, groups) or self.unexpandable(sweeps)):
                return Positions(self.program, groups, sweeps, self.mixing)

    def sweep_all(self) -> list[Sweep] | None:
        sweeps = []
        for s in range(len(self.new)):
            sweeps.append(self.sweep(s))
            if sweeps[-1] is None:
                return None
        return sweeps

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
                        self.sweep(s)
                        self.blame(self.old[r], lb.identity(self.shapes[r]), self.received)
        return len(self.mixing) > before

    def blame(self, value: int, own: np.ndarray, received) -> None:
        """Follow misplaced labels from an old state to the first equation that moves them, and cut it."""
        for i, lab in received.get(value, ()):
            if not (lb.merge(lab, own) == lb.MANY).any():
                continue
            out = next((o for o in self.program.equations[i].outs if o in received), None)
            sent = self.combine(out, received, 0) if out is not None else None
            if sent is not None and sent.shape == lab.shape and (sent == lab).all():
                self.blame(out, own, received)
            else:
                self.cut(i, 'moves values to other positions')

    def unexpandable(self, sweeps: list[Sweep]) -> bool:
        """Cut what merges positions of a y, where y can not be expanded over the axes that it lacks."""
        before = len(self.mixing)
        for s, sweep in enumerate(sweeps):
            for op, labels in sweep.y.items():
                if labels is not None and (labels == lb.MANY).any() and self.read_once(op, s) is None:
                    y = self.program.equations[op].outs[self.program.equations[op].primitive.y_outvar_index]
                    behind = self.descendants([y])
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


def find_positions(program: Program) -> tuple[Positions, _Analysis]:
    """Analyse a program; also returns the analysis, which answers ``read_once``."""
    analysis = _Analysis(program)
    return analysis.run(), analysis
