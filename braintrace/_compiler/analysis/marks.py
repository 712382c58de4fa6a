"""What automatic marking did: ops that it put, equations that it left, constants that look like
weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..equations.equation import Equation, is_inexact
from ..graph import Diagnostic, OpUse
from ..program import dataflow as flow
from ..program.program import Program
from .left_out import plain_ways


def find_marks(program: Program, ops: Sequence[OpUse]) -> Iterator[Diagnostic]:
    """A diagnostic for each, none where nothing is marked."""
    if program.to_mark is None:
        return
    for op in ops:
        name = program.equations[op.equation].marked
        for i in sorted({i for behind in op.parameters.values() for i in behind} if name else ()):
            path = program.param_names[i]
            yield Diagnostic('marked', path, op.where, (op.equation,), name)
    origins, moving = _origins(program), 1 << len(program.params)
    plain = plain_ways(program, ops)
    for i, eqn in enumerate(program.equations):
        leads = flow.union(plain, eqn.outs)
        if eqn.unmarked and leads:
            held = flow.union(origins, (v for v in eqn.ins if not origins[v] & moving))
            for k in flow.members(held):
                if k in program.to_mark:
                    path = program.param_names[k]
                    yield Diagnostic('unmarked', path, eqn.where, (i,), eqn.unmarked)
        elif leads and _holds_a_constant(program, eqn, origins):
            yield Diagnostic('closed-over', '', eqn.where, (i,))


def _origins(program: Program) -> list[int]:
    """A bit for each parameter that a value is made of, and one if it changes."""
    moving = 1 << len(program.params)
    start = {v: 1 << i for i, v in enumerate(program.params)}
    start |= dict.fromkeys((*program.carry, *program.inputs), moving)

    def keep(i: int, found: int) -> int:
        eqn = program.equations[i]
        return (found if eqn.does.gradient else found & moving) | (moving if eqn.effects else 0)

    return flow.forward(program, start, keep)


def _holds_a_constant(program: Program, eqn: Equation, origins: Sequence[int]) -> bool:
    """Whether an equation does with a constant array what an op does with a weight."""
    matrices = (v for v in eqn.ins if is_inexact(program.avals[v]) and program.avals[v].ndim > 1)
    return bool(eqn.does.op) and any(not origins[v] for v in matrices)
