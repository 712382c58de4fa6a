"""Which axes of the carry are the batch: axes that run together are joined, beginning at the batch axis of the ops.

Whether axis 0 of a state is the batch can not be read from its length: a threshold that all samples share may be as wide as the
batch. So two axes are joined where an equation lines them up, and a state has lanes where its axis 0 is joined with axis 0 of
a batched op. What an unknown primitive does joins nothing: its results then have no known lanes, which a reset reports.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .. import _jax
from . import flow
from .program import BEGIN, ELEMENTWISE, Equation, Program

__all__ = ['carried_lanes']

Axis = tuple            # (key of a value, number of the axis)
Pair = tuple[Axis, Axis]
LANES: Axis = ('lanes', 0)

ALIKE = ELEMENTWISE | {'and', 'or', 'xor', 'not', 'eq', 'ne', 'lt', 'le', 'gt', 'ge', 'is_finite', 'population_count', 'clz',
                       'shift_left', 'shift_right_logical', 'shift_right_arithmetic', 'stop_gradient', 'zeros_like', 'mulhi'}
PAIRED = {'sort', 'optimization_barrier'}               # operand k becomes result k
UPDATED = {'scatter', 'scatter-add', 'scatter-mul', 'scatter-min', 'scatter-max', 'scatter-sub'}     # operand 0
SAME_AXES = UPDATED | {'rev', 'slice', 'pad', 'concatenate', 'split', 'cumsum', 'cumprod', 'cummax', 'cummin',
                       'cumlogsumexp', 'dynamic_slice', 'dynamic_update_slice', 'tile', 'top_k'}


class _Sets:
    """Disjoint sets of axes."""

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


class _Value(tuple):
    """``(key, shape)``; the key is None where the value is a constant, whose axes say nothing of where it is used."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self[1]

    def axes(self) -> list[Axis]:
        return [(self[0], k) for k in range(len(self[1]))]


def carried_lanes(program: Program, groups: Sequence, ops: Sequence, relations: Sequence,
                  lanes: int | None) -> frozenset[int]:
    """Positions in the carry of the leaves whose axis 0 is the batch of the step's ops, ``lanes`` samples wide."""
    if lanes is None:
        return frozenset()
    sets = _Sets()
    moving = flow.forward(program, dict.fromkeys((*program.carry, *program.inputs), 1))

    def value(v: int) -> _Value:
        return _Value((v if moving[v] else None, program.avals[v].shape))

    for op in ops:
        if op.primitive.batched and op.x is not None:
            sets.join(((key, 0), LANES) for key in (value(op.x)[0], value(op.y)[0]) if key is not None)
    for old, new in zip(program.carry, program.new_carry, strict=True):
        sets.join(_all(value(old), value(new)))
    for group in groups:                            # states of a group stand position by position
        first, *others = [value(program.carry[c]) for c in group.states]
        sets.join(pair for other in others for pair in _all(first, other))
    for rel in relations:
        for group, coords in zip(rel.groups, rel.coordinates, strict=True):
            if rel.op.primitive.batched and not coords.expanded and coords.has_lanes(lanes):
                sets.join([((program.carry[group.states[0]], 0), LANES)])
    for i, eqn in enumerate(program.equations):
        if eqn.loop is not None:
            sets.join(_through_marker(program, i, eqn, value))
        elif i not in program.op_set:
            sets.join(_joined(eqn, [value(v) for v in eqn.ins], [value(v) for v in eqn.outs]))
    home = sets.find(LANES)

    def laned(v: int) -> bool:
        first, *others = [sets.find(axis) == home for axis in value(v).axes()] or [False]
        return first and not any(others) and program.avals[v].shape[0] == lanes
    return frozenset(c for c, v in enumerate(program.carry) if laned(v))


def _all(a: _Value, b: _Value) -> Iterator[Pair]:
    """Every axis with the one in the same place."""
    return _along(a, b, zip(range(len(a.shape)), range(len(b.shape)), strict=False))


def _along(a: _Value, b: _Value, places: Iterable[tuple[int, int]]) -> Iterator[Pair]:
    """Axes ``j`` of one value and ``k`` of another, where they are equally long and neither value is a constant."""
    if a[0] is not None and b[0] is not None:
        yield from (((a[0], j), (b[0], k)) for j, k in places if a.shape[j] == b.shape[k])


def _through_marker(program: Program, i: int, eqn: Equation, value) -> Iterator[Pair]:
    """The border of a loop, slot by slot: sequences have the turns in front on the outside."""
    for k, (v, o) in enumerate(zip(eqn.ins, eqn.outs, strict=True)):
        a, b = value(v), value(o)
        if k < eqn.loop.num_carry:
            yield from _all(a, b)
        else:
            outer, inner = (a, b) if eqn.primitive is BEGIN else (b, a)
            yield from _along(outer, inner, ((n + 1, n) for n in range(len(inner.shape))))
    if eqn.primitive is BEGIN:
        for first, last in program.feedback(i):
            yield from _all(value(first), value(last))


