"""Hidden states that a step keeps side by side in one array: each is a hidden state of its own.

A step that stacks, concatenates or writes row by row the new states of several layers into one
array, or keeps the array in another layout than it computes with, has hidden states that are
values of the step, not leaves of its carry. Such a leaf is split: old states are inputs of the
program, the leaf is put together from them for who reads it whole, and each new state is the value
that became a part of the leaf. What is computed element by element from several of them at once is
computed apart, so that no path joins what no element does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from .. import _jax
from . import flow
from .copies import INDEXED, MISSING, MOVES, RESHAPES, Elements, forward_copies, renamed
from .flatten import extending
from .lines import delay_line, moved_elements
from .program import ELEMENTWISE, Equation, Program, alive
from .recurrence import reached_groups
from .split import Split, grid

__all__ = ['MustSplit', 'chain', 'read_apart', 'taken_apart']

JOINS = {
    *RESHAPES,
    'transpose',
    'rev',
    'broadcast_in_dim',
    'concatenate',
    'stack',
    'scatter',
    'dynamic_update_slice',
}
MOVED = {*JOINS, 'slice', 'gather', 'pad', 'split', 'unstack'}
WHOLE = {'sharding_constraint', 'device_put'}  # their parameters are about the whole array


class MustSplit(Exception):
    """Leaves of the carry that must be split like those they are coupled with; None: not at all."""

    def __init__(self, splits: dict[int, Split | None]):
        super().__init__(*splits)
        self.splits = splits


def taken_apart(program: Program, forced: Mapping[int, Split | None]) -> Program:
    """The program with every leaf split that holds several states, and all in ``forced``.

    None there: the leaf stays whole.
    """
    decided, forced = forced.keys(), {c: s for c, s in forced.items() if s is not None}
    if not any(map(_joins, program.equations)) and not forced:
        return program
    makings, elements = _Makings(program, {}), moved_elements(program)
    asked = [c for c in program.hidden if c not in decided]
    lines = {c: s for c in asked if (s := delay_line(program, elements, c)) is not None}
    found = lines | {
        c: s for c in asked if c not in lines and (s := makings.split(c, elements)) is not None
    }
    if not found and not forced:
        return program
    apart = _Rewriting(program, {**found, **forced}).run()
    needed = {
        c: s
        for c, s in found.items()
        if c in lines or read_apart(program, program.new_carry[c]) or _cross_talk(apart, c)
    }
    if needed == found:
        return apart
    return _Rewriting(program, {**needed, **forced}).run() if needed or forced else program


def chain(program: Program, value: int, wide: bool = False) -> tuple[set[int], set[int]]:
    """The equations that put a value together by moving elements, and the values that they move.

    ``wide``: also those that no state is taken apart for, as a slice, a pad or rows added to zeros.
    """
    equations: set[int] = set()
    values: set[int] = set()
    todo = [value]
    while todo:
        v = todo.pop()
        i = program.producer.get(v)
        if i is not None and i not in equations and (
            _moves(program, i) if wide else _joins(program.equations[i])
        ):
            eqn = program.equations[i]
            places = INDEXED.get(eqn.primitive.name, range(len(eqn.ins)))
            equations.add(i)
            values.update(eqn.ins[k] for k in places)
            todo.extend(eqn.ins[k] for k in places)
    return equations, values & program.producer.keys()


def read_apart(program: Program, value: int, wide: bool = False) -> list[int]:
    """What a value is put together from by moving elements, and who reads it otherwise as well."""
    equations, values = chain(program, value, wide)
    results = {*program.outputs, *program.new_carry}
    return [
        v
        for v in sorted(values)
        if v in results or not equations.issuperset(program.consumers.get(v, ()))
    ]


def _joins(eqn: Equation) -> bool:
    return eqn.loop is None and not eqn.effects and eqn.primitive.name in JOINS


def _moves(program: Program, i: int) -> bool:
    """Whether an equation only moves elements; rows added to zeros, and sums of padded ones, do."""
    eqn = program.equations[i]
    if eqn.loop is not None or eqn.effects:
        return False
    name = getattr(eqn.primitive, 'name', None)
    if name in ('add', 'add_any'):
        return all(_is_padded(program, v) for v in eqn.ins)
    if name != 'scatter-add':
        return name in MOVED
    before = program.producer.get(eqn.ins[0])
    return eqn.ins[0] in program.constants or before is not None and _moves(program, before)


def _is_padded(program: Program, value: int) -> bool:
    i = program.producer.get(value)
    if i is None:
        return False
    name = program.equations[i].primitive.name
    return name == 'pad' or name in ('add', 'add_any') and _moves(program, i)


def _acts_on_elements(eqn: Equation) -> bool:
    return eqn.loop is None and eqn.primitive.name in ELEMENTWISE - WHOLE


def _cross_talk(apart: Program, leaf: int) -> bool:
    """Whether one piece reads another otherwise than by an op that both read and are made by.

    Only where the result of an op is as large as the pieces that it reaches: otherwise pieces are
    positions of one layer, which a plain op like a roll lets read each other.
    """
    at = apart.pieces(leaf)
    piece = {c: k for k, c in enumerate(at)}
    if not _whole_results(apart, piece):
        return False
    recurrent = reached_groups(apart, piece, apart.ops)
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
    """Whether the result of each op, where it reaches a piece before another op, is as large as that."""
    ends = {apart.new_carry[c]: 1 << k for c, k in piece.items()}
    ahead = flow.backward(apart, ends, lambda i, found: 0 if i in apart.op_set else found)
    sizes = {k: np.prod(apart.avals[apart.carry[c]].shape) for c, k in piece.items()}
    for i in apart.ops:
        y = apart.equations[i].outs[apart.equations[i].primitive.y_outvar_index]
        if any(np.prod(apart.avals[y].shape) != sizes[k] for k in flow.members(ahead[y])):
            return False
    return True


class _Makings:
    """Of which values the new states are made; ``given``: labels of split values."""

    def __init__(self, program: Program, given: Mapping[int, np.ndarray]):
        self.program, self.elements = program, Elements(program)
        self.labels: dict[int, np.ndarray] = dict(given)
        for i in self._behind():
            eqn = program.equations[i]
            if _joins(eqn):
                self.elements.moved.update(self.elements.moved_by(eqn))
                labels = [
                    self._by_owner(self.elements.moved[o])[0]
                    for o in eqn.outs
                    if o in self.elements.moved
                ]
            else:
                labels = [self._combined(eqn)]
            self.labels.update(
                (o, lab)
                for o, lab in zip(eqn.outs, labels, strict=False)
                if lab is not None and lab.size and lab.max()
            )

    def _behind(self) -> list[int]:
        """The equations behind the new states that move or act on single elements."""
        found: set[int] = set()
        todo = [self.program.new_carry[c] for c in self.program.hidden]
        while todo:
            i = self.program.producer.get(todo.pop())
            if (
                i is not None
                and i not in found
                and (
                    _joins(self.program.equations[i])
                    or _acts_on_elements(self.program.equations[i])
                )
            ):
                found.add(i)
                todo.extend(self.program.equations[i].ins)
        return sorted(found)

    def _by_owner(self, ids: np.ndarray) -> tuple[np.ndarray, list]:
        """A label for each element by the value that it is of, and these values; copies differ."""
        flat = ids.reshape(-1)
        owners = np.array(
            [bisect_right(self.elements.bases, int(e)) - 1 for e in flat]
            if flat.size < 64
            else np.searchsorted(self.elements.bases, flat, 'right') - 1
        )
        owners[flat == MISSING] = -1
        inner = np.zeros_like(flat)
        for k in np.unique(owners[owners >= 0]):
            lab = self.labels.get(self.elements.owners[k])
            if lab is not None:
                inner[owners == k] = lab.reshape(-1)[flat[owners == k] - self.elements.bases[k]]
        kinds, found = np.unique(
            np.stack([owners, _occurrence(flat), inner]), axis=1, return_inverse=True
        )
        return found.reshape(ids.shape), [
            None if k < 0 else self.elements.owners[k] for k in kinds[0]
        ]

    def _combined(self, eqn: Equation) -> np.ndarray | None:
        shape = self.program.avals[eqn.outs[0]].shape
        read = [
            self.labels[v].reshape(-1)
            for v in eqn.ins
            if v in self.labels and self.program.avals[v].shape == shape
        ]
        return (
            np.unique(np.stack(read), axis=1, return_inverse=True)[1].reshape(shape)
            if read
            else None
        )

    def split(self, leaf: int, moved: Elements) -> Split | None:
        """How the new value of a leaf is put together, if it is from states of other shapes."""
        found = self._put_together(leaf)
        return None if found is None or self._shifts(found, moved) else found

    def _put_together(self, leaf: int) -> Split | None:
        value = self.program.new_carry[leaf]
        aval, ids = self.program.avals[value], self.elements.moved.get(value)
        if not np.prod(aval.shape):
            return None
        if ids is None:
            labels, owners = self.labels.get(value), None
        else:
            labels, owners = self._by_owner(ids)
        if labels is None or None in (owners or ()):
            return None
        places = [
            self._places(labels == k, ids, owners[k] if owners else None)
            for k in range(labels.max() + 1)
        ]
        if len(places) == 1 and np.array_equal(places[0], _in_order(aval.shape)):
            return None
        return Split(aval, tuple(sorted(places, key=lambda p: int(p.min()))))

    def _shifts(self, split: Split, full: Elements) -> bool:
        """Whether a piece is torn: pieces are no states then."""
        shape = split.aval.shape
        for value in self.labels:
            if self.program.avals[value].shape == shape and value in full.moved:
                ids = full.moved[value].reshape(-1)
                for k in np.unique(np.searchsorted(full.bases, ids[ids != MISSING], 'right') - 1):
                    if self.program.avals[full.owners[k]].shape == shape and _tears(
                        ids - full.bases[k], split.places
                    ):
                        return True
        return False

    def _places(self, chosen: np.ndarray, ids, owner: int | None) -> np.ndarray:
        """The flat positions of one piece, in the shape of the value that it is if it is one."""
        at, shape = np.flatnonzero(chosen), chosen.shape
        if owner is not None:
            offsets = ids.reshape(-1)[at] - self.elements.base_of[owner]
            own = self.program.avals[owner].shape
            maker = self.program.producer.get(owner)
            if at.size == np.prod(own) and (
                maker is None or self.program.equations[maker].primitive.name not in MOVES - JOINS
            ):
                return at[np.argsort(offsets)].reshape(own)
        return grid(at, shape)


def _tears(offsets: np.ndarray, places) -> bool:
    """Whether a piece holds elements of another value (at ``offsets``) that are no piece of it."""
    for piece in places:
        read = offsets[piece.reshape(-1)]
        if ((read >= 0) & (read < offsets.size)).any() and not any(
            np.array_equal(read, p.reshape(-1)) for p in places
        ):
            return True
    return False


def _in_order(shape) -> np.ndarray:
    return np.arange(int(np.prod(shape))).reshape(shape)


def _occurrence(flat: np.ndarray) -> np.ndarray:
    """For each entry, how many equal ones stand before it."""
    order = np.argsort(flat, kind='stable')
    ranked = flat[order]
    first = np.concatenate([[True], ranked[1:] != ranked[:-1]])
    starts = np.maximum.accumulate(np.where(first, np.arange(len(flat)), 0))
    found = np.empty(len(flat), np.int64)
    found[order] = np.arange(len(flat)) - starts
    return found


class _Rewriting:
    """The program with some leaves of its carry split."""

    def __init__(self, program: Program, splits: Mapping[int, Split]):
        self.program, self.splits = program, splits
        self.makings = _Makings(program, {program.carry[c]: _labels(s) for c, s in splits.items()})
        self.flat = extending(program)
        self.names: dict[int, int] = {}
        self.new: dict[int, list[int]] = {}
        self.kept: set[int] = set()
        self.made: dict[tuple[int, int, int], int] = {}

    def run(self) -> Program:
        program, flat = self.program, self.flat
        carry = [[v] for v in program.carry]
        for c, s in self.splits.items():
            carry[c] = [flat.new(self._shaped(s.aval, places.shape)) for places in s.places]
            first = program.consumers.get(program.carry[c], [0])[0]
            (self.names[program.carry[c]],) = flat.traced(
                lambda *p, s=s: s.together(p), carry[c], program.equations[first].where
            )
        leaves: dict[int, list[int]] = {}
        for c in self.splits:
            leaves.setdefault(program.new_carry[c], []).append(c)
        for eqn in program.equations:
            flat.bodies[0].append(renamed(eqn, self.names))
            for v in eqn.outs:
                self._renew(v, leaves.pop(v, ()), eqn)
        for v, of in leaves.items():
            self._renew(v, of, None)
        return self._program(carry)

    def _renew(self, value: int, leaves: Sequence[int], eqn: Equation | None) -> None:
        """The new states in a value that is new in some leaves; who reads the value reads them."""
        if not leaves:
            return
        self.flat.scope, where = (eqn.scope, eqn.where) if eqn is not None else ((), '')
        for c in leaves:
            self.new[c] = [
                self._piece(value, self.splits[c], k, where)
                for k in range(len(self.splits[c].places))
            ]
        if eqn is not None and not _joins(eqn):
            c = leaves[0]
            (self.names[value],) = self.flat.traced(
                lambda *p: self.splits[c].together(p), self.new[c], where
            )
            self.kept.add(self.names[value])
        self.flat.scope = ()

    def _piece(self, value: int, s: Split, k: int, where: str) -> int:
        """One piece of a value; what acts on single elements acts on this piece alone."""
        key = value, id(s), k
        if key not in self.made:
            eqn = (
                self.program.equations[self.program.producer[value]]
                if value in self.program.producer
                else None
            )
            if eqn is None or not _acts_on_elements(eqn) or value not in self.makings.labels:
                (self.made[key],) = self.flat.traced(
                    lambda a: s.piece(a, k), [self.names.get(value, value)], where
                )
            else:
                ins = tuple(
                    self._piece(v, s, k, where)
                    if self.program.avals[v].shape == s.aval.shape
                    else self.names.get(v, v)
                    for v in eqn.ins
                )
                (self.made[key],) = self.flat.append(
                    replace(eqn, ins=ins),
                    [self._shaped(self.program.avals[value], s.places[k].shape)],
                )
        return self.made[key]

    @staticmethod
    def _shaped(aval, shape):
        return _jax.ShapedArray(shape, aval.dtype, weak_type=getattr(aval, 'weak_type', False))

    def _program(self, carry: list[list[int]]) -> Program:
        program, flat = self.program, self.flat
        new = [self.new.get(c, [self.names.get(v, v)]) for c, v in enumerate(program.new_carry)]
        keys = [
            [key] if len(carry[c]) == 1 else [(*key, str(k)) for k in range(len(carry[c]))]
            for c, key in enumerate(program.carry_keys)
        ]
        outputs = tuple(self.names.get(v, v) for v in program.outputs)
        flat_new = tuple(v for part in new for v in part)
        starts = np.cumsum([0, *map(len, carry)])
        return forward_copies(
            replace(
                program,
                avals=tuple(flat.avals),
                constants=flat.constants,
                equations=alive(flat.bodies[0], (*outputs, *flat_new)),
                outputs=outputs,
                new_carry=flat_new,
                carry=tuple(v for part in carry for v in part),
                carry_keys=tuple(k for part in keys for k in part),
                hidden=tuple(
                    int(starts[c]) + k for c in program.hidden for k in range(len(carry[c]))
                ),
                splits=tuple(self.splits.get(c) for c in range(len(carry))),
            ),
            self.kept,
        )


def _labels(s: Split) -> np.ndarray:
    """For each element of a leaf, the number of its piece."""
    labels = np.empty(int(np.prod(s.aval.shape)), np.int64)
    for k, places in enumerate(s.places):
        labels[places.reshape(-1)] = k
    return labels.reshape(s.aval.shape)
