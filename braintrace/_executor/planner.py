"""From an :class:`ETraceGraph` to the plans of its two passes."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Set

from .._compiler import ETraceGraph, Program, Remat, forward, old_ancestors
from .plan import (
    EMPTY,
    Key,
    One,
    Plan,
    Read,
    Recomputed,
    Repeated,
    Slice,
    Slot,
    Stack,
    Step,
    Variant,
    input_key,
)


def make_plan(graph: ETraceGraph, probes: bool, whole: bool = False) -> Plan:
    """The two-sided pass; ``whole``: nothing is cut."""
    reads, program = TwoSided(graph, probes, whole), graph.program
    recorded = {op.equation for op in graph.ops if op.owned and op.x is not None}
    return Planner(program, reads, recorded).plan(
        tuple(reads.result(v, None) for v in program.outputs),
        tuple(reads.result(v, c) for c, v in enumerate(program.new_carry)),
    )


def make_d_plan(graph: ETraceGraph, cut: bool = True) -> Plan:
    """The D pass, or the same pass in which nothing is cut."""
    program = graph.program
    states = tuple(Read(program.new_carry[c]) for c in graph.states)
    cuts = {*program.ops, *graph.mixing} if cut else set()
    return Planner(program, DReads(graph, cuts), set()).plan((), states)


class Reads(ABC):
    """How a pass reads values."""

    @abstractmethod
    def read(self, value: int, variant: Variant) -> Read:
        """How a consumer that runs in ``variant`` reads ``value``."""

    @abstractmethod
    def operands(self, i: int, variant: Variant) -> tuple[Read, ...]:
        """How equation ``i`` reads its operands to make its results in ``variant``."""

    @abstractmethod
    def runs_anyway(self, i: int) -> bool:
        """Whether an equation is evaluated even if nothing wants it."""


class DReads(Reads):
    """Every cut equation reads constants; only equations behind new hidden states are evaluated."""

    def __init__(self, graph: ETraceGraph, cuts: Set[int]):
        self.equations, self.cuts = graph.program.equations, cuts

    def read(self, value: int, variant: Variant) -> Read:
        return Read(value)

    def operands(self, i: int, variant: Variant) -> tuple[Read, ...]:
        return tuple(Read(v, stop=i in self.cuts) for v in self.equations[i].ins)

    def runs_anyway(self, i: int) -> bool:
        return False


class TwoSided(Reads):
    """Every cut equation reads constant the old states of the groups that it is recurrent for."""

    def __init__(self, graph: ETraceGraph, probes: bool, whole: bool):
        self.probes, self.whole = probes, whole
        self.recurrent = dict.fromkeys(graph.recurrent, 0) if whole else graph.recurrent
        self.program = program = graph.program
        self.cuts, self.states = {*program.ops, *graph.mixing}, graph.states
        self.group_of = {c: g for g, group in enumerate(graph.hidden_groups) for c in group.carried}
        self.old = {program.carry[c]: self.group_of[c] for c in program.hidden}  # value -> group
        self.new: dict[int, int] = {}  # value -> slot of the carry; the first, if it is in several
        for c in graph.states:
            if program.new_carry[c] in program.producer:
                self.new.setdefault(program.new_carry[c], c)
        # variants of a value differ by the old and new states behind it
        self.old_behind = old_ancestors(program, self.group_of, self.recurrent)
        self.new_behind = self._readers_of_new_states() if probes else [0] * len(program.avals)

    def _readers_of_new_states(self) -> list[int]:
        """Whether each value reads a new state without passing a cut."""
        direct = (
            o
            for v in self.new
            for i in self.program.consumers.get(v, ())
            if i not in self.cuts
            for o in self.program.results(i, v)
        )
        return forward(
            self.program, dict.fromkeys(direct, 1), lambda i, found: 0 if i in self.cuts else found
        )

    def read(self, value: int, variant: Variant) -> Read:
        stopped, silent = variant
        reads_new = bool(self.new_behind[value])
        if value in self.new:
            # a new state is one value for all readers; its own equation reads others silently
            probe = self.new[value] if self.probes and not silent else None
            return Read(value, Variant(0, reads_new), probe=probe)
        if value in self.old:
            return Read(value, EMPTY, stop=bool(stopped >> self.old[value] & 1))
        if value not in self.program.producer:
            return Read(value)
        # variants of a value differ only by the states behind it
        return Read(value, Variant(stopped & self.old_behind[value], silent and reads_new))

    def operands(self, i: int, variant: Variant) -> tuple[Read, ...]:
        if self.whole and self.program.equations[i].extra:
            reads = (self.read(v, variant) for v in self.program.equations[i].ins)
            return tuple(r._replace(stop=True) for r in reads)
        if i in self.cuts:
            variant = Variant(variant.stopped | self.recurrent[i], False)
        return tuple(self.read(v, variant) for v in self.program.equations[i].ins)

    def runs_anyway(self, i: int) -> bool:
        return self.program.equations[i].effects

    def result(self, value: int, slot: int | None) -> Read:
        """How a result is read; a new state that no equation makes carries its probe there."""
        read = self.read(value, EMPTY)
        if self.probes and slot in self.states and read.probe is None:
            return read._replace(probe=slot)
        return read


class Planner:
    """Finds, from the results backwards, the variants of equations that are needed."""

    def __init__(self, program: Program, reads: Reads, recorded: set[int]):
        self.program, self.reads, self.recorded = program, reads, recorded
        self.wanted: dict[int, set[tuple[int, Variant]]] = {}  # equation -> results in variants

    def plan(self, outputs: tuple[Read, ...], new_carry: tuple[Read, ...]) -> Plan:
        self.want(*outputs, *new_carry)
        steps = self.block(0, len(self.program.equations))
        uses = Counter(k for s in steps for k in s.needs(self.program))
        uses.update(r.key for r in (*outputs, *new_carry))
        return Plan(tuple(self.nest(steps, 0, uses)), outputs, new_carry)

    def want(self, *reads: Read) -> None:
        """Ask the equations that make these values for them."""
        for r in reads:
            if r.value in self.program.producer:
                equation = self.program.producer[r.value]
                self.wanted.setdefault(equation, set()).add((r.value, r.variant))

    def block(self, start: int, stop: int) -> list[Step]:
        """The steps of some equations, asked for from the last to the first."""
        steps: list[Step] = []
        i = stop - 1
        while i >= start:
            eqn = self.program.equations[i]
            if eqn.loop is not None:  # the marker at its end: go on in front of its beginning
                begin = self.program.begin_of[i]
                loop = self.repeated(begin, i)
                steps += [loop] if loop is not None else []
                i = begin - 1
                continue
            variants = {variant for _, variant in self.wanted.get(i, ())}
            if self.reads.runs_anyway(i):
                variants.add(EMPTY)
            for variant in sorted(variants):
                reads = self.reads.operands(i, variant)
                steps.append(One(i, variant, reads, i in self.recorded, eqn.scope))
                self.want(*reads)
            i -= 1
        return steps[::-1]

    def repeated(self, begin: int, end: int) -> Repeated | None:
        """The loop between two markers; None where nothing of it is wanted."""
        first, last = self.program.equations[begin], self.program.equations[end]
        number = first.loop.num_carry
        results = sorted(self.wanted.get(end, ()))
        place = {v: k for k, v in enumerate(last.outs)}
        asked = {(place[v], variant) for v, variant in results if place[v] < number}
        ys = tuple(
            Stack(self.reads.read(last.ins[place[v]], variant), (v, variant))
            for v, variant in results
            if place[v] >= number
        )
        self.want(*(y.inside for y in ys))
        steps, asked, sliced = self._turn(begin, end, asked)
        if not steps and not results:
            return None
        carry = tuple(
            Slot(
                (first.outs[k], variant),
                self.reads.read(first.ins[k], variant),
                self.reads.read(last.ins[k], variant),
                (last.outs[k], variant) if (last.outs[k], variant) in results else None,
            )
            for k, variant in sorted(asked)
        )
        xs = tuple(
            Slice((first.outs[k], variant), self.reads.read(first.ins[k], variant))
            for k, variant in sorted(sliced)
        )
        self.want(*(s.first for s in carry), *(x.outside for x in xs))
        ops = tuple(i for i in self.program.ops if begin < i < end)
        made = {k for s in steps for k in s.makes(self.program)}
        recorded = tuple(i for i in ops if input_key(i) in made)
        return Repeated(first.loop, tuple(steps), carry, xs, ys, ops, recorded, first.scope)

    def _turn(self, begin: int, end: int, asked: set) -> tuple[list[Step], set, set]:
        """The steps of one turn of a loop, and the slots, with variants, that it carries and that
        it reads as slices.

        The turn before must make each variant of a slot that a turn reads; this repeats until
        nothing new is asked for.
        """
        first, last = self.program.equations[begin], self.program.equations[end]
        slots = {v: k for k, v in enumerate(first.outs)}
        while True:
            self.want(*(self.reads.read(last.ins[k], variant) for k, variant in asked))
            steps = self.block(begin + 1, end)
            inside = {(slots[v], variant) for v, variant in self.wanted.get(begin, ())}
            carried = {(k, variant) for k, variant in inside if k < first.loop.num_carry}
            if carried <= asked:
                return steps, asked, inside - carried
            asked = asked | carried

    # regions that are recomputed ------------------------------------------------------------------

    def nest(self, steps: Iterable[Step], depth: int, uses: Counter[Key]) -> list[Step]:
        """Steps, with the steps of each recomputed region put together; ``uses`` counts the reads
        of each key in all of them and behind them.
        """
        found: list[Step] = []
        group: list[Step] = []

        def close() -> None:
            if group:
                found.append(self.recomputed(list(group), depth, uses))
                group.clear()

        for step in steps:
            region = step.scope[depth] if len(step.scope) > depth else None
            if group and group[0].scope[depth] is not region:
                close()
            if isinstance(region, Remat):
                group.append(step)
            elif isinstance(step, Repeated):
                inner = Counter(k for s in step.steps for k in s.needs(self.program))
                inner.update(r.key for r in step.read_inside)
                inner.update(map(input_key, step.recorded))
                body = tuple(self.nest(step.steps, depth + 1, inner))
                found.append(dataclasses.replace(step, steps=body))
            else:
                found.append(step)
        close()
        return found

    def recomputed(self, steps: list[Step], depth: int, uses: Counter[Key]) -> Recomputed:
        """One region, as a function from its outside reads to the values that are read outside."""
        needs = Counter(k for s in steps for k in s.needs(self.program))
        makes = [k for s in steps for k in s.makes(self.program)]
        kind, _ = input_key(0)
        results = tuple(k for k in makes if uses[k] > needs[k] or k[0] == kind)
        reads = tuple(k for k in needs if k not in set(makes))
        inner = Counter(needs)
        inner.update(results)
        nested = tuple(self.nest(steps, depth + 1, inner))
        return Recomputed(steps[0].scope[depth], nested, reads, results, steps[0].scope[:depth])
