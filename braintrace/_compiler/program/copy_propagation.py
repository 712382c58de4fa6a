"""A value that is put into an array and taken out again, element by element, is the value itself.

A ``HiddenGroupState`` hands its states to the model side by side in one array. A model that reads
one back reads that new state, as if each state were kept by itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..equations.equation import Equation
from .elements import Elements
from .program import Program, alive


def forward_copies(program: Program, kept: Collection[int] = ()) -> Program:
    """The program in which a value copied unchanged out of a larger one is that value.

    All copies of a new state are one value. Values in ``kept`` stay copies.
    """
    elements, names, equations = Elements(program), {}, []
    for eqn in program.equations:
        eqn = renamed(eqn, names)
        equations.append(eqn)
        for value, ids in elements.moved_by(eqn):
            source = elements.original(ids, value)
            elements.moved[value] = ids
            if source is not None and value not in kept:
                names[value] = source
    new = {names.get(v, v) for v in program.new_carry}
    twins = elements.twins(new, equations)
    equations = [renamed(eqn, twins) for eqn in equations]
    names |= twins
    outputs, carry = (
        tuple(_final(names, v) for v in part) for part in (program.outputs, program.new_carry)
    )
    living = alive(equations, (*outputs, *carry))
    return replace(program, equations=living, outputs=outputs, new_carry=carry)


def renamed(eqn: Equation, names: dict[int, int]) -> Equation:
    return (
        eqn
        if names.keys().isdisjoint(eqn.ins)
        else replace(eqn, ins=tuple(names.get(v, v) for v in eqn.ins))
    )


def _final(names: dict[int, int], value: int) -> int:
    while value in names:
        value = names[value]
    return value
