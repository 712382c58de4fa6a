"""Hidden states that a step keeps side by side in one array: each is a hidden state of its own.

A step may stack, or write row by row, the new states of several layers, or keep them in another
layout than it computes with. Its hidden states are then values of the step, not leaves of its
carry. Such a leaf is split: old states become inputs, readers of the whole leaf read it put
together, and each new state is the value that became a part of the leaf. An element-wise equation
of several states is applied to each alone, so that no path joins states that no element joins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ..._errors import NotSupportedError
from ..program import dataflow as flow
from ..program.elements import moved_elements
from ..program.program import Program
from ..program.stacked_leaf import Parts, Split
from .assembly import assembles, read_apart
from .delay_line import delay_line
from .origins import Origins
from .rewriting import rewritten


class MustSplit(Exception):
    """Leaves of the carry that must be split like their partners; None: that must stay whole."""

    def __init__(self, splits: dict[int, Split | Parts | None]):
        super().__init__(*splits)
        self.splits = splits


def split_in_parts(program: Program, states: Iterable[int], where: str) -> None:
    """Raise :class:`MustSplit` for complex states (positions in the carry) whose step has no
    complex derivative: their real and imaginary parts become states of their own.
    """
    leaves = {program.leaf_of(c) for c in states}
    if any(program.splits and program.splits[leaf] is not None for leaf in leaves):
        names = ', '.join(program.carry_names[c] for c in states)
        raise NotSupportedError(
            f'{where}: the step is not holomorphic in {names}, complex hidden states that stand in '
            'one array with others. Keep each of them in an array of its own.'
        )
    raise MustSplit({leaf: Parts(program.leaf_avals[leaf]) for leaf in leaves})


def taken_apart(program: Program, forced: Mapping[int, Split | Parts | None]) -> Program:
    """The program with every leaf split that holds several states, and all in ``forced``.

    A leaf that has None there stays whole.
    """
    asked = [c for c in program.hidden if c not in forced]
    forced = {c: s for c, s in forced.items() if s is not None}
    if not any(map(assembles, program.equations)) and not forced:
        return program
    # delay lines first, then leaves that are put together from several values
    origins, elements = Origins(program, {}), moved_elements(program)
    lines = {c: s for c in asked if (s := delay_line(program, elements, c)) is not None}
    rest = (c for c in asked if c not in lines)
    found = lines | {c: s for c in rest if (s := origins.split(c, elements)) is not None}
    if not found and not forced:
        return program
    # A split costs a trace for each piece that an op reaches. So keep it only where the pieces are
    # read apart, or read each other.
    apart = rewritten(program, {**found, **forced})
    needed = {
        c: s
        for c, s in found.items()
        if c in lines or read_apart(program, program.new_carry[c]) or _cross_talk(apart, c)
    }
    if needed == found:
        return apart
    return rewritten(program, {**needed, **forced}) if needed or forced else program


def _cross_talk(apart: Program, leaf: int) -> bool:
    """Whether one piece reads another by anything but an op that both read and are made by.

    This counts only where the result of an op is as large as the pieces that it reaches. Otherwise
    pieces are positions of one layer, which a plain op like a roll lets read each other.
    """
    at = apart.pieces(leaf)
    piece = {c: k for k, c in enumerate(at)}
    if not _whole_results(apart, piece):
        return False
    recurrent = flow.reached_groups(apart, piece, apart.ops)
    old = flow.forward(
        apart,
        {apart.carry[c]: 1 << k for c, k in piece.items()},
        lambda i, found: 0 if i in apart.blocks else found & ~recurrent.get(i, 0),
    )
    new: dict[int, int] = {}
    for c, k in piece.items():
        for i in apart.consumers.get(apart.new_carry[c], ()):
            for o in apart.results(i, apart.new_carry[c]):
                new[o] = new.get(o, 0) | 1 << k
    read = flow.forward(apart, new, flow.gradients(apart))
    return any(
        (old[apart.new_carry[c]] | read[apart.new_carry[c]]) & ~(1 << k) for c, k in piece.items()
    )


def _whole_results(apart: Program, piece: Mapping[int, int]) -> bool:
    """Whether each op's result is as large as every piece that it reaches before another op."""
    ends = {apart.new_carry[c]: 1 << k for c, k in piece.items()}
    ahead = flow.backward(apart, ends, lambda i, found: 0 if i in apart.op_set else found)
    sizes = {k: np.prod(apart.avals[apart.carry[c]].shape) for c, k in piece.items()}
    for i in apart.ops:
        y = apart.y_of(i)
        if any(np.prod(apart.avals[y].shape) != sizes[k] for k in flow.members(ahead[y])):
            return False
    return True
