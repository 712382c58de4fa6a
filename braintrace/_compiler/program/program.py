"""A step as a flat list of equations, the elements of its values, and its copies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._etrace_op import is_etp_primitive
from ..equations import BEGIN, END, Equation, Region, is_inexact, moved, moved_operands
from ..primitives import NONE
from .leaves import ComplexParts, Split, path_name

# program ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """One step ``(params, carry, *inputs) -> (outputs, carry)``: values are integers, equations are
    records, calls are inlined.

    ``hidden`` holds positions in ``carry``, ``trainable`` positions in ``params``. ``constants``:
    value number -> array. Trees rebuild the user's structures from flat leaves. ``leaf_keys``: the
    paths of the leaves of the cell's carry; ``splits``: how each leaf holds several hidden states,
    None where it is one entry of ``carry``. ``to_mark``: the parameters whose equations become ops,
    by position; None where nothing is marked. ``virtual``: so many entries at the end of ``carry``
    are hidden states that the cell does not have; their value is always zero, so only their
    derivatives count. ``raw_keys``: the paths of leaves of the cell's carry that are integers and
    random keys.
    """

    avals: tuple
    params: tuple[int, ...]
    carry: tuple[int, ...]
    inputs: tuple[int, ...]
    constants: dict[int, Any]
    equations: tuple[Equation, ...]
    outputs: tuple[int, ...]
    new_carry: tuple[int, ...]
    param_keys: tuple[tuple[str, ...], ...]
    carry_keys: tuple[tuple[str, ...], ...]
    hidden: tuple[int, ...]
    trainable: tuple[int, ...]
    trees: dict[str, Any]
    leaf_keys: tuple[tuple[str, ...], ...]
    splits: tuple[Split | ComplexParts | None, ...]
    to_mark: tuple[int, ...] | None = None
    virtual: int = 0
    raw_keys: frozenset[tuple[str, ...]] = frozenset()

    def apart(self, leaves: Sequence) -> list:
        """The carry as the program has it, from the leaves that the cell has."""
        both = zip(leaves, self.splits, strict=True)
        parts = [
            [x] if s is None else [s.piece(x, k) for k in range(len(s.names))] for x, s in both
        ]
        avals = (self.avals[self.carry[c]] for c in self.virtual_states)
        return [x for part in parts for x in part] + [jnp.zeros(a.shape, a.dtype) for a in avals]

    def together(self, carry: Sequence) -> list:
        """The inverse of :meth:`apart`."""
        return [
            carry[at] if s is None else s.together(carry[at : at + len(s.names)])
            for at, s in zip(self.starts, self.splits, strict=False)
        ]

    @cached_property
    def starts(self) -> list[int]:
        """The position in the carry of the first part of each leaf, and the one behind them all."""
        return [0, *accumulate(1 if s is None else len(s.names) for s in self.splits)]

    def pieces(self, leaf: int) -> range:
        """The positions in the carry of the parts of one leaf."""
        return range(*self.starts[leaf : leaf + 2])

    def leaf_of(self, c: int) -> int:
        """The leaf that entry ``c`` of the carry is, or is a part of."""
        return bisect_right(self.starts, c) - 1

    @cached_property
    def leaf_avals(self) -> list:
        return [
            self.avals[self.carry[start]] if s is None else s.aval
            for start, s in zip(self.starts, self.splits, strict=False)
        ]

    @property
    def virtual_states(self) -> range:
        """The positions of the virtual states in the carry."""
        return range(len(self.carry) - self.virtual, len(self.carry))

    @cached_property
    def producer(self) -> dict[int, int]:
        return {v: i for i, e in enumerate(self.equations) for v in e.outs}

    @cached_property
    def consumers(self) -> dict[int, list[int]]:
        """In program order."""
        found: dict[int, list[int]] = {}
        for i, eqn in enumerate(self.equations):
            for v in dict.fromkeys(eqn.ins):
                found.setdefault(v, []).append(i)
        return found

    @cached_property
    def begin_of(self) -> dict[int, int]:
        """End marker of each loop -> its begin marker."""
        begins = {e.loop: i for i, e in enumerate(self.equations) if e.primitive is BEGIN}
        return {i: begins[e.loop] for i, e in enumerate(self.equations) if e.primitive is END}

    @cached_property
    def end_of(self) -> dict[int, int]:
        return {b: e for e, b in self.begin_of.items()}

    def feedback(self, i: int) -> list[tuple[int, int]]:
        """For a marker: each carry of an iteration with its value at the end of the iteration."""
        begin, end = self.equations[self.begin_of.get(i, i)], self.equations[self.end_of.get(i, i)]
        return list(zip(begin.outs, end.ins, strict=False))[
            : begin.loop.num_carry if begin.loop else 0
        ]

    def results(self, i: int, value: int) -> list[int]:
        """The values that depend on ``value`` through equation ``i``."""
        eqn = self.equations[i]
        if eqn.loop is None:
            return list(eqn.outs)
        found = [o for v, o in zip(eqn.ins, eqn.outs, strict=True) if v == value]
        return found + [
            first for first, last in self.feedback(i) if last == value and eqn.primitive is END
        ]

    def operands(self, i: int, value: int) -> list[int]:
        """The values that ``value``, made by equation ``i``, depends on."""
        eqn = self.equations[i]
        if eqn.loop is None:
            return list(eqn.ins)
        found = [v for v, o in zip(eqn.ins, eqn.outs, strict=True) if o == value]
        return found + [
            last for first, last in self.feedback(i) if first == value and eqn.primitive is BEGIN
        ]

    @cached_property
    def ops(self) -> tuple[int, ...]:
        return tuple(i for i, e in enumerate(self.equations) if is_etp_primitive(e.primitive))

    @cached_property
    def blocks(self) -> frozenset[int]:
        """Equations that pass no gradient, or make integers or booleans only."""
        return frozenset(
            i
            for i, e in enumerate(self.equations)
            if e.loop is None
            and (not e.does.gradient or not any(is_inexact(self.avals[o]) for o in e.outs))
        )

    @cached_property
    def op_set(self) -> frozenset[int]:
        return frozenset(self.ops)

    def y_of(self, op: int) -> int:
        eqn = self.equations[op]
        return eqn.outs[eqn.primitive.y_outvar_index]

    @cached_property
    def new_states(self) -> tuple[int, ...]:
        return tuple(self.new_carry[c] for c in self.hidden)

    @cached_property
    def param_names(self) -> tuple[str, ...]:
        return tuple(path_name(k, 'params') for k in self.param_keys)

    @cached_property
    def carry_names(self) -> tuple[str, ...]:
        return tuple(path_name(k, 'carry') for k in self.carry_keys)


def alive(equations: Sequence[Equation], results: Sequence[int]) -> tuple[Equation, ...]:
    """Equations that lead to a result or have a side effect, and the loops around those."""
    wanted, kept = set(results), []
    loops: set[Region | None] = set()
    for eqn in equations:
        if eqn.effects:
            loops.update(eqn.scope)
    for eqn in reversed(equations):
        if eqn.effects or not wanted.isdisjoint(eqn.outs) or eqn.loop in loops:
            kept.append(eqn)
            wanted.update(eqn.ins)
            if eqn.loop is not None:
                loops.add(eqn.loop)
    return tuple(reversed(kept))


# elements -----------------------------------------------------------------------------------------
#
# Numbers for the elements of values, which tell where a moved element comes from.


class Elements:
    """A number for each element of each value.

    ``moved`` holds the numbers in a value that is made by moving. The elements of any other value
    have consecutive numbers from its base on, given when it is first asked for; ``bases`` and
    ``owners`` list these bases and values, ascending.
    """

    def __init__(self, program: Program):
        self.avals, self.constants = program.avals, program.constants
        self.moved: dict[int, np.ndarray] = {}
        self.bases: list[int] = []
        self.owners: list[int] = []
        self.base_of: dict[int, int] = {}
        self.next = 0

    def of(self, value: int) -> np.ndarray:
        if value in self.moved:
            return self.moved[value]
        shape = self.avals[value].shape
        size = int(np.prod(shape))
        if value not in self.base_of:
            self.base_of[value] = self.next
            self.bases.append(self.next)
            self.owners.append(value)
            self.next += max(1, size)
        return np.arange(self.base_of[value], self.base_of[value] + size).reshape(shape)

    def which(self, ids: np.ndarray) -> np.ndarray:
        """For each number the place in ``owners`` of the value that it is of; -1 for ``NONE``."""
        if ids.size >= 64:
            return np.searchsorted(self.bases, ids, 'right') - 1
        # for a few numbers an array of all bases would cost more than it saves
        return np.array([bisect_right(self.bases, int(e)) - 1 for e in ids], np.int64)

    def moved_by(self, eqn: Equation) -> list[tuple[int, np.ndarray]]:
        """The results of an equation that only moves elements, each with the numbers in it."""
        operands = () if eqn.effects else moved_operands(eqn)
        if not operands:
            return []
        before, after = (sum(self.avals[v].size for v in vs) for vs in (eqn.ins, eqn.outs))
        if eqn.does.repeats and after > before:
            return []  # a value that is in several places is no copy
        found = moved(
            eqn,
            [self.of(v) if k in operands else None for k, v in enumerate(eqn.ins)],
            [self.constants.get(v) for v in eqn.ins],
        )
        return list(zip(eqn.outs, found or (), strict=False))

    def original(self, ids: np.ndarray, value: int) -> int | None:
        """The value that consists of exactly ``ids`` in their order, if it is like ``value``."""
        if not ids.size or (ids == NONE).any():
            return None
        owner = self.owners[bisect_right(self.bases, int(ids.flat[0])) - 1]
        a, b = self.avals[owner], self.avals[value]
        alike = (a.shape, a.dtype) == (b.shape, b.dtype)
        return owner if alike and (ids == self.of(owner)).all() else None


# copy propagation ---------------------------------------------------------------------------------
#
# A value that is put into an array and taken out again, element by element, is the value itself.
#
# A ``HiddenGroupState`` hands its states to the model side by side in one array. A model that reads
# one back reads that new state, as if each state were kept by itself.


def forward_copies(program: Program, kept: Collection[int] = ()) -> Program:
    """The program in which a value copied unchanged out of a larger one is that value.

    All copies of a new state are one value. Values in ``kept`` stay copies.
    """
    elements, names, equations = Elements(program), {}, []
    for eqn in program.equations:
        eqn = renamed(eqn, names)
        equations.append(eqn)
        for value, ids in elements.moved_by(eqn):
            source = elements.original(ids, value)
            elements.moved[value] = ids
            if source is not None and value not in kept:
                names[value] = source

    # copies of a new state that move the same elements are all the first of them
    def key(value: int) -> tuple:
        ids = elements.moved[value]
        return program.avals[value].dtype, ids.shape, ids.tobytes()

    new = {names.get(v, v) for v in program.new_carry}
    keys = {key(v) for v in new if v in elements.moved}
    first: dict[tuple, int] = {}
    twins = {}
    for v in (v for eqn in equations if not eqn.scope for v in eqn.outs if v in elements.moved):
        if (k := key(v)) in keys and first.setdefault(k, v) != v:
            twins[v] = first[k]
    equations = [renamed(eqn, twins) for eqn in equations]
    names |= twins

    def final(value: int) -> int:
        while value in names:
            value = names[value]
        return value

    outputs, carry = (tuple(map(final, vs)) for vs in (program.outputs, program.new_carry))
    living = alive(equations, (*outputs, *carry))
    return replace(program, equations=living, outputs=outputs, new_carry=carry)


def renamed(eqn: Equation, names: dict[int, int]) -> Equation:
    if names.keys().isdisjoint(eqn.ins):
        return eqn
    return replace(eqn, ins=tuple(names.get(v, v) for v in eqn.ins))
