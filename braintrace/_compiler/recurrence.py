"""Which groups a cut equation is recurrent for, and what of their old states it reads."""
from __future__ import annotations

from collections.abc import Collection

from . import flow
from .program import Program

__all__ = ['Groups', 'old_ancestors', 'reached_groups']

Groups = int    # a bit set of group numbers


def reached_groups(program: Program, group_of: dict[int, int], cuts: Collection[int]) -> dict[int, Groups]:
    """For each cut equation, the groups whose new states its result reaches by any path; ``group_of`` maps carry positions."""
    start: dict[int, Groups] = {}
    for c, g in group_of.items():
        start[program.new_carry[c]] = start.get(program.new_carry[c], 0) | 1 << g
    ahead = flow.backward(program, start, flow.gradients(program))
    return {i: flow.union(ahead, program.equations[i].outs) for i in cuts}


def old_ancestors(program: Program, group_of: dict[int, int], recurrent: dict[int, Groups]) -> list[Groups]:
    """For each value, the groups whose old states it reads live without passing a new state."""
    new = {program.new_carry[c] for c in group_of if program.new_carry[c] in program.producer}
    start: dict[int, Groups] = {program.carry[c]: 1 << g for c, g in group_of.items()}
    return flow.forward(program, start, lambda i, found: 0 if i in program.blocks else found & ~recurrent.get(i, 0), new)
