"""Which axes of the carry are the batch: axes that run together are joined, from the batch of the
ops on.

The length of axis 0 does not tell: a threshold that all samples share may be as wide as the batch.
So two axes are joined where an equation lines them up, and a state has lanes where its axis 0 is
joined with a batched op's. An unknown primitive joins nothing: its results have no known lanes,
which a reset reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ... import _jax
from .. import primitives
from ..equations import BEGIN, Equation, Loop
from ..program import dataflow as flow
from ..program.program import Program

Axis = tuple  # (key of a value, number of the axis)
Pair = tuple[Axis, Axis]
LANES: Axis = ('lanes', 0)


class _Sets:
    """Disjoint sets of axes; ``leader`` leads from an axis towards the axis that names its set."""

    def __init__(self) -> None:
        self.leader: dict[Axis, Axis] = {}

    def find(self, axis: Axis) -> Axis:
        while (up := self.leader.get(axis, axis)) != axis:
            self.leader[axis] = self.leader.get(up, up)
            axis = up
        return axis

    def join(self, pairs: Iterable[Pair]) -> None:
        for a, b in pairs:
            self.leader[self.find(a)] = self.find(b)


class _Axes(NamedTuple):
    """A value of the program or of a body inside an equation.

    ``key`` names its axes. A constant has None: one mask may be used along the batch and elsewhere.
    """

    key: object
    shape: tuple[int, ...]

    def axes(self) -> list[Axis]:
        return [(self.key, k) for k in range(len(self.shape))]


Values = list[_Axes]
Valued = Callable[[int], _Axes]  # the value with a number in the program


def carried_lanes(
    program: Program, groups: Sequence, ops: Sequence, relations: Sequence, lanes: int | None
) -> frozenset[int]:
    """Positions in the carry of the leaves whose axis 0 is the batch, ``lanes`` samples wide."""
    if lanes is None:
        return frozenset()
    sets = _Sets()
    moving = flow.forward(program, dict.fromkeys((*program.carry, *program.inputs), 1))

    def value(v: int) -> _Axes:
        return _Axes(v if moving[v] else None, program.avals[v].shape)

    # begin at axis 0 of x and y of every batched op
    for op in ops:
        if op.primitive.batched and op.x is not None:
            known = [value(v) for v in (op.x, op.y)]
            sets.join(((v.key, 0), LANES) for v in known if v.key is not None)
    # a trace whose entries have lanes says the same of its group
    for rel in relations:
        for group, coords in zip(rel.groups, rel.coordinates, strict=True):
            if rel.op.primitive.batched and coords.has_lanes(lanes):
                sets.join([((program.carry[group.states[0]], 0), LANES)])
    # a state keeps its axes from step to step
    for old, new in zip(program.carry, program.new_carry, strict=True):
        sets.join(_all(value(old), value(new)))
    # states of a group stand position by position
    for group in groups:
        first, *others = [value(program.carry[c]) for c in group.carried]
        sets.join(pair for other in others for pair in _all(first, other))
    # every equation lines up axes, but for ops: of their rules axis 0 alone is known
    for i, eqn in enumerate(program.equations):
        if eqn.loop is not None:
            sets.join(_through_marker(program, i, eqn, eqn.loop, value))
        elif i not in program.op_set:
            sets.join(_joined(eqn, [value(v) for v in eqn.ins], [value(v) for v in eqn.outs]))
    home = sets.find(LANES)

    # axis 0 alone must be the batch, and have its length
    def laned(v: int) -> bool:
        first, *others = [sets.find(axis) == home for axis in value(v).axes()] or [False]
        return first and not any(others) and program.avals[v].shape[0] == lanes

    return frozenset(c for c, v in enumerate(program.carry) if laned(v))


def _all(a: _Axes, b: _Axes) -> Iterator[Pair]:
    """Every axis with the axis in the same place."""
    return _along(a, b, zip(range(len(a.shape)), range(len(b.shape)), strict=False))


def _along(a: _Axes, b: _Axes, places: Iterable[tuple[int, int]]) -> Iterator[Pair]:
    """Pairs of equally long axes, unless a value is a constant."""
    if a.key is not None and b.key is not None:
        yield from (((a.key, j), (b.key, k)) for j, k in places if a.shape[j] == b.shape[k])


def _through_marker(
    program: Program, i: int, eqn: Equation, loop: Loop, value: Valued
) -> Iterator[Pair]:
    """Slot by slot; outside of a loop, sequences have the iterations in front."""
    for k, (v, o) in enumerate(zip(eqn.ins, eqn.outs, strict=True)):
        a, b = value(v), value(o)
        if k < loop.num_carry:
            yield from _all(a, b)
        else:
            outer, inner = (a, b) if eqn.primitive is BEGIN else (b, a)
            yield from _along(outer, inner, ((n + 1, n) for n in range(len(inner.shape))))
    if eqn.primitive is BEGIN:
        for first, last in program.feedback(i):
            yield from _all(value(first), value(last))


def _joined(eqn, ins: Values, outs: Values) -> Iterator[Pair]:
    rule = RULES.get(primitives.TABLE[eqn.primitive.name].axes)
    if rule is not None:
        yield from rule(eqn.params, ins, outs)
    else:
        yield from _inside(eqn, ins, outs)


def _same(p: dict, ins: Values, outs: Values) -> Iterator[Pair]:
    """Operands and results of one rank have the same axes."""
    for a in ins:
        for b in outs:
            if len(a.shape) == len(b.shape):
                yield from _all(a, b)


def _first(p: dict, ins: Values, outs: Values) -> Iterator[Pair]:
    """Operands behind the first are indices and updates."""
    return _same(p, ins[:1], outs)


def _paired(p: dict, ins: Values, outs: Values) -> Iterator[Pair]:
    for a, b in zip(ins, outs, strict=True):
        yield from _all(a, b)


def _broadcast(p: dict, ins: Values, outs: Values) -> Iterator[Pair]:
    return _along(ins[0], outs[0], enumerate(p['broadcast_dimensions']))


def _transposed(p: dict, ins: Values, outs: Values) -> Iterator[Pair]:
    return _along(ins[0], outs[0], ((j, k) for k, j in enumerate(p['permutation'])))


def _reduced(p: dict, ins: Values, outs: Values) -> Iterator[Pair]:
    kept = [j for j in range(len(ins[0].shape)) if j not in p['axes']]
    for a, b in zip(ins, outs, strict=False):
        yield from _along(a, b, ((j, k) for k, j in enumerate(kept)))


def _reshaped(p: dict, ins: Values, outs: Values) -> Iterator[Pair]:
    """An axis is kept where as many elements stand in front of it as before."""
    (a, b), places = (ins[0].shape, outs[0].shape), []
    j = k = 0
    before_a = before_b = 1
    while j < len(a) and k < len(b):
        if before_a == before_b and a[j] == b[k]:
            places.append((j, k))
        # go on along the shape that has fewer elements behind, or both
        ahead_a, ahead_b = before_a * a[j], before_b * b[k]
        if ahead_a <= ahead_b:
            before_a, j = ahead_a, j + 1
        if ahead_b <= ahead_a:
            before_b, k = ahead_b, k + 1
    return _along(ins[0], outs[0], places)


def _stacked(p: dict, parts: Values, wholes: Values) -> Iterator[Pair]:
    (whole,) = wholes
    places = [k for k in range(len(whole.shape)) if k != p['axis'] % len(whole.shape)]
    for part in parts:
        yield from _along(part, whole, enumerate(places))


def _unstacked(p: dict, ins: Values, outs: Values) -> Iterator[Pair]:
    return _stacked(p, outs, ins)


def _convolved(p: dict, ins: Values, outs: Values) -> Iterator[Pair]:
    """The batch alone: features are contracted, and places in space move."""
    dims = p['dimension_numbers']
    return _along(ins[0], outs[0], [(dims.lhs_spec[0], dims.out_spec[0])])


def _product(p: dict, ins: Values, outs: Values) -> Iterator[Pair]:
    """Batch axes, then the free axes of both operands; contracted axes run together."""
    (a, b), (out,) = ins[:2], outs
    contracted, batch = p['dimension_numbers']
    yield from _along(a, b, (*zip(*contracted, strict=True), *zip(*batch, strict=True)))
    place = len(batch[0])
    for value, dims, also in ((a, batch[0], contracted[0]), (b, batch[1], contracted[1])):
        free = [k for k in range(len(value.shape)) if k not in dims and k not in also]
        yield from _along(value, out, ((j, k) for k, j in enumerate(dims)))
        yield from _along(value, out, ((j, place + n) for n, j in enumerate(free)))
        place += len(free)


def _gathered(p: dict, ins: Values, outs: Values) -> Iterator[Pair]:
    """Whole axes of the operand lie at the offsets, axes of the indices in the other places."""
    (operand, indices), (out,), dims = ins, outs, p['dimension_numbers']
    gone = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    whole = [j for j in range(len(operand.shape)) if j not in gone]
    yield from _along(operand, out, zip(whole, dims.offset_dims, strict=False))
    others = [k for k in range(len(out.shape)) if k not in dims.offset_dims]
    yield from _along(indices, out, enumerate(others))
    batching = zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True)
    yield from _along(operand, indices, batching)


# by `Properties.axes` of a primitive
RULES: dict[str, Callable[[dict, Values, Values], Iterator[Pair]]] = {
    'same': _same,
    'first': _first,
    'paired': _paired,
    'broadcast': _broadcast,
    'transposed': _transposed,
    'reduced': _reduced,
    'reshaped': _reshaped,
    'stacked': _stacked,
    'unstacked': _unstacked,
    'product': _product,
    'convolution': _convolved,
    'gathered': _gathered,
}


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
        yield from _paired({}, carry, outs)
        yield from _through(loop.body, [*consts, *outs], outs)
    elif scan is not None:
        consts, init, xs = scan.split(ins)
        carry = outs[: scan.num_carry]
        yield from _paired({}, init, carry)
        # a turn reads and makes rows of the sequences, without their first axis
        sequences = [*xs, *outs[scan.num_carry :]]
        turn = [_Axes(None if v.key is None else object(), v.shape[1:]) for v in sequences]
        for outer, inner in zip(sequences, turn, strict=True):
            yield from _along(outer, inner, ((k + 1, k) for k in range(len(inner.shape))))
        n = len(xs)
        yield from _through(scan.body, [*consts, *carry, *turn[:n]], [*carry, *turn[n:]])


def _through(jaxpr, ins: Sequence[_Axes], outs: Sequence[_Axes]) -> Iterator[Pair]:
    """Values of a body that depend on no operand are constants."""
    known = {
        v: _Axes(None if a.key is None else object(), v.aval.shape)
        for v, a in zip(jaxpr.invars, ins, strict=True)
    }

    def read(atom) -> _Axes:
        constant = _Axes(None, atom.aval.shape)
        return constant if isinstance(atom, _jax.Literal) else known.get(atom, constant)

    for v, a in zip(jaxpr.invars, ins, strict=True):
        yield from _all(known[v], a)
    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        moving = any(a.key is not None for a in operands)
        results = [_Axes(object() if moving else None, v.aval.shape) for v in eqn.outvars]
        known.update(zip(eqn.outvars, results, strict=True))
        yield from _joined(eqn, operands, results)
    for v, b in zip(jaxpr.outvars, outs, strict=True):
        yield from _all(read(v), b)
