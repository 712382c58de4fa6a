"""D-RTRL: ``e^t = D^t e^{t-1} + D_f^t (x) x^t``; the gradient is the same-step part and
``< dL/dh^{t-1}, e^{t-1} >``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph
from .._errors import OptionError
from .._executor import Vector, add
from .contraction import add_gradients, same_step
from .coordinates import Pair, by_pair, gathered_once, pairs
from .entries import apart, reads_weights, zeros
from .lanes import anywhere
from .pending import SHORT, Pending, Segment, Steps
from .reading import solve
from .reverse_scan import Credit, backwards
from .rule import Network, OpGradients, Rule, Trace, Window
from .storage import Stored, after, entry_dtype, stored_dtype
from .writing import Change, has_kernel, renewed

__all__ = ['DRTRL']

CACHED = 2**24  # bytes that a processor's last cache may hold
SMALL = 2**22  # bytes of a trace that a single step may as well write
PENDING = '(pending)'  # the key, beside a trace's relations, of steps not yet written into it
PENDING_STEPS = 4  # a write moves the trace twice, each pending step costs a contraction


@dataclass(frozen=True)
class DRTRL(Rule):
    """D-RTRL with a trace of the parameter's size for each sample (see
    :func:`braintrace.rules.d_rtrl`).
    """

    trace_dtype: Any = None
    write_every: int | None = None
    name: ClassVar[str] = 'D_RTRL'
    required: ClassVar[tuple[str, ...]] = ('yw_to_w', 'xy_to_dw', 'init_drtrl')
    probes: ClassVar[bool] = False

    @property
    def approximation(self) -> str:
        return ''

    @property
    def remembers(self) -> bool:
        return True

    def init(self, graph):
        def one(pair: Pair):
            entry = apart(zeros(pair.op, pair.coords, pair.group.num_state))
            own = pair.group.dtype
            return jax.tree.map(
                lambda e: e.astype(self._stored_in(entry_dtype(e.dtype, own))), entry
            )

        return by_pair(graph, one)

    def _stored_in(self, dtype):
        own = self.trace_dtype is None or jnp.issubdtype(dtype, jnp.complexfloating)
        return dtype if own else stored_dtype(self.trace_dtype)

    # several steps --------------------------------------------------------------------------------

    def window(self, network, trace, pending, window, keep):
        graph, resets = network.graph, window.resets
        # delta_t = dy_t + lam_t . D_f,t        lam_{t-1} = c_t + lam_t D_t
        # push_t  = p_t . D_f,t                 p_{t-1}   = p_t D_t
        credit, steps = backwards(graph, window, keep)
        # gradient = sum_t xy_to_dw(x_t, delta_t) + < lam_0 , e_0 >; a reset at the start ends e_0
        past = pending if pending is None or resets is None else pending.without(graph, resets[0])
        grads = self._gradient(network, trace, past, window, credit)
        # e_K = p_0 e_0 + sum_t push_t (x) x_t; any reset ends e_0
        if pending is not None and steps is not None:
            past = pending if resets is None else pending.without(graph, resets.any(0))
            steps = past.joined_to(graph, steps)
        return grads, steps

    def _gradient(
        self,
        network: Network,
        trace: Trace,
        pending: Pending | None,
        window: Window,
        credit: Credit,
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
        grads = _with_rows(same_step(network.graph, xs, delta, network.weights), network, older)
        return add_gradients(grads, self._history(network, trace, lam, alive, window.t[0]))

    def close(self, network, trace, pending, t, read):
        first, *rest = pending.segments
        first = first._replace(p=after(read, t, first.p))
        pending = pending._replace(segments=(first, *rest))
        graph = network.graph
        changes = by_pair(graph, pending.change)
        factors = by_pair(graph, lambda pair: tuple(map(_factors, pair.of(changes))))
        factors = gathered_once(graph, anywhere(t >= 0), factors)

        def one(pair: Pair):
            old = self._stored(trace, pair, pending.alive)
            each = zip(pair.of(changes), pair.of(factors), strict=True)
            made = tuple(change._replace(**of_entry) for change, of_entry in each)
            weights = network.weights[pair.relation.key]
            return renewed(pair.op, pair.coords, old, made, weights, t)

        return by_pair(graph, one)

    def _stored(self, trace: Trace, pair: Pair, alive: jax.Array) -> Stored:
        return Stored(pair.of(trace), alive if pair.laned else alive.any(), pair.op.y_aval.dtype)

    def _history(
        self,
        network: Network,
        carried: dict,
        lam: dict[str, Vector],
        alive: jax.Array,
        t: jax.Array,
    ) -> OpGradients:
        """``< lam , e >`` for every relation, skipped while no lane has a past. Steps that are
        pending beside the trace are read with it.
        """
        graph = network.graph
        related = {r.key: network.weights[r.key] for r in graph.hidden_param_op_relations}

        def of_past():
            trace, steps = _apart(carried)
            if steps is None:
                return self._read(network, trace, lam, alive)
            pending = steps.pending(graph, t)
            older, before = pending.credit(graph, lam)
            of_trace = self._read(network, trace, before, pending.alive)
            return _with_rows(of_trace, network, older)

        return jax.lax.cond(anywhere(alive), of_past, lambda: jax.tree.map(jnp.zeros_like, related))

    def _read(
        self, network: Network, trace: Trace, lam: dict[str, Vector], alive: jax.Array
    ) -> OpGradients:
        """``< lam , e >`` for every relation, of a trace with nothing pending."""
        total: dict = {}
        signals = by_pair(network.graph, lambda pair: pair.gathered(lam))
        signals = gathered_once(network.graph, anywhere(alive), signals)
        for pair in pairs(network.graph):
            key, old = pair.relation.key, self._stored(trace, pair, alive)
            got = solve(pair.op, pair.coords, pair.of(signals), old, network.weights[key])
            total[key] = add(total.get(key), got)
        return {
            key: {n: g.astype(network.weights[key][n].dtype) for n, g in got.items()}
            for key, got in total.items()
        }

    # single steps ---------------------------------------------------------------------------------

    def carried(self, graph, trace, t):
        rows = self._rows(graph, trace)
        return trace if rows == 1 else {**trace, PENDING: Steps.empty(graph, rows, t)}

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
        self, flag: jax.Array, network: Network, trace: Trace, steps: Steps, t: jax.Array
    ) -> Trace:
        """The trace, with the pending steps written into it where the flag is set."""

        def close(trace):
            return self.close(network, trace, steps.pending(network.graph, t), t, ())

        return jax.lax.cond(flag, close, lambda trace: trace, trace)

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
        pending, credit = None, Credit(signals.c, dy)
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


def _apart(carried: dict) -> tuple[Trace, Steps | None]:
    """The trace, and the steps that are pending beside it."""
    trace = {key: of_group for key, of_group in carried.items() if key != PENDING}
    return trace, carried.get(PENDING)


def _with_rows(grads: OpGradients, network: Network, older: list) -> OpGradients:
    """Gradients, and those of earlier steps: pairs of x and the signal at each y, by op."""
    for x, of_rows in older:
        others = network.weights.keys() - of_rows
        few = same_step(network.graph, x, of_rows, network.weights, others)
        grads = add_gradients(grads, few)
    return grads


def _joined(pieces: list[tuple[dict, dict]]) -> tuple[dict, dict]:
    """x and delta of some steps after each other, by op."""

    def together(dicts: list[dict]) -> dict:
        return {
            key: jnp.concatenate([each[key] for each in dicts if key in each]) for key in dicts[-1]
        }

    return together([x for x, _ in pieces]), together([delta for _, delta in pieces])


def _factors(change: Change) -> dict:
    """What is multiplied with numbers of an entry one by one; many rows are contracted instead."""
    few = change.rows <= SHORT
    return {'p': change.p, 'q': change.q} if few else {'p': change.p}


def _bytes(trace) -> int:
    return sum(e.size * e.dtype.itemsize for e in jax.tree.leaves(trace))
