"""The step of a model as a flat program: values are integers, equations are records, calls are
inlined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from ..._etrace_op import is_etp_primitive
from ..equations.equation import BEGIN, END, Equation, Region, is_inexact
from .leaves import path_name
from .stacked_leaf import Parts, Split


@dataclass(frozen=True)
class Program:
    """One step ``(params, carry, *inputs) -> (outputs, carry)``.

    ``hidden`` holds positions in ``carry``, ``trainable`` positions in ``params``. ``constants``:
    value number -> array. Trees rebuild the user's structures from flat leaves. ``leaf_keys``: the
    paths of the leaves of the cell's carry; ``splits``: how each leaf holds several hidden states,
    None where it is one entry of ``carry``; empty if no leaf is split. ``to_mark``: the parameters
    whose equations become ops, by position; None where nothing is marked. ``virtual``: so many
    entries at the end of ``carry`` are hidden states that the cell does not have; their value is
    always zero, so only their derivatives count. ``raw_keys``: the paths of leaves of the cell's
    carry that are integers and random keys.
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
    splits: tuple[Split | Parts | None, ...] = ()
    to_mark: tuple[int, ...] | None = None
    virtual: int = 0
    raw_keys: frozenset[tuple[str, ...]] = frozenset()

    def apart(self, leaves: Sequence) -> list:
        """The carry as the program has it, from the leaves that the cell has."""
        splits = self.splits or [None] * len(leaves)
        parts = [[x] if s is None else s.apart(x) for x, s in zip(leaves, splits, strict=True)]
        avals = (self.avals[self.carry[c]] for c in self.virtual_states)
        return [x for part in parts for x in part] + [jnp.zeros(a.shape, a.dtype) for a in avals]

    def together(self, carry: Sequence) -> list:
        """The inverse of :meth:`apart`."""
        if not self.splits:
            return list(carry[: len(self.leaf_keys)])
        parts = ([carry[c] for c in self.pieces(leaf)] for leaf in range(len(self.splits)))
        return [
            part[0] if s is None else s.together(part)
            for part, s in zip(parts, self.splits, strict=True)
        ]

    def pieces(self, leaf: int) -> range:
        """The positions in the carry of the parts of one leaf."""
        if not self.splits:
            return range(leaf, leaf + 1)
        sizes = [1 if s is None else len(s.names) for s in self.splits[: leaf + 1]]
        return range(sum(sizes[:-1]), sum(sizes))

    def leaf_of(self, c: int) -> int:
        """The leaf that entry ``c`` of the carry is, or is a part of."""
        return next(leaf for leaf in range(len(self.leaf_keys)) if c in self.pieces(leaf))

    @cached_property
    def leaf_avals(self) -> list:
        return [
            self.avals[self.carry[self.pieces(leaf)[0]]] if s is None else s.aval
            for leaf, s in enumerate(self.splits or [None] * len(self.leaf_keys))
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
        return list(zip(begin.outs, end.ins, strict=False))[: begin.loop.num_carry]

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
