"""Builds a flat program: numbers values, and puts equations into their loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from ... import _jax
from ..equations.equation import Equation, Loop, Region, is_inexact

FOLD_LIMIT = 1 << 16  # elements of a constant that is worked out while building


class Place(NamedTuple):
    """A place in the user's code: for equations that know none of their own, or for all if
    ``fixed``.
    """

    where: str
    fixed: bool = False

    def of(self, eqn) -> Place:
        return self if self.fixed else Place(_jax.location(eqn.source_info) or self.where)


@dataclass(eq=False)
class Branch:
    """A branch that is being lowered; ``taken``: its predicate, joined with those around it.

    ``inside``: values that reach outside values only through a gate. ``gated``: outside values,
    each with its gate's result. ``made``: pure equations of the branch, by result.
    """

    taken: int
    inside: set[int] = field(default_factory=set)
    gated: dict[int, int] = field(default_factory=dict)
    made: dict[int, Equation] = field(default_factory=dict)


class Builder:
    """Numbers values and appends equations; there is one list of equations for each open loop.

    ``lower(builder, eqn, ins, place)`` lowers one equation of a jaxpr and returns its results.
    ``depth``: how many loops stand around the equation that makes a value. ``pure`` values are
    functions of parameters and constants alone; ``owned`` ones depend on parameters to mark and
    have not met an op or a value that changes: each has the place of its mark, empty for the place
    where it meets one. ``unmarked``: why nothing is marked now, None where it is. ``marking``: the
    primitive in whose place ops are put now. ``spread``: results of ops by the value that each
    reads element by element. ``twins``: functions of parameters to mark, each with the first one
    equal to it; ``firsts`` has these.
    """

    def __init__(self, lower: Callable[[Builder, Any, list[int], Place], list[int]]):
        self.lower = lower
        self.avals: list = []
        self.depth: list[int] = []
        self.constants: dict[int, Any] = {}
        self.pure: set[int] = set()
        self.owned: dict[int, str] = {}
        self.unmarked: str | None = None
        self.marking = ''
        self.spread: dict[tuple, int] = {}
        self.firsts: dict[tuple, int] = {}
        self.twins: dict[int, int] = {}
        self.bodies: list[list[Equation]] = [[]]
        self.scope: tuple[Region, ...] = ()
        self.branches: list[Branch] = []

    # ---- values ----

    def new(self, aval, depth: int | None = None) -> int:
        """A number for a value; by default it belongs to the innermost loop."""
        self.avals.append(aval)
        self.depth.append(len(self.bodies) - 1 if depth is None else depth)
        return len(self.avals) - 1

    def constant(self, value, aval=None) -> int:
        number = self.new(aval if aval is not None else jax.typeof(value), 0)
        self.constants[number] = value
        self.pure.add(number)
        return number

    def inside(self, values: Sequence[int]) -> None:
        """These values stand behind the gates of every open branch."""
        for branch in self.branches:
            branch.inside.update(values)

    # ---- jaxprs and functions ----

    def call(self, jaxpr, consts, ins: Sequence[int], place: Place) -> list[int]:
        def lowered(eqn, operands: list[int]) -> list[int]:
            return self.lower(self, eqn, operands, place.of(eqn))

        def number(atom) -> int:
            return self.constant(atom.val, atom.aval)

        return _jax.walk(jaxpr, map(self.constant, consts), ins, lowered, number)

    def traced(self, fn: Callable, ins: Sequence[int], where: str) -> list[int]:
        jaxpr, consts = _jax.trace(fn, *(self.avals[v] for v in ins))
        return self.call(jaxpr, consts, ins, Place(where, fixed=True))

    def plain(self, fn: Callable, ins: Sequence[int], where: str) -> int:
        """Lower a function of one result, outside of any branch."""
        branches, self.branches = self.branches, []
        with self.leaving(''):
            (out,) = self.traced(fn, ins, where)
        self.branches = branches
        return out

    @contextmanager
    def leaving(self, why: str) -> Iterator[None]:
        """Nothing is marked here; ``why`` is empty where there is nothing to tell."""
        before, self.unmarked = self.unmarked, why
        yield
        self.unmarked = before

    @contextmanager
    def marks(self, name: str) -> Iterator[None]:
        """New ops stand in the place of a primitive."""
        before, self.marking = self.marking, name
        yield
        self.marking = before

    # ---- equations ----

    def append(self, eqn: Equation, avals: Sequence) -> list[int]:
        """Give an equation its results and its place; it goes before a loop that does not change
        it.
        """
        here = len(self.bodies) - 1
        stays = eqn.effects or eqn.loop is not None
        depth = here if stays else max((self.depth[v] for v in eqn.ins), default=0)
        outs = [self.new(a, depth) for a in avals]
        scope = self.scope if depth == here else self.scope[: self._loop_at(depth)]
        eqn = replace(eqn, outs=tuple(outs), scope=scope)
        if not self._fold(eqn):
            self.bodies[depth].append(eqn)
        return outs

    def _loop_at(self, depth: int) -> int:
        """The place in the scope of the loop inside ``depth`` others."""
        return [k for k, r in enumerate(self.scope) if isinstance(r, Loop)][depth]

    def widened(self, eqn: Equation, shape) -> Equation:
        """An element-wise equation whose operands have the shape of its result.

        The implicit broadcast of an operand becomes an equation, so that it can be cut alone.
        """
        ins = tuple(self._widen(v, eqn, shape) for v in eqn.ins)
        return eqn if ins == eqn.ins else replace(eqn, ins=ins)

    def _widen(self, value: int, eqn: Equation, shape) -> int:
        aval = self.avals[value]
        if aval.shape == shape or value in self.constants or not is_inexact(aval):
            return value
        axes = tuple(range(len(aval.shape)))
        params = dict(shape=shape, broadcast_dimensions=axes, sharding=None)
        broadcast = Equation(jax.lax.broadcast_in_dim_p, params, eqn.ctx, (value,), (), eqn.where)
        (wide,) = self.append(broadcast, [aval.update(shape=shape)])
        if value in self.pure:
            self.pure.add(wide)
        if value in self.owned:
            self.owned[wide] = self.owned[value]
        return wide

    def _fold(self, eqn: Equation) -> bool:
        """Evaluate small integer equations of constants, so that static indices are known."""
        constant = bool(eqn.outs) and all(v in self.constants for v in eqn.ins)
        if not constant or eqn.effects or eqn.loop is not None:
            return False
        avals = [self.avals[v] for v in (*eqn.ins, *eqn.outs)]
        made = avals[len(eqn.ins) :]
        if not all(isinstance(a.dtype, np.dtype) for a in avals):
            return False  # random keys
        if any(is_inexact(a) or a.size > FOLD_LIMIT for a in made):
            return False
        with jax.ensure_compile_time_eval():
            values = eqn.evaluate([self.constants[i] for i in eqn.ins])
        self.constants.update({o: np.asarray(v) for o, v in zip(eqn.outs, values, strict=True)})
        return True

    @contextmanager
    def within(self, *regions: Region) -> Iterator[None]:
        """New equations stand in these regions."""
        before, self.scope = self.scope, (*self.scope, *regions)
        yield
        self.scope = before
