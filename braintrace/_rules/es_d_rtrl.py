"""ES-D-RTRL (pp-prop): a trace of the input and one of the output instead of one of the parameter."""
from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph
from .._executor import Factors
from . import kernels as k
from .d_rtrl import add_gradients, pairs, same_step
from .rule import OpGradients, Rule, Trace

__all__ = ['ESDRTRL']


@dataclass(frozen=True)
class ESDRTRL(Rule):
    """ES-D-RTRL with decay ``a`` (see :func:`braintrace.rules.es_d_rtrl`)."""
    decay: float
    name: ClassVar[str] = 'ES_D_RTRL'
    required: ClassVar[tuple[str, ...]] = ('xy_to_dw', 'init_pp')
    probes: ClassVar[bool] = True

    @property
    def remembers(self) -> bool:                # type: ignore[override]
        return self.decay > 0

    @property
    def approximation(self) -> str:             # type: ignore[override]
        if not self.remembers:
            return ('with decay 0 (rank 1) the trace remembers no earlier step: every gradient '
                    'holds the current step only')
        return ('an input factor and an output factor stand for the whole trace: exact at the '
                'first step after a reset, approximate from the second on')

    def init(self, graph: ETraceGraph) -> Trace:
        trace: Trace = {r.key: {} for r in graph.hidden_param_op_relations}
        for rel, group, coords in pairs(graph):
            op, slots = k.as_represented(rel.op), {'f': k.zeros_pp(rel.op, coords, group.num_state)}
            if op.x is not None:
                added = coords.shape[:k.added_axes(op, coords)]
                slots['x'] = jnp.zeros((*op.repeats, *added, *op.x_aval.shape), op.x_aval.dtype)
            trace[rel.key][group.name] = slots
        return trace

    def update(self, graph, trace, factors, weights, t):
        a = self.decay
        new: Trace = {r.key: {} for r in graph.hidden_param_op_relations}
        for rel, group, coords in pairs(graph):
            laned = coords.has_lanes(graph.lanes_of(group))
            old = {n: k.where_lanes(t > 0, laned, e, len(rel.op.repeats)) for n, e in trace[rel.key][group.name].items()}
            d = k.at_coordinates(coords, factors.d[group.name], 2)
            f = a * (d * old['f'][..., None, :]).sum(-1) + (1 - a) * factors.df[rel.key][group.name]
            new[rel.key][group.name] = {'f': f.astype(old['f'].dtype)}
            if 'x' in old:
                new[rel.key][group.name]['x'] = (a * old['x'] + k.represented(rel.op, factors.x[rel.key])).astype(old['x'].dtype)
        return new

    def gradient(self, graph, before, after, factors, signals, weights, t):
        return self._gradient(graph, *jax.tree.map(lambda x: x[None], (after, factors, signals)), weights, t[None])

    def _gradient(self, graph, traces: Trace, factors: Factors, signals, weights, t) -> OpGradients:
        """Gradient from stacked traces: one contraction for the factored part, one for what misses the groups."""
        rest = dict(signals.dy)
        factored: OpGradients = {}
        for rel, group, coords in pairs(graph):
            signal = jax.vmap(lambda s, c=coords: k.at_coordinates(c, s, 1))(signals.l[group.name])
            slots, df = traces[rel.key][group.name], factors.df[rel.key][group.name]
            signal = jnp.expand_dims(signal, range(1, 1 + len(rel.op.repeats)))
            d = (signal * slots['f']).sum(-1) / self._correction(rel, coords.has_lanes(graph.lanes_of(group)), t, slots['f'].ndim - 1)
            got = k.factored_gradient(k.as_represented(rel.op), coords, slots.get('x'), d, weights[rel.key])
            factored[rel.key] = got if rel.key not in factored else jax.tree.map(operator.add, factored[rel.key], got)
            inside = jax.vmap(lambda s, op=rel.op, c=coords: k.to_y(op, c, s))((signal * df).sum(-1))
            rest[rel.key] = rest[rel.key] - inside
        through = {r.key for r in graph.hidden_param_op_relations if r.only_through_groups}
        skipped = {key: jax.tree.map(jnp.zeros_like, factored[key]) for key in through}
        owned = same_step(graph, factors.x, rest, weights, skip=through)
        return add_gradients({**owned, **skipped}, factored)

    def _correction(self, rel, laned: bool, t, ndim: int):
        """``1 - a^(t+1)`` for each lane, with ``ndim`` axes."""
        if t.ndim == 2 and not laned:
            t = t.max(-1)
        number = jnp.result_type(float)
        correction = 1 - jnp.power(jnp.asarray(self.decay, number), t.astype(number) + 1)
        correction = jnp.expand_dims(correction, range(1, 1 + len(rel.op.repeats)))
        return correction.reshape(correction.shape + (1,) * (ndim - correction.ndim))

    def window(self, graph, trace, pending, factors, signals, weights, t, resets, keep):
        def forward(trace, at):
            factors, t = at
            trace = self.update(graph, trace, factors, weights, t)
            return trace, trace
        last, traces = jax.lax.scan(forward, trace if pending is None else pending, (factors, t))
        return self._gradient(graph, traces, factors, signals, weights, t), last

    def close(self, graph, trace, pending, weights, t, read):
        return pending
