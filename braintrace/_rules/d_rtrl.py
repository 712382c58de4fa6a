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
from .._executor import Vector
from ..errors import OptionError
from .contraction import WHOLE, Groups, add_gradients, over_lanes, same_step
from .entries import OpTrace, apart, if_any, reads_weights
from .layout import (
    Pair,
    States,
    after,
    by_op,
    by_pair,
    entry_dtype,
    gathered_once,
    is_plain,
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
            entry = apart(OpTrace(pair.op, pair.coords).zeros(pair.group.num_state))

            def stored_as(e):
                dtype = entry_dtype(graph, pair, e.dtype)
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
        first = None if resets is None else resets[0]
        grads = self._gradient(network, trace, pending, window, credit, first)
        return grads, steps if steps is None else _behind(pending, graph, window, steps)

    def _gradient(
        self,
        network: Network,
        trace: dict,
        pending: Pending | None,
        window: Window,
        credit: tuple[dict[str, Vector], dict[str, jax.Array]],
        reset: jax.Array | None = None,
    ) -> OpGradients:
        """``sum_t xy_to_dw(x_t, delta_t) + < lam_0 , e_0 >``; pending steps count as earlier steps
        of the window.
        """
        graph, weights, xs, (lam, delta) = network.graph, network.weights, window.x, credit
        past, lam, older = _past(graph, trace, pending, lam, window.t[0], reset)
        if older and len(window.t) <= SHORT:
            pieces = zip(*older, (xs, delta), strict=True)
            older, (xs, delta) = [], map(_joined, pieces)

        def gradients(groups: Groups):
            grads = same_step(graph, xs, delta, weights, groups=groups)
            return _with_history(network, grads, past, lam, older, groups)

        return over_lanes(graph, gradients)

    def with_history(self, network, grads, trace, pending, lam, t, reset):
        past = _past(network.graph, trace, pending, lam, t, reset)
        return _with_history(network, grads, *past)

    def advance(self, network, trace, pending, window):
        _, steps = backwards(network.graph, window, True)
        return _behind(pending, network.graph, window, steps)

    def close(self, network, trace, pending, t, read):
        first, *rest = pending.segments
        first = first._replace(p=after(read, t, first.p))
        pending = pending._replace(segments=(first, *rest))
        return by_pair(network.graph, _writer(network, trace, pending, t))

    # single steps ---------------------------------------------------------------------------------

    def carried(self, graph, trace, t):
        size, rows = _bytes(trace), 1
        # a trace of a few bytes may as well be written at each step
        if size and (self.write_every is not None or size >= SMALL):
            rows = self.delay(graph, 1, self.write_every)
        return trace if rows == 1 else {**trace, PENDING: PendingSteps.empty(graph, rows, t)}

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
        apart, together = _parted(graph, lambda primitive: primitive.trace_writer)

        def written(pairs: list[Pair], *flag: jax.Array) -> list[States]:
            if not pairs:
                return []
            return list(map(_writer(network, trace, steps.pending(graph, t), t, *flag), pairs))

        old = [pair.of(trace) for pair in together]
        new = jax.lax.cond(flag, lambda _: written(together), lambda old: old, old)
        places = [pair.place for pair in (*together, *apart)]
        found = dict(zip(places, (*new, *written(apart, flag)), strict=True))
        return by_pair(graph, lambda pair: found[pair.place])

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
        at_once = bound or _parted(graph, lambda primitive: primitive.trace_kernel)[0]
        return 1 if at_once else max(1, (PENDING_STEPS if size > CACHED else 2) // every)


def _parted(graph: ETraceGraph, own: Callable[[Any], Any]) -> tuple[list[Pair], list[Pair]]:
    """The pairs whose primitive has ``own`` code for a platform, and the others."""
    parts: tuple[list[Pair], list[Pair]] = [], []
    for pair in pairs(graph):
        plain = is_plain(pair.op, pair.coords) and not pair.by_position
        has_own = own(pair.op.primitive) and plain
        parts[0 if has_own else 1].append(pair)
    return parts


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


def _past(
    graph: ETraceGraph,
    carried: dict,
    pending: Pending | None,
    lam: dict[str, Vector],
    t: jax.Array,
    reset: jax.Array | None,
) -> tuple[tuple[Trace, jax.Array], dict[str, Vector], list[tuple[dict, dict]]]:
    """What a signal ``lam`` at the present states reads in lanes without a reset: the stored trace
    with the flags of its lanes, the signal there, and of pending steps x and the signal at y.
    """
    trace, steps = _apart(carried)
    # what single steps left beside the trace is pending like the steps of an earlier window
    if steps is not None:
        pending = steps.pending(graph, t)
    if pending is None:
        return (trace, t > 0), lam, []
    pending = pending if reset is None else pending.without(graph, reset)
    older, lam = pending.credit(graph, lam)
    return (trace, pending.alive), lam, older


def _with_history(
    network: Network,
    grads: OpGradients,
    past: tuple[Trace, jax.Array],
    lam: dict[str, Vector],
    older: list[tuple[dict, dict]],
    groups: Groups = WHOLE,
) -> OpGradients:
    """``grads + < lam , e >``, and the gradients of ``older`` steps (see :func:`_past`)."""
    graph, weights, (trace, alive) = network.graph, network.weights, past
    for x, delta in older:
        few = same_step(graph, x, delta, weights, weights.keys() - delta, groups)
        grads = add_gradients(grads, few)

    def arguments(pair: Pair, signal: Vector) -> tuple:
        of_op = groups.get(pair.relation.key, 0)
        return signal, pair.of(trace), pair.flags(alive), of_op

    # An op with a reader of its own chooses by platform; all others are read behind one branch.
    apart, together = _parted(graph, lambda primitive: primitive.trace_reader)
    if together:
        like = {pair.relation.key: grads[pair.relation.key] for pair in together}

        def read():
            signals = by_pair(graph, lambda pair: pair.gathered(lam))
            signals = gathered_once(graph, alive, signals)

            def one(pair: Pair):
                return _entry_of(network, pair).solve(*arguments(pair, pair.of(signals)))

            return jax.tree.map(lambda g, w: g.astype(w.dtype), by_op(together, one), like)

        grads = add_gradients(grads, read() if groups else if_any(alive, read, like))
    for pair in apart:
        key, own = pair.relation.key, _entry_of(network, pair)
        found = own.solve_onto(grads[key], *arguments(pair, pair.gathered(lam)))
        grads = {**grads, key: found}
    return grads


def _entry_of(network: Network, pair: Pair) -> OpTrace:
    weights = network.weights[pair.relation.key]
    return OpTrace(pair.op, pair.coords, weights, pair.by_position)


def _writer(
    network: Network,
    trace: Trace,
    pending: Pending,
    t: jax.Array,
    flag: jax.Array | None = None,
) -> Callable[[Pair], States]:
    """The function that writes pending steps into the entry of a pair; where the op has a writer of
    its own, if the flag is set.
    """
    graph = network.graph
    changes = by_pair(graph, pending.change)
    # What is multiplied with numbers of an entry one by one is gathered once for all of them; many
    # rows are contracted instead.
    few = lambda c: {'p': c.p, 'q': c.q} if c.rows <= SHORT else {'p': c.p}
    gathered = by_pair(graph, lambda pair: tuple(map(few, pair.of(changes))))
    gathered = gathered_once(graph, t >= 0, gathered)

    def one(pair: Pair) -> States:
        each = zip(pair.of(changes), pair.of(gathered), strict=True)
        own = tuple(change._replace(**of_entry) for change, of_entry in each)
        old = pair.of(trace), pair.flags(pending.alive)
        return _entry_of(network, pair).renewed_if(flag, *old, own, t)

    return one


def _joined(pieces: tuple[dict, ...]) -> dict[str, jax.Array]:
    """The rows of some steps after each other, by op; every op is in the last piece."""
    return {
        key: jnp.concatenate([each[key] for each in pieces if key in each]) for key in pieces[-1]
    }


def _bytes(trace) -> int:
    return sum(e.size * e.dtype.itemsize for e in jax.tree.leaves(trace))
