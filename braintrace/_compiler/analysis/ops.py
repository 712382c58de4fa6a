"""The ETP ops of a program, each with the parameters that its weights are functions of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import RuleContractError
from ..equations import Equation, Loop
from ..graph import OpUse
from ..program import dataflow as flow
from ..program.control_flow import MustUnroll
from ..program.program import Program


def find_ops(program: Program) -> tuple[OpUse, ...]:
    """Every op; raises :class:`MustUnroll` where a loop changes an op's weights."""
    # The origins of values: a bit for each parameter, one for what changes from step to step, and
    # one for what changes from iteration to iteration of a loop.
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

    origins = flow.forward(program, start, keep)
    ops: list[OpUse] = []
    times: dict[str, int] = {}
    for i in program.ops:
        eqn = program.equations[i]
        slots = _slots(eqn)
        trainable = {name: eqn.ins[k] for name, k in slots.items()}
        # the last operands are the op's structure
        last = eqn.primitive.structure
        structure = dict(zip(last, eqn.ins[len(eqn.ins) - len(last) :], strict=True))
        read = (*trainable.values(), *structure.values())
        made_of = flow.union(origins, read)
        if made_of & turning and not made_of & moving:
            # the loop around the op, or else the one that makes its weights
            around = [r for r in eqn.scope if isinstance(r, Loop)]
            behind = flow.slice_behind(program, read)
            made = [loop for j in behind if (loop := program.equations[j].loop)]
            raise MustUnroll((around or made)[-1])
        # a structure is fixed if it is the same at each step, and in each lane of a `vmap`
        forms = (eqn.primitive, *eqn.primitive.originals())
        axes = [form.axes or () for form in forms]
        mapped = [axis for each in axes for axis in each[len(each) - len(structure) :]]
        moves = flow.union(origins, structure.values()) & moving
        fixed = not moves and all(axis is None for axis in mapped)
        parameters = {
            name: tuple(flow.members(origins[v] & names)) for name, v in trainable.items()
        }
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
                owned=fixed and not made_of & moving and any(parameters.values()),
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


def _key(
    program: Program, primitive: Any, parameters: Mapping[str, tuple], times: dict[str, int]
) -> str:
    """The path of the op's first parameter, with ``#k`` for the k-th further op of that name."""
    names = [program.param_names[behind[0]] for behind in parameters.values() if behind]
    first = names[0].replace('#', '~3') if names else f'({primitive.name})'
    times[first] = times.get(first, -1) + 1
    return f'{first}#{times[first]}' if times[first] else first


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
