"""A step as two passes: what is evaluated in which order, and the plan that says it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from .. import _jax
from .._compiler import ETraceGraph, Groups, Loop, Program, Remat, forward, old_ancestors

# running a plan -----------------------------------------------------------------------------------
#
# A plan: which equations a pass evaluates, in which variants, and what it holds constant.
#
# A *variant* of a value is ``(stopped, silent)``.
#
# - ``stopped``: old states of these groups are held constant on the way to it.
# - ``silent``: computed without probes on new states. It is used for operands of a new state's own
#   equation: D_f already counts that path, a probe would count it twice.
#
# Every cut equation reads its inputs in a variant of their own. A loop carries each variant that is
# asked for as a value of its own.


class Variant(NamedTuple):
    """How a value is computed (see the head of this file)."""

    stopped: Groups = 0
    silent: bool = False


EMPTY = Variant()
Key = tuple[Any, Any]  # (value, variant), or one of the two below


def probe_key(op: int) -> Key:
    """The key of the probe on an op's y; ops by equation number."""
    return 'y', op


def input_key(op: int) -> Key:
    """The key of an op's x."""
    return 'x', op


class Read(NamedTuple):
    """How one input is read: a value in a variant, perhaps with its gradient stopped, perhaps with
    a new state's probe added.
    """

    value: int
    variant: Variant = EMPTY
    stop: bool = False
    probe: int | None = None

    @property
    def key(self) -> Key:
        return self.value, self.variant


class Evaluation:
    """One run of a plan: values by key, the evaluation of ops, and the probes on new states."""

    def __init__(
        self, program: Program, env: dict[Key, Any], on_op: Callable, probes: dict[int, Any]
    ):
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
        env = {**self.env, **dict(zip(keys, values, strict=True))}
        return Evaluation(self.program, env, self.on_op, self.probes)


@dataclass(frozen=True)
class One:
    """One equation in one variant; ``records``: whether its op's x is kept."""

    number: int
    variant: Variant
    reads: tuple[Read, ...]
    records: bool
    scope: tuple

    def run(self, at: Evaluation) -> None:
        args, eqn = [at.read(r) for r in self.reads], at.program.equations[self.number]
        if self.number not in at.program.op_set:
            outs = _jax.bind(eqn, *args)
        else:
            outs = at.on_op(self.number, args, at.env.get(probe_key(self.number)))
            if self.records:
                at.env[input_key(self.number)] = args[eqn.primitive.x_invar_index]
        at.env.update(((v, self.variant), x) for v, x in zip(eqn.outs, outs, strict=True))

    def needs(self, program: Program) -> Iterator[Key]:
        yield from _keys(self.reads, program)
        if self.number in program.op_set:
            yield probe_key(self.number)

    def makes(self, program: Program) -> Iterator[Key]:
        yield from ((v, self.variant) for v in program.equations[self.number].outs)
        if self.records:
            yield input_key(self.number)


@dataclass(frozen=True)
class Recomputed:
    """Steps of a region that is recomputed in the backward pass."""

    region: Remat
    steps: tuple[Step, ...]
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

        again = jax.checkpoint(body, policy=self.region.policy, prevent_cse=self.region.prevent_cse)
        at.env.update(zip(self.results, again([at.env[k] for k in reads]), strict=True))

    def needs(self, program: Program) -> Iterator[Key]:
        yield from self.reads

    def makes(self, program: Program) -> Iterator[Key]:
        yield from self.results


class Slot(NamedTuple):
    """One value that a loop carries: its key ``inside``, how it is read ``first`` and at each
    ``turn``, and the key of its ``last`` value (None: nobody reads it).
    """

    inside: Key
    first: Read
    turn: Read
    last: Key | None


class Slice(NamedTuple):
    """A sequence that a loop reads: its key inside, and how it is read outside."""

    inside: Key
    outside: Read


class Stack(NamedTuple):
    """A sequence that a loop makes: how it is read inside, and its key outside."""

    inside: Read
    outside: Key


