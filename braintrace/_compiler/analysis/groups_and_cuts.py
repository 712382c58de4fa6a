"""Which states form a group, which op reaches which group, and which equations mix positions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..equations import labels as lb
from ..program import dataflow as flow
from ..program.program import Program
from .d_pass import DPass
from .fan_out import FanOut
from .following import Following
from .sweeps import MERGES_RESULT, Sweep, Sweeper, coupled, cut_what_moves


@dataclass
class Positions:
    """States are numbered as in ``program.hidden``, ops and cuts as in ``program.equations``."""

    program: Program
    groups: list[tuple[int, ...]]
    sweeps: list[Sweep]
    mixing: dict[int, str]

    @cached_property
    def group_of(self) -> dict[int, int]:
        return {s: g for g, states in enumerate(self.groups) for s in states}


def find_positions(program: Program) -> tuple[Positions, FanOut]:
    """Sweep from every state until no further equation has to be cut: every round cuts at least
    one.

    Also returns which positions each element of a y feeds.
    """
    d_pass = DPass(program)
    fan_out = FanOut(d_pass)
    sweeper = Sweeper(d_pass, Following(d_pass))
    sweeps: list[Sweep | None] = [None] * len(d_pass.new)
    while True:
        for s in range(len(sweeps)):
            while sweeps[s] is None:
                before = len(d_pass.mixing)
                sweeps[s] = sweeper.sweep(s)
                _forget(sweeps, list(d_pass.mixing)[before:])
        if any(s is None for s in sweeps):
            continue
        # all sweeps agree with the cuts: now look at states and ops together
        before, done = len(d_pass.mixing), [s for s in sweeps if s is not None]
        groups = _groups(d_pass, done)
        _cut_misplaced(d_pass, done, groups)
        if len(d_pass.mixing) == before:
            _cut_merging(d_pass, fan_out, done)
        if len(d_pass.mixing) == before:
            return Positions(program, groups, done, d_pass.mixing), fan_out
        _forget(sweeps, list(d_pass.mixing)[before:])


def _forget(sweeps: list[Sweep | None], cuts: list[int]) -> None:
    """A cut sends back only the sweeps that passed it."""
    for s, sweep in enumerate(sweeps if cuts else ()):
        if sweep is not None and not sweep.visited.isdisjoint(cuts):
            sweeps[s] = None


def _groups(d_pass: DPass, sweeps: list[Sweep]) -> list[tuple[int, ...]]:
    """States that read each other position by position, directly or by others."""
    leader = list(range(len(sweeps)))

    def find(s: int) -> int:
        while leader[s] != s:
            s = leader[s]
        return s

    for s, sweep in enumerate(sweeps):
        for r, labels in sweep.old.items():
            if coupled(d_pass, s, r, labels):
                leader[max(find(s), find(r))] = min(find(s), find(r))
    heads = sorted({find(s) for s in leader})
    return [tuple(s for s in range(len(leader)) if find(s) == h) for h in heads]


def _cut_misplaced(d_pass: DPass, sweeps: list[Sweep], groups) -> None:
    """Cut the equations by which a new state reads another position of its group's old states."""
    for states in groups:
        for s in states:
            for r in states:
                labels = sweeps[s].old.get(r)
                if lb.has(labels) and not coupled(d_pass, s, r, labels):
                    own = lb.identity(d_pass.shapes[r])
                    cut_what_moves(d_pass, d_pass.old[r], own, sweeps[s])


def _cut_merging(d_pass: DPass, fan_out: FanOut, sweeps: list[Sweep]) -> None:
    """Cut the equations that combine elements of a y, where each of them feeds several positions.

    Where such elements are only moved and read position by position, a trace has an entry for each
    pair of an element and a position.
    """
    program = d_pass.program
    for s, sweep in enumerate(sweeps):
        for op, labels in sweep.y.items():
            if not lb.meet(labels):
                continue
            behind = flow.reach(program, program.y_of(op), program.op_set)
            found = {
                i for i in fan_out.mixing(s) if not behind.isdisjoint(program.equations[i].ins)
            }
            for i in found:
                d_pass.cut(i, MERGES_RESULT)
