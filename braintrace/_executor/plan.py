"""Which equations to evaluate, how often, and with what held constant.

A *variant* of a value is ``(stopped, silent)``: old states of the groups in ``stopped`` are held constant on the way to it;
``silent``: it is read position by position by a new hidden state, so new states are read without their probe (that path is inside
the reader's D_f already). Every cut equation reads its inputs in a variant of its own. A loop carries each variant that is asked
for as a value of its own.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from .._compiler import ETraceGraph, Groups, Loop, Program, Remat, flow, old_ancestors

__all__ = ['Plan', 'Read', 'make_d_plan', 'make_plan']

Variant = tuple[Groups, bool]
Key = tuple[Any, Any]       # (value, variant), ('y', op): the probe on its y, ('x', op): its input
EMPTY: Variant = (0, False)


class Read(NamedTuple):
    """How one input is read: a value in a variant, perhaps with its gradient stopped or a new state's probe added."""
    value: int
    variant: Variant = EMPTY
    stop: bool = False
    probe: int | None = None

    @property
    def key(self) -> Key:
        return self.value, self.variant


class Evaluation:
    """One run of a plan: values by key, how ops are evaluated, and which new states carry a probe."""

    def __init__(self, program: Program, env: dict[Key, Any], on_op: Callable, probes: dict[int, Any]):
        self.program, self.env, self.on_op, self.probes = program, env, on_op, probes

    def read(self, r: Read):
        if r.value in self.program.constants:
            return self.program.constants[r.value]
        x = self.env[r.key]
        if r.stop:
            x = jax.lax.stop_gradient(x)
        return x if r.probe is None else x + self.probes[r.probe]

    def inside(self, keys: Iterable[Key], values) -> Evaluation:
        """The same run with some values replaced, for a region that is a function of them."""
        return Evaluation(self.program, {**self.env, **dict(zip(keys, values, strict=True))}, self.on_op, self.probes)


@dataclass(frozen=True)
class One:
    """One equation in one variant."""
    number: int
    variant: Variant
    reads: tuple[Read, ...]
    records: bool
    scope: tuple

    def run(self, at: Evaluation) -> None:
        args, eqn = [at.read(r) for r in self.reads], at.program.equations[self.number]
        if self.number not in at.program.op_set:
            outs = eqn.evaluate(args)
        else:
            outs = at.on_op(self.number, args, at.env.get(('y', self.number)))
            if self.records:
                at.env['x', self.number] = args[eqn.primitive.x_invar_index]
        at.env.update(((v, self.variant), x) for v, x in zip(eqn.outs, outs, strict=True))

    def needs(self, program: Program) -> Iterator[Key]:
        yield from (r.key for r in self.reads if r.value not in program.constants)
        if self.number in program.op_set:
            yield 'y', self.number

    def makes(self, program: Program) -> Iterator[Key]:
        yield from ((v, self.variant) for v in program.equations[self.number].outs)
        if self.records:
            yield 'x', self.number


@dataclass(frozen=True)
class Recomputed:
    """Steps of a region that is recomputed in the backward pass."""
    region: Remat
    steps: tuple
    reads: tuple[Key, ...]
    results: tuple[Key, ...]
    scope: tuple

    def run(self, at: Evaluation) -> None:
        reads = [k for k in self.reads if k in at.env]

        def body(values):
            inner = at.inside(reads, values)
            for step in self.steps:
                step.run(inner)
            return [inner.env[k] for k in self.results]

        outs = jax.checkpoint(body, policy=self.region.policy, prevent_cse=self.region.prevent_cse)([at.env[k] for k in reads])
        at.env.update(zip(self.results, outs, strict=True))

    def needs(self, program: Program) -> Iterator[Key]:
        yield from self.reads

    def makes(self, program: Program) -> Iterator[Key]:
        yield from self.results


@dataclass(frozen=True)
class Repeated:
    """A loop: ``carry`` holds (key inside, initial read, read at the turn, key of the last value), ``xs`` (key inside, read outside),
    ``ys`` (read inside, key outside); ``ops`` are those inside, and ``recorded`` those of which x is kept."""
    loop: Loop
    steps: tuple
    carry: tuple[tuple[Key, Read, Read, Key | None], ...]
    xs: tuple[tuple[Key, Read], ...]
    ys: tuple[tuple[Read, Key], ...]
    ops: tuple[int, ...]
    recorded: tuple[int, ...]
    scope: tuple

    def run(self, at: Evaluation) -> None:
        probed = [('y', i) for i in self.ops if ('y', i) in at.env]
        kept = [('x', i) for i in self.recorded]

        def body(carry, row):
            keys = [k for k, *_ in self.carry] + [k for k, _ in self.xs] + probed
            inner = at.inside(keys, [*carry, *row])
            for step in self.steps:
                step.run(inner)
            return [inner.read(turn) for _, _, turn, _ in self.carry], [inner.read(r) for r, _ in self.ys] + [inner.env[k] for k in kept]

        init = [at.read(r) for _, r, _, _ in self.carry]
        rows = [at.read(r) for _, r in self.xs] + [at.env[k] for k in probed]
        last, stacked = jax.lax.scan(body, init, rows, self.loop.length, self.loop.reverse, self.loop.unroll)
        at.env.update((out, x) for (_, _, _, out), x in zip(self.carry, last, strict=True) if out is not None)
        at.env.update(zip([*(k for _, k in self.ys), *kept], stacked, strict=True))

    def needs(self, program: Program) -> Iterator[Key]:
        inside = {k for k, *_ in self.carry} | {k for k, _ in self.xs} | {k for s in self.steps for k in s.makes(program)}
        outer = [r for _, r, _, _ in self.carry] + [r for _, r in self.xs]
        inner = [r for _, _, r, _ in self.carry] + [r for r, _ in self.ys]
        yield from (r.key for r in outer if r.value not in program.constants)
        yield from (r.key for r in inner if r.value not in program.constants and r.key not in inside)
        yield from (k for s in self.steps for k in s.needs(program) if k not in inside)

    def makes(self, program: Program) -> Iterator[Key]:
        yield from (out for *_, out in self.carry if out is not None)
        yield from (k for _, k in self.ys)
        yield from (('x', i) for i in self.recorded)


