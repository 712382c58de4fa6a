"""The values that a leaf of the carry is made of, element by element, and so how to split it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import numpy as np

from ..equations.equation import Equation
from ..equations.labels import identity
from ..primitives import NONE
from ..program.elements import Elements
from ..program.program import Program
from ..program.stacked_leaf import Split, grid
from .assembly import acts_on_elements, assembles


class Origins:
    """The values that the new states are made of.

    ``labels`` holds a number for each element of a value that is made of several others: elements
    with one number belong together. ``given``: the labels of values that are split already.
    """

    def __init__(self, program: Program, given: Mapping[int, np.ndarray]):
        self.program, self.elements = program, Elements(program)
        self.labels: dict[int, np.ndarray] = dict(given)
        for i in self._behind():
            eqn = program.equations[i]
            found = self._assembled(eqn) if assembles(eqn) else {eqn.outs[0]: self._combined(eqn)}
            # labels that are all one say nothing
            self.labels |= {
                o: lab for o, lab in found.items() if lab is not None and lab.size and lab.max()
            }

    def _behind(self) -> list[int]:
        """The equations behind the new states that move or act on single elements."""
        found: set[int] = set()
        todo = [*self.program.new_states]
        while todo:
            i = self.program.producer.get(todo.pop())
            if i is None or i in found:
                continue
            eqn = self.program.equations[i]
            if assembles(eqn) or acts_on_elements(eqn):
                found.add(i)
                todo.extend(eqn.ins)
        return sorted(found)

    def _assembled(self, eqn: Equation) -> dict[int, np.ndarray]:
        moved = dict(self.elements.moved_by(eqn))
        self.elements.moved.update(moved)
        return {o: self._by_owner(ids)[0] for o, ids in moved.items()}

    def _combined(self, eqn: Equation) -> np.ndarray | None:
        """Elements computed from elements that belong together in every operand belong together."""
        shape = self.program.avals[eqn.outs[0]].shape
        read = [
            self.labels[v].reshape(-1)
            for v in eqn.ins
            if v in self.labels and self.program.avals[v].shape == shape
        ]
        if not read:
            return None
        return np.unique(np.stack(read), axis=1, return_inverse=True)[1].reshape(shape)

    def _by_owner(self, ids: np.ndarray) -> tuple[np.ndarray, list]:
        """A label for each element by the value that it is of, and these values; copies differ."""
        flat, bases = ids.reshape(-1), self.elements.bases
        if flat.size < 64:  # NumPy would have to make an array of all bases
            owners = np.array([bisect_right(bases, int(e)) - 1 for e in flat])
        else:
            owners = np.searchsorted(bases, flat, 'right') - 1
        owners[flat == NONE] = -1
        # an owner that is itself made of several values counts as these
        inner = np.zeros_like(flat)
        for k in np.unique(owners[owners >= 0]):
            lab = self.labels.get(self.elements.owners[k])
            if lab is not None:
                inner[owners == k] = lab.reshape(-1)[flat[owners == k] - bases[k]]
        kinds, found = np.unique(
            np.stack([owners, _occurrence(flat), inner]), axis=1, return_inverse=True
        )
        values = [None if k < 0 else self.elements.owners[k] for k in kinds[0]]
        return found.reshape(ids.shape), values

    def split(self, leaf: int, moved: Elements) -> Split | None:
        """How the new value of a leaf is put together, if it holds states of other shapes.

        ``moved``: the elements of all values that are made by moving.
        """
        found = self._put_together(leaf)
        return None if found is None or self._tears(found, moved) else found

    def _put_together(self, leaf: int) -> Split | None:
        value = self.program.new_carry[leaf]
        aval, ids = self.program.avals[value], self.elements.moved.get(value)
        if not np.prod(aval.shape):
            return None
        labels, owners = (self.labels.get(value), None) if ids is None else self._by_owner(ids)
        if labels is None or None in (owners or ()):
            return None  # some elements come from nowhere
        places = [
            self._places(labels == k, ids, owners[k] if owners else None)
            for k in range(labels.max() + 1)
        ]
        if len(places) == 1 and np.array_equal(places[0], identity(aval.shape)):
            return None  # the leaf is one value as it is
        return Split(aval, tuple(sorted(places, key=lambda p: int(p.min()))))

    def _places(self, chosen: np.ndarray, ids, owner: int | None) -> np.ndarray:
        """The flat positions of one piece, in the shape of its value if it is a whole one."""
        at, shape = np.flatnonzero(chosen), chosen.shape
        if owner is None:
            return grid(at, shape)
        own = self.program.avals[owner].shape
        maker = self.program.producer.get(owner)
        # a value that was itself taken out of a larger one has no shape of its own
        taken = maker is not None and self.program.equations[maker].does.takes_part
        if at.size != np.prod(own) or taken:
            return grid(at, shape)
        offsets = ids.reshape(-1)[at] - self.elements.base_of[owner]
        return at[np.argsort(offsets)].reshape(own)

    def _tears(self, split: Split, full: Elements) -> bool:
        """Whether an equation behind a new state moves parts of a piece, which is then no state."""
        shape = split.aval.shape
        for value in self.labels:
            if self.program.avals[value].shape != shape or value not in full.moved:
                continue
            ids = full.moved[value].reshape(-1)
            for k in np.unique(np.searchsorted(full.bases, ids[ids != NONE], 'right') - 1):
                alike = self.program.avals[full.owners[k]].shape == shape
                if alike and _is_torn(ids - full.bases[k], split.places):
                    return True
        return False


def _is_torn(offsets: np.ndarray, places) -> bool:
    """Whether a piece holds elements of another value (at ``offsets``) that are no piece of it."""
    for piece in places:
        read = offsets[piece.reshape(-1)]
        whole = any(np.array_equal(read, p.reshape(-1)) for p in places)
        if ((read >= 0) & (read < offsets.size)).any() and not whole:
            return True
    return False


def _occurrence(flat: np.ndarray) -> np.ndarray:
    """How many equal entries stand before each entry."""
    order = np.argsort(flat, kind='stable')
    ranked = flat[order]
    first = np.concatenate([[True], ranked[1:] != ranked[:-1]])
    starts = np.maximum.accumulate(np.where(first, np.arange(len(flat)), 0))
    found = np.empty(len(flat), np.int64)
    found[order] = np.arange(len(flat)) - starts
    return found
