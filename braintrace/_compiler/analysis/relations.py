"""Which op feeds which hidden groups, and where the entries of its trace sit."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from ..equations import labels as lb
from ..equations.equation import Loop, is_inexact
from ..graph import Coordinates, Diagnostic, HiddenGroup, OpUse, Relation
from ..program.control_flow import MustUnroll
from ..program.program import Program
from .complex_states import split_where_entries_are_real
from .following import Following
from .groups_and_cuts import Positions

__all__ = ['find_relations']


def find_relations(
    positions: Positions, following: Following, groups: Sequence[HiddenGroup], ops: Iterable[OpUse]
) -> tuple[tuple[Relation, ...], list[Diagnostic]]:
    """The relations, and why some ops have none although they reach a group."""
    near = _groups_near(positions)
    relations: list[Relation] = []
    missing: list[Diagnostic] = []
    for op in ops:
        # coordinates with each group that the op's y reaches, or why there are none
        found = {
            groups[g]: _coordinates(positions, following, op, positions.groups[g], groups[g])
            for g in sorted(near.get(op.equation, ()))
        }
        lost = [c for c in found.values() if isinstance(c, Diagnostic)]
        reached = {g: c for g, c in found.items() if isinstance(c, Coordinates)}
        missing += lost
        if reached and op.owned:
            relations.append(_relation(positions, op, reached, bool(lost)))
        elif reached and any(op.parameters.values()):
            first = next(i for behind in op.parameters.values() for i in behind)
            path = positions.program.param_names[first]
            why = '' if op.fixed_structure else 'structure'
            missing.append(
                Diagnostic('input-dependent-weight', path, op.where, (op.equation,), why)
            )
    return tuple(relations), missing


def _groups_near(positions: Positions) -> dict[int, set[int]]:
    """For each op, the groups with a state that sends a cotangent to y."""
    near: dict[int, set[int]] = {}
    for s, sweep in enumerate(positions.sweeps):
        for i in sweep.y:
            near.setdefault(i, set()).add(positions.group_of[s])
    return near


def _relation(
    positions: Positions, op: OpUse, reached: dict[HiddenGroup, Coordinates], lost: bool
) -> Relation:
    split_where_entries_are_real(positions.program, op, reached)
    program = positions.program
    paths = {
        name: tuple(program.param_names[i] for i in behind)
        for name, behind in op.parameters.items()
        if behind
    }
    cuts = {*program.ops, *positions.mixing}
    through = not lost and _only_through_states(program, op.y, cuts)
    return Relation(op, tuple(reached), tuple(reached.values()), paths, through)


def _only_through_states(program: Program, value: int, cuts: Collection[int]) -> bool:
    """Whether every path from a value meets a new hidden state before a cut or another result."""
    new = set(program.new_states)
    results = {*program.outputs, *program.new_carry} - new
    seen, todo = set(), [value]
    while todo:
        v = todo.pop()
        if v in new or v in seen or not is_inexact(program.avals[v]):
            continue
        seen.add(v)
        readers = program.consumers.get(v, ())
        if v in results or any(i in cuts for i in readers):
            return False
        todo.extend(o for i in readers for o in program.results(i, v))
    return True


# ---- where the entries of a trace sit ----


def _coordinates(
    positions: Positions, following: Following, op: OpUse, states: Sequence[int], group: HiddenGroup
) -> Coordinates | Diagnostic | None:
    """None where op and group are not related, a diagnostic where no trace fits."""
    # the position of the group that each element of y feeds, as each state of the group sees it
    received = {s: positions.sweeps[s].y.get(op.equation) for s in states}
    labels = {s: found for s, found in received.items() if lb.has(found)}
    if not labels:
        return None
    if any(map(lb.meet, labels.values())):
        # an element of y feeds several positions: entries must sit at the group's positions
        if op.repeats:
            scope = positions.program.equations[op.equation].scope
            raise MustUnroll(next(r for r in reversed(scope) if isinstance(r, Loop)))
        return _expanded(following, op, labels, group)
    # an element of y feeds one position: entries sit at y
    total = None
    for found in labels.values():
        total = lb.merge(total, found)
    if lb.meet(total):
        return _lost(op, group, 'different-positions')
    if total.shape == group.shape and lb.in_place(total):
        return Coordinates(total.shape, group.shape, None)
    unread = _first_of_lane(total.shape, group.shape)
    return Coordinates(total.shape, group.shape, np.where(total == lb.NONE, unread, total))


def _first_of_lane(shape: tuple[int, ...], group_shape: tuple[int, ...]) -> np.ndarray:
    """A position for entries that no state reads, in their own lane."""
    if shape[:1] != group_shape[:1] or not shape:
        return np.zeros(shape, np.int64)
    return (np.arange(shape[0]) * math.prod(group_shape[1:])).reshape(-1, *[1] * (len(shape) - 1))


def _expanded(
    following: Following, op: OpUse, states: Iterable[int], group: HiddenGroup
) -> Coordinates | Diagnostic:
    """Entries at the group's positions, where y lacks axes of the hidden state."""
    # the element of y that each position of the group reads
    source = None
    for s in states:
        read = following.read_once(op.equation, s)
        source = lb.merge(source, read) if read is not None else np.full(group.shape, lb.MANY)
    # it must be y broadcast along leading axes of the group
    y_shape = op.y_aval.shape
    try:
        wide = np.broadcast_to(lb.identity(y_shape), group.shape)
    except ValueError:
        wide = None
    if wide is None or lb.disagree(source, wide):
        return _not_expanded(op, source, group)
    added = len(group.shape) - len(y_shape)
    if not op.pointwise and group.shape[added:] != y_shape:
        return _not_expanded(op, wide, group)
    return Coordinates(group.shape, group.shape, None, expanded=True)


def _not_expanded(op: OpUse, source: np.ndarray, group: HiddenGroup) -> Diagnostic:
    """Why y can not be expanded to a state whose positions read ``source``."""
    if lb.meet(source):
        return _lost(op, group, 'several-elements')
    axes = [k for k, n in enumerate(group.shape) if n > 1]
    alike = tuple(k for k in axes if (source == source.take([0], k)).all())
    return _lost(op, group, 'broadcast' if alike else 'repeated', alike)


def _lost(op: OpUse, group: HiddenGroup, reason: str, axes: tuple[int, ...] = ()) -> Diagnostic:
    return Diagnostic(
        'lost-relation', op.key, op.where, (op.equation,), reason, group=group.name, axes=axes
    )
