"""The program in which some leaves of the carry are several hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ... import _jax
from ..equations.equation import Equation
from ..program.copy_propagation import forward_copies, renamed
from ..program.flatten import extending
from ..program.program import Program, alive
from ..program.stacked_leaf import Parts, Split
from .assembly import acts_on_elements, assembles
from .origins import Origins


def rewritten(program: Program, splits: Mapping[int, Split | Parts]) -> Program:
    """The program with these leaves split, by position in its carry."""
    return _Rewriting(program, splits).run()


class _Rewriting:
    """``names``: the new name of an old value; ``new``: the new states of each split leaf;
    ``kept``: leaves that are put together again; ``made``: the pieces of values.
    """

    def __init__(self, program: Program, splits: Mapping[int, Split | Parts]):
        self.program, self.splits = program, splits
        given = {program.carry[c]: _numbered(s) for c, s in splits.items() if isinstance(s, Split)}
        self.origins = Origins(program, given)
        self.build = extending(program)
        self.names: dict[int, int] = {}
        self.new: dict[int, list[int]] = {}
        self.kept: set[int] = set()
        self.made: dict[tuple, int] = {}

    def run(self) -> Program:
        program, build = self.program, self.build
        # old states are inputs; readers of a whole leaf read it put together
        carry = [[v] for v in program.carry]
        for c, s in self.splits.items():
            carry[c] = [build.new(_shaped(s.aval, shape, s.dtype)) for shape in s.shapes]
            first = program.consumers.get(program.carry[c], [0])[0]
            where = program.equations[first].where
            self.names[program.carry[c]] = self._together(s, carry[c], where)
        # where a new leaf is made, its new states are made as well
        leaves: dict[int, list[int]] = {}
        for c in self.splits:
            leaves.setdefault(program.new_carry[c], []).append(c)
        for eqn in program.equations:
            build.bodies[0].append(renamed(eqn, self.names))
            for v in eqn.outs:
                self._renew(v, leaves.pop(v, ()), eqn)
        # a new leaf that no equation makes is an input or an old state
        for v, of in leaves.items():
            self._renew(v, of, None)
        return self._program(carry)

    def _together(self, s: Split | Parts, pieces: Sequence[int], where: str) -> int:
        (whole,) = self.build.traced(lambda *p: s.together(p), pieces, where)
        return whole

    def _renew(self, value: int, leaves: Sequence[int], eqn: Equation | None) -> None:
        """Make the new states in a value that is a new leaf; its readers then read them."""
        if not leaves:
            return
        self.build.scope, where = (eqn.scope, eqn.where) if eqn is not None else ((), '')
        for c in leaves:
            s = self.splits[c]
            self.new[c] = [self._piece(value, s, k, where) for k in range(len(s.names))]
        if eqn is not None and not assembles(eqn):
            c = leaves[0]
            self.names[value] = self._together(self.splits[c], self.new[c], where)
            self.kept.add(self.names[value])
        self.build.scope = ()

    def _piece(self, value: int, s: Split | Parts, k: int, where: str) -> int:
        """An equation that acts on single elements is applied to the piece alone."""
        key = value, s, k
        if key in self.made:
            return self.made[key]
        program, i = self.program, self.program.producer.get(value)
        eqn = None if i is None else program.equations[i]
        of_elements = isinstance(s, Split) and value in self.origins.labels
        if of_elements and eqn is not None and acts_on_elements(eqn):
            ins = [
                self._piece(v, s, k, where)
                if program.avals[v].shape == s.aval.shape
                else self.names.get(v, v)
                for v in eqn.ins
            ]
            aval = _shaped(program.avals[value], s.shapes[k])
            (made,) = self.build.append(replace(eqn, ins=tuple(ins)), [aval])
        else:
            whole = self.names.get(value, value)
            (made,) = self.build.traced(lambda a: s.piece(a, k), [whole], where)
        self.made[key] = made
        return made

    def _program(self, carry: list[list[int]]) -> Program:
        program, names = self.program, self.names
        new = [self.new.get(c, [names.get(v, v)]) for c, v in enumerate(program.new_carry)]
        keys = [
            [key] if len(carry[c]) == 1 else [(*key, name) for name in self.splits[c].names]
            for c, key in enumerate(program.carry_keys)
        ]
        outputs = tuple(names.get(v, v) for v in program.outputs)
        new_carry = tuple(v for part in new for v in part)
        starts = np.cumsum([0, *map(len, carry)])
        apart = replace(
            program,
            avals=tuple(self.build.avals),
            constants=self.build.constants,
            equations=alive(self.build.bodies[0], (*outputs, *new_carry)),
            outputs=outputs,
            new_carry=new_carry,
            carry=tuple(v for part in carry for v in part),
            carry_keys=tuple(k for part in keys for k in part),
            hidden=tuple(int(starts[c]) + k for c in program.hidden for k in range(len(carry[c]))),
            splits=tuple(self.splits.get(c) for c in range(len(carry))),
        )
        # now a new state is the value that became a part of the leaf
        return forward_copies(apart, self.kept)


def _shaped(aval, shape, dtype=None):
    weak = getattr(aval, 'weak_type', False)
    return _jax.ShapedArray(shape, dtype or aval.dtype, weak_type=weak)


def _numbered(s: Split) -> np.ndarray:
    """For each element of a leaf, the number of its piece."""
    numbers = np.empty(int(np.prod(s.aval.shape)), np.int64)
    for k, places in enumerate(s.places):
        numbers[places.reshape(-1)] = k
    return numbers.reshape(s.aval.shape)
