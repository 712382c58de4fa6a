"""ES-D-RTRL (pp-prop): a trace of the input and one of the output instead of one of the
parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from .contraction import (
    add_gradients,
    as_represented,
    factored_gradient,
    represented,
    same_step,
)
from .coordinates import Pair, added_axes, by_pair, gathered, pairs, to_y
from .entries import zeros_pp
from .lanes import where_lanes
from .rule import Network, OpGradients, Rule, Trace, Window
from .transition import Vector, add, apply, dense, dot

__all__ = ['ESDRTRL']


@dataclass(frozen=True)
class ESDRTRL(Rule):
    """ES-D-RTRL with decay ``a`` (see :func:`braintrace.rules.es_d_rtrl`).

    ex^t = a ex^{t-1} + x^t        ef^t = a D^t ef^{t-1} + (1 - a) D_f^t
    """

    decay: float
    name: ClassVar[str] = 'ES_D_RTRL'
    required: ClassVar[tuple[str, ...]] = ('xy_to_dw', 'init_pp')
    probes: ClassVar[bool] = True

    @property
    def remembers(self) -> bool:
        return self.decay > 0

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

    def init(self, graph):
        def one(pair: Pair):
            op, coords = as_represented(pair.op), pair.coords
            slots = {'f': zeros_pp(pair.op, coords, pair.group.num_state)}
            if op.x is not None:
                lanes = coords.shape[: added_axes(op, coords)]
                slots['x'] = jnp.zeros((*op.repeats, *lanes, *op.x_aval.shape), op.x_aval.dtype)
            return slots

        return by_pair(graph, one)

    def update(self, network, carried, factors, t):
        a = self.decay

        def one(pair: Pair):
            front = len(pair.op.repeats)
            old = {n: where_lanes(t > 0, pair.laned, e, front) for n, e in pair.of(carried).items()}
            f = old['f']
            moved = dense(apply(pair.gathered(factors.d), _by_state(f)), f.shape[:-1], f.dtype)
            fresh = dense(pair.of(factors.df), f.shape[:-1], f.dtype)
            new = {'f': (a * moved + (1 - a) * fresh).astype(f.dtype)}
            if 'x' in old:
                x = represented(pair.op, factors.x[pair.relation.key])
                new['x'] = (a * old['x'] + x).astype(old['x'].dtype)
            return new

        return by_pair(network.graph, one)

    def gradient(self, network, before, after, step):
        return self._gradient(network, jax.tree.map(lambda e: e[None], after), step)

    def window(self, network, trace, pending, window, keep):
        def forward(trace, at):
            trace = self.update(network, trace, *at)
            return trace, trace

        start = trace if pending is None else pending
        last, traces = jax.lax.scan(forward, start, (window.factors, window.t))
        return self._gradient(network, traces, window), last

    def _gradient(self, network: Network, traces: Trace, window: Window) -> OpGradients:
        """The gradient from the traces of each step: one contraction for the factored part, one for
        the part of dy that misses the groups.
        """
        graph, weights = network.graph, network.weights
        factors, signals, t, _ = window
        rest, factored = dict(signals.dy), {}
        for pair in pairs(graph):
            key, op, slots = pair.relation.key, pair.op, pair.of(traces)
            signal = self._signal(pair, signals.l)
            # the factored part: xy_to_dw(ex, L . ef), corrected for the decay of ef
            d = dot(signal, _by_state(slots['f']))
            d = d / self._correction(pair, t, d.ndim)
            got = factored_gradient(
                as_represented(op), pair.coords, slots.get('x'), d, weights[key]
            )
            factored[key] = add(factored.get(key), got)
            # it holds the current step through the groups already: dy - L . D_f is left
            inside = dot(signal, pair.of(factors.df))
            if inside is not None:
                rest[key] = rest[key] - jax.vmap(lambda s, op=op: to_y(op, s))(inside)
        through = {r.key for r in graph.hidden_param_op_relations if r.only_through_groups}
        skipped = {key: jax.tree.map(jnp.zeros_like, factored[key]) for key in through}
        owned = same_step(graph, factors.x, rest, weights, skip=through)
        return add_gradients({**owned, **skipped}, factored)

    def _signal(self, pair: Pair, by_group: dict) -> Vector:
        """``dL/dh`` of each step at the relation's coordinates, with axes for the loops around the
        op.
        """
        of_steps = jax.vmap(lambda l: gathered(pair.coords, _by_state(l)))  # noqa: E741
        front = range(1, 1 + len(pair.op.repeats))
        return tuple(jnp.expand_dims(s, front) for s in of_steps(by_group[pair.group.name]))

    def _correction(self, pair: Pair, t: jax.Array, ndim: int) -> jax.Array:
        """``1 - a^(t+1)`` for each step and lane, with ``ndim`` axes."""
        if t.ndim == 2 and not pair.laned:
            t = t.max(-1)
        number = jnp.result_type(float)
        correction = 1 - jnp.power(jnp.asarray(self.decay, number), t.astype(number) + 1)
        correction = jnp.expand_dims(correction, range(1, 1 + len(pair.op.repeats)))
        return correction.reshape(correction.shape + (1,) * (ndim - correction.ndim))

    # the trace is small: nothing is ever pending --------------------------------------------------

    def carried(self, graph, trace, t):
        return trace

    def written(self, graph, carried, t):
        return carried

    def apart(self, graph, carried, t):
        return carried, None

    def close(self, network, trace, pending, t, read):
        return pending

    def delay(self, graph, every, asked):
        return 1 if asked is None else asked


def _by_state(f: jax.Array) -> Vector:
    """An array with the states in its last axis as a vector."""
    return tuple(f[..., s] for s in range(f.shape[-1]))
