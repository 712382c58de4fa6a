"""Which equations to evaluate, how often, and with what held constant.

A *variant* of a value is ``(stopped, silent)``: old states of the groups in ``stopped`` are held constant on the way to it;
``silent``: it is read position by position by a new hidden state, so new states are read without their probe (that path is inside
the reader's D_f already). Every cut equation reads its inputs in a variant of its own.
"""
from __future__ import annotations

from dataclasses import dataclass

import jax

from .._compiler import ETraceGraph, Groups, old_ancestors

__all__ = ['Plan', 'Read', 'make_d_plan', 'make_plan']

Variant = tuple[Groups, bool]
NONE: Groups = frozenset()
EMPTY: Variant = (NONE, False)


@dataclass(frozen=True)
class Read:
    """How one input is read: a value in a variant, perhaps with its gradient stopped or a new state's probe added."""
    value: int
    variant: Variant = EMPTY
    stop: bool = False
    probe: int | None = None


@dataclass(frozen=True)
class Plan:
    """Equations in order, each with the variant that it makes and how it reads its inputs; then the reads of the results."""
    steps: tuple[tuple[int, Variant, tuple[Read, ...]], ...]
    outputs: tuple[Read, ...]
    new_carry: tuple[Read, ...]

    def run(self, graph: ETraceGraph, env: dict, on_op, probes) -> tuple[list, list]:
        """Evaluate: ``env`` maps (value, variant) to arrays and is filled on the way.

        ``on_op(i, args)`` evaluates the op at equation ``i``; ``probes[s]`` is added to reads of new hidden state ``s``.
        """
        equations, constants = graph.program.equations, graph.program.constants

        def read(r: Read):
            if r.value in constants:
                return constants[r.value]
            x = env[r.value, r.variant]
            if r.stop:
                x = jax.lax.stop_gradient(x)
            return x if r.probe is None else x + probes[r.probe]

        for i, variant, reads in self.steps:
            outs = on_op(i, [read(r) for r in reads])
            for v, x in zip(equations[i].outs, outs, strict=True):
                env[v, variant] = x
        return [read(r) for r in self.outputs], [read(r) for r in self.new_carry]


class _Planner:
    """Works out, from the results backwards, which variants of which equations are needed."""

    def __init__(self, graph: ETraceGraph, probes: bool):
        self.graph, self.program, self.probes = graph, graph.program, probes
        program = self.program
        group_of = {c: g for g, group in enumerate(graph.hidden_groups) for c in group.states}
        self.old = {program.carry[c]: group_of[c] for c in program.hidden}
        self.new = {}
        for c in program.hidden:
            if program.new_carry[c] in program.producer:
                self.new.setdefault(program.new_carry[c], c)
        self.group_of = group_of
        self.cuts = {op.equation for op in graph.ops} | set(graph.mixing)
        self.recurrent = graph.recurrent
        self.anc_old = old_ancestors(program, group_of, graph.recurrent)
        self.reads_new = self._readers_of_new_states() if probes else set()

    def _readers_of_new_states(self) -> set[int]:
        """Values that read a new state without passing a cut."""
        found: set[int] = set()
        for i, eqn in enumerate(self.program.equations):
            if i not in self.cuts and any(v in self.new or v in found for v in eqn.ins):
                found.update(eqn.outs)
        return found

    def read(self, value: int, variant: Variant) -> Read:
        """How a consumer that runs in ``variant`` reads ``value``."""
        stopped, silent = variant
        if value in self.new:
            return Read(value, (NONE, value in self.reads_new), probe=self.new[value] if self.probes and not silent else None)
        if value in self.old:
            return Read(value, EMPTY, stop=self.old[value] in stopped)
        if value not in self.program.producer:
            return Read(value)
        return Read(value, (stopped & self.anc_old[value], silent and value in self.reads_new))

    def result(self, value: int, slot: int | None) -> Read:
        """How a result is read; a new state that no equation makes carries its probe there."""
        read = self.read(value, EMPTY)
        if self.probes and slot in self.group_of and read.probe is None:
            return Read(read.value, read.variant, read.stop, slot)
        return read

    def plan(self) -> Plan:
        program = self.program
        outputs = tuple(self.result(v, None) for v in program.outputs)
        new_carry = tuple(self.result(v, c) for c, v in enumerate(program.new_carry))
        wanted: dict[int, set] = {}
        steps = []

        def want(read: Read) -> None:
            if read.value in program.producer:
                wanted.setdefault(program.producer[read.value], set()).add((read.value, read.variant))

        for r in (*outputs, *new_carry):
            want(r)
        for i in range(len(program.equations) - 1, -1, -1):
            eqn = program.equations[i]
            for variant in {v for _, v in wanted.get(i, ())} | ({EMPTY} if eqn.effects else set()):
                inner = (variant[0] | self.recurrent[i], False) if i in self.cuts else variant
                reads = tuple(self.read(v, inner) for v in eqn.ins)
                steps.append((i, variant, reads))
                for r in reads:
                    want(r)
        return Plan(tuple(reversed(steps)), outputs, new_carry)


def make_plan(graph: ETraceGraph, probes: bool) -> Plan:
    """The two-sided pass: every cut equation reads constant the old states of the groups that it is recurrent for."""
    return _Planner(graph, probes).plan()


def make_d_plan(graph: ETraceGraph) -> Plan:
    """The D pass: every cut equation reads constants; only what leads to new hidden states is evaluated."""
    program = graph.program
    cuts = {op.equation for op in graph.ops} | set(graph.mixing)
    wanted = {program.new_carry[c] for c in program.hidden}
    steps = []
    for i in range(len(program.equations) - 1, -1, -1):
        eqn = program.equations[i]
        if not wanted.isdisjoint(eqn.outs):
            steps.append((i, EMPTY, tuple(Read(v, stop=i in cuts) for v in eqn.ins)))
            wanted.update(eqn.ins)
    new = tuple(Read(program.new_carry[c]) for c in program.hidden)
    return Plan(tuple(reversed(steps)), (), new)
