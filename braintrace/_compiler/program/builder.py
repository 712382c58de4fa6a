"""Building a program, equation by equation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ... import _jax
from ..._etrace_op import at_positions
from ..equations import Equation, Loop, Region, is_inexact, moved_operands
from .program import Program, renamed

# builder ------------------------------------------------------------------------------------------


FOLD_LIMIT = 1 << 16  # elements of a constant that is worked out while building


class Branch:
    """A branch that is being lowered; ``taken``: its predicate, joined with those around it.

    ``inside``: values that reach outside values only through a gate. ``gated``: outside values,
    each with its gate's result. ``made``: pure equations of the branch, by result.
    """

    def __init__(self, taken: int):
        self.taken = taken
        self.inside: set[int] = set()
        self.gated: dict[int, int] = {}
        self.made: dict[int, Equation] = {}


class Builder:
    """Numbers values and appends equations; there is one list of equations for each open loop.

    ``lower(builder, eqn, ins, where)`` lowers one equation of a jaxpr and returns its results.
    ``place``: the line of the user for every equation; None: each has its own.
    ``depth``: how many loops are around the equation that makes a value. ``pure`` values are
    functions of parameters and constants alone; ``owned`` ones depend on parameters to mark and
    have not met an op or a value that changes: each has the place of its mark, empty for the place
    where it meets one. ``unmarked``: why nothing is marked now, None where it is. ``marking``: the
    primitive in whose place ops are put now. ``spread``: results of ops by the value that each
    reads element by element. ``twins``: functions of parameters to mark, each with the first one
    equal to it; ``firsts`` has these.
    """

    def __init__(self, lower: Callable[[Builder, Any, list[int], str], list[int]]):
        self.lower = lower
        self.place: str | None = None
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
        """These values are behind the gates of every open branch."""
        for branch in self.branches:
            branch.inside.update(values)

    # ---- jaxprs and functions ----

    def call(self, jaxpr, consts, ins: Sequence[int], where: str) -> list[int]:
        """Lower a jaxpr; ``where``: the place of equations that know none of their own."""

        def lowered(eqn, operands: list[int]) -> list[int]:
            own = _jax.location(eqn.source_info) or where if self.place is None else self.place
            return self.lower(self, eqn, operands, own)

        def number(atom) -> int:
            return self.constant(atom.val, atom.aval)

        return _jax.walk(jaxpr, map(self.constant, consts), ins, lowered, number)

    def traced(self, fn: Callable, ins: Sequence[int], where: str) -> list[int]:
        """Lower a function whose equations all are at one place."""
        jaxpr, consts = _jax.trace(fn, *(self.avals[v] for v in ins))
        with self.having(place=where):
            return self.call(jaxpr, consts, ins, where)

    def plain(self, fn: Callable, ins: Sequence[int], where: str) -> int:
        """Lower a function of one result, outside of any branch and without marks."""
        with self.having(branches=[], unmarked=''):
            (out,) = self.traced(fn, ins, where)
        return out

    @contextmanager
    def having(self, **values) -> Iterator[None]:
        """These attributes have other values inside the ``with``: a scope, what is marked."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    # ---- equations ----

    def append(self, eqn: Equation, avals: Sequence) -> list[int]:
        """Give an equation its results and its place; it goes before a loop that does not change
        it.
        """
        here = len(self.bodies) - 1
        stays = eqn.effects or eqn.loop is not None
        depth = here if stays else max((self.depth[v] for v in eqn.ins), default=0)
        outs = [self.new(a, depth) for a in avals]
        # the scope of a depth ends in front of the next loop
        loops = [k for k, region in enumerate(self.scope) if isinstance(region, Loop)]
        scope = self.scope if depth == here else self.scope[: loops[depth]]
        eqn = replace(eqn, outs=tuple(outs), scope=scope)
        if not self._fold(eqn):
            self.bodies[depth].append(eqn)
        return outs

    def widened(self, eqn: Equation, shape) -> Equation:
        """An element-wise equation whose operands have the shape of its result.

        The implicit broadcast of an operand becomes an equation, so that it can be cut alone.
        """
        ins = list(eqn.ins)
        for k, value in enumerate(eqn.ins):
            aval = self.avals[value]
            if aval.shape == shape or value in self.constants or not is_inexact(aval):
                continue
            axes = tuple(range(len(aval.shape)))
            params = dict(shape=shape, broadcast_dimensions=axes, sharding=None)
            broadcast = Equation(
                jax.lax.broadcast_in_dim_p, params, eqn.ctx, (value,), (), eqn.where
            )
            (ins[k],) = self.append(broadcast, [aval.update(shape=shape)])
            # what is known of the operand holds for its copies
            self.pure.update([ins[k]] if value in self.pure else [])
            self.owned.update({ins[k]: self.owned[value]} if value in self.owned else {})
        return eqn if ins == list(eqn.ins) else replace(eqn, ins=tuple(ins))

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


# marking ------------------------------------------------------------------------------------------
#
# Where a function of parameters to mark meets a value that changes: the op for it.


