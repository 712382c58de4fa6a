"""States in one array, once positions are known: what else to split, and what stays unsettled."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from . import flow
from . import labels as lb
from .graph import Diagnostic
from .pieces import MustSplit, chain, read_apart
from .positions import Positions
from .program import END, Program
from .recurrence import Groups, old_ancestors

__all__ = ['split_alike', 'stacked_notes']


def split_alike(program: Program, positions: Positions) -> None:
    """Have a leaf split like one of its shape with the pieces of which it is coupled."""
    leaf_of = {c: leaf for leaf in range(len(program.splits)) for c in program.pieces(leaf)}
    shape_of = [program.avals[program.carry[c]].shape for c in program.hidden]
    for s, sweep in enumerate(positions.sweeps) if leaf_of else ():
        for r, labels in sweep.old.items():
            if lb.has(labels) and shape_of[s] != shape_of[r]:
                pair = leaf_of[program.hidden[s]], leaf_of[program.hidden[r]]
                for whole, part in (pair, pair[::-1]):
                    aval, split = program.leaf_avals[whole], program.splits[part]
                    alike = split is not None and split.aval.shape == aval.shape
                    if program.splits[whole] is None and alike:
                        raise MustSplit({whole: replace(split, aval=aval)})


def stacked_notes(program: Program, group_of, recurrent) -> list[Diagnostic]:
    """A diagnostic for each place where a part of a new state is read as an old one."""
    notes = []
    for c, i in _read_as_old(program, group_of, recurrent):
        eqn, name = program.equations[i], program.carry_names[c]
        notes.append(Diagnostic(
            'stacked-state', 'warning', f'{name} holds several states, and a part of its new value '
            f'is read by {eqn.primitive.name} as if it were made of old ones: what it owes to earlier '
            'steps has no gradient there. Keep each of these states in a leaf of the carry (a '
            'HiddenState) of its own', name, eqn.where))
    return notes


def _read_as_old(
    program: Program, group_of: Mapping[int, int], recurrent: Mapping[int, Groups]
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
    parts = [(c, v, found) for c, v in ends if (found := read_apart(program, v))]
    past = old_ancestors(program, dict(group_of), dict(recurrent)) if parts else []
    places = set()
    for c, value, values in parts:
        stop = recurrent.keys() | program.blocks | chain(program, value)[0]

        def passed(i: int, facts: int, stop=stop) -> int:
            return 0 if i in stop else facts

        read = flow.forward(program, {v: past[v] for v in values}, passed, new)
        places |= {
            (c, i)
            for i, groups in recurrent.items()
            if groups & flow.union(read, set(program.equations[i].ins) - new)
        }
    return sorted(places)
