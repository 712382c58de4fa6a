"""States in one array, once positions are known: what else to split, and what stays unsettled."""
from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from . import flow
from . import labels as lb
from .copies import MOVES
from .graph import Diagnostic
from .pieces import MustSplit, chain, read_apart
from .positions import Positions
from .program import END, Program, path_name
from .recurrence import Groups, old_ancestors

__all__ = ['split_alike', 'stacked_notes']

ENTRIES = {'concatenate', 'stack', 'scatter', 'scatter-add', 'dynamic_update_slice'}


def split_alike(program: Program, positions: Positions, kept: Collection[int]) -> None:
    """Have a leaf split like one of its shape with the pieces of which it is coupled.

    A leaf in which a row and a block of rows read each other stays whole, as those in ``kept`` and
    what is coupled with them do.
    """
    leaf_of = {c: leaf for leaf in range(len(program.splits)) for c in program.pieces(leaf)}
    shape_of = [program.avals[program.carry[c]].shape for c in program.hidden]
    for s, sweep in enumerate(positions.sweeps) if leaf_of else ():
        for r, labels in sweep.old.items():
            if lb.has(labels) and shape_of[s] != shape_of[r]:
                pair = leaf_of[program.hidden[s]], leaf_of[program.hidden[r]]
                if pair[0] == pair[1] and len(shape_of[s]) != len(shape_of[r]):
                    raise MustSplit({pair[0]: None})
                for whole, part in (pair, pair[::-1]):
                    aval, split = program.leaf_avals[whole], program.splits[part]
                    alike = split is not None and split.aval.shape == aval.shape
                    if program.splits[whole] is None and alike:
                        forced = {whole: replace(split, aval=aval)}
                        raise MustSplit({part: None} if whole in kept else forced)


def stacked_notes(program: Program, mixing, group_of, recurrent) -> list[Diagnostic]:
    """A diagnostic where a part of a new state is read as an old one, and where old rows move."""
    past = old_ancestors(program, dict(group_of), dict(recurrent))
    moving = {i for i in mixing if getattr(program.equations[i].primitive, 'name', '') in MOVES}
    read = _read_as_old(program, group_of, recurrent, past)
    notes = []
    for c in group_of.keys() - dict(read).keys() if moving else ():
        i = _moved_at(program, moving, group_of, c, past)
        if i is not None:
            name, eqn = _leaf_name(program, c), program.equations[i]
            notes.append(Diagnostic(
                'stacked-state', 'warning', f'{name} holds several states, and {eqn.primitive.name} '
                'moves them through the array from step to step in a way that is not taken apart: '
                'what they owe to earlier steps has no gradient. Give each row a leaf of the carry '
                '(a HiddenState) of its own', name, eqn.where))
    for c, i in read:
        eqn, name = program.equations[i], program.carry_names[c]
        notes.append(Diagnostic(
            'stacked-state', 'warning', f'{name} holds several states, and a part of its new value '
            f'is read by {eqn.primitive.name} as if it were made of old ones: what it owes to earlier '
            'steps has no gradient there. Keep each of these states in a leaf of the carry (a '
            'HiddenState) of its own', name, eqn.where))
    return list(dict.fromkeys(notes))


def _leaf(program: Program, c: int) -> int:
    return next(k for k in range(len(program.leaf_keys)) if c in program.pieces(k))


def _leaf_name(program: Program, c: int) -> str:
    return path_name(program.leaf_keys[_leaf(program, c)], 'carry')


def _moved_at(
    program: Program, moving: set[int], group_of: Mapping[int, int], c: int, past
) -> int | None:
    """Where old states move in the leaf of a state: beside what an op makes, or between pieces."""
    behind, own = _behind(program, program.new_carry[c]), 1 << group_of[c]
    pieces = program.pieces(_leaf(program, c))
    others = sum({1 << group_of[d] for d in pieces if d in group_of}) & ~own
    read = {i: flow.union(past, program.equations[i].ins) for i in moving & behind}
    start = {o: 1 for i in program.ops for o in program.equations[i].outs}
    start |= {o: 2 for i in read if read[i] & own for o in program.equations[i].outs}
    facts = flow.forward(program, start, lambda i, found: 0 if i in program.blocks else found)
    for i in sorted(behind):
        eqn = program.equations[i]
        if read.get(i, 0) & others:
            return i
        made = [v for v in eqn.ins if facts[v] & 1]
        kept = [v for v in eqn.ins if not facts[v] & 1]
        if getattr(eqn.primitive, 'name', '') in ENTRIES and made and any(
            past[v] & own if i in read else facts[v] & 2 for v in kept
        ):
            return i
    return None


def _behind(program: Program, value: int) -> set[int]:
    """The equations that a value is made by, up to ops and what passes no gradient."""
    behind, todo = set(), [value]
    while todo:
        i = program.producer.get(todo.pop())
        if i is not None and i not in behind and i not in program.op_set | program.blocks:
            behind.add(i)
            todo.extend(program.equations[i].ins)
    return behind


def _read_as_old(
    program: Program, group_of: Mapping[int, int], recurrent: Mapping[int, Groups], past
) -> list[tuple[int, int]]:
    """(position in the carry, equation): a part of that new state is read there as an old one.

    A cut equation holds the old states that it finds constant. Of a state that is not split, and of
    one that a loop carries, it does not see that a value it reads is the new state itself, or that
    of the iteration, which keeps its past.
    """
    new = {program.new_carry[c] for c in group_of}
    ends = [(c, program.new_carry[c]) for c in group_of]
    loops = [eqn for eqn in program.equations if eqn.primitive is END]
    if loops:
        reached = flow.backward(
            program, {program.new_carry[c]: 1 << c for c in group_of}, flow.gradients(program)
        )
        for eqn in loops:
            ends += [
                (next(flow.members(reached[o])), v)
                for v, o in list(zip(eqn.ins, eqn.outs, strict=True))[: eqn.loop.num_carry]
                if reached[o]
            ]
    parts = [(c, v, found) for c, v in ends if (found := read_apart(program, v, wide=True))]
    places = set()
    for c, value, values in parts:
        stop = recurrent.keys() | program.blocks | chain(program, value, wide=True)[0]

        def passed(i: int, facts: int, stop=stop) -> int:
            return 0 if i in stop else facts

        read = flow.forward(program, {v: past[v] for v in values}, passed, new)
        places |= {
            (c, i)
            for i, groups in recurrent.items()
            if groups & flow.union(read, set(program.equations[i].ins) - new)
        }
    return sorted(places)
