"""Equations that are put into a finished program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ... import _jax
from ..equations.equation import Equation
from .builder import Builder, Place
from .copy_propagation import renamed
from .program import Program


class Splicing:
    """A copy of a program into which equations are put; numbers of its values and equations are
    those of the program until :meth:`result`.
    """

    def __init__(self, program: Program):
        self.program = program
        self._build = Builder(_lowered)
        self._build.avals = list(program.avals)
        self._build.depth = [0] * len(program.avals)
        self._build.constants = dict(program.constants)
        self._before: dict[int, list[Equation]] = {}
        self._names: dict[int, list[tuple[int, int]]] = {}

    def value(self, aval) -> int:
        """A new value that no equation makes."""
        return self._build.new(aval)

    def put(self, place: int, fn: Callable, ins: Sequence[int], extra: bool = False) -> list[int]:
        """Put the equations of ``fn`` of these values in front of equation ``place``; returns its
        results.

        They stand in the regions of the equation before. ``extra``: see :class:`Equation`.
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


def _lowered(build: Builder, eqn, ins: list[int], place: Place) -> list[int]:
    body = _jax.inlinable(eqn)
    if body is not None:
        return build.call(*_jax.closed_jaxpr(body), ins, place)
    flat = Equation(eqn.primitive, eqn.params, eqn.ctx, tuple(ins), (), place.where, origin=eqn)
    return build.append(flat, [v.aval for v in eqn.outvars])