Step = One | Recomputed | Repeated


@dataclass(frozen=True)
class Plan:
    """Steps in order, then the reads of the results."""
    steps: tuple[Step, ...]
    outputs: tuple[Read, ...]
    new_carry: tuple[Read, ...]

    def run(self, program: Program, env: dict, on_op: Callable, probes: dict) -> tuple[list, list, dict[int, Any]]:
        """``(outputs, new carry, x of recorded ops)``; ``env`` maps keys to arrays and is filled on the way.

        ``on_op(i, args, probe)`` evaluates the op at equation ``i``; ``probes[s]`` is added to reads of new hidden state ``s``.
        """
        at = Evaluation(program, env, on_op, probes)
        for step in self.steps:
            step.run(at)
        xs = {k[1]: x for k, x in at.env.items() if k[0] == 'x'}
        return [at.read(r) for r in self.outputs], [at.read(r) for r in self.new_carry], xs


class _Planner:
    """Works out, from the results backwards, which variants of which equations are needed."""

    def __init__(self, graph: ETraceGraph):
        self.graph, self.program = graph, graph.program
        self.wanted: dict[int, set[tuple[int, Variant]]] = {}
        self.recorded = {op.equation for op in graph.ops if op.owned and op.x is not None}

    def read(self, value: int, variant: Variant) -> Read:
        """How a consumer that runs in ``variant`` reads ``value``."""
        raise NotImplementedError

    def operands(self, i: int, variant: Variant) -> tuple[Read, ...]:
        """How equation ``i`` reads its operands to make its results in ``variant``."""
        raise NotImplementedError

    def runs_anyway(self, i: int) -> bool:
        """Whether an equation is evaluated even if nothing wants it."""
        return False

    def want(self, *reads: Read) -> None:
        for r in reads:
            if r.value in self.program.producer:
                self.wanted.setdefault(self.program.producer[r.value], set()).add((r.value, r.variant))

    def plan(self, outputs: tuple[Read, ...], new_carry: tuple[Read, ...]) -> Plan:
        self.want(*outputs, *new_carry)
        steps = self.block(0, len(self.program.equations))
        uses = Counter(k for s in steps for k in s.needs(self.program))
        uses.update(r.key for r in (*outputs, *new_carry))
        return Plan(tuple(self.nest(steps, 0, uses)), outputs, new_carry)

    def block(self, start: int, stop: int) -> list[Step]:
        steps: list[Step] = []
        i = stop - 1
        while i >= start:
            eqn = self.program.equations[i]
            if eqn.loop is not None:
                begin = self.program.begin_of[i]
                loop = self.repeated(begin, i)
                steps += [loop] if loop is not None else []
                i = begin - 1
                continue
            for variant in sorted({v for _, v in self.wanted.get(i, ())} | ({EMPTY} if self.runs_anyway(i) else set())):
                reads = self.operands(i, variant)
                steps.append(One(i, variant, reads, i in self.recorded, eqn.scope))
                self.want(*reads)
            i -= 1
        return steps[::-1]

    def repeated(self, begin: int, end: int) -> Repeated | None:
        first, last = self.program.equations[begin], self.program.equations[end]
        n, slots = first.loop.num_carry, {v: k for k, v in enumerate(first.outs)}
        results = sorted(self.wanted.get(end, ()))
        place = {v: k for k, v in enumerate(last.outs)}
        asked = {(place[v], variant) for v, variant in results if place[v] < n}
        ys = [(self.read(last.ins[place[v]], variant), (v, variant)) for v, variant in results if place[v] >= n]
        self.want(*(r for r, _ in ys))
        while True:
            self.want(*(self.read(last.ins[k], variant) for k, variant in asked))
            body = self.block(begin + 1, end)
            inside = {(slots[v], variant) for v, variant in self.wanted.get(begin, ())}
            more = asked | {(k, variant) for k, variant in inside if k < n}
            if more == asked:
                break
            asked = more
        if not body and not results:
            return None
        carry = tuple(((first.outs[k], variant), self.read(first.ins[k], variant), self.read(last.ins[k], variant),
                       (last.outs[k], variant) if (last.outs[k], variant) in results else None) for k, variant in sorted(asked))
        xs = tuple(((first.outs[k], variant), self.read(first.ins[k], variant)) for k, variant in sorted(inside) if k >= n)
        self.want(*(r for _, r, _, _ in carry), *(r for _, r in xs))
        ops = tuple(i for i in self.program.ops if begin < i < end)
        made = {k for s in body for k in s.makes(self.program)}
        return Repeated(first.loop, tuple(body), carry, xs, tuple(ys), ops, tuple(i for i in ops if ('x', i) in made), first.scope)

    def nest(self, steps: Iterable[Step], depth: int, uses: Counter) -> list[Step]:
        """Put steps of one recomputed region together."""
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
                inner.update(r.key for r in (*(t for _, _, t, _ in step.carry), *(r for r, _ in step.ys)))
                inner.update(('x', i) for i in step.recorded)
                body = tuple(self.nest(step.steps, depth + 1, inner))
                found.append(Repeated(step.loop, body, step.carry, step.xs, step.ys, step.ops, step.recorded, step.scope))
            else:
                found.append(step)
        close()
        return found

    def recomputed(self, steps: list[Step], depth: int, uses: Counter) -> Recomputed:
        needs = Counter(k for s in steps for k in s.needs(self.program))
        makes = [k for s in steps for k in s.makes(self.program)]
        results = tuple(k for k in makes if uses[k] > needs[k] or k[0] == 'x')
        reads = tuple(k for k in needs if k not in set(makes))
        region = steps[0].scope[depth]
        inner = Counter(needs)
        inner.update(results)
        return Recomputed(region, tuple(self.nest(steps, depth + 1, inner)), reads, results, steps[0].scope[:depth])


