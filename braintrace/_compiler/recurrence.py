"""Which groups a cut equation is recurrent for, and what of their old states it reads."""
from __future__ import annotations

from .program import Program

__all__ = ['Groups', 'old_ancestors', 'reached_groups']

Groups = frozenset[int]
NONE: Groups = frozenset()


def reached_groups(program: Program, group_of: dict[int, int], cuts: set[int]) -> dict[int, Groups]:
    """For each cut equation, the groups whose new states its result reaches by any path; ``group_of`` maps carry positions."""
    reach: dict[int, set[int]] = {}
    for c, g in group_of.items():
        reach.setdefault(program.new_carry[c], set()).add(g)
    found = {}
    for i in range(len(program.equations) - 1, -1, -1):
        eqn = program.equations[i]
        here = set().union(*(reach.get(o, ()) for o in eqn.outs))
        if here:
            for v in eqn.ins:
                reach.setdefault(v, set()).update(here)
        if i in cuts:
            found[i] = frozenset(here)
    return found


def old_ancestors(program: Program, group_of: dict[int, int], recurrent: dict[int, Groups]) -> dict[int, Groups]:
    """For each value, the groups whose old states it reads live without passing a new state."""
    new = {program.new_carry[c] for c in group_of if program.new_carry[c] in program.producer}
    old = {program.carry[c]: frozenset([g]) for c, g in group_of.items()}
    for i, eqn in enumerate(program.equations):
        found = NONE.union(*(old.get(v, NONE) for v in eqn.ins if v not in new)) - recurrent.get(i, NONE)
        old.update(dict.fromkeys(eqn.outs, found))
    return old
