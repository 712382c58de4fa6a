"""Where a function of parameters to mark meets a value that changes: the op for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..._etrace_op import AUTOMATIC, at_positions
from ..equations.equation import Equation, is_inexact
from ..equations.labels import moved_operands
from ..policy import Policy
from .builder import Builder


def chosen(policy: Policy, names: Sequence, avals: Sequence, trainable: tuple) -> tuple | None:
    """Positions of the parameters to mark; None where nothing is marked."""
    mark = policy.mark
    if not callable(mark):
        return None if mark is None else trainable
    return tuple(i for i in trainable if mark(names[i], avals[i]))


def owned_by(build: Builder, eqn: Equation, outs: Sequence[int]) -> dict[int, str]:
    """The results of an equation that are functions of parameters to mark."""
    places = [build.owned[v] for v in eqn.ins if v in build.owned]
    if not places or not eqn.does.gradient or eqn.effects or _moves(build, eqn):
        return {}
    return dict.fromkeys((o for o in outs if is_inexact(build.avals[o])), max(places))


def note_twin(build: Builder, eqn: Equation, outs: Sequence[int]) -> None:
    """Equal functions of parameters to mark share their op: the first stands for all."""
    if len(outs) == 1 and outs[0] in build.owned and (eqn.does.moves or eqn.does.elementwise):
        ins = tuple(_known_as(build, v) for v in eqn.ins)
        key = eqn.primitive, ins, tuple(sorted(eqn.params.items())), _region(build)
        build.twins[outs[0]] = build.firsts.setdefault(key, outs[0])


def _known_as(build: Builder, value: int) -> Any:
    """The first of equal values; a constant number is known as what it is."""
    constant = build.constants.get(value)
    if constant is None or np.ndim(constant):
        return build.twins.get(value, value)
    return str(build.avals[value]), np.asarray(constant).item()


def _region(build: Builder) -> tuple:
    return build.scope, tuple(build.branches)


def _moves(build: Builder, eqn: Equation) -> bool:
    return any(v not in build.pure for v in eqn.ins)


def weights_of(build: Builder, eqn: Equation, outvars: Sequence) -> list[int]:
    """The operands that are functions of parameters to mark, where another one changes."""
    found = [k for k, v in enumerate(eqn.ins) if v in build.owned]
    if not found or build.unmarked == '' or not eqn.does.gradient:
        return []
    smooth = any(is_inexact(v.aval) for v in outvars)
    return found if smooth and (eqn.effects or _moves(build, eqn)) else []


def marked_op(build: Builder, eqn: Equation, weights: list[int]) -> Callable | None:
    """The function of the operands that applies an op in place of the equation."""
    if build.unmarked or len(weights) != 1 or eqn.does.op not in AUTOMATIC:
        return None
    avals = [build.avals[v] for v in eqn.ins]
    return AUTOMATIC[eqn.does.op](eqn.params, weights[0], avals)


def marked_operands(build: Builder, eqn: Equation, weights: list[int], outvars) -> Equation:
    """The equation that reads its weights through ops, element by element; or why it does not."""
    does = eqn.does
    why = build.unmarked or (does.control.option if does.control else 'layout' if does.op else '')
    assembles = does.updates or set(weights) <= set(moved_operands(eqn))
    if why or not (does.elementwise or assembles):
        return replace(eqn, unmarked=why or 'primitive')
    ins = list(eqn.ins)
    for k in weights:
        aval = outvars[0].aval if does.elementwise else build.avals[ins[k]]
        ins[k] = marked_value(build, ins[k], aval.shape, eqn.where, eqn.primitive.name)
    return replace(eqn, ins=tuple(ins))


def marked_value(build: Builder, value: int, shape: tuple, where: str, name: str) -> int:
    """A value of ``shape``, element by element through an op; one for all its readers."""
    value = build.twins.get(value, value)
    key = value, shape, _region(build)
    if key not in build.spread:
        with build.marks(name):
            place = build.owned[value] or where
            (build.spread[key],) = build.traced(at_positions(shape), [value], place)
    return build.spread[key]


def marked_at_border(build: Builder, value: int, where: str, name: str) -> int:
    """A weight that leaves a branch meets its condition there; one that enters or leaves a loop
    meets the other iterations, and one that becomes a state the next step.
    """
    if value not in build.owned or build.unmarked is not None:
        return value
    return marked_value(build, value, build.avals[value].shape, where, name)
