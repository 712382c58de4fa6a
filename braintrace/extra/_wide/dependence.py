"""Which elements of a step depend on which, by evaluating it on positive numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ... import _jax
from ..._compiler import PROPERTIES, ETraceGraph, OpUse, abstract, is_inexact
from ..._executor import Executor
from ..._rules import op_gradient
from ...errors import NotSupportedError

# positive evaluation ------------------------------------------------------------------------------
#
# Which results of a linear program depend on which of its operands, by structure.
#
# The program is evaluated on the numbers 0 and 1 with every sign a plus, so that nothing cancels: a
# result is then not zero exactly where a path leads to it. Values that do not depend on a linear
# operand are coefficients: what is made of constants alone keeps its zeros, and so do products and
# movements of it; all other coefficients count as ones.


MOST = 2**24  # numbers of an intermediate result that are kept at once

KNOWN, ZEROS, ANY, LINEAR = range(4)  # constants, known zeros, nothing known, linear
INDEXED = 'taken', 'put', 'indexed'  # what they read is known where their indices are
EVALUATED = {'product', 'moved', 'chosen', *INDEXED}


class _Pattern(NamedTuple):
    kind: int
    array: Any = None  # numbers of a constant, else 0 and 1; None: nothing known

    def pattern(self, aval):
        """0 where the value is zero by structure, else 1."""
        if self.array is None:
            return jnp.ones(aval.shape, aval.dtype)
        return _ones(self.array, aval) if is_inexact(aval) else self.array


def _ones(x, aval):
    return jnp.broadcast_to(x != 0, aval.shape).astype(aval.dtype)


class Linear:
    """A function ``fn(*unknown, *linear)`` of flat arrays, linear in the last ones.

    ``unknown`` and ``linear``: their shapes.
    """

    def __init__(self, fn: Callable, unknown: list, linear: list):
        self.jaxpr, self.consts, _ = _jax.called(_jax.opened, fn, [*unknown, *linear])
        self.unknown = len(unknown)
        sizes = [math.prod(v.aval.shape) for eqn in self.jaxpr.eqns for v in eqn.outvars]
        self._chunk = max(1, MOST // max(sizes, default=1))

    def depends(self, basis: list[np.ndarray], seen: Callable | None = None) -> Any:
        """For each row of the linear operands which elements of the results depend on its ones.

        ``seen(eqn, arrays, results)`` may look at each linear equation; its findings come back.
        """
        found = []

        def run(consts, rows):
            return jax.vmap(functools.partial(self._one, consts, seen))(rows)

        run = jax.jit(run, compiler_options={'xla_backend_optimization_level': 0})
        # as many rows at once as fit into memory
        for k in range(0, len(basis[0]), self._chunk):
            rows = [b[k : k + self._chunk] for b in basis]
            found.append(jax.tree.map(np.asarray, _jax.called(run, self.consts, rows)))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    def _one(self, consts, seen, rows):
        values = [_Pattern(ANY)] * self.unknown + [
            _Pattern(LINEAR, r.astype(v.aval.dtype))
            for v, r in zip(self.jaxpr.invars[self.unknown :], rows, strict=True)
        ]
        findings: list = []
        look = None if seen is None else lambda *at: findings.append(seen(*at))
        outs = _evaluate(self.jaxpr, consts, values, look)
        if seen is not None:
            return findings
        return [
            v.array != 0 if v.kind == LINEAR else jnp.zeros(o.aval.shape, bool)
            for v, o in zip(outs, self.jaxpr.outvars, strict=True)
        ]


def _evaluate(jaxpr, consts: Sequence, args: list[_Pattern], look) -> list[_Pattern]:
    known = [_Pattern(KNOWN, c) for c in consts]

    def of_literal(atom) -> _Pattern:
        return _Pattern(KNOWN, _jax.literal(atom))

    return _jax.walk(jaxpr, known, args, lambda eqn, ins: _equation(eqn, ins, look), of_literal)


def _equation(eqn, ins: list[_Pattern], look) -> list[_Pattern]:
    kind = max((v.kind for v in ins), default=KNOWN)
    # what is made of constants alone is computed, so that its zeros are seen
    if kind == KNOWN:
        found = _jax.bind(eqn, *(v.array for v in ins))
        return [_Pattern(KNOWN, x) for x in found]
    if PROPERTIES[eqn.primitive.name].passes:
        return ins
    inner = _inside(eqn, ins, look)
    if inner is not None:
        return inner
    numbers = all(is_inexact(v.aval) for v in eqn.outvars)  # no keys, which are not compared with 0
    arrays = _positive(eqn, ins) if numbers or kind == LINEAR else None
    if kind == LINEAR:
        if arrays is None:
            # of a primitive that is not known, every result reads every linear operand
            some = jnp.stack([(v.array != 0).any() for v in ins if v.kind == LINEAR]).any()
            arrays = [jnp.broadcast_to(some, v.aval.shape) for v in eqn.outvars]
            arrays = [x.astype(v.aval.dtype) for x, v in zip(arrays, eqn.outvars, strict=True)]
        if look is not None:
            look(eqn, [v.array if v.kind == LINEAR else None for v in ins], arrays)
        return [_Pattern(LINEAR, x) for x in arrays]
    if arrays is None:
        return [_Pattern(ANY)] * len(eqn.outvars)
    return [_Pattern(ZEROS, x) for x in arrays]


def _inside(eqn, ins: list[_Pattern], look) -> list[_Pattern] | None:
    """The results of an equation that has a body."""
    call = _jax.call_body(eqn)
    if call is not None:
        return _evaluate(*call, ins, look)
    scan, branches = _jax.scan_parts(eqn), _jax.cond_branches(eqn)
    if scan is not None:
        return _scanned(scan, [v.aval for v in eqn.outvars], ins, look)
    if branches is None:
        return None
    found = [_evaluate(*branch, ins[1:], look) for branch in branches]
    return [_one_of(v.aval, each, sum) for v, each in zip(eqn.outvars, zip(*found), strict=True)]


def _one_of(aval, values, gather: Callable) -> _Pattern:
    """Values of one shape, each a branch's or a turn's, gathered as a sum or in a stack."""
    kind = max(ZEROS, *(v.kind for v in values))
    if not is_inexact(aval) or (kind != LINEAR and any(v.array is None for v in values)):
        return _Pattern(ANY)
    found = gather([_part(v, aval, kind) for v in values])
    return _Pattern(kind, _ones(found, aval) if gather is sum else found)


def _part(v: _Pattern, aval, kind: int):
    """A value among others; a constant of a linear sum is a zero."""
    if kind == LINEAR and v.kind != LINEAR:
        return jnp.zeros(aval.shape, aval.dtype)
    return v.pattern(aval)


def _scanned(scan: _jax.ScanParts, avals: list, ins: list[_Pattern], look) -> list[_Pattern]:
    """A loop, turn after turn."""
    consts, carry, xs = scan.split(ins)
    turns, rows = range(scan.length), []
    for t in reversed(turns) if scan.reverse else turns:
        at = [v if v.array is None else v._replace(array=v.array[t]) for v in xs]
        outs = _evaluate(scan.body, scan.consts, [*consts, *carry, *at], look)
        carry, row = outs[: scan.num_carry], outs[scan.num_carry :]
        rows.append(row)
    rows = rows[::-1] if scan.reverse else rows
    slices = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in avals[scan.num_carry :]]
    sequences = zip(slices, zip(*rows), strict=True)
    return [*carry, *(_one_of(aval, each, jnp.stack) for aval, each in sequences)]


def _positive(eqn, ins: list[_Pattern]) -> list | None:
    """The results on numbers that are not negative; None for a primitive that is not known."""
    kind, outs = PROPERTIES[eqn.primitive.name].zeros, [v.aval for v in eqn.outvars]
    # Operands that name places must be known; else each element may come from anywhere.
    places = {'taken': slice(1, None), 'put': slice(2, None)}
    places |= {'chosen': slice(1), 'indexed': slice(1, 2)}
    known = all(v.kind == KNOWN for v in ins[places.get(kind, slice(0))])
    linear = kind != 'product' and any(v.kind == LINEAR for v in ins)
    # a sum of a linear value and another one is linear where that is zero
    patterns = [
        _part(v, x.aval, LINEAR) if linear and is_inexact(x.aval) else v.pattern(x.aval)
        for v, x in zip(ins, eqn.invars, strict=True)
    ]
    if kind == 'same':
        return [_ones(x, out) for x, out in zip(patterns, outs, strict=True)]
    if kind == 'sum' or (kind == 'chosen' and not known):
        several = patterns if kind == 'sum' else patterns[1:]
        return [_ones(sum(abs(x) for x in several), outs[0])]
    if kind == 'first':
        return [_ones(patterns[0], outs[0])]
    if kind in ('taken', 'put') and not known:
        # the slice begins somewhere: along the axes that it does not fill, anywhere
        *beside, moving = patterns[: 1 + (kind == 'put')]
        whole, part = patterns[0].shape, moving.shape if beside else outs[0].shape
        axes = tuple(k for k, n in enumerate(part) if n < whole[k])
        return [_ones(sum(beside) + moving.sum(axes, keepdims=True), outs[0])]
    if kind not in EVALUATED or not known:
        return None
    # the primitive itself, on numbers that are not negative: nothing cancels
    found = _jax.bind(eqn, *patterns)
    return [_ones(x, out) for x, out in zip(found, outs, strict=True)]


# dependence ---------------------------------------------------------------------------------------
#
# What the new hidden numbers of a step read, by structure.


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
        values = program.params, program.inputs, [program.carry[c] for c in graph.states]
        params, inputs, hidden = ([abstract(program.avals[v]) for v in vs] for vs in values)
        leaves = list(map(abstract, program.leaf_avals))
        ends = np.cumsum([len(params), len(leaves), len(inputs)])
        self.keys: list[str] = []

        # nothing is cut here: a wide rule follows every path of the step
        def pull(*values):
            p, carry, x, cotangents = (values[a:b] for a, b in zip((0, *ends), (*ends, None)))
            uncut = self.executor.uncut(p, self.executor.op_weights(p), list(carry), x)
            old, y = uncut.pull(list(cotangents))
            self.keys[:] = y
            return [*old, *y.values()]

        self.linear = Linear(pull, [*params, *leaves, *inputs], hidden)

    def found(self) -> Dependence:
        """What each new number reads, in any lane."""
        n = self.numbers
        rows = [p.astype(float) for p in n.split(np.eye(n.total))]
        if n.front:  # and ones on half of the lanes
            rows = [np.concatenate(pair) for pair in zip(rows, self._halves, strict=True)]
        found = self.linear.depends(rows)
        # the first N rows say what each number reads, those behind them which lanes meet
        laned = self._laned([x[n.total :] for x in found]) if n.front else frozenset()
        old = n.joined([x[: n.total] for x in found[: len(n.shapes)]])
        feeds = {
            key: y[: n.total].any(1) if key in laned else y[: n.total]
            for key, y in zip(self.keys, found[len(n.shapes) :], strict=True)
        }
        return Dependence(old.any(1) if n.front else old, feeds, laned)

    @cached_property
    def _flags(self) -> np.ndarray:
        return _flags(math.prod(self.numbers.front))

    @cached_property
    def _halves(self) -> list[np.ndarray]:
        """Ones on the new states of the flagged lanes."""
        return [_flagged(self._flags, shape) for shape in self.numbers.shapes]

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
        batched = {
            op.key
            for op in self.graph.ops
            if op.primitive.batched or by_lane(op, self.numbers.lanes)
        }
        return frozenset(
            key
            for key, y in zip(self.keys, found[count:], strict=True)
            if key in batched and y.shape[1:2] == lanes.shape[1:] and not _crosses(y, lanes)
        )

    def _crossing(self) -> str:
        """What is said of the lanes: the equation at which they meet, or may meet."""
        equations, flags = [], self._flags

        lanes = self.numbers.lanes

        def look(eqn, *arrays):
            # which lanes each linear value is in; None without lanes
            equations.append(eqn)
            return [
                [
                    None
                    if x is None or x.shape[:1] != (lanes,)
                    else (x != 0).any(tuple(range(1, x.ndim)))
                    for x in each
                ]
                for each in arrays
            ]

        seen = self.linear.depends(self._halves, look)
        for eqn, (ins, outs) in zip(equations, seen, strict=False):
            if any((x & ~flags).any() for x in outs if x is not None) and not any(
                (x & ~flags).any() for x in ins if x is not None
            ):
                where = _jax.location(eqn.source_info)
                name = f'{eqn.primitive.name}{f" [{where}]" if where else ""}'
                if PROPERTIES[eqn.primitive.name].zeros in INDEXED:
                    return f'are not known to be apart: the step makes the indices of {name}'
                return f'read one another: {name}'
        return 'read one another in an equation of the step'


def _flags(lanes: int) -> np.ndarray:
    """``(m, lanes)``: for each binary digit of a lane's number the lanes that have it, and those
    that have not; of any two lanes one row has the first alone.
    """
    each = np.arange(lanes)
    digits = [(each >> k) % 2 == 1 for k in range(max(1, (lanes - 1).bit_length()))]
    return np.stack([*digits, *(~d for d in digits)])


def _flagged(flags: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """``(m, *shape)``: ones in the flagged lanes."""
    rows = flags.reshape(*flags.shape, *(1 for _ in shape[1:]))
    return np.broadcast_to(rows, (len(flags), *shape)).astype(float)


def _crosses(x: np.ndarray, flags: np.ndarray) -> bool:
    """Whether a row of ``(m, lanes, ...)`` is in another lane than those flagged."""
    if x.shape[1:2] != flags.shape[1:]:
        return bool(x.any())
    return bool((x.reshape(*flags.shape, -1).any(-1) & ~flags).any())


def by_lane(op: OpUse, lanes: int | None) -> bool:
    """Whether the weights of an op without x have the lanes in front, and each lane of them makes
    that lane of y alone: those of a bias that was broadcast to the batch before it became an op.
    """
    shapes = {a.shape[:1] for a in (op.y_aval, *op.weight_avals.values())}
    if op.x is not None or op.repeats or shapes != {(lanes,)}:
        return False
    empty = op.empty()

    def gradient(*values):
        *weights, d = values
        given = dict(zip(op.weight_avals, weights, strict=True))
        return list(op_gradient(empty, None, d[None], given).values())

    linear = Linear(gradient, list(map(abstract, op.weight_avals.values())), [abstract(op.y_aval)])
    flags = _flags(op.y_aval.shape[0])
    found = linear.depends([_flagged(flags, op.y_aval.shape)])
    return not any(_crosses(x, flags) for x in found)


def dependence(graph: ETraceGraph) -> Dependence:
    """What each new hidden number reads. Raises :class:`braintrace.errors.NotSupportedError` where
    lanes read one another.
    """
    return _LinearPullBack(graph).found()


def lanes_meet(graph: ETraceGraph) -> str:
    """Where the lanes of a step, whose states all have lanes, read one another; empty: nowhere."""
    return _LinearPullBack(graph).meet()
