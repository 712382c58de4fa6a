"""Branches and loops of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import _jax
from ...errors import NotSupportedError
from .. import equations as lb
from ..equations import BEGIN, END, Equation, Loop, along, holds_op, is_complex, is_inexact
from ..policy import Policy
from . import dataflow as flow
from .builder import Branch, Builder, marked_at_border
from .program import Program

# branches -----------------------------------------------------------------------------------------
#
# Branches of a ``cond`` behind gates, so that no gradient meets the values of a branch not taken.
#
# A gate passes a value on. Where the branch was not taken, it drops the cotangent that comes back,
# so that a zero is not multiplied by an infinity that the branch may have made.


def gate(taken, x):
    """x, with a zero cotangent where the branch is not taken."""
    return jax.lax.select_n(taken, jax.lax.stop_gradient(x), x)


def selected(build: Builder, branches: list, ins: list[int], where: str) -> list[int]:
    """Every branch, each behind gates, then a select."""
    index, operands = ins[0], ins[1:]
    results = []
    for k, (body, consts) in enumerate(branches):
        around = [b.taken for b in build.branches[-1:]]

        def is_taken(i, *outer, k=k):
            return jnp.logical_and(i == k, *outer) if outer else i == k

        # the predicate holds where this branch and those around it are taken
        build.branches.append(Branch(build.plain(is_taken, [index, *around], where)))
        outs = build.call(body, consts, operands, where)
        outs = [marked_at_border(build, v, where, 'cond') for v in outs]
        results.append([gated(build, v) for v in outs])
        build.branches.pop()
    # equal rows are one value: a state that is an output as well stays that state
    rows = list(zip(*results, strict=True))
    made = {
        cases: build.traced(jax.lax.select_n, [index, *cases], where)[0]
        if len(set(cases)) > 1
        else cases[0]
        for cases in dict.fromkeys(rows)
    }
    return [made[cases] for cases in rows]


def guarded(build: Builder, eqn: Equation, op: bool) -> Equation:
    """An equation that reads its operands behind the gates of the innermost branch.

    An op keeps its pure weights, so that they stay functions of parameters alone. If its branch is
    not taken, its x is zero.
    """
    if not op:
        ins = [gated(build, v) for v in eqn.ins]
        return replace(eqn, ins=tuple(ins), conditional=True)
    weights = set(eqn.primitive.trainable_invars_fn(eqn.params).values())
    ins = [
        v if k in weights and v in build.pure else gated(build, v) for k, v in enumerate(eqn.ins)
    ]
    x = eqn.primitive.x_invar_index
    if x is not None:
        zero_unless = lambda taken, x: jax.lax.select_n(taken, jnp.zeros_like(x), x)
        ins[x] = build.plain(zero_unless, [build.branches[-1].taken, ins[x]], eqn.where)
    return replace(eqn, ins=tuple(ins), conditional=True)


def gated(build: Builder, value: int) -> int:
    """A value as the innermost branch reads it."""
    branch, todo = build.branches[-1], [value]

    def read(v: int) -> int | None:
        """None: it is to be gated first."""
        inside = v in branch.inside or v in build.constants
        return v if inside or not is_inexact(build.avals[v]) else branch.gated.get(v)

    while todo:
        v = todo[-1]
        if read(v) is None:
            made = next((b.made[v] for b in build.branches if v in b.made), None)
            ins: tuple = () if made is None else tuple(map(read, made.ins))
            if made is not None and None in ins:
                missing = [u for u, known in zip(made.ins, ins, strict=True) if known is None]
                todo += missing
                continue
            if made is None:
                keys: tuple[int, ...] = (v,)
                outs = [build.plain(gate, [branch.taken, v], '')]
            else:
                # a function of parameters made in this branch is made once more, of gated ones
                keys = made.outs
                again = replace(made, ins=ins, conditional=True)
                outs = build.append(again, [build.avals[o] for o in keys])
            build.inside(outs)
            branch.gated.update(zip(keys, outs, strict=True))
        todo.pop()
    return branch.gated.get(value, value)


def while_taken(parts: _jax.WhileParts) -> Callable:
    """A ``while`` as a function ``(taken, *operands)``: if not taken, it might never end."""

    def run(taken, *args):
        cond_args, body_args, init = parts.split(list(args))

        def going_on(carry):  # one flag for each sample of a loop under vmap
            return _jax.evaluate(parts.cond, parts.cond_consts, [*cond_args, *carry])[0]

        def cond(carry):
            return jnp.logical_and(taken, jnp.any(going_on(carry)))

        def body(carry):
            flags = going_on(carry)
            new = _jax.evaluate(parts.body, parts.body_consts, [*body_args, *carry])
            if not flags.ndim:
                return tuple(new)
            # samples whose own loop has ended keep their carry
            wide = (flags.reshape(flags.shape + (1,) * (n.ndim - flags.ndim)) for n in new)
            return tuple(jnp.where(f, n, o) for f, n, o in zip(wide, new, carry, strict=True))

        return list(jax.lax.while_loop(cond, body, tuple(init)))

    return run


# loops --------------------------------------------------------------------------------------------
#
# A ``scan`` in a flat program: unrolled, or as a region between two markers.


def _row(build: Builder, value: int, at: int, where: str) -> int:
    (row,) = build.traced(lambda a: jax.lax.index_in_dim(a, at, keepdims=False), [value], where)
    return row


def unrolled(build: Builder, parts: _jax.ScanParts, ins: list[int], where: str) -> list[int]:
    """Every iteration by itself."""
    consts, carry, xs = parts.split(ins)
    rows: dict[int, list[int]] = {}
    for t in reversed(range(parts.length)) if parts.reverse else range(parts.length):
        slices = [_row(build, x, t, where) for x in xs]
        outs = build.call(parts.body, parts.consts, [*consts, *carry, *slices], where)
        carry, rows[t] = outs[: parts.num_carry], outs[parts.num_carry :]
    if not rows:
        empty = [v.aval for v in parts.body.outvars[parts.num_carry :]]
        return [*carry, *(build.constant(jnp.zeros((0, *a.shape), a.dtype)) for a in empty)]
    columns = zip(*(rows[t] for t in range(parts.length)), strict=True)
    return [
        *carry,
        *(build.traced(lambda *r: jnp.stack(r), column, where)[0] for column in columns),
    ]


def peeled(build: Builder, eqn, parts, ins: list[int], where: str) -> list[int]:
    """A loop and then its last iteration, so that readers of the last carry read the new state."""
    consts, init, xs = parts.split(ins)
    n, first = parts.length - 1, int(parts.reverse)
    most = lambda rows: jax.lax.slice_in_dim(rows, first, first + n)
    rest = [build.traced(most, [x], where)[0] for x in xs]
    last = [_row(build, x, 0 if first else n, where) for x in xs]
    outs = descended(build, eqn, parts._replace(length=n), [*consts, *init, *rest], where)
    carry = outs[: parts.num_carry]
    ends = build.call(parts.body, parts.consts, [*consts, *carry, *last], where)
    join = lambda rows, row: jnp.concatenate([row[None], rows] if first else [rows, row[None]])
    rows = zip(outs[parts.num_carry :], ends[parts.num_carry :], strict=True)
    return [*ends[: parts.num_carry], *(build.traced(join, pair, where)[0] for pair in rows)]


def descended(build: Builder, eqn, parts, ins: list[int], where: str) -> list[int]:
    """The loop as a region between two markers."""
    consts, init, xs = parts.split(ins)
    init = [marked_at_border(build, v, where, eqn.primitive.name) for v in init]
    if build.branches:
        init, xs = ([gated(build, v) for v in values] for values in (init, xs))
    # the body, one loop deeper, on a carry and slices of its own
    inner = [build.new(v.aval, len(build.bodies)) for v in parts.body.invars[len(consts) :]]
    build.inside(inner)
    # rows of a function of parameters are functions of parameters
    for sequence, row in zip(xs, inner[len(init) :], strict=True):
        build.pure.update([row] if sequence in build.pure else [])
        build.owned.update({row: build.owned[sequence]} if sequence in build.owned else {})
    region = Loop(parts.length, parts.reverse, parts.unroll, len(init), where, eqn)
    build.bodies.append([])
    with build.having(scope=(*build.scope, region)):
        outs = build.call(parts.body, parts.consts, [*consts, *inner], where)
        outs = [marked_at_border(build, v, where, eqn.primitive.name) for v in outs]
        if build.branches:
            outs = [gated(build, v) for v in outs]
    body = build.bodies.pop()
    # its results: the last carry, and sequences of the iterations' results
    results = [
        build.new(v.aval if k < len(init) else v.aval.update(shape=(parts.length, *v.aval.shape)))
        for k, v in enumerate(parts.body.outvars)
    ]
    build.inside(results)
    marker = Equation(BEGIN, {}, None, (), (), where, scope=build.scope, loop=region)
    build.bodies[-1] += [
        replace(marker, ins=(*init, *xs), outs=tuple(inner)),
        *body,
        replace(marker, primitive=END, ins=tuple(outs), outs=tuple(results)),
    ]
    # a sequence of the carry ends with the last carry: who reads its last row then reads the new
    # state, as if the loop were unrolled
    carry = dict(zip(outs[: len(init)], results, strict=False))

    def put(rows, last):
        parts = [last[None], rows[1:]] if region.reverse else [rows[:-1], last[None]]
        return jnp.concatenate(parts)

    return [
        build.traced(put, [r, carry[o]], region.where)[0] if k >= len(init) and o in carry else r
        for k, (o, r) in enumerate(zip(outs, results, strict=True))
    ]


# forward mode -------------------------------------------------------------------------------------
#
# Reverse mode for a ``while`` loop, taken by forward mode where the loop works position by
# position.


def forward_derivative(eqn, where: str, learned: frozenset[int]) -> Callable:
    """A ``while`` as a function whose reverse mode is the loop's forward derivative.

    Each element of a result may read one element of an operand. Several are an error if the operand
    is in ``learned``: it depends on a state or a parameter. Other operands depend on inputs alone;
    they get a NaN cotangent.
    """
    loop, parts = Equation(eqn.primitive, eqn.params, eqn.ctx, (), (), where), _jax.while_parts(eqn)
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    smooth = [j for j, v in enumerate(eqn.outvars) if is_inexact(v.aval)]

    def pushed(args: list, k: int, tangent) -> list:
        """The tangents of the inexact results, for a tangent of operand k."""

        def of_one(x):
            return [o for o in loop.evaluate([*args[:k], x, *args[k + 1 :]]) if is_inexact(o)]

        return jax.jvp(of_one, [args[k]], [tangent])[1]

    # operand -> result -> which element of the operand each element of the result reads
    sources: dict[int, dict[int, np.ndarray]] = {}
    for k in range(parts.cond_nconsts if parts else 0, len(avals)):
        if is_inexact(avals[k]):
            found = along(lambda *a, k=k: pushed(list(a[:-1]), k, a[-1]), avals, avals[k])
            sources[k] = {j: lab for j, lab in zip(smooth, found, strict=True) if lb.has(lab)}
    mixed = {k for k, found in sources.items() if any(map(lb.meet, found.values()))}
    if mixed & learned:
        raise NotSupportedError(
            f'{where}: a while loop lies between a state or parameter and the result of '
            'the step, and positions meet in it, so it has no derivative in reverse mode. '
            'Use lax.fori_loop with a static number of steps, or lax.scan.'
        )

    def run(*args):
        still = [jax.lax.stop_gradient(a) for a in args]
        outs = loop.evaluate(still)
        for k, found in sources.items():
            if k in mixed:
                for j in found:
                    outs[j] = outs[j] + _poison(args[k]).astype(outs[j].dtype)
                continue
            if not found:
                continue
            # a loop need not have a complex derivative: real and imaginary part move one by one
            zero = args[k] - still[k]
            ways = [(1, jnp.real(zero)), (1j, jnp.imag(zero))] if is_complex(zero) else [(1, zero)]
            for unit, moves in ways:
                slopes = dict(zip(smooth, pushed(still, k, jnp.full_like(still[k], unit))))
                for j, source in found.items():
                    # a zero whose derivative is the slope at the element that is read
                    moved = moves
                    if moves.shape != source.shape or (source != lb.identity(source.shape)).any():
                        read = moves.reshape(-1)[np.maximum(source, 0)]
                        moved = jnp.where(source == lb.NONE, 0, read)
                    moved = moved.astype(outs[j].dtype)
                    outs[j] = outs[j] + jax.lax.stop_gradient(slopes[j]) * moved
        return outs

    return run


@jax.custom_vjp
def _poison(x):
    """A zero that sends NaN back."""
    return jnp.zeros((), x.dtype)


_poison.defvjp(lambda x: (jnp.zeros((), x.dtype), x), lambda x, g: (jnp.full_like(x, jnp.nan),))


# decisions ----------------------------------------------------------------------------------------
#
# Which control flow of a program must be lowered further, and how.


# facts about a value, behind or ahead of it: hidden states and ops, hidden states and parameters,
# inputs; any result
STATE, LEARNED, INPUT, RESULT = 1, 2, 4, 8
MOST_UNROLLED = 1024


class MustUnroll(Exception):
    """A descended loop can only be analysed iteration by iteration: the decision that this asks
    for.
    """

    def __init__(self, loop: Loop):
        super().__init__(loop.where)
        if loop.length > MOST_UNROLLED:
            raise NotSupportedError(
                f'{loop.where}: a scan of {loop.length} steps has hidden states or weights of its '
                f'own in every step; such loops are unrolled, up to {MOST_UNROLLED} steps. Shorten '
                'it, or keep what changes from step to step in its carry.'
            )
        self.decision = {loop.origin: 'unroll'}


def refuse_ops_in_while(jaxpr) -> None:
    """No learner can look into a loop of unknown length."""
    for eqn, where in _equations(jaxpr, lambda eqn: _jax.sub_jaxprs(eqn.params)):
        if _jax.while_parts(eqn) is not None and any(map(holds_op, _jax.sub_jaxprs(eqn.params))):
            raise NotSupportedError(
                f'{where}: a while loop holds an ETP op; neither its trace nor its reverse mode '
                'exists. Use lax.fori_loop with a static number of steps, or lax.scan.'
            )


def refuse_mutable_arrays(jaxpr) -> None:
    """A program of values cannot hold an array that is written to."""
    for eqn, where in _equations(jaxpr, lambda eqn: filter(None, [_jax.inlinable(eqn)])):
        if any(_jax.is_mutable(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            raise NotSupportedError(
                f'{where}: {eqn.primitive.name} works on a mutable array (jax.new_ref), whose '
                'values no trace can follow. Compute with values: h = h.at[...].set(...).'
            )


def _equations(jaxpr, bodies: Callable, outer: str = 'an unknown place') -> Iterator[tuple]:
    """The equations of a jaxpr and of ``bodies(equation)``, each with its place."""
    for eqn in _jax.closed_jaxpr(jaxpr)[0].eqns:
        where = _jax.location(eqn.source_info) or outer
        yield eqn, where
        for body in bodies(eqn):
            yield from _equations(body, bodies, where)


def peel(program: Program) -> dict[Any, object]:
    """Loops whose body reads a new hidden state that is their last carry: the last iteration must
    are alone.
    """
    final = set(program.new_states)
    found: dict[Any, object] = {}
    # outer loops end last, so they come first: the carry of an inner one may be final by them
    for end, begin in sorted(program.begin_of.items(), reverse=True):
        loop, eqn = program.equations[end].loop, program.equations[end]
        carried = list(zip(eqn.ins, eqn.outs, strict=True))[: loop.num_carry if loop else 0]
        last = {v for v, o in carried if o in final}
        final |= last
        if any(begin < i < end for v in last for i in program.consumers.get(v, ())):
            found |= {r.origin: 'peel' for r in (*eqn.scope, loop) if isinstance(r, Loop)}
    return found


def decide(program: Program, policy: Policy) -> dict[Any, object]:
    """Decisions for control flow between hidden states, or with an op that leads to one."""
    # the facts behind each value by a gradient, and ahead of it
    states = {program.carry[c]: STATE | LEARNED for c in program.hidden}
    states |= {o: STATE | LEARNED for i in program.ops for o in program.equations[i].outs}
    states |= {v: LEARNED for v in program.params}
    inputs = {v: INPUT for v in (*program.inputs, *program.carry) if v not in states}
    results = dict.fromkeys((*program.outputs, *program.new_carry), RESULT)
    results |= dict.fromkeys(program.new_states, RESULT | STATE)
    behind = flow.forward(program, states | inputs, flow.gradients(program))
    ahead = flow.backward(program, results)
    avals, found = program.avals, {}
    for eqn in program.equations:
        does = eqn.does
        if eqn.origin is None or not does.option:
            continue
        to = flow.union(ahead, eqn.outs)
        # a while loop has no reverse mode, so it matters wherever a gradient passes it
        if _jax.while_parts(eqn.origin) is not None:
            reads = any(behind[v] and is_inexact(avals[v]) for v in eqn.ins)
            if to and reads and any(is_inexact(avals[o]) for o in eqn.outs):
                if does.option in policy.refuse:
                    _refuse(eqn, 'needs a derivative')
                # it is lowered with the operands that depend on a state or a parameter
                learned = frozenset(k for k, v in enumerate(eqn.ins) if behind[v] & LEARNED)
                found[eqn.origin] = learned | found.get(eqn.origin, frozenset())
            continue
        scan = _jax.scan_parts(eqn.origin)
        # a `while` that a branch holds must not run if the branch is not taken
        opens = eqn.conditional and _jax.holds_call(eqn, {'while'})
        opens = opens and (_jax.cond_branches(eqn.origin) or scan) is not None
        inside = eqn.unmarked or eqn.holds_op() or any(behind[v] & STATE for v in eqn.ins)
        if to & STATE and inside or opens:
            # a rule of the user's own is kept as it is, so only an op inside it is in question
            asked = does.decision or eqn.holds_op()
            if asked and does.option in policy.refuse:
                _refuse(eqn, 'holds an ETP op or lies between hidden states')
            short = scan is not None and scan.length <= max(policy.unroll, 1)
            if decision := 'unroll' if short else does.decision:
                found[eqn.origin] = decision
    return found


def _refuse(eqn: Equation, what: str) -> None:
    option = eqn.does.option
    raise NotSupportedError(
        f'{eqn.where}: {eqn.primitive.name} {what}, and the policy refuses {option!r}. '
        f'Write {eqn.does.instead} instead, or compile with another policy.'
    )
