"""Which axes of the carry are the batch: axes that run together are joined, from the batch of the
ops on, and of states that are known to have it first.

The length of axis 0 does not tell: a threshold that all samples share may be as wide as the batch.
So two axes are joined where an equation lines them up, and a state has lanes along the one axis
that is joined with a batched op's. An unknown primitive joins nothing: its results have no known
lanes, which a reset reports.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from ... import _jax
from ...errors import OptionError
from .. import primitives
from ..equations import BEGIN
from ..primitives import Names, paired_axes
from ..program import dataflow as flow
from ..program.leaves import describe_aval
from ..program.program import Program

Axis = tuple  # (key of a value, number of the axis)
Pair = tuple[Axis, Axis]


class Sets:
    """Disjoint sets; ``leader`` leads from a member towards the member that names its set."""

    def __init__(self) -> None:
        self.leader: dict = {}

    def find(self, member):
        while (up := self.leader.get(member, member)) != member:
            self.leader[member] = self.leader.get(up, up)
            member = up
        return member

    def join(self, pairs: Iterable[tuple]) -> None:
        for a, b in pairs:
            self.leader[self.find(a)] = self.find(b)


# A value of the program, or of a body inside an equation: a key that names its axes, and its shape.
# The key of a constant is None: one mask may be used along the batch and elsewhere.
Value = tuple[object, tuple[int, ...]]
Values = list[Value]


def find_batch(
    program: Program, groups: Sequence, ops: Sequence, relations: Sequence, named: Collection[int]
) -> tuple[int | None, dict[int, int]]:
    """The batch size, and position in the carry -> axis of the batch, where it is known; ``named``:
    positions of leaves whose axis 0 is the batch, which say the size.

    Batched ops of one size have one batch. Of ops of several sizes, as where each sample has four
    patches, those count whose axis 0 is one of a state's, if they have one size.
    """
    sets, sizes = Sets(), set()
    moving = flow.forward(program, dict.fromkeys((*program.carry, *program.inputs), 1))

    def value(v: int) -> Value:
        return v if moving[v] else None, program.avals[v].shape

    def begin(v: int, size: int) -> None:
        sizes.add(size)
        sets.join([((v, 0), ('batch', size))])

    # begin at axis 0 of x and y of every batched op
    for op in ops:
        if op.primitive.batched and op.x is not None:
            for v in filter(moving.__getitem__, (op.x, op.y)):
                begin(v, op.x_aval.shape[0])
    # a trace whose entries have lanes says the same of its group
    for rel in relations:
        for group, coords in zip(rel.groups, rel.coordinates, strict=True):
            if rel.op.primitive.batched and coords.leads(0):
                begin(program.carry[group.states[0]], group.shape[0])
    # a state keeps its axes from step to step
    sets.join(_pairs(map(value, program.carry), map(value, program.new_carry)))
    # states of a group stand position by position
    for group in groups:
        first, *others = [value(program.carry[c]) for c in group.carried]
        sets.join(_pairs([first] * len(others), others))
    # every equation lines up axes, but for ops: of their rules axis 0 alone is known
    for i, eqn in enumerate(program.equations):
        ins, outs = [value(v) for v in eqn.ins], [value(v) for v in eqn.outs]
        if eqn.loop is not None:
            begins = eqn.primitive is BEGIN
            outer, inner = (ins, outs) if begins else (outs, ins)
            sets.join(_turns(eqn.loop.num_carry, outer, inner))
            back = program.feedback(i) if begins else ()
            sets.join(_pairs(*([value(pair[k]) for pair in back] for k in (0, 1))))
        elif i not in program.op_set:
            sets.join(_joined(eqn, ins, outs))

    def along(size: int) -> dict[int, int]:
        """The states with a batch of this size, in the one axis that is joined with it."""
        home, found = sets.find(('batch', size)), {}
        for c, (key, shape) in enumerate(map(value, program.carry)):
            axes = [k for k in range(len(shape)) if sets.find((key, k)) == home]
            if len(axes) == 1 and shape[axes[0]] == size:
                found[c] = axes[0]
        return found

    known = {size: axes for size in sizes if (axes := along(size))}
    told = {program.avals[program.carry[c]].shape[0] for c in named}
    if told and known and told.isdisjoint(known):
        name, aval = program.carry_names[min(named)], program.avals[program.carry[min(named)]]
        states = [program.carry_names[c] for c in next(iter(known.values()))]
        raise OptionError(
            f'batched names {name!r}, {describe_aval(aval)}, but the batch of the states {states} '
            f'is {next(iter(known))}: its axis 0 is not the batch.'
        )
    one = told or set(known)
    if len(one) != 1:
        return None, {}
    (size,) = one
    if size not in known:  # what no op shows begins at the states that are named
        sets.join(((program.carry[c], 0), ('batch', size)) for c in named)
    # what the user says of a state holds
    return size, along(size) | dict.fromkeys(named, 0)


def _lined_up(ins: Values, outs: Values, names: tuple[Names, Names]) -> Iterator[Pair]:
    """Equally long axes of one name: of an operand and a result, or of two operands, if no result
    has the name.
    """
    # of operands and of results: name -> its axes, each with its length
    found: tuple[dict, dict] = {}, {}
    for axes, values, each in zip(found, (ins, outs), names, strict=True):
        for (key, shape), of in zip(values, each, strict=False):
            for k, name in enumerate(of):
                if key is not None and name is not None:
                    axes.setdefault(name, []).append(((key, k), shape[k]))
    operands, results = found
    met = {name for of in names[1] for name in of}
    for name, axes in operands.items():
        others = results.get(name, ()) if name in met else axes
        yield from ((a, b) for a, n in axes for b, m in others if n == m)


def _pairs(ins: Iterable[Value], outs: Iterable[Value]) -> Iterator[Pair]:
    """Every axis of a value with the axis of its partner in the same place."""
    ins, outs = list(ins), list(outs)
    names = paired_axes({}, [shape for _, shape in ins], [shape for _, shape in outs])
    return _lined_up(ins, outs, names)


def _turns(num_carry: int, outer: Values, inner: Values) -> Iterator[Pair]:
    """A loop from outside and in one of its turns: sequences have the turns in front."""
    yield from _pairs(outer[:num_carry], inner[:num_carry])
    sequences, rows = outer[num_carry:], inner[num_carry:]
    _, names = paired_axes({}, (), [shape for _, shape in rows])
    yield from _lined_up(sequences, rows, ([[None, *of] for of in names], names))


def _joined(eqn, ins: Values, outs: Values) -> Iterator[Pair]:
    names = primitives.TABLE[eqn.primitive.name].axes
    if names is None:
        return _inside(eqn, ins, outs)
    shapes = ([shape for _, shape in values] for values in (ins, outs))
    return _lined_up(ins, outs, names(eqn.params, *shapes))


def _inside(eqn, ins: Values, outs: Values) -> Iterator[Pair]:
    """Through the jaxprs of an equation, as far as it is known what they read and return."""
    call = eqn.params.get('call_jaxpr', _jax.inlinable(eqn))
    branches, scan, loop = _jax.cond_branches(eqn), _jax.scan_parts(eqn), _jax.while_parts(eqn)
    if call is not None:
        yield from _through(_jax.closed_jaxpr(call)[0], ins, outs)
    elif branches is not None:
        # operand 0 chooses the branch
        for body, _ in branches:
            yield from _through(body, ins[1:], outs)
    elif loop is not None:
        # the carry comes in as an operand and goes round as a result
        _, consts, carry = loop.split(ins)
        yield from _pairs(carry, outs)
        yield from _through(loop.body, [*consts, *outs], outs)
    elif scan is not None:
        consts, init, xs = scan.split(ins)
        carry = outs[: scan.num_carry]
        yield from _pairs(init, carry)
        # a turn reads and makes rows of the sequences, without their first axis
        sequences = [*xs, *outs[scan.num_carry :]]
        turn = [_inner(key, shape[1:]) for key, shape in sequences]
        yield from _turns(0, sequences, turn)
        n = len(xs)
        yield from _through(scan.body, [*consts, *carry, *turn[:n]], [*carry, *turn[n:]])


def _inner(key: object, shape: tuple[int, ...]) -> Value:
    """A value of a body, with a key of its own unless it is a constant."""
    return None if key is None else object(), shape


def _through(jaxpr, ins: Values, outs: Values) -> Iterator[Pair]:
    """Values of a body that depend on no operand are constants."""
    found: list[Pair] = []

    def step(eqn, operands: Values) -> Values:
        moving = next((key for key, _ in operands if key is not None), None)
        results = [_inner(moving, v.aval.shape) for v in eqn.outvars]
        found.extend(_joined(eqn, operands, results))
        return results

    own = [_inner(key, v.aval.shape) for v, (key, _) in zip(jaxpr.invars, ins, strict=True)]
    consts = [_inner(None, v.aval.shape) for v in jaxpr.constvars]
    results = _jax.walk(jaxpr, consts, own, step, lambda atom: _inner(None, atom.aval.shape))
    return itertools.chain(_pairs(own, ins), found, _pairs(results, outs))
