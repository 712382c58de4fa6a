"""Which axes of the carry are the batch: axes that run together are joined, from the batch of the
ops on.

The length of axis 0 does not tell: a threshold that all samples share may be as wide as the batch.
So two axes are joined where an equation lines them up, and a state has lanes where its axis 0 is
joined with a batched op's. An unknown primitive joins nothing: its results have no known lanes,
which a reset reports.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from ... import _jax
from .. import primitives
from ..equations import BEGIN
from ..primitives import Names, paired_axes
from ..program import dataflow as flow
from ..program.program import Program

Axis = tuple  # (key of a value, number of the axis)
Pair = tuple[Axis, Axis]
LANES: Axis = ('lanes', 0)


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


def carried_lanes(
    program: Program, groups: Sequence, ops: Sequence, relations: Sequence, lanes: int | None
) -> frozenset[int]:
    """Positions in the carry of the leaves whose axis 0 is the batch, ``lanes`` samples wide."""
    if lanes is None:
        return frozenset()
    sets = Sets()
    moving = flow.forward(program, dict.fromkeys((*program.carry, *program.inputs), 1))

    def value(v: int) -> Value:
        return v if moving[v] else None, program.avals[v].shape

    # begin at axis 0 of x and y of every batched op
    for op in ops:
        if op.primitive.batched and op.x is not None:
            sets.join(((v, 0), LANES) for v in (op.x, op.y) if moving[v])
    # a trace whose entries have lanes says the same of its group
    for rel in relations:
        for group, coords in zip(rel.groups, rel.coordinates, strict=True):
            if rel.op.primitive.batched and coords.has_lanes(lanes):
                sets.join([((program.carry[group.states[0]], 0), LANES)])
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
    home = sets.find(LANES)

    # axis 0 alone must be the batch, and have its length
    def laned(v: int) -> bool:
        key, shape = value(v)
        first, *others = [sets.find((key, k)) == home for k in range(len(shape))] or [False]
        return first and not any(others) and shape[0] == lanes

    return frozenset(c for c, v in enumerate(program.carry) if laned(v))


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
