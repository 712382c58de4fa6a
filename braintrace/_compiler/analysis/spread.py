"""Ops used element by element whose result is broadcast before anything that changes reads it.

A trace has one entry for each element of an op's result. Where several positions of a state read
one element along axes that no trace can add, the op is applied to the broadcast weight instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..graph import OpUse, Relation
from ..program import dataflow as flow
from ..program.program import Program

__all__ = ['MustSpread', 'find_spread']


class MustSpread(Exception):
    """These ops, by ``id`` of the jaxpr's equation, have to be applied behind a broadcast."""

    def __init__(self, ops: set[int]):
        super().__init__(f'{len(ops)} ops')
        self.ops = ops


def find_spread(
    program: Program,
    ops: Iterable[OpUse],
    relations: Iterable[Relation],
    lost: Collection[int],
    plain: list[int],
) -> None:
    """Raise :class:`MustSpread` for the ops that lack a trace and can have one.

    ``lost``: the equations of ops whose trace to a group is lost; ``plain``: ``plain_ways``.
    """
    traced = {rel.op.equation for rel in relations} - set(lost)
    without = [op for op in ops if op.equation not in traced and op.pointwise and op.owned]
    if not any(plain[op.y] for op in without):
        return
    changes = flow.forward(
        program,
        dict.fromkeys((*program.carry, *program.inputs), 1),
        lambda i, found: 1 if program.equations[i].effects else found,
    )
    found = {
        id(program.equations[op.equation].origin)
        for op in without
        if plain[op.y]
        and not program.equations[op.equation].marked
        and _is_spread(program, op.y, changes)
    }
    if found:
        raise MustSpread(found)


def _is_spread(program: Program, y: int, changes: list[int]) -> bool:
    """Whether y meets what changes in position-wise equations alone, and broadcast in one."""
    todo, seen, wide = [y], {y}, False
    while todo:
        v = todo.pop()
        for i in program.consumers.get(v, ()):
            eqn = program.equations[i]
            if eqn.loop is not None or i in program.op_set:
                return False
            if any(changes[u] for u in eqn.ins):
                if not eqn.does.elementwise:
                    return False
                wide |= program.avals[v].size > program.avals[y].size
            else:
                todo += [o for o in eqn.outs if o not in seen]
                seen.update(eqn.outs)
    return wide
