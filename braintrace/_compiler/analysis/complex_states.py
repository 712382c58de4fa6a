"""Complex hidden states that have no complex derivative, and so become two real states.

In a group of complex states D is one complex number for each position, and an entry of a trace is
a complex derivative. So every equation from a complex number to such a state must be holomorphic,
and complex results must be holomorphic functions of complex weights. A real y may reach complex
states: its derivative is a complex number as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..equations.equation import is_complex
from ..graph import HiddenGroup, OpUse
from ..program.program import Program
from ..program.tracing import is_holomorphic
from ..stacked_states.unstacking import split_in_parts
from .groups_and_cuts import Positions


def split_among_real_states(program: Program, positions: Positions) -> None:
    """Raise :class:`MustSplit` for complex states of a group that has real ones too."""
    for states in positions.groups:
        found = [program.hidden[s] for s in states if is_complex(_new(program, s))]
        if found and len(found) < len(states):
            i = program.producer.get(program.new_carry[found[0]])
            split_in_parts(program, found, '' if i is None else program.equations[i].where)


def _new(program: Program, s: int):
    return program.avals[program.new_states[s]]


def split_where_entries_are_real(
    program: Program, op: OpUse, groups: Iterable[HiddenGroup]
) -> None:
    """Raise :class:`MustSplit` where a complex y reaches complex states, and is no holomorphic
    function of complex weights.
    """
    states = [c for g in groups for c in g.states if is_complex(program.avals[program.carry[c]])]
    if states and is_complex(op.y_aval) and not _is_holomorphic(op):
        split_in_parts(program, states, op.where)


def _is_holomorphic(op: OpUse) -> bool:
    """Whether y is a holomorphic function of complex weights, by the equations of the op."""
    avals = op.weight_avals

    def y(values, x):
        return op.impl(x, dict(zip(avals, values, strict=True)))

    return all(map(is_complex, avals.values())) and is_holomorphic(y, [*avals.values()], op.x_aval)
