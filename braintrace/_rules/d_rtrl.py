"""D-RTRL: ``e^t = D^t e^{t-1} + D_f^t (x) x^t``; the gradient is the same-step part and
``< dL/dh^{t-1}, e^{t-1} >``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph, HiddenGroup, Relation
from .._executor import Vector
from .contraction import WHOLE, Groups, add_gradients, over_lanes, same_step
from .entries import OpTrace, apart, if_any, reads_weights, solve_each
from .layout import (
    Pair,
    States,
    after,
    by_name,
    by_op,
    by_pair,
    by_state,
    entry_dtype,
    gathered_once,
    is_plain,
    pairs,
    reached,
    stored,
    stored_dtype,
    tree_bytes,
)
from .pending import SHORT, Newest, Pending, backwards
from .rule import Network, OpGradients, PositionWise, Trace, Window, Windowed

NEWEST = '(pending)'  # the key, beside a trace's relations, of the step not yet written into it
UPDATES = 4  # that share a write, which moves the trace twice; each costs a contraction


class Unwritten(NamedTuple):
    """The steps since a trace was written; of one that is written late the newest apart."""

    steps: Pending | None
    newest: Newest | None

    def all(self, graph: ETraceGraph, t: jax.Array) -> Pending | None:
        """All of them at step count ``t``; None: there is none."""
        if self.newest is None:
            return self.steps
        newest = self.newest.pending(graph, t)
        return newest if self.steps is None else self.steps.then(graph, newest)

    def without(self, graph: ETraceGraph, dead: jax.Array) -> Unwritten:
        """Without the lanes that are reset; the step count tells them of the newest one."""
        return self._replace(steps=self.steps and self.steps.without(graph, dead))


@dataclass(frozen=True, repr=False)
class DRTRL(PositionWise, Windowed):
    """D-RTRL with a trace of the parameter's size for each sample (see
    :func:`braintrace.rules.d_rtrl`).

    There are entries for the states that an op reaches and that something reads one step later.
    Where it reaches others too, or where the trace is large, this is written one step late: the
    newest step is beside it, from which entries of every state follow.
    """

    trace_dtype: Any = None
    credit: str = 'cut'
    name: ClassVar[str] = 'D_RTRL'
    made_by: ClassVar[str] = 'd_rtrl'
    required: ClassVar[tuple[str, ...]] = ('yw_to_w', 'xy_to_dw', 'init_drtrl')
    late_from: ClassVar[int] = 2**22  # bytes; a smaller trace a single step may as well write
    cached: ClassVar[int] = 2**24  # bytes that a processor's last cache may hold
    filters: ClassVar[bool] = True
    approximation = ''
    remembers = True

    def widened(self, graph):
        relations = [replace(r, traced=reached(r)) for r in graph.hidden_param_op_relations]
        seen = replace(graph, hidden_param_op_relations=tuple(relations))
        read = [replace(r, traced=_read(graph, r)) for r in relations]
        # Credit along every path may reach any state. A trace that is made with the weights can not
        # be written late, with the next ones.
        if self.credit == 'whole' or read == relations or any(map(reads_weights, pairs(seen))):
            return seen
        return replace(graph, hidden_param_op_relations=tuple(read))

    def init(self, graph):
        trace = by_pair(graph, lambda pair: self._empty(graph, pair, len(pair.states)))
        return {**trace, NEWEST: Newest.none(graph)} if self._is_late(graph, trace) else trace

    def _is_late(self, graph: ETraceGraph, trace: Trace) -> bool:
        """Whether a trace is written one step late: entries of some states then follow from the
        newest step, and single steps do not need the trace before and after them.
        """
        if any(r.traced != reached(r) for r in graph.hidden_param_op_relations):
            return True
        return tree_bytes(trace) >= self.late_from and not any(map(reads_weights, pairs(graph)))

    def _empty(self, graph: ETraceGraph, pair: Pair, number: int) -> States:
        """The empty entry of so many states."""
        entry = apart(OpTrace(pair.op, pair.coords).zeros(number))

        def stored_as(e):
            dtype = entry_dtype(graph, pair, e.dtype)
            # complex numbers are stored as they are
            as_is = self.trace_dtype is None or jnp.issubdtype(dtype, jnp.complexfloating)
            return e.astype(dtype if as_is else stored_dtype(self.trace_dtype))

        return jax.tree.map(stored_as, entry)

    def written(self, graph, trace, t):
        (entries, newest), pending = _apart(trace), None
        new, weights = entries, {op.key: op.weight_avals for op in graph.ops}
        # no entry that is made with the weights is written late
        network = Network(graph, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), weights))
        if newest is not None:
            pending = newest.pending(graph, t)
            new = _write(network, entries, pending, t)

        def one(pair: Pair) -> States:
            states = range(pair.group.num_state)
            full = by_state(self._empty(graph, pair, len(states)))
            if pending is not None:  # the newest step makes entries of every state
                own, change = _entry_of(network, pair), pending.change(pair, states)
                made = own.changed(change, pair.of(entries), pair.flags(pending.alive))
                full = tuple(map(_stored_like, made, full))
            kept = dict(zip(pair.states, by_state(pair.of(new)), strict=True))
            return by_name(tuple(kept.get(s, full[s]) for s in states), full[0])

        return by_pair(graph, one)

    # several steps --------------------------------------------------------------------------------

    def window(self, network, trace, pending, window, keep):
        graph, resets = network.graph, window.resets
        unwritten, late = _unwritten(trace, pending), NEWEST in trace
        # delta_t = dy_t + lam_t . D_f,t        lam_{t-1} = c_t + lam_t D_t
        # push_t  = p_t . D_f,t                 p_{t-1}   = p_t D_t
        credit, steps = backwards(graph, window, keep, late)
        # gradient = sum_t xy_to_dw(x_t, delta_t) + < lam_0 , e_0 >; a reset at the start ends e_0
        first = None if resets is None else resets[0]
        past = _past(graph, trace, unwritten, window.first, first)
        grads = _gradient(network, past, window, credit)
        return grads, _behind(graph, unwritten, window, steps) if keep else None

    def with_history(self, network, grads, trace, pending, lam, t, reset):
        past, older = _past(network.graph, trace, _unwritten(trace, pending), t, reset), []
        if past.pending is not None:
            older, lam = past.pending.credit(network.graph, lam)
        return _with_history(network, grads, past, lam, older)

    def advance(self, network, trace, pending, window):
        _, steps = backwards(network.graph, window, True, NEWEST in trace)
        return _behind(network.graph, _unwritten(trace, pending), window, steps)

    def close(self, network, trace, pending, t, read):
        (entries, _), (steps, newest) = _apart(trace), pending
        steps = steps._replace(p=after(read, t, steps.p))
        return _joined(_write(network, entries, steps, t), newest)

    def restarted(self, graph, pending, dead):
        return pending and pending.without(graph, dead)

    def counting_in(self, graph, trace, pending, t):
        steps = pending and pending.all(graph, t)
        if steps is None:
            return [(trace, t > 0)], []
        return [(trace, steps.alive)], steps.spoiled(graph)

    # single steps ---------------------------------------------------------------------------------

    def update(self, network, trace, factors, t):
        (entries, newest), graph = _apart(trace), network.graph
        if newest is None:
            return _write(network, entries, Pending.of_step(graph, factors, t > 0), t)
        # the step before is written: so the trace before this one and the trace after it are one
        return _joined(
            _write(network, entries, newest.pending(graph, t), t), newest.replaced(graph, factors)
        )

    def gradient(self, network, before, after, step):
        _, _, signals = step.steps.at(0)
        dy = jax.tree.map(lambda a: a[None], signals.dy)
        entries, _ = _apart(after if NEWEST in before else before)
        return _gradient(network, Past(entries, step.first > 0, None), step, (signals.c, dy))

    # when the trace is written --------------------------------------------------------------------

    def delay(self, graph, every):
        size = tree_bytes(jax.eval_shape(lambda: self.init(graph)))
        at_once = _parted(graph, lambda primitive: primitive.trace_kernel)[0]
        if at_once or any(map(reads_weights, pairs(graph))):
            return 1
        return max(1, (UPDATES if size > self.cached else 2) // every)


# the states that entries are kept of --------------------------------------------------------------


def _read(graph: ETraceGraph, relation: Relation) -> tuple[tuple[int, ...], ...]:
    """Of these the ones that something reads one step later."""

    def is_read(group: HiddenGroup, s: int) -> bool:
        return group.states[s] in graph.read_later or any(row[s] for row in group.reads)

    each = zip(relation.groups, reached(relation), strict=bool(relation.feeds))
    return tuple(tuple(s for s in states if is_read(group, s)) for group, states in each)


# the trace and the steps that are not written into it ---------------------------------------------


class Past(NamedTuple):
    """What signals at the present states read: the entries, the flags of the lanes that count in
    them, and the steps behind them (None: there are none).
    """

    entries: Trace
    alive: jax.Array
    pending: Pending | None


def _apart(trace: dict) -> tuple[Trace, Newest | None]:
    """The entries, and the newest step beside them."""
    return {key: of_group for key, of_group in trace.items() if key != NEWEST}, trace.get(NEWEST)


def _joined(entries: Trace, newest: Newest | None) -> dict:
    """The inverse of :func:`_apart`."""
    return entries if newest is None else {**entries, NEWEST: newest}


def _unwritten(trace: dict, pending: Unwritten | None) -> Unwritten:
    return Unwritten(None, trace.get(NEWEST)) if pending is None else pending


def _past(
    graph: ETraceGraph, trace: dict, unwritten: Unwritten, t: jax.Array, reset: jax.Array | None
) -> Past:
    """What the first step of a window reads, at ``t``, behind its resets (None: it has none)."""
    entries, pending = _apart(trace)[0], unwritten.all(graph, t)
    if pending is None:
        return Past(entries, t > 0, None)
    pending = pending if reset is None else pending.without(graph, reset)
    return Past(entries, pending.alive, pending)


def _behind(
    graph: ETraceGraph, unwritten: Unwritten, window: Window, steps: Pending | None
) -> Unwritten:
    """What is not written after a window: ``e_K = p_0 e_0 + sum_t push_t (x) x_t``; any reset ends
    ``e_0``. ``steps``: those of the window, of a trace that is written late all but the last.
    """
    past, newest = unwritten.all(graph, window.first), unwritten.newest
    if past is not None:
        past = past if window.resets is None else past.without(graph, window.resets.any(0))
        steps = past if steps is None else past.then(graph, steps)
    return Unwritten(steps, newest and newest.replaced(graph, window.newest))


# reading and writing ------------------------------------------------------------------------------


def _gradient(
    network: Network,
    past: Past,
    window: Window,
    credit: tuple[dict[str, Vector], dict[str, jax.Array]],
) -> OpGradients:
    """``sum_t xy_to_dw(x_t, delta_t) + < lam_0 , e_0 >``; pending steps count as earlier steps
    of the window.
    """
    graph, weights, xs, (lam, delta) = network.graph, network.weights, window.x, credit
    older, lam = ([], lam) if past.pending is None else past.pending.credit(graph, lam)
    if len(window.t) <= SHORT:  # then so are the older ones
        xs, delta = map(_rows, zip(*older, (xs, delta), strict=True))
        older = []

    def gradients(groups: Groups):
        grads = same_step(graph, xs, delta, weights, groups=groups)
        return _with_history(network, grads, past, lam, older, groups)

    return over_lanes(graph, gradients)


def _with_history(
    network: Network,
    grads: OpGradients,
    past: Past,
    lam: dict[str, Vector],
    older: list[tuple[dict, dict]],
    groups: Groups = WHOLE,
) -> OpGradients:
    """``grads + < lam , e >``, and the gradients of ``older`` blocks of steps (see
    :meth:`Pending.credit`).
    """
    graph, weights, alive = network.graph, network.weights, past.alive
    for x, delta in older:
        few = same_step(graph, x, delta, weights, weights.keys() - delta, groups)
        grads = add_gradients(grads, few)

    def arguments(pair: Pair, signal: Vector) -> tuple:
        of_op = groups.get(pair.relation.key, 0)
        return pair.vector(signal), pair.of(past.entries), pair.flags(alive), of_op

    # An op with a reader of its own chooses by platform; all others are read behind one branch.
    apart, together = _parted(graph, lambda primitive: primitive.trace_reader)
    if together:
        like = {pair.relation.key: grads[pair.relation.key] for pair in together}

        def read():
            signals = by_pair(graph, lambda pair: pair.gathered(lam))
            signals = gathered_once(graph, alive, signals)

            asked = [
                (_entry_of(network, pair), *arguments(pair, pair.of(signals))) for pair in together
            ]
            of_pair = iter(solve_each(asked))
            found = by_op(together, lambda pair: next(of_pair))
            return jax.tree.map(lambda g, w: g.astype(w.dtype), found, like)

        grads = add_gradients(grads, read() if groups else if_any(alive, read, like))
    for pair in apart:
        key, own = pair.relation.key, _entry_of(network, pair)
        found = own.solve_onto(grads[key], *arguments(pair, pair.gathered(lam)))
        grads = {**grads, key: found}
    return grads


def _write(network: Network, entries: Trace, pending: Pending, t: jax.Array) -> Trace:
    """The entries after some steps."""
    graph = network.graph
    changes = by_pair(graph, lambda pair: pending.change(pair, pair.states))
    # What is multiplied with numbers of an entry one by one is gathered once for all of them; many
    # rows are contracted instead.
    few = by_pair(graph, lambda pair: pair.of(changes).few)
    few = gathered_once(graph, t >= 0, few)

    def one(pair: Pair) -> States:
        old, change = pair.of(entries), pair.of(changes).with_few(pair.of(few))
        if not pair.states:
            return old
        return _entry_of(network, pair).renewed(old, pair.flags(pending.alive), change, t)

    return by_pair(graph, one)


def _parted(graph: ETraceGraph, own: Callable[[Any], Any]) -> tuple[list[Pair], list[Pair]]:
    """The pairs with entries whose primitive has ``own`` code for a platform, and the others."""
    parts: tuple[list[Pair], list[Pair]] = [], []
    for pair in pairs(graph):
        plain = is_plain(pair.op, pair.coords) and not pair.by_position
        has_own = own(pair.op.primitive) and plain
        if pair.states:
            parts[0 if has_own else 1].append(pair)
    return parts


def _entry_of(network: Network, pair: Pair) -> OpTrace:
    weights = network.weights[pair.relation.key]
    return OpTrace(pair.op, pair.coords, weights, pair.by_position)


def _stored_like(made: dict | None, like: dict) -> dict:
    """The numbers of one state as an entry stores them."""
    return like if made is None else {n: stored(e, like[n].dtype) for n, e in made.items()}


def _rows(pieces: tuple[dict, ...]) -> dict[str, jax.Array]:
    """The rows of some steps after each other, by op; every op is in the last piece."""
    return {
        key: jnp.concatenate([each[key] for each in pieces if key in each]) for key in pieces[-1]
    }
