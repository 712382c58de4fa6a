"""Several states in one array, once positions are known: which leaves to split too, and which paths
are lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..equations import labels as lb
from ..equations.equation import END
from ..graph import Diagnostic, ETraceGraph, Groups
from ..program import dataflow as flow
from ..program.leaves import path_name
from ..program.program import Program
from ..stacked_states.assembly import chain, read_apart
from ..stacked_states.unstacking import MustSplit
from .groups_and_cuts import Positions


def split_alike(program: Program, positions: Positions, kept: Collection[int]) -> None:
    """Raise :class:`MustSplit` where a whole leaf and a piece of a split leaf of its shape read
    each other: both are split, or, where the whole leaf is in ``kept``, neither is.

    A split leaf in which a row and a block of rows read each other becomes whole again.
    """
    leaf_of = {c: leaf for leaf in range(len(program.splits)) for c in program.pieces(leaf)}
    shape_of = [program.avals[program.carry[c]].shape for c in program.hidden]
    for s, sweep in enumerate(positions.sweeps) if leaf_of else ():
        for r, labels in sweep.old.items():
            states = {program.hidden[s], program.hidden[r]}
            if states <= leaf_of.keys() and lb.has(labels) and shape_of[s] != shape_of[r]:
                pair = leaf_of[program.hidden[s]], leaf_of[program.hidden[r]]
                if pair[0] == pair[1] and len(shape_of[s]) != len(shape_of[r]):
                    raise MustSplit({pair[0]: None})
                for whole, part in (pair, pair[::-1]):
                    aval, split = program.leaf_avals[whole], program.splits[part]
                    alike = split is not None and split.aval.shape == aval.shape
                    if program.splits[whole] is None and alike:
                        forced = {whole: replace(split, aval=aval)}
                        raise MustSplit({part: None} if whole in kept else forced)


def stacked_states(graph: ETraceGraph) -> list[Diagnostic]:
    """Where old rows move through an array of states, and where a part of a new state is read as an
    old one.
    """
    program, recurrent = graph.program, graph.recurrent
    group_of = {c: g for g, group in enumerate(graph.hidden_groups) for c in group.states}
    past = flow.old_ancestors(program, group_of, recurrent)
    moving = {i for i in graph.mixing if program.equations[i].does.moves is not None}
    read = _read_as_old(program, group_of, recurrent, past)
    told = dict(read)
    moved = {
        c: _moved_at(program, moving, group_of, c, past)
        for c in group_of
        if moving and c not in told and c not in program.virtual_states
    }
    found = [(_leaf_name(program, c), i, 'moved') for c, i in moved.items() if i is not None]
    found += [(program.carry_names[c], i, 'read-as-old') for c, i in read]
    return [
        Diagnostic('stacked-state', name, program.equations[i].where, (i,), reason)
        for name, i, reason in dict.fromkeys(found)
    ]


def _leaf_name(program: Program, c: int) -> str:
    return path_name(program.leaf_keys[program.leaf_of(c)], 'carry')


def _moved_at(
    program: Program, moving: set[int], group_of: Mapping[int, int], c: int, past
) -> int | None:
    """The equation behind a new state that moves old rows to another piece of its leaf, or beside
    rows that an op makes.
    """
    behind, own = _behind(program, program.new_carry[c]), 1 << group_of[c]
    pieces = program.pieces(program.leaf_of(c))
    others = sum({1 << group_of[d] for d in pieces if d in group_of}) & ~own
    read = {i: flow.union(past, program.equations[i].ins) for i in moving & behind}
    # bit 1: an op made it; bit 2: it holds old rows of this state that were moved
    start = {o: 1 for i in program.ops for o in program.equations[i].outs}
    start |= {o: 2 for i in read if read[i] & own for o in program.equations[i].outs}
    facts = flow.forward(program, start, lambda i, found: 0 if i in program.blocks else found)
    for i in sorted(behind):
        eqn = program.equations[i]
        if read.get(i, 0) & others:
            return i
        # rows of an op and old rows put side by side
        made = [v for v in eqn.ins if facts[v] & 1]
        kept = [v for v in eqn.ins if not facts[v] & 1]
        if (
            eqn.does.beside
            and made
            and any(past[v] & own if i in read else facts[v] & 2 for v in kept)
        ):
            return i
    return None


def _behind(program: Program, value: int) -> set[int]:
    """The equations that make a value, up to ops and blocked equations."""
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
    """(position in the carry, equation) where a part of that new state is read as an old one.

    A cut equation holds old states constant. If a new state is not split, or a loop carries it, the
    cut can not see that a value is a part of it, whose past should be kept.
    """
    # where a new state is put together: at the end of the step, and of each iteration of a loop
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
    # its parts, and the past that reaches cut equations from them
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
