"""A plan: which equations a pass evaluates, in which variants, and what it holds constant.

A *variant* of a value is ``(stopped, silent)``.

- ``stopped``: old states of these groups are held constant on the way to it.
- ``silent``: computed without probes on new states. It is used for operands of a new state's own
  equation: D_f already counts that path, a probe would count it twice.

Every cut equation reads its inputs in a variant of their own. A loop carries each variant that is
asked for as a value of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from .._compiler import Groups, Loop, Program, Remat


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
            outs = eqn.evaluate(args)
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
