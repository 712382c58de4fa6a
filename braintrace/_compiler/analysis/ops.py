"""The ETP ops of a program, each with the parameters that its weights are functions of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ...errors import RuleContractError
from ..equations import Equation, Loop
from ..graph import OpUse
from ..program import dataflow as flow
from ..program.control_flow import MustUnroll
from ..program.program import Program


class Sources(NamedTuple):
    """The origins of values: one bit for each parameter, and two more.

    ``moving``: the value changes from step to step; ``turning``: from iteration to iteration of a
    loop.
    """

    facts: list[int]
    names: int
    moving: int
    turning: int

    def parameters(self, value: int) -> tuple[int, ...]:
        return tuple(flow.members(self.facts[value] & self.names))


def find_ops(program: Program) -> tuple[OpUse, ...]:
    """Every op; raises :class:`MustUnroll` where a loop changes an op's weights."""
    sources = _sources(program)
    ops: list[OpUse] = []
    times: dict[str, int] = {}
    for i in program.ops:
        eqn = program.equations[i]
        slots = _slots(eqn)
        trainable = {name: eqn.ins[k] for name, k in slots.items()}
        structure = _structure(eqn)
        read = (*trainable.values(), *structure.values())
        made_of = flow.union(sources.facts, read)
        if made_of & sources.turning and not made_of & sources.moving:
            raise MustUnroll(_loop_of_weights(program, eqn, read))
        fixed = _is_fixed(sources, eqn.primitive, structure)
        parameters = {name: sources.parameters(v) for name, v in trainable.items()}
        x = None if eqn.primitive.x_invar_index is None else eqn.ins[eqn.primitive.x_invar_index]
        y = program.y_of(i)
        ops.append(
            OpUse(
                key=_key(program, eqn.primitive, parameters, times),
                equation=i,
                primitive=eqn.primitive,
                params=eqn.params,
                x=x,
                y=y,
                slots=slots,
                trainable=trainable,
                parameters=parameters,
                owned=fixed and not made_of & sources.moving and any(parameters.values()),
                where=eqn.where,
                x_aval=None if x is None else program.avals[x],
                y_aval=program.avals[y],
                weight_avals={name: program.avals[v] for name, v in trainable.items()},
                repeats=eqn.repeats,
                conditional=eqn.conditional,
                structure=structure,
                structure_avals={name: program.avals[v] for name, v in structure.items()},
                fixed_structure=fixed,
            )
        )
    return tuple(ops)


def _structure(eqn: Equation) -> dict[str, int]:
    """The values that are an op's structure."""
    names = eqn.primitive.structure
    return dict(zip(names, eqn.ins[len(eqn.ins) - len(names) :], strict=True))


def _is_fixed(sources: Sources, primitive: Any, structure: Mapping[str, int]) -> bool:
    """Whether an op's structure is the same at each step, and in each lane of a ``vmap``."""
    moves = flow.union(sources.facts, structure.values()) & sources.moving
    axes = [form.axes or () for form in (primitive, *primitive.originals())]
    mapped = [axis for each in axes for axis in each[len(each) - len(structure) :]]
    return not moves and all(axis is None for axis in mapped)


def _sources(program: Program) -> Sources:
    count = len(program.params)
    names, moving, turning = (1 << count) - 1, 1 << count, 1 << count + 1
    start = {v: 1 << i if i in program.trainable else 0 for i, v in enumerate(program.params)}
    start |= dict.fromkeys((*program.carry, *program.inputs), moving)
    for begin in program.end_of:
        start |= dict.fromkeys(program.equations[begin].outs, turning)

    def keep(i: int, found: int) -> int:
        passed = found | moving if program.equations[i].effects else found
        # an op's parameters are its own where it reads anything that moves: they stop there
        return passed & ~names if i in program.op_set and found & moving else passed

    return Sources(flow.forward(program, start, keep), names, moving, turning)


def _key(
    program: Program, primitive: Any, parameters: Mapping[str, tuple], times: dict[str, int]
) -> str:
    """The path of the op's first parameter, with ``#k`` for the k-th further op of that name."""
    first = next(
        (
            program.param_names[found[0]].replace('#', '~3')
            for found in parameters.values()
            if found
        ),
        f'({primitive.name})',
    )
    times[first] = times.get(first, -1) + 1
    return f'{first}#{times[first]}' if times[first] else first


def _loop_of_weights(program: Program, eqn: Equation, weights: Iterable[int]) -> Loop:
    """The loop around an op whose weights change in it, or the loop that makes them."""
    around = [r for r in eqn.scope if isinstance(r, Loop)]
    made = [
        loop
        for v in weights
        for i in flow.slice_behind(program, v, ())
        if (loop := program.equations[i].loop)
    ]
    return (around or made)[-1]


def _slots(eqn: Equation) -> dict[str, int]:
    """The place of each trainable among the operands, checked."""
    primitive = eqn.primitive
    slots = dict(primitive.trainable_invars_fn(eqn.params))
    wrong = {n: k for n, k in slots.items() if not 0 <= k < len(eqn.ins)}
    if wrong:
        raise RuleContractError(
            f'{eqn.where}: trainable_invars_fn of {primitive.name} names inputs {wrong}, but the '
            f'equation has {len(eqn.ins)} inputs. Return {{name: position}} within them.'
        )
    operands = set(range(len(eqn.ins) - len(primitive.structure)))
    others = operands - set(slots.values()) - {primitive.x_invar_index}
    if others:
        raise RuleContractError(
            f'{eqn.where}: inputs {sorted(others)} of {primitive.name} are neither its x nor '
            'trainable, and no rule sees them. Name them in trainable_invars_fn or structure, '
            'or make them static parameters.'
        )
    return slots