def note(build: Builder, eqn: Equation, outs: Sequence[int]) -> None:
    """Note which results of an equation are functions of parameters to mark, and a result that is
    equal to another: these share their op, the first stands for all.
    """
    places = [build.owned[v] for v in eqn.ins if v in build.owned]
    fixed = not eqn.effects and all(v in build.pure for v in eqn.ins)
    if places and eqn.does.gradient and fixed:
        smooth = (o for o in outs if is_inexact(build.avals[o]))
        build.owned.update(dict.fromkeys(smooth, max(places)))
    if len(outs) == 1 and outs[0] in build.owned and (eqn.does.moves or eqn.does.elementwise):
        ins = []
        for v in eqn.ins:
            # a constant number is known as what it is
            number = build.constants.get(v)
            known = number is not None and not np.ndim(number)
            ins.append(
                (str(build.avals[v]), np.asarray(number).item()) if known else build.twins.get(v, v)
            )
        key = eqn.primitive, tuple(ins), tuple(sorted(eqn.params.items())), _region(build)
        build.twins[outs[0]] = build.firsts.setdefault(key, outs[0])


def _region(build: Builder) -> tuple:
    return build.scope, tuple(build.branches)


def marked_operands(build: Builder, eqn: Equation, weights: list[int], outvars) -> Equation:
    """The equation that reads its weights through ops, element by element; or why it does not."""
    does = eqn.does
    why = build.unmarked or does.option or ('layout' if does.op else '')
    assembles = does.updates or set(weights) <= set(moved_operands(eqn))
    if why or not (does.elementwise or assembles):
        return replace(eqn, unmarked=why or 'primitive')
    ins = list(eqn.ins)
    for k in weights:
        aval = outvars[0].aval if does.elementwise else build.avals[ins[k]]
        ins[k] = marked_value(build, ins[k], aval.shape, eqn.where, eqn.primitive.name)
    return replace(eqn, ins=tuple(ins))


def marked_value(build: Builder, value: int, shape: tuple, where: str, name: str) -> int:
    """A value of ``shape``, element by element through an op; one for all its readers."""
    value = build.twins.get(value, value)
    key = value, shape, _region(build)
    if key not in build.spread:
        with build.having(marking=name):
            place = build.owned[value] or where
            (build.spread[key],) = build.traced(at_positions(shape), [value], place)
    return build.spread[key]


def marked_at_border(build: Builder, value: int, where: str, name: str) -> int:
    """A weight that leaves a branch meets its condition there; one that enters or leaves a loop
    meets the other iterations, and one that becomes a state the next step.
    """
    if value not in build.owned or build.unmarked is not None:
        return value
    return marked_value(build, value, build.avals[value].shape, where, name)


# splicing -----------------------------------------------------------------------------------------
#
# Equations that are added to a finished program.


def extending(program: Program) -> Builder:
    """A builder of further equations of a program's values; it holds no equation yet."""

    def lowered(build: Builder, eqn, ins: list[int], where: str) -> list[int]:
        body = _jax.inlinable(eqn)
        if body is not None:
            return build.call(*_jax.closed_jaxpr(body), ins, where)
        flat = Equation(eqn.primitive, eqn.params, eqn.ctx, tuple(ins), (), where, origin=eqn)
        return build.append(flat, [v.aval for v in eqn.outvars])

    build = Builder(lowered)
    build.avals, build.depth = list(program.avals), [0] * len(program.avals)
    build.constants = dict(program.constants)
    return build


class Splicing:
    """A copy of a program into which equations are put; numbers of its values and equations are
    those of the program until :meth:`result`.
    """

    def __init__(self, program: Program):
        self.program, self._build = program, extending(program)
        self._before: dict[int, list[Equation]] = {}
        self._names: dict[int, list[tuple[int, int]]] = {}

    def value(self, aval) -> int:
        """A new value that no equation makes."""
        return self._build.new(aval)

    def put(self, place: int, fn: Callable, ins: Sequence[int], extra: bool = False) -> list[int]:
        """Put the equations of ``fn`` of these values in front of equation ``place``; returns its
        results.

        They are in the regions of the equation before. ``extra``: see :class:`Equation`.
        """
        beside = self.program.equations[max(place - 1, 0)]
        self._build.bodies = [[]]
        outs = self._build.traced(fn, ins, beside.where)
        made = [replace(e, scope=beside.scope, extra=extra) for e in self._build.bodies[0]]
        self._before.setdefault(place, []).extend(made)
        return outs

    def rename(self, place: int, old: int, new: int) -> None:
        """The equations from ``place`` on, and the results, read one value in place of another."""
        self._names.setdefault(place, []).append((old, new))

    def result(self, **changes) -> Program:
        """The program with all that was put in; ``changes`` are further fields of it."""
        names: dict[int, int] = {}
        equations: list[Equation] = []
        for i, eqn in enumerate(self.program.equations):
            equations += [renamed(e, names) for e in self._before.get(i, ())]
            names.update(self._names.get(i, ()))
            equations.append(renamed(eqn, names))
        end = len(self.program.equations)
        equations += [renamed(e, names) for e in self._before.get(end, ())]
        names.update(self._names.get(end, ()))
        results = {
            name: tuple(names.get(v, v) for v in getattr(self.program, name))
            for name in ('outputs', 'new_carry')
        }
        return replace(
            self.program,
            avals=tuple(self._build.avals),
            constants=self._build.constants,
            equations=tuple(equations),
            **(results | changes),
        )
