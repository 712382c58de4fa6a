"""Which op feeds which hidden groups, and where the entries of its trace sit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..equations import labels as lb
from ..equations.equation import Loop, is_inexact
from ..graph import Coordinates, Diagnostic, HiddenGroup, OpUse, Relation
from ..program.control_flow import MustUnroll
from ..program.program import Program
from .complex_states import split_where_entries_are_real
from .fan_out import FanOut, fanned_out, placed_at
from .groups_and_cuts import Positions


def find_relations(
    positions: Positions, fan_out: FanOut, groups: Sequence[HiddenGroup], ops: Iterable[OpUse]
) -> tuple[tuple[Relation, ...], list[Diagnostic]]:
    """The relations, and why some ops have none although they reach a group."""
    near = _groups_near(positions)
    relations: list[Relation] = []
    missing: list[Diagnostic] = []
    for op in ops:
        # coordinates with each group that the op's y reaches, or why there are none
        found = {
            groups[g]: _coordinates(positions, fan_out, op, positions.groups[g], groups[g])
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
    positions: Positions, fan_out: FanOut, op: OpUse, states: Sequence[int], group: HiddenGroup
) -> Coordinates | Diagnostic | None:
    """None where op and group are not related, a diagnostic where no trace fits."""
    # the position of the group that each element of y feeds, as each state of the group sees it
    received = {s: positions.sweeps[s].y.get(op.equation) for s in states}
    labels = {s: found for s, found in received.items() if lb.has(found)}
    if not labels:
        return None
    total = None
    for found in labels.values():
        total = lb.merge(total, found)
    # an element of y feeds one position: entries sit at y
    if not lb.meet(total):
        return placed_at(total, group.shape)
    # an element of y feeds several positions: it has an entry for each
    if op.repeats:
        scope = positions.program.equations[op.equation].scope
        raise MustUnroll(next(r for r in reversed(scope) if isinstance(r, Loop)))
    coords = fanned_out(fan_out.pairs(op.equation, labels), op, group.shape)
    return _lost(op, group, 'several-elements') if coords is None else coords


def _lost(op: OpUse, group: HiddenGroup, reason: str) -> Diagnostic:
    where = op.where, (op.equation,)
    return Diagnostic('lost-relation', op.key, *where, reason, group=group.name)
