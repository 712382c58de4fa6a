"""Numbers for the elements of values, which tell where a moved element comes from."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np

from ..equations.equation import Equation
from ..equations.labels import moved, moved_operands
from ..primitives import NONE
from .program import Program


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

    def moved_by(self, eqn: Equation) -> list[tuple[int, np.ndarray]]:
        """The results of an equation that only moves elements, each with the numbers in it."""
        operands = () if eqn.effects else moved_operands(eqn)
        if not operands or eqn.does.repeats and self._size(eqn.outs) > self._size(eqn.ins):
            return []  # a value that stands in several places is no copy
        found = moved(
            eqn,
            [self.of(v) if k in operands else None for k, v in enumerate(eqn.ins)],
            [self.constants.get(v) for v in eqn.ins],
        )
        return list(zip(eqn.outs, found or (), strict=False))

    def _size(self, values: Iterable[int]) -> int:
        return sum(self.avals[v].size for v in values)

    def original(self, ids: np.ndarray, value: int) -> int | None:
        """The value that consists of exactly ``ids`` in their order, if it is like ``value``."""
        if not ids.size or (ids == NONE).any():
            return None
        owner = self.owners[bisect_right(self.bases, int(ids.flat[0])) - 1]
        a, b = self.avals[owner], self.avals[value]
        alike = (a.shape, a.dtype) == (b.shape, b.dtype)
        return owner if alike and (ids == self.of(owner)).all() else None

    def twins(self, new: set[int], equations: list[Equation]) -> dict[int, int]:
        """Copies of a new state: all of them are the first one."""
        keys = {self.key(v) for v in new if v in self.moved}
        first: dict = {}
        found = {}
        for eqn in equations:
            for v in eqn.outs if not eqn.scope else ():
                if (
                    v in self.moved
                    and (key := self.key(v)) in keys
                    and first.setdefault(key, v) != v
                ):
                    found[v] = first[key]
        return found

    def key(self, value: int):
        return self.avals[value].dtype, self.moved[value].shape, self.moved[value].tobytes()


def moved_elements(program: Program) -> Elements:
    elements = Elements(program)
    for eqn in program.equations:
        elements.moved.update(elements.moved_by(eqn))
    return elements