def _joined(eqn, ins: list[_Value], outs: list[_Value]) -> Iterator[Pair]:
    """The axes that one equation lines up."""
    name, p = eqn.primitive.name, eqn.params
    if name in ALIKE:
        for a in ins:
            if len(a.shape) == len(outs[0].shape):
                yield from _all(a, outs[0])
    elif name in PAIRED:
        for a, b in zip(ins, outs, strict=True):
            yield from _all(a, b)
    elif name in SAME_AXES:
        for a in ins[:1] if name in UPDATED else ins:
            for b in outs:
                if len(a.shape) == len(b.shape):
                    yield from _all(a, b)
    elif name == 'broadcast_in_dim':
        yield from _along(ins[0], outs[0], enumerate(p['broadcast_dimensions']))
    elif name == 'transpose':
        yield from _along(ins[0], outs[0], ((j, k) for k, j in enumerate(p['permutation'])))
    elif name.startswith(('reduce_', 'arg')) and 'axes' in p:
        kept = [j for j in range(len(ins[0].shape)) if j not in p['axes']]
        for a, b in zip(ins, outs, strict=False):
            yield from _along(a, b, ((j, k) for k, j in enumerate(kept)))
    elif name in ('reshape', 'squeeze', 'expand_dims'):
        yield from _along(ins[0], outs[0], _kept_by_reshape(ins[0].shape, outs[0].shape))
    elif name in ('stack', 'unstack'):
        whole, parts = (outs[0], ins) if name == 'stack' else (ins[0], outs)
        places = [k for k in range(len(whole.shape)) if k != p['axis'] % len(whole.shape)]
        for part in parts:
            yield from _along(part, whole, enumerate(places))
    elif name == 'dot_general':
        yield from _of_product(p['dimension_numbers'], ins[0], ins[1], outs[0])
    elif name == 'conv_general_dilated':
        dims = p['dimension_numbers']
        yield from _along(ins[0], outs[0], [(dims.lhs_spec[0], dims.out_spec[0])])
    elif name == 'gather':
        yield from _of_gather(p, ins[0], ins[1], outs[0])
    else:
        yield from _inside(eqn, ins, outs)


def _kept_by_reshape(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The axes that a reshape leaves whole."""
    j = k = 0
    before_a = before_b = 1
    while j < len(a) and k < len(b):
        if before_a == before_b and a[j] == b[k]:
            yield j, k
        if before_a * a[j] <= before_b * b[k]:
            ahead = before_a * a[j] == before_b * b[k]
            before_a, j = before_a * a[j], j + 1
            if ahead:
                before_b, k = before_b * b[k], k + 1
        else:
            before_b, k = before_b * b[k], k + 1


def _of_product(dimension_numbers, a: _Value, b: _Value, out: _Value) -> Iterator[Pair]:
    """Batch axes first, then the free axes of both operands; contracted axes run together."""
    contracted, batch = dimension_numbers
    yield from _along(a, b, (*zip(*contracted, strict=True), *zip(*batch, strict=True)))
    place = len(batch[0])
    for value, dims, also in ((a, batch[0], contracted[0]), (b, batch[1], contracted[1])):
        free = [k for k in range(len(value.shape)) if k not in dims and k not in also]
        yield from _along(value, out, (*((j, k) for k, j in enumerate(dims)), *((j, place + n) for n, j in enumerate(free))))
        place += len(free)


def _of_gather(p: dict, operand: _Value, indices: _Value, out: _Value) -> Iterator[Pair]:
    """Whole axes of the operand lie at the offsets, axes of the indices in the other places."""
    dims = p['dimension_numbers']
    gone = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    whole = [j for j in range(len(operand.shape)) if j not in gone]
    yield from _along(operand, out, zip(whole, dims.offset_dims, strict=False))
    others = [k for k in range(len(out.shape)) if k not in dims.offset_dims]
    yield from _along(indices, out, enumerate(others))
    yield from _along(operand, indices, zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True))


def _inside(eqn, ins: list[_Value], outs: list[_Value]) -> Iterator[Pair]:
    """Through the jaxprs that an equation holds, where it is known what they read and return."""
    call = eqn.params.get('call_jaxpr', _jax.inlinable(eqn))
    branches, scan, loop = _jax.cond_parts(eqn), _jax.scan_parts(eqn), _jax.while_parts(eqn)
    if call is not None:
        yield from _through(_jax.closed_jaxpr(call)[0], ins, outs)
    elif branches is not None:
        for body, _ in branches.branches:
            yield from _through(body, ins[1:], outs)
    elif loop is not None:
        carry = ins[loop.cond_nconsts + loop.body_nconsts:]
        for a, b in zip(carry, outs, strict=True):
            yield from _all(a, b)
        yield from _through(loop.body, [*ins[loop.cond_nconsts:loop.cond_nconsts + loop.body_nconsts], *outs], outs)
    elif scan is not None:
        n, end = scan.num_consts, scan.num_consts + scan.num_carry
        for a, b in zip(ins[n:end], outs, strict=False):
            yield from _all(a, b)
        sequences, xs = [*ins[end:], *outs[scan.num_carry:]], len(ins) - end
        turn = [_Value((None if v[0] is None else object(), v.shape[1:])) for v in sequences]
        for outer, inner in zip(sequences, turn, strict=True):
            yield from _along(outer, inner, ((k + 1, k) for k in range(len(inner.shape))))
        carry = outs[:scan.num_carry]
        yield from _through(scan.body, [*ins[:n], *carry, *turn[:xs]], [*carry, *turn[xs:]])


def _through(jaxpr, ins: Sequence[_Value], outs: Sequence[_Value]) -> Iterator[Pair]:
    """The body of a call: values that depend on no operand are constants."""
    known = {v: _Value((None if a[0] is None else object(), v.aval.shape))
             for v, a in zip(jaxpr.invars, ins, strict=True)}

    def read(atom) -> _Value:
        constant = _Value((None, atom.aval.shape))
        return constant if isinstance(atom, _jax.Literal) else known.get(atom, constant)
    for v, a in zip(jaxpr.invars, ins, strict=True):
        yield from _all(known[v], a)
    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        moving = any(a[0] is not None for a in operands)
        results = [_Value((object() if moving else None, v.aval.shape)) for v in eqn.outvars]
        known.update(zip(eqn.outvars, results, strict=True))
        yield from _joined(eqn, operands, results)
    for v, b in zip(jaxpr.outvars, outs, strict=True):
        yield from _all(read(v), b)
