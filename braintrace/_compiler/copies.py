"""Equations that only copy: what is put together and taken out again, element by element, is the value itself.

A ``HiddenGroupState`` hands its states to the model side by side in one array. Reading one back is then reading that new state, as it
is where each state is kept by itself.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import replace

import jax
import numpy as np

from .program import Equation, Program, alive

__all__ = ['Elements', 'MISSING', 'MOVES', 'RESHAPES', 'forward_copies', 'renamed']

RESHAPES = {'reshape', 'squeeze', 'expand_dims', 'copy', 'copy_p'}
INDEXED = {'gather': (0,), 'dynamic_slice': (0,), 'scatter': (0, 2), 'dynamic_update_slice': (0, 1)}      # the operands that move
MOVES = {*RESHAPES, *INDEXED, 'transpose', 'rev', 'slice', 'broadcast_in_dim', 'concatenate', 'stack', 'unstack', 'split'}
MISSING = -1


def forward_copies(program: Program, kept: Collection[int] = ()) -> Program:
    """The program in which a value copied unchanged out of a larger one is that value.

    The copies of a new state are one value, too. Values in ``kept`` stay copies: they are read in
    the place of what they are a copy of.
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
    new = {names.get(v, v) for v in program.new_carry}
    twins = elements.twins(new, equations)
    equations = [renamed(eqn, twins) for eqn in equations]
    names |= twins
    outputs, carry = (tuple(_final(names, v) for v in part) for part in (program.outputs, program.new_carry))
    living = alive(equations, (*outputs, *carry))
    return replace(program, equations=living, outputs=outputs, new_carry=carry)


def renamed(eqn: Equation, names: dict[int, int]) -> Equation:
    return eqn if names.keys().isdisjoint(eqn.ins) else replace(eqn, ins=tuple(names.get(v, v) for v in eqn.ins))


def _final(names: dict[int, int], value: int) -> int:
    while value in names:
        value = names[value]
    return value


class Elements:
    """A number for each element of each value; ``moved`` holds, for a value made by moving, where its elements come from."""

    def __init__(self, program: Program):
        self.avals, self.constants, self.moved = program.avals, program.constants, {}
        self.bases, self.owners, self.base_of, self.next = [], [], {}, 0

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

    def moved_by(self, eqn: Equation) -> list[tuple[int, np.ndarray]]:
        """The results of an equation that only moves elements, each with where its elements come from."""
        if eqn.effects or getattr(eqn.primitive, 'name', None) not in MOVES:
            return []
        moved = _moved(eqn, [self.of(v) for v in eqn.ins], [self.avals[o].shape for o in eqn.outs],
                       [self.constants.get(v) for v in eqn.ins])
        return list(zip(eqn.outs, moved or (), strict=False))

    def original(self, ids: np.ndarray, value: int) -> int | None:
        """The value of which ``ids`` are all the elements in their order, if it is like ``value``."""
        if not ids.size or (ids == MISSING).any():
            return None
        owner = self.owners[bisect_right(self.bases, int(ids.flat[0])) - 1]
        a, b = self.avals[owner], self.avals[value]
        alike = (a.shape, a.dtype) == (b.shape, b.dtype)
        return owner if alike and (ids == self.of(owner)).all() else None

    def twins(self, new: set[int], equations: list[Equation]) -> dict[int, int]:
        """Other copies of the same elements as a new state: all of them are the first one."""
        keys = {self.key(v) for v in new if v in self.moved}
        first: dict = {}
        found = {}
        for eqn in equations:
            for v in eqn.outs if not eqn.scope else ():
                if v in self.moved and (key := self.key(v)) in keys and first.setdefault(key, v) != v:
                    found[v] = first[key]
        return found

    def key(self, value: int):
        return self.avals[value].dtype, self.moved[value].shape, hash(self.moved[value].tobytes())


def _moved(eqn: Equation, ids: list[np.ndarray], shapes: list, known: list) -> list[np.ndarray] | None:
    """Where each element of the results comes from, if the equation only moves elements; else None."""
    name, p = eqn.primitive.name, eqn.params
    if name in RESHAPES:
        return [ids[0].reshape(shapes[0])] if name != 'reshape' or p['dimensions'] is None else None
    if name == 'broadcast_in_dim':
        return [ids[0].reshape(shapes[0])] if ids[0].size == int(np.prod(shapes[0])) else None
    if name == 'transpose':
        return [ids[0].transpose(p['permutation'])]
    if name == 'rev':
        return [np.flip(ids[0], p['dimensions'])]
    if name == 'slice':
        strides = p['strides'] or (1,) * len(p['start_indices'])
        return [ids[0][tuple(slice(*s) for s in zip(p['start_indices'], p['limit_indices'], strides, strict=True))]]
    if name == 'concatenate':
        return [np.concatenate(ids, p['dimension'])]
    if name == 'stack':
        return [np.stack(ids, p['axis'])]
    if name == 'unstack':
        return list(np.moveaxis(ids[0], p['axis'], 0))
    if name == 'split':
        return np.split(ids[0], np.cumsum(p['sizes'])[:-1], p['axis'])
    return _indexed(eqn, ids, known)


def _indexed(eqn: Equation, ids: list[np.ndarray], known: list) -> list[np.ndarray] | None:
    """A gather, scatter or dynamic slice with known indices, evaluated on the numbers of the elements."""
    moving = INDEXED[eqn.primitive.name]
    if eqn.params.get('update_jaxpr') is not None or any(known[k] is None for k in range(len(ids)) if k not in moving):
        return None
    flat = np.concatenate([ids[k].reshape(-1) for k in moving])
    args, start = list(known), 0
    for k in moving:
        args[k] = np.arange(start, start + ids[k].size, dtype=np.int32).reshape(ids[k].shape)
        start += ids[k].size
    with jax.ensure_compile_time_eval():
        found = np.asarray(eqn.evaluate(args)[0])
    inside = (found >= 0) & (found < start)
    return [np.where(inside, flat[np.where(inside, found, 0)], MISSING)] if start else None
