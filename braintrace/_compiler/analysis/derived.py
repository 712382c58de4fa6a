"""Hidden states that are functions of the other new states of their group, as a stored spike is.

Such a state is no state of its own in a trace: with ``z = g(h)`` its part is ``g'(h) e_h``. The
next step finds ``h`` among its old states, so it has ``g'`` without a number carried for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..equations import labels as lb
from ..equations.equation import Equation
from ..graph import Derived
from ..program.program import Program
from .d_pass import DPass
from .groups_and_cuts import Positions


class _Makers(NamedTuple):
    """The equations that make a value, and the values of the new carry that they read."""

    equations: set[int]
    reads: set[int]


def find_derived(positions: Positions, d_pass: DPass) -> Derived:
    """The derived states. What makes them reads the new carry and constants alone: a parameter or
    an input of the step before is not at hand one step later.
    """
    program, found = positions.program, {}
    # a value of the new carry -> the first position that holds it; derived states are taken out
    holders: dict[int, int] = {}
    for c in (*program.hidden, *range(len(program.carry))):
        holders.setdefault(program.new_carry[c], c)
    # a state comes after those that it may be made of
    order = sorted((program.producer.get(v, -1), s) for s, v in enumerate(program.new_states))
    for _, s in order:
        c, value = program.hidden[s], program.new_states[s]
        first = holders.get(value) == c
        others = {v: h for v, h in holders.items() if v != value} if first else holders
        made = _made_of(program, value, others, positions.mixing)
        if made is not None and _follows(positions, d_pass, s, made, others):
            found[c], holders = made, others
    reads = set().union(*(made.reads for made in found.values()))
    equations = set().union(*(made.equations for made in found.values()))
    return Derived(
        tuple(sorted(found)), tuple(sorted(equations)), {v: holders[v] for v in sorted(reads)}
    )


def _made_of(
    program: Program, value: int, holders: Mapping[int, int], mixing: Mapping[int, str]
) -> _Makers | None:
    """How a value is made of the new carry; None where that is not all that it is made of."""
    made, todo = _Makers(set(), set()), [value]
    while todo:
        v = todo.pop()
        i = program.producer.get(v)
        if v in holders:
            made.reads.add(v)
        elif i is not None and i not in mixing and _can_be_repeated(program, i):
            if i not in made.equations:
                made.equations.add(i)
                todo.extend(program.equations[i].ins)
        elif v not in program.constants:
            return None
    return made


def _can_be_repeated(program: Program, i: int) -> bool:
    """Whether an equation may be evaluated at other numbers, those of a first carry: it is no op,
    has no effect, stands in no loop, and its derivative is finite.
    """
    eqn = program.equations[i]
    barred = i in program.op_set or eqn.effects or eqn.loop is not None or eqn.repeats
    return not barred and not eqn.holds_op() and _is_finite(program, eqn)


def _is_finite(program: Program, eqn: Equation) -> bool:
    does, varying = eqn.does, [v not in program.constants for v in eqn.ins]
    linear = does.linear is not None and does.linear(varying)
    return linear or does.finite or not does.gradient


def _follows(
    positions: Positions, d_pass: DPass, s: int, made: _Makers, holders: Mapping[int, int]
) -> bool:
    """Whether all that is traced in a new state comes from others of its group, each position from
    its own.
    """
    program, sweep = positions.program, positions.sweeps[s]
    group = {program.hidden[r] for r in positions.groups[positions.group_of[s]]}
    own = {v for v in made.reads if holders[v] in group}
    if not own or any(_moved(sweep.total(v)) for v in own):
        return False
    traced = {v for v in made.reads - own if d_pass.depends[v]}
    for i in sorted(made.equations - program.blocks):
        if not traced.isdisjoint(program.equations[i].ins):
            traced.update(program.equations[i].outs)
    return program.new_carry[program.hidden[s]] not in traced


def _moved(labels: lb.Labels) -> bool:
    return labels is not None and not lb.in_place(labels)
