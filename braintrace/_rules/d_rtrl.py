"""D-RTRL: ``e^t = D^t e^{t-1} + D_f^t (x) x^t``; the gradient is the same-step part and
``< dL/dh^{t-1}, e^{t-1} >``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph
from .._executor import Vector, add
from ..errors import OptionError
from .contraction import WHOLE, Groups, add_gradients, over_lanes, same_step
from .entries import (
    Change,
    apart,
    has_kernel,
    has_reader,
    has_writer,
    if_any,
    reads_weights,
    renewed,
    renewed_if,
    solve,
    solve_onto,
    zeros,
)
from .layout import (
    Pair,
    States,
    Stored,
    after,
    by_pair,
    entry_dtype,
    gathered_once,
    pairs,
    stored_dtype,
)
from .pending import SHORT, Pending, PendingSteps, Segment, backwards
from .rule import Network, OpGradients, PositionWise, Trace, Window, Windowed

CACHED = 2**24  # bytes that a processor's last cache may hold
SMALL = 2**22  # bytes of a trace that a single step may as well write
PENDING = '(pending)'  # the key, beside a trace's relations, of steps not yet written into it
PENDING_STEPS = 4  # a write moves the trace twice, each pending step costs a contraction


@dataclass(frozen=True, repr=False)
class DRTRL(PositionWise, Windowed):
    """D-RTRL with a trace of the parameter's size for each sample (see
    :func:`braintrace.rules.d_rtrl`).
    """

    trace_dtype: Any = None
    write_every: int | None = None
    credit: str = 'cut'
    name: ClassVar[str] = 'D_RTRL'
    made_by: ClassVar[str] = 'd_rtrl'
    required: ClassVar[tuple[str, ...]] = ('yw_to_w', 'xy_to_dw', 'init_drtrl')
    filters: ClassVar[bool] = True
    approximation = ''
    remembers = True

    def init(self, graph):
        def one(pair: Pair):
            entry = apart(zeros(pair.op, pair.coords, pair.group.num_state))
            own = pair.group.dtype

            def stored_as(e):
                dtype = entry_dtype(e.dtype, own)
                # complex numbers are stored as they are
                as_is = self.trace_dtype is None or jnp.issubdtype(dtype, jnp.complexfloating)
                return e.astype(dtype if as_is else stored_dtype(self.trace_dtype))

            return jax.tree.map(stored_as, entry)

        return by_pair(graph, one)

    # several steps --------------------------------------------------------------------------------

    def window(self, network, trace, pending, window, keep):
        graph, resets = network.graph, window.resets
        # delta_t = dy_t + lam_t . D_f,t        lam_{t-1} = c_t + lam_t D_t
        # push_t  = p_t . D_f,t                 p_{t-1}   = p_t D_t
        credit, steps = backwards(graph, window, keep)
        # gradient = sum_t xy_to_dw(x_t, delta_t) + < lam_0 , e_0 >; a reset at the start ends e_0
        past = pending if pending is None or resets is None else pending.without(graph, resets[0])
        grads = self._gradient(network, trace, past, window, credit)
        return grads, steps if steps is None else _behind(pending, graph, window, steps)

    def _gradient(
        self,
        network: Network,
        trace: Trace,
        pending: Pending | None,
        window: Window,
        credit: tuple[dict[str, Vector], dict[str, jax.Array]],
    ) -> OpGradients:
        """``sum_t xy_to_dw(x_t, delta_t) + < lam_0 , e_0 >``; pending steps count as earlier steps
        of the window.
        """
        xs, (lam, delta), alive, older = window.x, credit, window.t[0] > 0, []
        if pending is not None:
            older, lam = pending.credit(network.graph, lam)
            alive = pending.alive
            if len(window.t) <= SHORT:
                older, xs, delta = [], *_joined([*older, (xs, delta)])
        graph, weights = network.graph, network.weights

        def gradients(groups: Groups):
            grads = same_step(graph, xs, delta, weights, groups=groups)
            grads = _with_rows(grads, network, older, groups)
            return self._with_history(grads, network, trace, lam, alive, window.t[0], groups)

        return over_lanes(graph, gradients)

    def with_history(self, network, grads, trace, pending, lam, t, reset):
        alive = t > 0
        if pending is not None:
            past = pending if reset is None else pending.without(network.graph, reset)
            alive, (older, lam) = past.alive, past.credit(network.graph, lam)
            grads = _with_rows(grads, network, older)
        return self._with_history(grads, network, trace, lam, alive, t)

    def advance(self, network, trace, pending, window):
        _, steps = backwards(network.graph, window, True)
        return _behind(pending, network.graph, window, steps)

    def close(self, network, trace, pending, t, read):
        first, *rest = pending.segments
        first = first._replace(p=after(read, t, first.p))
        pending = pending._replace(segments=(first, *rest))
        graph = network.graph
        changes = _changes(graph, pending, t)

        def one(pair: Pair):
            return self._renewed(network, trace, pending.alive, pair, pair.of(changes), t)

        return by_pair(graph, one)

    def _renewed(
        self,
        network: Network,
        trace: Trace,
        alive: jax.Array,
        pair: Pair,
        changes: tuple[Change, ...],
        t: jax.Array,
        flag: jax.Array | None = None,
    ) -> States:
        """An entry after its changes; where the op has its own writer, if the flag is set."""
        op, coords, weights = pair.op, pair.coords, network.weights[pair.relation.key]
        old = self._stored(trace, pair, alive)
        if has_writer(op, coords):
            return renewed_if(flag, op, coords, old, changes, weights, t)
        return renewed(op, coords, old, changes, weights, t)

    def _stored(self, trace: Trace, pair: Pair, alive: jax.Array) -> Stored:
        return Stored(pair.of(trace), alive if pair.laned else alive.any(), pair.op.y_aval.dtype)

    def _with_history(
        self,
        grads: OpGradients,
        network: Network,
        carried: dict,
        lam: dict[str, Vector],
        alive: jax.Array,
        t: jax.Array,
        groups: Groups = WHOLE,
    ) -> OpGradients:
        """``grads + < lam , e >``; steps that are pending beside the trace are read with it."""
        graph, (trace, steps) = network.graph, _apart(carried)
        if steps is not None:
            pending = steps.pending(graph, t)
            older, lam = pending.credit(graph, lam)
            alive, grads = pending.alive, _with_rows(grads, network, older, groups)

        def arguments(pair: Pair, signal: Vector):
            key, old = pair.relation.key, self._stored(trace, pair, alive)
            return pair.op, pair.coords, signal, old, network.weights[key], groups.of(key)

        def read():
            total: dict = {}
            signals = by_pair(graph, lambda pair: pair.gathered(lam))
            signals = gathered_once(graph, alive, signals)
            for pair in together:
                key = pair.relation.key
                total[key] = add(total.get(key), solve(*arguments(pair, pair.of(signals))))
            return jax.tree.map(lambda g, w: g.astype(w.dtype), total, read_weights)

        apart, together = _parted(graph, has_reader)
        if together:
            read_weights = {p.relation.key: network.weights[p.relation.key] for p in together}
            found = read() if groups.number else if_any(alive, read, read_weights)
            grads = add_gradients(grads, found)
        for pair in apart:
            key = pair.relation.key
            grads = {**grads, key: solve_onto(grads[key], *arguments(pair, pair.gathered(lam)))}
        return grads

    # single steps ---------------------------------------------------------------------------------

    def carried(self, graph, trace, t):
        rows = self._rows(graph, trace)
        return trace if rows == 1 else {**trace, PENDING: PendingSteps.empty(graph, rows, t)}

    def _rows(self, graph: ETraceGraph, trace: Trace) -> int:
        """Steps to keep pending before the trace is written; 1 (write each step) for a trace below
        ``SMALL`` bytes.
        """
        size = _bytes(trace)
        if not size or (self.write_every is None and size < SMALL):
            return 1
        return self.delay(graph, 1, self.write_every)

    def written(self, graph, carried, t):
        trace, steps = _apart(carried)
        if steps is None:
            return trace
        avals = {op.key: op.weight_avals for op in graph.ops}
        network = Network(graph, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), avals))
        return self._written_if(steps.number > 0, network, trace, steps, t)

    def _written_if(
        self, flag: jax.Array, network: Network, trace: Trace, steps: PendingSteps, t: jax.Array
    ) -> Trace:
        """The trace, with the pending steps written into it where the flag is set."""

        graph = network.graph
        apart, together = _parted(graph, has_writer)

        def written(pairs: list[Pair], *flag: jax.Array) -> list[States]:
            if not pairs:
                return []
            pending = steps.pending(graph, t)
            changes = _changes(graph, pending, t)
            return [
                self._renewed(network, trace, pending.alive, pair, pair.of(changes), t, *flag)
                for pair in pairs
            ]

        old = [pair.of(trace) for pair in together]
        new = jax.lax.cond(flag, lambda _: written(together), lambda old: old, old)
        found = dict(zip(map(_place, (*together, *apart)), (*new, *written(apart, flag))))
        return by_pair(graph, lambda pair: found[_place(pair)])

    def update(self, network, carried, factors, t):
        trace, steps = _apart(carried)
        if steps is None:
            x, q = jax.tree.map(lambda a: a[None], (factors.x, factors.df))
            steps = Pending(t > 0, (Segment(factors.d, x, q),))
            return self.close(network, trace, steps, t, ())
        # the write comes before the new step, so that the old and the new state share the trace
        trace = self._written_if(steps.is_full, network, trace, steps, t)
        return {**trace, PENDING: steps.added(network.graph, factors, t)}

    def gradient(self, network, before, after, step):
        trace, steps = _apart(before)
        _, _, signals = step.steps.at(0)
        dy = jax.tree.map(lambda a: a[None], signals.dy)
        pending, credit = None, (signals.c, dy)
        if steps is not None:
            # if a write was due, the pending steps are in the trace after the step
            trace, (pending, _) = _apart(after)[0], steps.with_room(network.graph, step.t[0])
        return self._gradient(network, trace, pending, step, credit)

    # when the trace is written --------------------------------------------------------------------

    def delay(self, graph, every, asked):
        bound = [pair.op for pair in pairs(graph) if reads_weights(pair)]
        if asked is not None:
            if bound and asked > 1:
                raise OptionError(
                    f'write_every: the trace of {bound[0].where} ({bound[0].primitive.name}) '
                    'depends on the weights at each step, so its steps can not stay pending over '
                    'an update. Leave write_every out.'
                )
            return asked
        size = _bytes(jax.eval_shape(lambda: self.init(graph)))
        at_once = bound or any(has_kernel(pair.op, pair.coords) for pair in pairs(graph))
        return 1 if at_once else max(1, (PENDING_STEPS if size > CACHED else 2) // every)


def _parted(graph: ETraceGraph, has_own: Callable) -> tuple[list[Pair], list[Pair]]:
    """The pairs whose op has code of its own, and the others."""
    own = [pair for pair in pairs(graph) if has_own(pair.op, pair.coords)]
    places = {_place(pair) for pair in own}
    return own, [pair for pair in pairs(graph) if _place(pair) not in places]


def _place(pair: Pair) -> tuple[str, str]:
    return pair.relation.key, pair.group.name


def _behind(pending: Pending | None, graph: ETraceGraph, window: Window, steps: Pending) -> Pending:
    """Pending steps and those of a window behind them: ``e_K = p_0 e_0 + sum_t push_t (x) x_t``;
    any reset ends ``e_0``.
    """
    if pending is None:
        return steps
    resets = window.resets
    past = pending if resets is None else pending.without(graph, resets.any(0))
    return past.joined_to(graph, steps)


def _apart(carried: dict) -> tuple[Trace, PendingSteps | None]:
    """The trace, and the steps that are pending beside it."""
    trace = {key: of_group for key, of_group in carried.items() if key != PENDING}
    return trace, carried.get(PENDING)


def _with_rows(
    grads: OpGradients, network: Network, older: list, groups: Groups = WHOLE
) -> OpGradients:
    """Gradients, and those of earlier steps: pairs of x and the signal at each y, by op."""
    for x, of_rows in older:
        others = network.weights.keys() - of_rows
        few = same_step(network.graph, x, of_rows, network.weights, others, groups)
        grads = add_gradients(grads, few)
    return grads


def _joined(pieces: list[tuple[dict, dict]]) -> tuple[dict, dict]:
    """x and delta of some steps after each other, by op."""

    def together(dicts: list[dict]) -> dict:
        return {
            key: jnp.concatenate([each[key] for each in dicts if key in each]) for key in dicts[-1]
        }

    return together([x for x, _ in pieces]), together([delta for _, delta in pieces])


def _changes(graph: ETraceGraph, pending: Pending, t: jax.Array) -> dict[str, dict]:
    """The changes of every entry by these steps; what is gathered for them is made once."""
    changes = by_pair(graph, pending.change)
    # what is multiplied with numbers of an entry one by one; many rows are contracted instead
    few = lambda c: {'p': c.p, 'q': c.q} if c.rows <= SHORT else {'p': c.p}  # noqa: E731
    factors = by_pair(graph, lambda pair: tuple(map(few, pair.of(changes))))
    factors = gathered_once(graph, t >= 0, factors)

    def one(pair: Pair) -> tuple[Change, ...]:
        each = zip(pair.of(changes), pair.of(factors), strict=True)
        return tuple(change._replace(**of_entry) for change, of_entry in each)

    return by_pair(graph, one)


def _bytes(trace) -> int:
    return sum(e.size * e.dtype.itemsize for e in jax.tree.leaves(trace))
