"""Which control flow of a program must be lowered further, and how."""

from __future__ import annotations

from typing import Any

from ... import _jax
from ..._errors import NotSupportedError
from ..equations.equation import Equation, Loop, holds_op, is_inexact
from ..policy import Policy
from . import dataflow as flow
from .program import Program

# facts about a value, behind or ahead of it: hidden states and ops, hidden states and parameters,
# inputs; any result
STATE, LEARNED, INPUT, RESULT = 1, 2, 4, 8
MOST_UNROLLED = 1024


class MustUnroll(Exception):
    """A descended loop can only be analysed iteration by iteration."""

    def __init__(self, loop):
        super().__init__(loop.where)
        self.loop = loop


def unroll(loop) -> dict[Any, object]:
    if loop.length > MOST_UNROLLED:
        raise NotSupportedError(
            f'{loop.where}: a scan of {loop.length} steps has hidden states or weights of its own '
            f'in every step; such loops are unrolled, up to {MOST_UNROLLED} steps. Shorten it, or '
            'keep what changes from step to step in its carry.'
        )
    return {loop.origin: 'unroll'}


def refuse_ops_in_while(jaxpr, outer: str = 'an unknown place') -> None:
    """No learner can look into a loop of unknown length."""
    for eqn in jaxpr.eqns:
        where = _jax.location(eqn.source_info) or outer
        held = [_jax.closed_jaxpr(j)[0] for j in _jax.sub_jaxprs(eqn.params)]
        if _jax.while_parts(eqn) is not None and any(map(holds_op, held)):
            raise NotSupportedError(
                f'{where}: a while loop holds an ETP op; neither its trace nor its reverse mode '
                'exists. Use lax.fori_loop with a static number of steps, or lax.scan.'
            )
        for j in held:
            refuse_ops_in_while(j, where)


def refuse_mutable_arrays(jaxpr, outer: str = 'an unknown place') -> None:
    """A program of values cannot hold an array that is written to."""
    for eqn in jaxpr.eqns:
        where = _jax.location(eqn.source_info) or outer
        if any(_jax.is_mutable(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            raise NotSupportedError(
                f'{where}: {eqn.primitive.name} works on a mutable array (jax.new_ref), whose '
                'values no trace can follow. Compute with values: h = h.at[...].set(...).'
            )
        inner = _jax.inlinable(eqn)
        if inner is not None:
            refuse_mutable_arrays(_jax.closed_jaxpr(inner)[0], where)


def _holds_while(params: dict) -> bool:
    return any(
        _jax.while_parts(e) is not None or _holds_while(e.params)
        for j in _jax.sub_jaxprs(params)
        for e in _jax.closed_jaxpr(j)[0].eqns
    )


def peel(program: Program) -> dict[Any, object]:
    """Loops whose body reads a new hidden state that is their last carry: the last iteration must
    stand alone.
    """
    final = set(program.new_states)
    found: dict[Any, object] = {}
    # outer loops end last, so they come first: the carry of an inner one may be final by them
    for end, begin in sorted(program.begin_of.items(), reverse=True):
        loop, eqn = program.equations[end].loop, program.equations[end]
        last = {
            v for v, o in list(zip(eqn.ins, eqn.outs, strict=True))[: loop.num_carry] if o in final
        }
        final |= last
        if any(begin < i < end for v in last for i in program.consumers.get(v, ())):
            found |= {r.origin: 'peel' for r in (*eqn.scope, loop) if isinstance(r, Loop)}
    return found


def decide(program: Program, policy: Policy) -> dict[Any, object]:
    """Decisions for control flow between hidden states, or with an op that leads to one."""
    behind, ahead = _facts(program)
    found: dict[Any, Any] = {}
    for eqn in program.equations:
        control = eqn.does.control
        if eqn.origin is None or control is None:
            continue
        to = flow.union(ahead, eqn.outs)
        # a while loop has no reverse mode, so it matters wherever a gradient passes it
        if _jax.while_parts(eqn.origin) is not None:
            if to and _differentiable(program, eqn, behind):
                known = found.get(eqn.origin, frozenset())
                found[eqn.origin] = _forward(eqn, behind, policy) | known
            continue
        inside = eqn.unmarked or eqn.holds_op() or any(behind[v] & STATE for v in eqn.ins)
        if to & STATE and inside or _must_be_opened(eqn):
            decision = _decision(eqn, policy)
            if decision:
                found[eqn.origin] = decision
    return found


def _facts(program: Program) -> tuple[list[int], list[int]]:
    """The facts behind each value by a gradient, and ahead of it."""
    states = {program.carry[c]: STATE | LEARNED for c in program.hidden}
    states |= {o: STATE | LEARNED for i in program.ops for o in program.equations[i].outs}
    states |= {v: LEARNED for v in program.params}
    inputs = {v: INPUT for v in (*program.inputs, *program.carry) if v not in states}
    results = dict.fromkeys((*program.outputs, *program.new_carry), RESULT)
    results |= dict.fromkeys(program.new_states, RESULT | STATE)
    behind = flow.forward(program, states | inputs, flow.gradients(program))
    return behind, flow.backward(program, results)


def _must_be_opened(eqn: Equation) -> bool:
    """Whether a branch holds a ``while`` in this equation: it must not run if the branch is not
    taken.
    """
    opens = _jax.cond_branches(eqn.origin) or _jax.scan_parts(eqn.origin)
    return eqn.conditional and opens is not None and _holds_while(eqn.params)


def _differentiable(program: Program, eqn: Equation, behind: list[int]) -> bool:
    return any(behind[v] and is_inexact(program.avals[v]) for v in eqn.ins) and any(
        is_inexact(program.avals[o]) for o in eqn.outs
    )


def _forward(eqn: Equation, behind: list[int], policy: Policy) -> frozenset[int]:
    """The operands of a ``while`` that depend on a state or a parameter."""
    if policy.while_loop == 'refuse':
        _refuse(eqn, 'needs a derivative')
    return frozenset(k for k, v in enumerate(eqn.ins) if behind[v] & LEARNED)


def _decision(eqn: Equation, policy: Policy) -> str | None:
    control = eqn.does.control
    # a rule of the user's own is kept as it is, so only an op inside it is in question
    if getattr(policy, control.option) == 'refuse' and (control.decision or eqn.holds_op()):
        _refuse(eqn, 'holds an ETP op or lies between hidden states')
    scan = _jax.scan_parts(eqn.origin)
    short = scan is not None and scan.length <= max(policy.unroll, 1)
    return 'unroll' if short else control.decision


def _refuse(eqn: Equation, what: str) -> None:
    control = eqn.does.control
    raise NotSupportedError(
        f"{eqn.where}: {eqn.primitive.name} {what}, and the policy says {control.option}='refuse'. "
        f'Write {control.instead} instead, or compile with another policy.'
    )
