"""Hidden states that a step keeps in one array, and the program that has them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .. import _jax
from ..errors import NotSupportedError
from .equations import Equation, identity, moved_operands
from .primitives import NONE
from .program import dataflow as flow
from .program.builder import extending
from .program.leaves import ComplexParts, Split, grid
from .program.program import Elements, Program, alive, forward_copies, renamed

# assembly -----------------------------------------------------------------------------------------
#
# How a value is put together by equations that move elements, and who reads its parts.


def assembles(eqn: Equation) -> bool:
    """Whether an equation only puts its operands together."""
    return not eqn.effects and eqn.does.assembles


def acts_on_elements(eqn: Equation) -> bool:
    """Whether each element is computed from the same element of the operands."""
    does = eqn.does
    return does.elementwise and does.gradient and not does.whole


def chain(program: Program, value: int, wide: bool = False) -> tuple[set[int], set[int]]:
    """The equations that put a value together by moving elements, and the values that they move.

    ``wide``: also a slice, a pad or rows added to zeros, for which no state is taken apart.
    """
    equations: set[int] = set()
    values: set[int] = set()
    todo = [value]
    while todo:
        i = program.producer.get(todo.pop())
        if i is None or i in equations:
            continue
        eqn = program.equations[i]
        if _only_moves(program, i) if wide else assembles(eqn):
            equations.add(i)
            # rows that are added to zeros are moved by all operands, indices and all
            read = [eqn.ins[k] for k in moved_operands(eqn)] or list(eqn.ins)
            values.update(read)
            todo.extend(read)
    return equations, values & program.producer.keys()


def read_apart(program: Program, value: int, wide: bool = False) -> list[int]:
    """The values that a value is put together from, as far as others read them too."""
    equations, values = chain(program, value, wide)
    results = {*program.outputs, *program.new_carry}
    return [
        v
        for v in sorted(values)
        if v in results or not equations.issuperset(program.consumers.get(v, ()))
    ]


def _only_moves(program: Program, i: int | None) -> bool:
    """Whether an equation only moves elements; rows added to zeros, sums of padded rows count."""
    maker, seen = program.producer.get, {i}
    todo: list = [i]
    while todo:
        i = todo.pop()
        if i is None or program.equations[i].effects:
            return False
        eqn = program.equations[i]
        more: list = []
        if eqn.does.sums:
            made_by = [(k, program.equations[k]) for k in map(maker, eqn.ins) if k is not None]
            more = [k for k, e in made_by if e.primitive.name != 'pad']
            only_sums = all(program.equations[k].does.sums for k in more)
            if len(made_by) < len(eqn.ins) or not only_sums:
                return False
        elif eqn.does.updates and eqn.does.beside:
            # added to a constant, or to rows that were put together in this way
            more = [] if eqn.ins[0] in program.constants else [maker(eqn.ins[0])]
        elif eqn.does.moves is None:
            return False
        todo += [k for k in more if k not in seen]
        seen.update(more)
    return True


# delay line ---------------------------------------------------------------------------------------
#
# Rows that move through an array of the carry from step to step: a delay line.


def delay_line(program: Program, elements: Elements, leaf: int) -> Split | None:
    """A leaf in which whole rows become other rows at the next step, split into these rows.

    Each row has the shape of the value that enters the line, so that all rows are states of one
    group. None for any other leaf.
    """
    old, new = program.carry[leaf], program.new_carry[leaf]
    aval, ids = program.avals[new], elements.moved.get(new)
    if ids is None or not ids.size or (ids == NONE).any() or old not in elements.base_of:
        return None
    # for each element of the new leaf, the element of the old leaf that it was, or itself
    flat, own = ids.reshape(-1), elements.of(old).reshape(-1)
    itself = np.arange(flat.size)
    source = np.where((flat >= own[0]) & (flat <= own[-1]), flat - own[0], itself)
    if (source == itself).all():
        return None
    # go back to the entrance of each element; an element without an entrance goes round
    root = source
    for _ in range(flat.size.bit_length()):  # twice as far each time
        root = root[root]
    if (source[root] != root).any():
        return None
    # follow each row that enters to the end of the line; it must stay whole
    places = []
    at = np.unique(root)
    owners = elements.which(flat[at])
    for k in np.unique(owners):
        # a value that enters whole keeps its own shape
        mine = at[owners == k]
        offsets, shape = flat[mine] - elements.bases[k], elements.avals[elements.owners[k]].shape
        once = len(np.unique(offsets)) == mine.size == np.prod(shape)
        row = mine[np.argsort(offsets)].reshape(shape) if once else grid(mine, ids.shape)
        while True:
            places.append(row)
            # where the row is at the next step, if anywhere
            before = row.reshape(-1)
            after = np.flatnonzero(np.isin(source, before) & (source != itself))
            if not after.size:
                break
            if after.size != before.size or len(np.unique(source[after])) != before.size:
                return None  # torn
            order = np.empty(source.size, np.int64)
            order[source[after]] = after
            row = order[before].reshape(row.shape)
    # the rows of all lines must fill the leaf, each element once
    whole = np.sort(np.concatenate([p.reshape(-1) for p in places]))
    if not np.array_equal(whole, itself):
        return None
    return Split.of(aval, places)


# origins ------------------------------------------------------------------------------------------
#
# The values that a leaf of the carry is made of, element by element, and so how to split it.


class Origins:
    """The values that the new states are made of.

    ``labels`` holds a number for each element of a value that is made of several others: elements
    with one number belong together. ``given``: the labels of values that are split already.
    """

    def __init__(self, program: Program, given: Mapping[int, np.ndarray]):
        self.program, self.elements = program, Elements(program)
        self.labels: dict[int, np.ndarray] = dict(given)

        # the equations behind the new states that move or act on single elements
        def passed(i: int) -> bool:
            return assembles(program.equations[i]) or acts_on_elements(program.equations[i])

        for i in flow.slice_behind(program, program.new_states, passed):
            eqn = program.equations[i]
            if assembles(eqn):
                moved = dict(self.elements.moved_by(eqn))
                self.elements.moved.update(moved)
                found = {o: self._by_owner(ids)[0] for o, ids in moved.items()}
            else:
                # Elements computed from elements that belong together in every operand belong
                # together.
                shape = program.avals[eqn.outs[0]].shape
                read = [
                    self.labels[v].reshape(-1)
                    for v in eqn.ins
                    if v in self.labels and program.avals[v].shape == shape
                ]
                if not read:
                    continue
                kinds = np.unique(np.stack(read), axis=1, return_inverse=True)[1]
                found = {eqn.outs[0]: kinds.reshape(shape)}
            # labels that are all one say nothing
            self.labels |= {o: lab for o, lab in found.items() if lab.size and lab.max()}

    def _by_owner(self, ids: np.ndarray) -> tuple[np.ndarray, list]:
        """A label for each element by the value that it is of, and these values; copies differ."""
        flat, elements = ids.reshape(-1), self.elements
        owners = elements.which(flat)
        # an owner that is itself made of several values counts as these
        inner = np.zeros_like(flat)
        for k in np.unique(owners[owners >= 0]):
            lab = self.labels.get(elements.owners[k])
            if lab is not None:
                inner[owners == k] = lab.reshape(-1)[flat[owners == k] - elements.bases[k]]
        # how many equal elements are before each
        order, copy = np.argsort(flat, kind='stable'), np.empty(len(flat), np.int64)
        copy[order] = np.arange(len(flat)) - np.searchsorted(flat[order], flat[order])
        kinds, found = np.unique(np.stack([owners, copy, inner]), axis=1, return_inverse=True)
        values = [None if k < 0 else elements.owners[k] for k in kinds[0]]
        return found.reshape(ids.shape), values

    def split(self, leaf: int, moved: Elements) -> Split | None:
        """How the new value of a leaf is put together, if it holds states of other shapes.

        ``moved``: the elements of all values that are made by moving.
        """
        program, value = self.program, self.program.new_carry[leaf]
        aval, ids = program.avals[value], self.elements.moved.get(value)
        if not np.prod(aval.shape):
            return None
        labels, owners = (self.labels.get(value), None) if ids is None else self._by_owner(ids)
        if labels is None or None in (owners or ()):
            return None  # some elements come from nowhere
        places = []
        for k in range(labels.max() + 1):
            at = np.flatnonzero(labels == k)
            places.append(grid(at, aval.shape))
            owner = owners[k] if owners else None
            if ids is None or owner is None:
                continue
            if at.size == np.prod(program.avals[owner].shape):
                # a piece that is a whole value has its shape, unless that value was itself taken
                # out of a larger one
                maker = program.producer.get(owner)
                if maker is None or not program.equations[maker].does.takes_part:
                    order = np.argsort(ids.reshape(-1)[at])
                    places[-1] = at[order].reshape(program.avals[owner].shape)
        if len(places) == 1 and np.array_equal(places[0], identity(aval.shape)):
            return None  # the leaf is one value as it is
        found = Split.of(aval, places)
        return None if self._tears(found, moved) else found

    def _tears(self, split: Split, full: Elements) -> bool:
        """Whether an equation behind a new state moves parts of a piece, which is then no state."""
        shape = split.aval.shape
        for value in self.labels:
            if self.program.avals[value].shape != shape or value not in full.moved:
                continue
            ids = full.moved[value].reshape(-1)
            for k in np.unique(full.which(ids[ids != NONE])):
                if self.program.avals[full.owners[k]].shape != shape:
                    continue
                # a piece must not hold elements of another value that are no piece of it
                offsets = ids - full.bases[k]
                for piece in split.places:
                    read = offsets[piece.reshape(-1)]
                    whole = any(np.array_equal(read, p.reshape(-1)) for p in split.places)
                    if ((read >= 0) & (read < offsets.size)).any() and not whole:
                        return True
        return False


# rewriting ----------------------------------------------------------------------------------------
#
# The program in which some leaves of the carry are several hidden states.


def rewritten(program: Program, splits: Mapping[int, Split | ComplexParts]) -> Program:
    """The program with these leaves split, by position in its carry."""
    given = {program.carry[c]: s.numbers for c, s in splits.items() if isinstance(s, Split)}
    labels, build = Origins(program, given).labels, extending(program)
    # the new name of an old value, the pieces of values, the new states of each split leaf, the
    # leaves that are put together again
    names: dict[int, int] = {}
    made: dict[tuple, int] = {}
    new: dict[int, list[int]] = {}
    kept: set[int] = set()

    def shaped(aval, shape, dtype=None):
        weak = getattr(aval, 'weak_type', False)
        return _jax.ShapedArray(shape, dtype or aval.dtype, weak_type=weak)

    def together(s: Split | ComplexParts, pieces: Sequence[int], where: str) -> int:
        return build.traced(lambda *p: s.together(p), pieces, where)[0]

    def piece(value: int, s: Split | ComplexParts, k: int, where: str) -> int:
        todo = [value]
        while todo:
            v = todo[-1]
            i = program.producer.get(v)
            eqn = program.equations[i] if i is not None else None
            apart = isinstance(s, Split) and v in labels
            if apart and eqn is not None and acts_on_elements(eqn):
                # an equation that acts on single elements is applied to the pieces alone
                alike = {u for u in eqn.ins if program.avals[u].shape == s.aval.shape}
                missing = [u for u in alike if (u, s, k) not in made]
                if missing:
                    todo += missing
                    continue
                ins = tuple(made[u, s, k] if u in alike else names.get(u, u) for u in eqn.ins)
                aval = shaped(program.avals[v], s.shapes[k])
                (made[v, s, k],) = build.append(replace(eqn, ins=ins), [aval])
            elif (v, s, k) not in made:
                whole = names.get(v, v)
                (made[v, s, k],) = build.traced(lambda a: s.piece(a, k), [whole], where)
            todo.pop()
        return made[value, s, k]

    def renew(value: int, leaves: Sequence[int], eqn: Equation | None) -> None:
        """Make the new states in a value that is a new leaf; its readers then read them."""
        scope, where = ((), '') if eqn is None else (eqn.scope, eqn.where)
        with build.having(scope=scope):
            for c in leaves:
                s = splits[c]
                new[c] = [piece(value, s, k, where) for k in range(len(s.names))]
            if leaves and eqn is not None and not assembles(eqn):
                names[value] = together(splits[leaves[0]], new[leaves[0]], where)
                kept.add(names[value])

    # old states are inputs; readers of a whole leaf read it put together
    carry = [[v] for v in program.carry]
    for c, s in splits.items():
        carry[c] = [build.new(shaped(s.aval, shape, s.dtype)) for shape in s.shapes]
        first = program.consumers.get(program.carry[c], [0])[0]
        names[program.carry[c]] = together(s, carry[c], program.equations[first].where)
    # where a new leaf is made, its new states are made as well
    leaves: dict[int, list[int]] = {}
    for c in splits:
        leaves.setdefault(program.new_carry[c], []).append(c)
    for eqn in program.equations:
        build.bodies[0].append(renamed(eqn, names))
        for v in eqn.outs:
            renew(v, leaves.pop(v, ()), eqn)
    # a new leaf that no equation makes is an input or an old state
    for v, of in leaves.items():
        renew(v, of, None)
    # the program of these equations and the longer carry
    parts = [new.get(c, [names.get(v, v)]) for c, v in enumerate(program.new_carry)]
    keys = [
        [key] if len(carry[c]) == 1 else [(*key, name) for name in splits[c].names]
        for c, key in enumerate(program.carry_keys)
    ]
    outputs = tuple(names.get(v, v) for v in program.outputs)
    new_carry = tuple(v for part in parts for v in part)
    starts = np.cumsum([0, *map(len, carry)])
    apart = replace(
        program,
        avals=tuple(build.avals),
        constants=build.constants,
        equations=alive(build.bodies[0], (*outputs, *new_carry)),
        outputs=outputs,
        new_carry=new_carry,
        carry=tuple(v for part in carry for v in part),
        carry_keys=tuple(k for part in keys for k in part),
        hidden=tuple(int(starts[c]) + k for c in program.hidden for k in range(len(carry[c]))),
        splits=tuple(splits.get(c) for c in range(len(carry))),
    )
    # now a new state is the value that became a part of the leaf
    return forward_copies(apart, kept)


# unstacking ---------------------------------------------------------------------------------------
#
# Hidden states that a step keeps side by side in one array: each is a hidden state of its own.
#
# A step may stack, or write row by row, the new states of several layers, or keep them in another
# layout than it computes with. Its hidden states are then values of the step, not leaves of its
# carry. Such a leaf is split: old states become inputs, readers of the whole leaf read it put
# together, and each new state is the value that became a part of the leaf. An element-wise equation
# of several states is applied to each alone, so that no path joins states that no element joins.


class MustSplit(Exception):
    """Leaves of the carry that must be split like their partners; None: that must stay whole."""

    def __init__(self, splits: Mapping[int, Split | ComplexParts | None]):
        super().__init__(*splits)
        self.splits = splits


def split_in_parts(program: Program, states: Iterable[int], where: str) -> None:
    """Raise :class:`MustSplit` for complex states (positions in the carry) whose step has no
    complex derivative: their real and imaginary parts become states of their own.
    """
    leaves = {program.leaf_of(c) for c in states}
    if any(program.splits[leaf] is not None for leaf in leaves):
        names = ', '.join(program.carry_names[c] for c in states)
        raise NotSupportedError(
            f'{where}: the step is not holomorphic in {names}, complex hidden states that are in '
            'one array with others. Keep each of them in an array of its own.'
        )
    raise MustSplit({leaf: ComplexParts(program.leaf_avals[leaf]) for leaf in leaves})


def taken_apart(program: Program, splits: Mapping[int, Split | ComplexParts | None]) -> Program:
    """The program with every leaf split that holds several states, and all in ``splits``.

    A leaf that has None there stays whole.
    """
    asked = [c for c in program.hidden if c not in splits]
    forced = {c: s for c, s in splits.items() if s is not None}
    if not any(map(assembles, program.equations)) and not forced:
        return program
    # delay lines first, then leaves that are put together from several values
    origins, elements = Origins(program, {}), Elements(program)
    for eqn in program.equations:
        elements.moved.update(elements.moved_by(eqn))
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
    # each op's result must be as large as every piece that it reaches before another op
    ends = {apart.new_carry[c]: 1 << k for c, k in piece.items()}
    ahead = flow.backward(apart, ends, lambda i, found: 0 if i in apart.op_set else found)
    sizes = {k: np.prod(apart.avals[apart.carry[c]].shape) for c, k in piece.items()}
    for y in map(apart.y_of, apart.ops):
        if any(np.prod(apart.avals[y].shape) != sizes[k] for k in flow.members(ahead[y])):
            return False
    # now what a new piece reads of the others: old ones before a cut, and new ones
    recurrent = flow.reached_groups(apart, piece, apart.ops)
    old = flow.old_ancestors(apart, piece, recurrent)
    new: dict[int, int] = {}
    for c, k in piece.items():
        for i in apart.consumers.get(apart.new_carry[c], ()):
            for o in apart.results(i, apart.new_carry[c]):
                new[o] = new.get(o, 0) | 1 << k
    read = flow.forward(apart, new, flow.gradients(apart))
    return any(
        (old[apart.new_carry[c]] | read[apart.new_carry[c]]) & ~(1 << k) for c, k in piece.items()
    )
