"""What the new hidden numbers of a step read, by structure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._compiler import ETraceGraph, properties_of
from .._errors import NotSupportedError
from .executor import Executor
from .positive import INDEXED, Linear


class Numbers(NamedTuple):
    """The hidden numbers of a step as one axis: of one lane, where ``lanes`` are given, else of all
    states. ``shapes`` are those of whole states.
    """

    shapes: tuple[tuple[int, ...], ...]
    lanes: int | None

    @classmethod
    def of(cls, graph: ETraceGraph) -> Numbers:
        """The numbers of a graph whose states all have lanes, or none has."""
        laned = graph.lanes is not None and graph.laned.issuperset(graph.states)
        avals = [graph.program.avals[graph.program.carry[c]] for c in graph.states]
        return cls(tuple(a.shape for a in avals), graph.lanes if laned else None)

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape[0 if self.lanes is None else 1 :]) for shape in self.shapes]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def front(self) -> tuple[int, ...]:
        """The axis of the lanes, if there is one."""
        return () if self.lanes is None else (self.lanes,)

    def joined(self, states: Sequence):
        """Arrays ``(*more, *state)`` as one ``(*more, lanes, N)``."""
        parts = [
            x.reshape(*x.shape[: x.ndim - len(shape)], *self.front, -1)
            for x, shape in zip(states, self.shapes, strict=True)
        ]
        of = np if all(isinstance(p, np.ndarray) for p in parts) else jnp
        return of.concatenate(parts, -1)

    def split(self, rows: np.ndarray) -> list[np.ndarray]:
        """Rows ``(m, N)``, the same in every lane, as arrays ``(m, *state)``."""
        parts = np.split(rows, np.cumsum(self.sizes)[:-1], -1)
        return [
            np.broadcast_to(
                p.reshape(len(rows), *(1 for _ in self.front), *shape[len(self.front) :]),
                (len(rows), *shape),
            )
            for p, shape in zip(parts, self.shapes, strict=True)
        ]


class Dependence(NamedTuple):
    """``reads`` (N, N): which old numbers each new one reads; ``feeds`` (op -> ``(N, *y)``): which
    elements of y, of one lane where y is in ``laned``.
    """

    reads: np.ndarray
    feeds: dict[str, np.ndarray]
    laned: frozenset[str]


class _LinearPullBack:
    """The pull-back of a compiled step, as a linear program."""

    def __init__(self, graph: ETraceGraph):
        self.executor, self.numbers = Executor(graph), Numbers.of(graph)
        self.graph, program = graph, graph.program
        avals = [[program.avals[v] for v in vs] for vs in (program.params, program.inputs)]
        leaves = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.leaf_avals]
        params, inputs = ([jax.ShapeDtypeStruct(a.shape, a.dtype) for a in each] for each in avals)
        hidden = [program.avals[program.carry[c]] for c in graph.states]
        hidden = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in hidden]
        self.keys: list[str] = []

        def pull(*leaves):
            p, rest = leaves[: len(params)], leaves[len(params) :]
            carry, rest = rest[: self._carry], rest[self._carry :]
            x, cotangents = rest[: len(inputs)], rest[len(inputs) :]
            weights = self.executor.op_weights(p)
            old, y = self.executor.uncut(p, weights, list(carry), x).pull(list(cotangents))
            self.keys[:] = y
            return [*old, *y.values()]

        self._carry = len(leaves)
        self.linear = Linear(pull, [*params, *leaves, *inputs], hidden)

    def found(self) -> Dependence:
        """What each new number reads, in any lane."""
        n = self.numbers
        rows = [p.astype(float) for p in n.split(np.eye(n.total))]
        if n.front:  # and ones on half of the lanes
            rows = [np.concatenate(pair) for pair in zip(rows, self._halves, strict=True)]
        found = self.linear.depends(rows)
        laned = self._laned([x[n.total :] for x in found]) if n.front else frozenset()
        old = n.joined([x[: n.total] for x in found[: len(n.shapes)]])
        feeds = {
            key: y[: n.total].any(1) if key in laned else y[: n.total]
            for key, y in zip(self.keys, found[len(n.shapes) :], strict=True)
        }
        return Dependence(old.any(1) if n.front else old, feeds, laned)

    @cached_property
    def _flags(self) -> np.ndarray:
        """``(m, lanes)``: for each binary digit of a lane's number the lanes that have it, and
        those that have not; of any two lanes one row has the first alone.
        """
        lanes = np.arange(self.numbers.lanes)
        digits = [(lanes >> k) % 2 == 1 for k in range(max(1, (len(lanes) - 1).bit_length()))]
        return np.stack([*digits, *(~d for d in digits)])

    @cached_property
    def _halves(self) -> list[np.ndarray]:
        """Ones on the new states of the flagged lanes."""
        flags = self._flags
        return [
            np.broadcast_to(
                flags.reshape(*flags.shape, *(1 for _ in s[1:])), (len(flags), *s)
            ).astype(float)
            for s in self.numbers.shapes
        ]

    def meet(self) -> str:
        """Where a lane reads another; empty: nowhere."""
        found = self.linear.depends(self._halves)[: len(self.numbers.shapes)]
        return self._crossing() if any(_crosses(h, self._flags) for h in found) else ''

    def _laned(self, found: list[np.ndarray]) -> frozenset[str]:
        """The ops whose y has lanes; refuse lanes that read one another."""
        lanes, count = self._flags, len(self.numbers.shapes)
        if any(_crosses(h, lanes) for h in found[:count]):
            raise NotSupportedError(
                f'the lanes of a batch {self._crossing()}. A trace of this rule '
                'takes the derivative of a step lane by lane. Use braintrace.rules.d_rtrl(), or '
                "an exact window (inside='exact')."
            )
        batched = {op.key for op in self.graph.ops if op.primitive.batched}
        return frozenset(
            key
            for key, y in zip(self.keys, found[count:], strict=True)
            if key in batched and y.shape[1:2] == lanes.shape[1:] and not _crosses(y, lanes)
        )

    def _crossing(self) -> str:
        """What is said of the lanes: the equation at which they meet, or may meet."""
        equations, flags = [], self._flags

        def look(eqn, ins, outs):
            equations.append(eqn)
            return [_lanes_of(x, lanes) for x in ins], [_lanes_of(x, lanes) for x in outs]

        lanes = self.numbers.lanes
        seen = self.linear.depends(self._halves, look)
        for eqn, (ins, outs) in zip(equations, seen, strict=False):
            if any((x & ~flags).any() for x in outs if x is not None) and not any(
                (x & ~flags).any() for x in ins if x is not None
            ):
                where = _jax.location(eqn.source_info)
                name = f'{eqn.primitive.name}{f" [{where}]" if where else ""}'
                if properties_of(eqn).zeros in INDEXED:
                    return f'are not known to be apart: the step makes the indices of {name}'
                return f'read one another: {name}'
        return 'read one another in an equation of the step'


def _lanes_of(x, lanes: int):
    """Which lanes a linear value of one evaluation stands in; None without lanes."""
    if x is None or x.shape[:1] != (lanes,):
        return None
    return (x != 0).any(tuple(range(1, x.ndim)))


def _crosses(x: np.ndarray, flags: np.ndarray) -> bool:
    """Whether a row of ``(m, lanes, ...)`` stands in another lane than those flagged."""
    if x.shape[1:2] != flags.shape[1:]:
        return bool(x.any())
    return bool((x.reshape(*flags.shape, -1).any(-1) & ~flags).any())


def dependence(graph: ETraceGraph) -> Dependence:
    """What each new hidden number reads. Raises :class:`braintrace.NotSupportedError` where lanes
    read one another.
    """
    return _LinearPullBack(graph).found()


def lanes_meet(graph: ETraceGraph) -> str:
    """Where the lanes of a step, whose states all have lanes, read one another; empty: nowhere."""
    return _LinearPullBack(graph).meet()