class _TwoSided(_Planner):
    """Every cut equation reads constant the old states of the groups that it is recurrent for."""

    def __init__(self, graph: ETraceGraph, probes: bool):
        super().__init__(graph)
        program, self.probes = graph.program, probes
        self.group_of = {c: g for g, group in enumerate(graph.hidden_groups) for c in group.states}
        self.old = {program.carry[c]: self.group_of[c] for c in program.hidden}
        self.new: dict[int, int] = {}
        for c in program.hidden:
            if program.new_carry[c] in program.producer:
                self.new.setdefault(program.new_carry[c], c)
        self.cuts = {*program.ops, *graph.mixing}
        self.anc_old = old_ancestors(program, self.group_of, graph.recurrent)
        self.reads_new = self._readers_of_new_states() if probes else [0] * len(program.avals)

    def _readers_of_new_states(self) -> list[int]:
        """Whether a value reads a new state without passing a cut."""
        direct = (o for v in self.new for i in self.program.consumers.get(v, ()) if i not in self.cuts for o in self.program.results(i, v))
        return flow.forward(self.program, dict.fromkeys(direct, 1), lambda i, found: 0 if i in self.cuts else found)

    def read(self, value: int, variant: Variant) -> Read:
        stopped, silent = variant
        if value in self.new:
            return Read(value, (0, bool(self.reads_new[value])), probe=self.new[value] if self.probes and not silent else None)
        if value in self.old:
            return Read(value, EMPTY, stop=bool(stopped >> self.old[value] & 1))
        if value not in self.program.producer:
            return Read(value)
        return Read(value, (stopped & self.anc_old[value], silent and bool(self.reads_new[value])))

    def operands(self, i: int, variant: Variant) -> tuple[Read, ...]:
        inner = (variant[0] | self.graph.recurrent[i], False) if i in self.cuts else variant
        return tuple(self.read(v, inner) for v in self.program.equations[i].ins)

    def runs_anyway(self, i: int) -> bool:
        return self.program.equations[i].effects

    def result(self, value: int, slot: int | None) -> Read:
        """How a result is read; a new state that no equation makes carries its probe there."""
        read = self.read(value, EMPTY)
        if self.probes and slot in self.group_of and read.probe is None:
            return read._replace(probe=slot)
        return read


class _DPass(_Planner):
    """Every cut equation reads constants; only what leads to new hidden states is evaluated."""

    def __init__(self, graph: ETraceGraph):
        super().__init__(graph)
        self.cuts, self.recorded = {*graph.program.ops, *graph.mixing}, set()

    def read(self, value: int, variant: Variant) -> Read:
        return Read(value)

    def operands(self, i: int, variant: Variant) -> tuple[Read, ...]:
        return tuple(Read(v, stop=i in self.cuts) for v in self.program.equations[i].ins)


def make_plan(graph: ETraceGraph, probes: bool) -> Plan:
    """The two-sided pass."""
    planner, program = _TwoSided(graph, probes), graph.program
    return planner.plan(tuple(planner.result(v, None) for v in program.outputs),
                        tuple(planner.result(v, c) for c, v in enumerate(program.new_carry)))


def make_d_plan(graph: ETraceGraph) -> Plan:
    """The D pass."""
    return _DPass(graph).plan((), tuple(Read(graph.program.new_carry[c]) for c in graph.program.hidden))
