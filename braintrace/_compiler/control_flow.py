"""Which control flow of a program must be lowered further, and how."""
from __future__ import annotations

from typing import Any

from .. import _jax
from .._errors import NotSupportedError
from . import flow
from .policy import Policy
from .program import Equation, Loop, Program, holds_op, is_inexact

__all__ = ['MustUnroll', 'decide', 'peel', 'refuse_ops_in_while', 'unroll']

STATE, LEARNED, INPUT, RESULT = 1, 2, 4, 8
MOST_UNROLLED = 1024
LONG_HAND = {'cond': 'jnp.where, or compute both branches', 'scan': 'a Python loop', 'while': 'lax.fori_loop with a static number of steps',
             'shard_map': 'the step for one shard', 'custom_jvp_call': 'the op outside of the function', 'custom_vjp_call':
             'the op outside of the function'}


class MustUnroll(Exception):
    """A descended loop can only be analysed iteration by iteration."""

    def __init__(self, loop):
        super().__init__(loop.where)
        self.loop = loop


def unroll(loop) -> dict[int, object]:
    """The decision to unroll a loop that could not be descended."""
    if loop.length > MOST_UNROLLED:
        raise NotSupportedError(f'{loop.where}: a scan of {loop.length} steps has hidden states or weights of its own in every step; such '
                                f'loops are unrolled, up to {MOST_UNROLLED} steps. Shorten it, or keep what changes from step to step in '
                                'its carry.')
    return {id(loop.origin): 'unroll'}


def refuse_ops_in_while(jaxpr, outer: str = 'an unknown place') -> None:
    """No learner can look into a loop of unknown length: refuse one that holds an op."""
    for eqn in jaxpr.eqns:
        where = _jax.location(eqn.source_info) or outer
        held = [_jax.closed_jaxpr(j)[0] for j in _jax.sub_jaxprs(eqn.params)]
        if _jax.while_parts(eqn) is not None and any(map(holds_op, held)):
            raise NotSupportedError(f'{where}: a while loop holds an ETP op; neither its trace nor its reverse mode exists. Use '
                                    'lax.fori_loop with a static number of steps, or lax.scan.')
        for j in held:
            refuse_ops_in_while(j, where)


def _holds_while(params: dict) -> bool:
    return any(_jax.while_parts(e) is not None or _holds_while(e.params)
               for j in _jax.sub_jaxprs(params) for e in _jax.closed_jaxpr(j)[0].eqns)


def peel(program: Program) -> dict[int, object]:
    """Loops of which the last carry is a new hidden state that the body reads as well: their last iteration must stand alone."""
    final = {program.new_carry[c] for c in program.hidden}
    found: dict[int, object] = {}
    for end, begin in sorted(program.begin_of.items(), reverse=True):
        loop, eqn = program.equations[end].loop, program.equations[end]
        last = {v for v, o in list(zip(eqn.ins, eqn.outs, strict=True))[:loop.num_carry] if o in final}
        final |= last
        if any(begin < i < end for v in last for i in program.consumers.get(v, ())):
            found |= {id(r.origin): 'peel' for r in (*eqn.scope, loop) if isinstance(r, Loop)}
    return found


def decide(program: Program, policy: Policy) -> dict[int, object]:
    """Decisions for control flow that holds an op that leads to a hidden state, or lies between hidden states; empty if none is left."""
    states = {program.carry[c]: STATE | LEARNED for c in program.hidden}
    states |= {o: STATE | LEARNED for i in program.ops for o in program.equations[i].outs}
    states |= {v: LEARNED for v in program.params} | {v: INPUT for v in (*program.inputs, *program.carry) if v not in states}
    behind = flow.forward(program, states, flow.gradients(program))
    ahead = flow.backward(program, dict.fromkeys((*program.outputs, *program.new_carry), RESULT)
                          | {program.new_carry[c]: RESULT | STATE for c in program.hidden})
    found: dict[int, Any] = {}
    for eqn in program.equations:
        name = eqn.primitive.name
        if eqn.origin is None or name not in LONG_HAND:
            continue
        to = flow.union(ahead, eqn.outs)
        if name == 'while':
            if to and _differentiable(program, eqn, behind):
                known = found.get(id(eqn.origin), frozenset())
                found[id(eqn.origin)] = _forward(program, eqn, behind, policy) | known
        elif eqn.conditional and name in ('cond', 'scan') and _holds_while(eqn.params) or to & STATE and (
                eqn.holds_op() or any(behind[v] & STATE for v in eqn.ins)):
            decision = _decision(eqn, policy)
            if decision:
                found[id(eqn.origin)] = decision
    return found


def _differentiable(program: Program, eqn: Equation, behind: list[int]) -> bool:
    return any(behind[v] and is_inexact(program.avals[v]) for v in eqn.ins) and any(is_inexact(program.avals[o]) for o in eqn.outs)


def _forward(program: Program, eqn: Equation, behind: list[int], policy: Policy) -> frozenset[int]:
    """The operands of a ``while`` that depend on a state or a parameter."""
    if policy.while_loop == 'refuse':
        _refuse(eqn, 'while_loop')
    return frozenset(k for k, v in enumerate(eqn.ins) if behind[v] & LEARNED)


def _decision(eqn: Equation, policy: Policy) -> str | None:
    name = eqn.primitive.name
    option = 'custom_rule' if name.startswith('custom') else name
    if getattr(policy, option) == 'refuse' and (option != 'custom_rule' or eqn.holds_op()):
        _refuse(eqn, option)
    if name == 'scan':
        return 'unroll' if eqn.params['length'] <= max(policy.unroll, 1) else 'descend'
    return {'cond': 'select', 'shard_map': 'vmap'}.get(name)


def _refuse(eqn: Equation, option: str) -> None:
    name = eqn.primitive.name
    what = 'needs a derivative' if name == 'while' else 'holds an ETP op or lies between hidden states'
    raise NotSupportedError(f"{eqn.where}: {name} {what}, and the policy says {option}='refuse'. "
                            f'Write {LONG_HAND[name]} instead, or compile with another policy.')
