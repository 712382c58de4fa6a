"""How a value is put together by equations that move elements, and who reads its parts."""

from __future__ import annotations

from ..equations.equation import Equation
from ..equations.labels import moved_operands
from ..program.program import Program


def assembles(eqn: Equation) -> bool:
    """Whether an equation only puts its operands together."""
    return not eqn.effects and eqn.does.assembles


def acts_on_elements(eqn: Equation) -> bool:
    """Whether each element is computed from the same element of the operands."""
    does = eqn.does
    return does.elementwise and does.gradient and not does.whole


def chain(program: Program, value: int, wide: bool = False) -> tuple[set[int], set[int]]:
    """The equations that put a value together by moving elements, and the values that they move.

    ``wide``: also a slice, a pad or rows added to zeros, for which no state is taken apart.
    """
    equations: set[int] = set()
    values: set[int] = set()
    todo = [value]
    while todo:
        i = program.producer.get(todo.pop())
        if i is None or i in equations:
            continue
        eqn = program.equations[i]
        if _moves(program, i) if wide else assembles(eqn):
            equations.add(i)
            # rows that are added to zeros are moved by all operands, indices and all
            read = [eqn.ins[k] for k in moved_operands(eqn)] or list(eqn.ins)
            values.update(read)
            todo.extend(read)
    return equations, values & program.producer.keys()


def read_apart(program: Program, value: int, wide: bool = False) -> list[int]:
    """The values that a value is put together from, as far as others read them too."""
    equations, values = chain(program, value, wide)
    results = {*program.outputs, *program.new_carry}
    return [
        v
        for v in sorted(values)
        if v in results or not equations.issuperset(program.consumers.get(v, ()))
    ]


def _moves(program: Program, i: int) -> bool:
    """Whether an equation only moves elements; rows added to zeros, sums of padded rows count."""
    eqn = program.equations[i]
    if eqn.effects:
        return False
    if eqn.does.sums:
        return all(_is_padded(program, v) for v in eqn.ins)
    if eqn.does.updates and eqn.does.beside:
        # added to a constant, or to rows that were put together in this way
        before = program.producer.get(eqn.ins[0])
        return eqn.ins[0] in program.constants or before is not None and _moves(program, before)
    return eqn.does.moves is not None


def _is_padded(program: Program, value: int) -> bool:
    i = program.producer.get(value)
    if i is None:
        return False
    eqn = program.equations[i]
    return eqn.primitive.name == 'pad' or eqn.does.sums and _moves(program, i)
