"""Weights of ops that nothing trains: constants, and states that no step changes."""
from __future__ import annotations

from collections.abc import Sequence

from . import flow
from .graph import Diagnostic, OpUse
from .program import Program
from .reasons import FIXED

__all__ = ['fixed_ops', 'fixed_weights']

# trained or changing; a parameter that is held fixed; above them one bit for each part of the carry
LIVE, HELD, FIRST = 1, 2, 2


def fixed_weights(program: Program, ops: Sequence[OpUse]) -> list[Diagnostic]:
    """A warning for each weight of an op that is no parameter, and that no step changes either."""
    facts = _origins(program)
    return [_note(program, op, slot, facts[value]) for op in ops
            for slot, value in op.trainable.items() if not facts[value] & (LIVE | HELD)]


def fixed_ops(program: Program, ops: Sequence[OpUse]) -> bool:
    """Whether no weight of any op is trained or changes."""
    facts = _origins(program)
    return not any(facts[v] & LIVE for op in ops for v in op.trainable.values())


def _origins(program: Program) -> list[int]:
    """Of what each value is made."""
    start = {v: LIVE if i in program.trainable else HELD for i, v in enumerate(program.params)}
    start |= dict.fromkeys(program.inputs, LIVE)
    for c, v in enumerate(program.carry):
        kept = program.new_carry[c] == v and c not in program.hidden
        start[v] = 1 << FIRST + c if kept else LIVE

    def keep(i: int, found: int) -> int:
        return found | LIVE if program.equations[i].effects else found
    return flow.forward(program, start, keep)


def _note(program: Program, op: OpUse, slot: str, found: int) -> Diagnostic:
    states = [program.carry_names[c] for c in flow.members(found >> FIRST)]
    made = 'a constant: no ParamState, and not among the parameters'
    if states:
        made = f'state {", ".join(states)}, which is no ParamState and not among the parameters'
    message = (f'the {slot} of {op.primitive.name} is {made}. Nothing trains it, and no trace is '
               'kept for it. Keep it in a brainstate.ParamState (functional: in params) to train '
               'it; if it is to stay as it is, apply it with a plain operation')
    return Diagnostic(FIXED, 'warning', message, states[0] if states else '', op.where)