@dataclass(frozen=True)
class Repeated:
    """A loop. ``ops`` are the ops inside, and ``recorded`` those whose x is kept."""

    loop: Loop
    steps: tuple[Step, ...]
    carry: tuple[Slot, ...]
    xs: tuple[Slice, ...]
    ys: tuple[Stack, ...]
    ops: tuple[int, ...]
    recorded: tuple[int, ...]
    scope: tuple

    def run(self, at: Evaluation) -> None:
        # probes and recorded inputs of ops inside have the turns as their first axis
        probed = [probe_key(i) for i in self.ops if probe_key(i) in at.env]
        kept = [input_key(i) for i in self.recorded]
        keys = [*(s.inside for s in self.carry), *(x.inside for x in self.xs), *probed]

        def body(carry, row):
            inner = at.inside(keys, [*carry, *row])
            for step in self.steps:
                step.run(inner)
            made = [*(inner.read(y.inside) for y in self.ys), *(inner.env[k] for k in kept)]
            return [inner.read(s.turn) for s in self.carry], made

        init = [at.read(s.first) for s in self.carry]
        rows = [*(at.read(x.outside) for x in self.xs), *(at.env[k] for k in probed)]
        loop = self.loop
        last, made = jax.lax.scan(body, init, rows, loop.length, loop.reverse, loop.unroll)
        for slot, x in zip(self.carry, last, strict=True):
            if slot.last is not None:
                at.env[slot.last] = x
        at.env.update(zip([*(y.outside for y in self.ys), *kept], made, strict=True))

    def needs(self, program: Program) -> Iterator[Key]:
        made = {k for step in self.steps for k in step.makes(program)}
        inside = made.union((s.inside for s in self.carry), (x.inside for x in self.xs))
        yield from _keys([s.first for s in self.carry], program)
        yield from _keys([x.outside for x in self.xs], program)
        of_body = [*_keys(self.read_inside, program)]
        of_body += [k for step in self.steps for k in step.needs(program)]
        yield from (k for k in of_body if k not in inside)

    @property
    def read_inside(self) -> list[Read]:
        """The reads of a turn's results."""
        return [*(s.turn for s in self.carry), *(y.inside for y in self.ys)]

    def makes(self, program: Program) -> Iterator[Key]:
        yield from (s.last for s in self.carry if s.last is not None)
        yield from (y.outside for y in self.ys)
        yield from map(input_key, self.recorded)


Step = One | Recomputed | Repeated


def _keys(reads: Iterable[Read], program: Program) -> Iterator[Key]:
    """Keys of the reads, without constants of the program."""
    yield from (r.key for r in reads if r.value not in program.constants)


@dataclass(frozen=True)
class Plan:
    """Steps in order, then the reads of the results."""

    steps: tuple[Step, ...]
    outputs: tuple[Read, ...]
    new_carry: tuple[Read, ...]

    def run(
        self, program: Program, env: dict, on_op: Callable, probes: dict
    ) -> tuple[list, list, dict[int, Any]]:
        """``(outputs, new carry, x of recorded ops)``; ``env`` maps keys to arrays and is filled on
        the way.

        ``on_op(i, args, probe)`` evaluates the op at equation ``i``; ``probes[s]`` is added to
        reads of new hidden state ``s``.
        """
        at = Evaluation(program, env, on_op, probes)
        for step in self.steps:
            step.run(at)
        kind, _ = input_key(0)
        xs = {k[1]: x for k, x in at.env.items() if k[0] == kind}
        return [at.read(r) for r in self.outputs], [at.read(r) for r in self.new_carry], xs


# making a plan ------------------------------------------------------------------------------------
#
# From an :class:`ETraceGraph` to the plans of its two passes.


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
                loop = self.repeated(eqn.loop, begin, i)
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

    def repeated(self, loop: Loop, begin: int, end: int) -> Repeated | None:
        """The loop between two markers; None where nothing of it is wanted."""
        first, last = self.program.equations[begin], self.program.equations[end]
        number = loop.num_carry
        results = sorted(self.wanted.get(end, ()))
        place = {v: k for k, v in enumerate(last.outs)}
        asked = {(place[v], variant) for v, variant in results if place[v] < number}
        ys = tuple(
            Stack(self.reads.read(last.ins[place[v]], variant), (v, variant))
            for v, variant in results
            if place[v] >= number
        )
        self.want(*(y.inside for y in ys))
        steps, asked, sliced = self._turn(number, begin, end, asked)
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
        return Repeated(loop, tuple(steps), carry, xs, ys, ops, recorded, first.scope)

    def _turn(self, number: int, begin: int, end: int, asked: set) -> tuple[list[Step], set, set]:
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
            carried = {(k, variant) for k, variant in inside if k < number}
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
