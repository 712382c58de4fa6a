"""A step as two passes: what is evaluated in which order, and the plan that says it.

A plan: which equations a pass evaluates, in which variants, and what it holds constant.

A *variant* of a value is a pair ``(stopped, silent)``.

- ``stopped``: old states of these groups are held constant on the way to it.
- ``silent``: computed without probes on new states. It is used for operands of a new state's own
  equation: D_f already counts that path, a probe would count it twice.

Every cut equation reads its inputs in a variant of their own. A loop carries each variant that is
asked for as a value of its own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

import jax

from .. import _jax
from .._compiler import ETraceGraph, Groups, Loop, Program, Remat, forward, old_ancestors

Variant = tuple[Groups, bool]
EMPTY: Variant = 0, False
PROBE, X = 'probe', 'x'
Key = tuple[Any, Any]  # (value, variant); (PROBE, op) of the probe on an op's y, (X, op) of its x


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


# the two passes -----------------------------------------------------------------------------------


def make_plan(graph: ETraceGraph, probes: bool, whole: bool = False) -> Plan:
    """The two-sided pass; ``whole``: nothing is cut."""
    reads, program = TwoSided(graph, probes, whole), graph.program
    return Plan(
        program,
        reads.read,
        reads.operands,
        [reads.result(v, None) for v in program.outputs],
        [reads.result(v, c) for c, v in enumerate(program.new_carry)],
        recorded={op.equation for op in graph.ops if op.owned and op.x is not None},
        effects=True,
    )


def make_d_plan(graph: ETraceGraph, cut: bool = True) -> Plan:
    """The D pass, in which every cut equation reads constants; or the same pass in which nothing is
    cut. Only what is behind new hidden states is evaluated.
    """
    program = graph.program
    cuts = {*program.ops, *graph.mixing} if cut else set()

    def read(value: int, variant: Variant) -> Read:
        return Read(value)

    def operands(i: int, variant: Variant) -> list[Read]:
        return [Read(v, stop=i in cuts) for v in program.equations[i].ins]

    return Plan(program, read, operands, [], [Read(program.new_carry[c]) for c in graph.states])


class TwoSided:
    """Every cut equation reads constant the old states of the groups that it is recurrent for."""

    def __init__(self, graph: ETraceGraph, probes: bool, whole: bool):
        self.probes, self.whole = probes, whole
        self.recurrent = dict.fromkeys(graph.recurrent, 0) if whole else graph.recurrent
        self.program = program = graph.program
        self.cuts, self.states = {*program.ops, *graph.mixing}, graph.states
        self.group_of = {c: g for g, group in enumerate(graph.hidden_groups) for c in group.carried}
        self.old = {program.carry[c]: self.group_of[c] for c in program.hidden}  # value -> group
        # value -> slot of the carry; the first, if it is in several. An old state may move on to be
        # the new value of another one.
        self.new: dict[int, int] = {}
        self.moved: dict[int, int] = {}
        for c in graph.states:
            value = program.new_carry[c]
            if value in program.producer:
                self.new.setdefault(value, c)
            elif value in self.old and value != program.carry[c]:
                self.moved.setdefault(value, c)
        # variants of a value differ by the old states behind it, and the new ones before a cut
        self.old_behind = old_ancestors(program, self.group_of, self.recurrent)
        readers = {
            o: 1
            for v in ((*self.new, *self.moved) if probes else ())
            for i in program.consumers.get(v, ())
            if i not in self.cuts
            for o in program.results(i, v)
        }
        self.new_behind = forward(program, readers, lambda i, found: 0 if i in self.cuts else found)

    def read(self, value: int, variant: Variant) -> Read:
        """How a consumer that runs in ``variant`` reads ``value``."""
        stopped, silent = variant
        reads_new = bool(self.new_behind[value])
        if value in self.new:
            # a new state is one value for all readers; its own equation reads others silently
            probe = self.new[value] if self.probes and not silent else None
            return Read(value, (0, reads_new), probe=probe)
        if value in self.old:
            stop = bool(stopped >> self.old[value] & 1)
            live = self.probes and not silent and not stop
            return Read(value, EMPTY, stop, self.moved.get(value) if live else None)
        if value not in self.program.producer:
            return Read(value)
        # variants of a value differ only by the states behind it
        return Read(value, (stopped & self.old_behind[value], silent and reads_new))

    def operands(self, i: int, variant: Variant) -> list[Read]:
        """How equation ``i`` reads its operands to make its results in ``variant``."""
        eqn, constant = self.program.equations[i], False
        if self.whole and eqn.extra:
            constant = True
        elif i in self.cuts:
            variant = variant[0] | self.recurrent[i], False
        reads = [self.read(v, variant) for v in eqn.ins]
        return [r._replace(stop=True) for r in reads] if constant else reads

    def result(self, value: int, slot: int | None) -> Read:
        """How a result is read; a new state that no equation makes carries its probe there."""
        read = self.read(value, EMPTY)
        if self.probes and slot in self.states and read.probe is None:
            return read._replace(probe=slot)
        return read


# a plan, and one run of it ------------------------------------------------------------------------


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

    def inside(self, steps: Sequence[Planned], keys: Iterable[Key], values) -> Evaluation:
        """The same run with some values replaced, after the steps of a region that is a function
        of them.
        """
        env = {**self.env, **dict(zip(keys, values, strict=True))}
        inner = Evaluation(self.program, env, self.on_op, self.probes)
        for step in steps:
            step.run(inner)
        return inner


class Planned(NamedTuple):
    """A step of a plan: ``run(at)`` makes the values of the keys ``makes`` of those that it
    ``needs``. ``scope``: the regions around it.
    """

    run: Callable[[Evaluation], None]
    needs: list[Key]
    makes: list[Key]
    scope: tuple


class Plan:
    """The steps of a pass in order, found from its results backwards: which variants of which
    equations are needed.

    ``read(value, variant)``: how a consumer that runs in a variant reads a value.
    ``operands(i, variant)``: how equation ``i`` reads its operands to make its results in a
    variant. ``recorded``: the ops whose x is kept. ``effects``: equations with an effect are
    evaluated even if nothing wants their results.
    """

    def __init__(
        self,
        program: Program,
        read: Callable[[int, Variant], Read],
        operands: Callable[[int, Variant], list[Read]],
        outputs: list[Read],
        new_carry: list[Read],
        recorded: Set[int] = frozenset(),
        effects: bool = False,
    ):
        self.program, self.read, self.operands = program, read, operands
        self.outputs, self.new_carry = outputs, new_carry
        self.recorded, self.effects = recorded, effects
        self.wanted: dict[int, set[tuple[int, Variant]]] = {}  # equation -> results in variants
        self.want(*outputs, *new_carry)
        steps = self.block(0, len(program.equations))
        self.steps = self.nest(steps, 0, [r.key for r in (*outputs, *new_carry)])

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
        xs = {k[1]: x for k, x in at.env.items() if k[0] == X}
        return [at.read(r) for r in self.outputs], [at.read(r) for r in self.new_carry], xs

    def want(self, *reads: Read) -> None:
        """Ask the equations that make these values for them."""
        for r in reads:
            if r.value in self.program.producer:
                equation = self.program.producer[r.value]
                self.wanted.setdefault(equation, set()).add((r.value, r.variant))

    def keys(self, reads: Iterable[Read]) -> list[Key]:
        """Keys of the reads, without constants of the program."""
        return [r.key for r in reads if r.value not in self.program.constants]

    def block(self, start: int, stop: int) -> list[Planned]:
        """The steps of some equations, asked for from the last to the first."""
        steps: list[Planned] = []
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
            if self.effects and eqn.effects:
                variants.add(EMPTY)
            steps += [self.one(i, variant) for variant in sorted(variants)]
            i -= 1
        return steps[::-1]

    def one(self, i: int, variant: Variant) -> Planned:
        """One equation in one variant; of an op also its probe is read, and its x may be kept."""
        eqn, reads = self.program.equations[i], self.operands(i, variant)
        self.want(*reads)
        is_op, kept = i in self.program.op_set, [(X, i)] if i in self.recorded else []
        needs, results = self.keys(reads), [(v, variant) for v in eqn.outs]

        def run(at: Evaluation) -> None:
            args = list(map(at.read, reads))
            if is_op:
                outs = at.on_op(i, args, at.env.get((PROBE, i)))
            else:
                outs = _jax.bind(eqn, *args)
            at.env.update(zip(results, outs, strict=True))
            for key in kept:
                at.env[key] = args[eqn.primitive.x_invar_index]

        return Planned(run, needs + [(PROBE, i)] * is_op, results + kept, eqn.scope)

    # loops ----------------------------------------------------------------------------------------

    def repeated(self, loop: Loop, begin: int, end: int) -> Planned | None:
        """The loop between two markers; None where nothing of it is wanted."""
        first, last = self.program.equations[begin], self.program.equations[end]
        place = {v: k for k, v in enumerate(last.outs)}
        slots = {v: k for k, v in enumerate(first.outs)}
        # slots in variants that are wanted behind the loop: of its carry, and sequences it makes
        wanted = sorted((place[v], variant) for v, variant in self.wanted.get(end, ()))
        carried = {(k, variant) for k, variant in wanted if k < loop.num_carry}
        stacked = [(k, variant) for k, variant in wanted if k >= loop.num_carry]

        def reads(values: Sequence[int], chosen: Iterable) -> list[Read]:
            found = [self.read(values[k], variant) for k, variant in chosen]
            self.want(*found)
            return found

        ys = reads(last.ins, stacked)
        # the turn before must make each variant of a slot that a turn reads: until nothing new is
        # asked for
        while True:
            reads(last.ins, carried)
            steps = self.block(begin + 1, end)
            inside = {(slots[v], variant) for v, variant in self.wanted.get(begin, ())}
            asked = {(k, variant) for k, variant in inside if k < loop.num_carry}
            if asked <= carried:
                break
            carried |= asked
        if not steps and not wanted:
            return None
        carry, sequences = sorted(carried), sorted(inside - asked)
        inits, rows = reads(first.ins, carry), reads(first.ins, sequences)
        turns = reads(last.ins, carry)
        # probes and recorded inputs of ops inside have the turns as their first axis
        ops = [i for i in self.program.ops if begin < i < end]
        recorded = {k for step in steps for k in step.makes if k[0] == X}
        kept = [(X, i) for i in ops if (X, i) in recorded]
        results = self.keys([*ys, *turns])
        steps = self.nest(steps, len(first.scope) + 1, [*results, *kept])
        given = [(first.outs[k], variant) for k, variant in (*carry, *sequences)]
        outside = [(last.outs[k], variant) for k, variant in (*carry, *stacked)] + kept

        def run(at: Evaluation) -> None:
            probed = [(PROBE, i) for i in ops if (PROBE, i) in at.env]

            def body(carry, row):
                inner = at.inside(steps, [*given, *probed], [*carry, *row])
                made = [*map(inner.read, ys), *(inner.env[k] for k in kept)]
                return list(map(inner.read, turns)), made

            init, xs = list(map(at.read, inits)), list(map(at.read, rows))
            xs += [at.env[k] for k in probed]
            ends, made = jax.lax.scan(body, init, xs, loop.length, loop.reverse, loop.unroll)
            at.env.update(zip(outside, (*ends, *made), strict=True))

        known = {*given, *(k for step in steps for k in step.makes)}
        of_body = [k for step in steps for k in step.needs] + results
        needs = self.keys([*inits, *rows]) + [k for k in of_body if k not in known]
        return Planned(run, needs, outside, first.scope)

    # regions that are recomputed ------------------------------------------------------------------

    def nest(self, steps: list[Planned], depth: int, read_behind: Iterable[Key]) -> list[Planned]:
        """Steps, with the steps of each recomputed region of a depth put together; ``read_behind``:
        the keys that are read behind all of them.
        """
        uses = Counter(k for step in steps for k in step.needs)
        uses.update(read_behind)
        found: list[Planned] = []
        for scope, group in itertools.groupby(steps, lambda step: step.scope[depth : depth + 1]):
            if scope and isinstance(scope[0], Remat):
                found.append(self.recomputed(scope[0], list(group), depth, uses))
            else:
                found += group
        return found

    def recomputed(
        self, region: Remat, steps: list[Planned], depth: int, uses: Counter[Key]
    ) -> Planned:
        """One region, as a function from its outside reads to the values that are read outside;
        ``uses`` counts the reads of each key inside and outside.
        """
        needs = Counter(k for s in steps for k in s.needs)
        makes = [k for s in steps for k in s.makes]
        results = [k for k in makes if uses[k] > needs[k] or k[0] == X]
        inside = set(makes)
        reads = [k for k in needs if k not in inside]
        nested = self.nest(steps, depth + 1, results)

        def run(at: Evaluation) -> None:
            given = [k for k in reads if k in at.env]

            def body(values):
                inner = at.inside(nested, given, values)
                return [inner.env[k] for k in results]

            again = jax.checkpoint(body, policy=region.policy, prevent_cse=region.prevent_cse)
            at.env.update(zip(results, again([at.env[k] for k in given]), strict=True))

        return Planned(run, reads, results, steps[0].scope[:depth])
