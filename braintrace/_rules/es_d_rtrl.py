"""ES-D-RTRL: a trace of two factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import ETraceGraph, describe_aval, is_inexact
from .._executor import Factors, Signals, Vector, add, apply, dot, over_time
from ..errors import RuleContractError
from .contraction import (
    Groups,
    add_gradients,
    as_represented,
    factored_gradient,
    over_lanes,
    represented,
    same_step,
)
from .entries import OpTrace
from .layout import Pair, by_op, by_pair, entry_dtype, pairs, reached, to_y, where_lanes
from .moving import Moving, number_of, times
from .rule import Network, OpGradients, PendsWhole, PositionWise, Trace, Window

# factored traces ----------------------------------------------------------------------------------
#
# A trace of two factors for each pair of a relation and a group: ``x`` of the input's size, and
# ``f`` of the output's, the states of the group in its last axis.


def empty_factors(graph: ETraceGraph, pair: Pair) -> dict[str, jax.Array]:
    """The two factors before the first step; an op without x has ``f`` alone."""
    op, coords = as_represented(pair.op), pair.coords
    f = OpTrace(pair.op, coords).zeros_pp(len(pair.states))
    slots = {'f': f.astype(entry_dtype(graph, pair, f.dtype))}
    if op.x is not None:
        lanes = coords.shape[: int(pair.has_lanes_added)]
        if not is_inexact(op.x_aval):
            raise RuleContractError(
                f'{op.primitive.root.name} at {op.where} has x {describe_aval(op.x_aval)}: '
                'integers stand for nothing that can be averaged over steps. Set '
                '`primitive.represent` to a function (x, weights) of the numbers that they stand '
                'for, or take d_rtrl().'
            )
        dtype = _jax.promoted(op.x_aval.dtype, jnp.finfo(slots['f'].dtype).dtype)
        slots['x'] = jnp.zeros((*op.repeats, *lanes, *op.x_aval.shape), dtype)
    return slots


def states_of(f: jax.Array) -> Vector:
    """An array with the states in its last axis as a vector."""
    return tuple(f[..., s] for s in range(f.shape[-1]))


def apart(trace: Trace) -> Trace:
    """The slots with one f for each state."""
    return _with_f(trace, states_of)


def joined(slots: Trace) -> Trace:
    """The inverse of :func:`apart`."""
    return _with_f(slots, lambda f: jnp.stack(f, -1))


def _with_f(trace: Trace, change: Callable) -> Trace:
    return {
        key: {g: {**slots, 'f': change(slots['f'])} for g, slots in by_group.items()}
        for key, by_group in trace.items()
    }


def alive(network: Network, slots: Trace, flags: jax.Array) -> Trace:
    """The slots, zero in lanes without a past."""
    return by_pair(network.graph, lambda pair: alive_slots(pair, pair.of(slots), flags))


def alive_slots(pair: Pair, slots: dict, flags: jax.Array) -> dict:
    """The slots of a pair, zero but in the flagged lanes. An x that lanes share stays while one of
    them is flagged.
    """
    at = {'f': pair.at_entries(flags)}

    def one(name: str, slot):
        here = at.get(name, pair.at_x(flags))
        return jax.tree.map(lambda e: where_lanes(here, True, e, len(pair.op.repeats)), slot)

    return {name: one(name, slot) for name, slot in slots.items()}


def at_entries(pair: Pair, by_group: dict[str, Vector]) -> Vector:
    """The group's vector at the relation's coordinates, with axes for the loops around the op."""
    front = tuple(range(len(pair.op.repeats)))
    return jax.tree.map(lambda s: jnp.expand_dims(s, front), pair.vector(pair.gathered(by_group)))


# the rule -----------------------------------------------------------------------------------------
#
# ES-D-RTRL (pp-prop): a trace of the input and one of the output instead of one of the
# parameter.


@dataclass(frozen=True, repr=False)
class ESDRTRL(PositionWise, PendsWhole):
    """ES-D-RTRL with one decay ``a`` or a pair ``(a_x, a_f)`` of two (see
    :func:`braintrace.rules.es_d_rtrl`).

    ex^t = a_x ex^{t-1} + x^t        ef^t = a_f D^t ef^{t-1} + (1 - a_f) D_f^t
    """

    decay: float | Moving | tuple[float | Moving, float | Moving]
    name: ClassVar[str] = 'ES_D_RTRL'
    made_by: ClassVar[str] = 'es_d_rtrl'
    required: ClassVar[tuple[str, ...]] = ('xy_to_dw', 'init_pp')
    probes: ClassVar[bool] = True
    credit = 'cut'
    refused: ClassVar[dict[str, str]] = {
        'trace_dtype': 'The two factors are small already; trace_dtype is for d_rtrl.'
    }

    @property
    def decays(self) -> tuple[Any, Any]:
        """``a_x`` and ``a_f``."""
        a_x, a_f = self.decay if isinstance(self.decay, tuple) else (self.decay, self.decay)
        return number_of(a_x), number_of(a_f)

    @property
    def remembers(self) -> bool:
        return self.decay not in (0.0, (0.0, 0.0))

    @property
    def approximation(self) -> str:
        if not self.remembers:
            return (
                'with decay 0 (rank 1) the trace remembers no earlier step: every gradient '
                'holds the current step only'
            )
        return (
            'an input factor and an output factor stand for the whole trace: exact at the '
            'first step after a reset, approximate from the second on'
        )

    def widened(self, graph):
        relations = graph.hidden_param_op_relations
        relations = tuple(replace(r, traced=reached(r)) for r in relations)
        return replace(graph, hidden_param_op_relations=relations)

    def init(self, graph):
        return by_pair(graph, partial(empty_factors, graph))

    def written(self, graph, trace, t):
        def one(pair: Pair) -> dict[str, jax.Array]:
            f = dict(zip(pair.states, states_of(pair.of(trace)['f']), strict=True))
            none = jnp.zeros_like(f[pair.states[0]])
            every = [f.get(s, none) for s in range(pair.group.num_state)]
            return {**pair.of(trace), 'f': jnp.stack(every, -1)}

        return by_pair(graph, one)

    def delay(self, graph, every):
        return 1

    def update(self, network, trace, factors, t):
        return joined(self._advanced(network, alive(network, apart(trace), t > 0), factors))

    def gradient(self, network, before, after, step):
        _, df, signals = step.steps.at(0)
        sent = self._sent(network, apart(after), df, signals, step.first)
        return self._gradient(network, step.x, *jax.tree.map(lambda a: a[None], sent))

    def window(self, network, trace, pending, window, keep):
        last, sent = self._walked(network, trace, pending, window, self._sent)
        return self._gradient(network, window.x, *sent), last

    def with_history(self, network, grads, trace, pending, lam, t, reset):
        slots = self._started(network, trace, pending, t)
        t = jnp.maximum(t, 1) - 1

        def one(pair: Pair):
            own = pair.of(slots)
            d = self._corrected(pair, t, dot(at_entries(pair, lam), own['f']))
            x, d = jax.tree.map(lambda a: a[None], (own.get('x'), d))
            return factored_gradient(pair, x, d, network.weights[pair.relation.key])

        return add_gradients(grads, by_op(pairs(network.graph), one))

    def advance(self, network, trace, pending, window):
        return self._walked(network, trace, pending, window, lambda *_: None)[0]

    def _walked(
        self, network: Network, trace: Trace, pending, window: Window, sent: Callable
    ) -> tuple[Trace, Any]:
        """The trace after a window, and of each step what it has ``sent``."""

        def forward(slots, at):
            row, x, t = at
            d, df, signals = window.steps.open(row)
            if window.resets is not None:
                slots = alive(network, slots, t > 0)
            slots = self._advanced(network, slots, Factors(x, d, df))
            return slots, sent(network, slots, df, signals, t)

        start = self._started(network, trace, pending, window.first)
        along = (window.steps.rows, window.x, window.t)
        last, found = over_time(forward, start, along, auto=network.graph.policy.at_once)
        return joined(last), found

    def _started(self, network: Network, trace: Trace, pending, t: jax.Array) -> Trace:
        """The slots before a window."""
        return alive(network, apart(trace if pending is None else pending), t > 0)

    def _advanced(self, network: Network, slots: Trace, factors: Factors) -> Trace:
        """The slots after a step."""
        a_x, a_f = self.decays

        def one(pair: Pair):
            old, df = pair.of(slots), pair.vector(pair.of(factors.df))
            moved = apply(pair.transition(factors.d), old['f'])
            new: dict[str, Any] = {
                'f': tuple(
                    _sum(_scaled(a_f, m), _scaled(1 - a_f, q), f)
                    for m, q, f in zip(moved, df, old['f'], strict=True)
                )
            }
            if 'x' in old:
                x = represented(pair.op, factors.x[pair.relation.key])
                new['x'] = (times(a_x, old['x']) + x).astype(old['x'].dtype)
            return new

        return by_pair(network.graph, one)

    def _sent(
        self, network: Network, slots: Trace, df: dict, signals: Signals, t: jax.Array
    ) -> tuple[dict, dict, dict]:
        """Of one step by pair ex and what the factored part sends to y, and by op the part of dy
        that misses the groups.
        """
        rest, factored, xs = dict(signals.dy), {}, {}
        l = {name: states_of(x) for name, x in signals.l.items()}
        for pair in pairs(network.graph):
            key, name = pair.relation.key, pair.group.name
            own, signal = pair.of(slots), at_entries(pair, l)
            # xy_to_dw(ex, L . ef), corrected for the decay of ef
            d = dot(signal, own['f'])
            factored.setdefault(key, {})[name] = self._corrected(pair, t, d)
            if 'x' in own:
                xs.setdefault(key, {})[name] = own['x']
            # it holds the current step through the groups already: dy - L . D_f is left
            inside = dot(signal, pair.vector(pair.of(df)))
            if inside is not None:
                rest[key] = rest[key] - to_y(pair, inside)
        return xs, factored, {key: rest[key] for key in rest.keys() - _through(network)}

    def _gradient(self, network: Network, x: dict, xs: dict, sent: dict, rest: dict) -> OpGradients:
        """The gradient: one contraction for the factored part, one for the rest."""
        graph, weights, through = network.graph, network.weights, _through(network)

        def gradients(groups: Groups):
            def one(pair: Pair):
                key, name = pair.place
                ex, number = xs.get(key, {}).get(name), groups.get(key, 0)
                return factored_gradient(pair, ex, sent[key][name], weights[key], number)

            factored = by_op(pairs(graph), one)
            skipped = {key: jax.tree.map(jnp.zeros_like, factored[key]) for key in through}
            owned = same_step(graph, x, rest, weights, through, groups)
            return add_gradients({**owned, **skipped}, factored)

        return over_lanes(graph, gradients)

    def _corrected(self, pair: Pair, t: jax.Array, d: jax.Array) -> jax.Array:
        """``d / (1 - a_f^(t+1))`` of each lane."""
        t, number = pair.at_entries(t), jnp.result_type(float)
        correction = 1 - jnp.power(jnp.asarray(self.decays[1], number), t.astype(number) + 1)
        d = d.astype(_jax.promoted(d.dtype, jnp.float32))
        return d / correction.astype(jnp.finfo(d.dtype).dtype)

    # the trace is small: nothing is ever pending --------------------------------------------------

    def close(self, network, trace, pending, t, read):
        return pending


def _sum(moved, fresh, like: jax.Array) -> jax.Array:
    """``moved + fresh``, each None for zero, as an array like another one."""
    total = add(moved, fresh)
    return (
        jnp.zeros_like(like)
        if total is None
        else jnp.broadcast_to(total, like.shape).astype(like.dtype)
    )


def _scaled(a, x):
    return None if x is None else times(a, x)


def _through(network: Network) -> set[str]:
    """Ops whose whole dy goes through their groups."""
    relations = network.graph.hidden_param_op_relations
    return {r.key for r in relations if r.only_through_groups}
