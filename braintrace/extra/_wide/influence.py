"""RTRL and SnAp-n: traces that keep more hidden numbers than those of their own position.

``e^t = D^t e^{t-1} + D_f^t (x) x^t``, where D is the derivative of the kept new numbers by the kept
old ones along every path of the step.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ... import _jax
from ..._compiler import ETraceGraph, HiddenGroup
from ..._rules import (
    Network,
    OpGradients,
    Pair,
    PendsWhole,
    Trace,
    Window,
    WritesAtOnce,
    add_gradients,
    after,
    by_op,
    by_pair,
    of_rows,
    pairs,
    reset_later,
    same_step,
    where_lanes,
)
from ...errors import OptionError
from .scopes import Flows, Slots, all_numbers, derivatives, flow, kept, reached_numbers


class Moved(NamedTuple):
    """Steps as one change of the trace: ``e <- p e + sum_t x_t (x) push_t``, in the lanes ``alive``
    of the old one.
    """

    p: Flows
    x: dict[str, jax.Array]
    push: dict[str, dict[str, jax.Array]]
    alive: jax.Array


class Wide(WritesAtOnce, PendsWhole):
    """A rule whose trace follows every path between the numbers that it keeps."""

    required: ClassVar[tuple[str, ...]] = ('yw_to_w', 'xy_to_dw', 'init_drtrl')
    credit = 'whole'
    remembers = True

    def init(self, graph):
        return by_pair(graph, lambda pair: Slots(pair).zeros(graph))

    # factors --------------------------------------------------------------------------------------

    def factors(self, executor, at, trace):
        d, df = derivatives(executor, at)
        carriers = {flow(pair): pair.group for pair in pairs(executor.graph)}
        return {name: self._carried(d[name], carriers[name]) for name in d}, df

    @abstractmethod
    def _carried(self, d: jax.Array, carrier: HiddenGroup) -> jax.Array:
        """The derivatives that carry the trace on."""

    # several steps --------------------------------------------------------------------------------

    def window(self, network, trace, pending, window, keep):
        (lam, delta), moved = self._backwards(network.graph, window, keep)
        grads = same_step(network.graph, window.x, delta, network.weights)
        return _with_history(network, grads, trace, lam, window.first > 0), moved

    def with_history(self, network, grads, trace, pending, lam, t, reset):
        return _with_history(network, grads, trace, kept(network.graph, lam), t > 0)

    def advance(self, network, trace, pending, window):
        return self._backwards(network.graph, window, True)[1]

    def _backwards(
        self, graph: ETraceGraph, window: Window, keep: bool
    ) -> tuple[tuple[Flows, dict[str, jax.Array]], Moved | None]:
        """The reverse scan of a window over signals and transitions: the signals at the states
        before it and at each step's y, and with ``keep`` its steps as one change.
        """
        flows = {flow(pair): Slots(pair) for pair in pairs(graph)}
        resets = window.resets
        later = None if resets is None else reset_later(resets)

        def back(after, at):
            (lam, p), (row, reset, later) = after, at
            d, df, signals = window.steps.open(row)

            def owed(pair: Pair) -> jax.Array:
                """``p D_f``; a lane that a later step resets owes nothing."""
                push = Slots(pair).pushed(p[flow(pair)], pair.of(df))
                return push if later is None else where_lanes(~later, pair.laned, push, 1)

            delta = dict(signals.dy)  # dy + lam D_f
            for pair in pairs(graph):
                key = pair.relation.key
                if key in delta:
                    delta[key] = delta[key] + Slots(pair).sent(lam[flow(pair)], pair.of(df))
            push = by_pair(graph, owed) if keep else {}
            # lam = c + lam D and p = p D
            c = kept(graph, signals.c)
            before = {k: c[k] + flows[k].pulled(s, d[k]) for k, s in lam.items()}
            moved = {k: flows[k].joined(s, d[k]) for k, s in p.items()}
            if reset is not None:  # nothing crosses a reset, in either direction
                before = {k: flows[k].in_lanes(~reset, s) for k, s in before.items()}
                moved = {k: flows[k].in_lanes(~(reset | later), s) for k, s in moved.items()}
            return (before, moved), (delta, push)

        # lam = 0 and p = 1 after the last step
        like, _, _ = window.steps.like
        one = {k: slots.identity(_jax.wide(like[k].dtype)) for k, slots in flows.items()}
        lam = {k: jnp.zeros_like(p[..., 0] if flows[k].shared else p[0]) for k, p in one.items()}
        end, steps = (lam, one if keep else {}), (window.steps.rows, resets, later)
        (lam, p), (delta, push) = jax.lax.scan(back, end, steps, len(window.t), reverse=True)
        if not keep:
            return (lam, delta), None
        related, alive = {r.key: r.op for r in graph.hidden_param_op_relations}, window.first > 0
        x = {key: rows for key, rows in window.x.items() if key in related}
        if later is not None and resets is not None:
            x = {key: of_rows(graph, related[key], ~later, rows) for key, rows in x.items()}
            alive &= ~resets.any(0)
        return (lam, delta), Moved(p, x, push, alive)

    def close(self, network, trace, pending, t, read):
        p = after(read, t, pending.p)

        def one(pair: Pair):
            key, slots = pair.relation.key, Slots(pair)
            old = slots.alive(pair.of(trace), pending.alive)
            moved = slots.moved(p[flow(pair)], old)
            weights = network.weights[key]
            new = slots.fresh(pending.x.get(key), pair.of(pending.push), weights)
            return {n: (moved[n] + new[n]).astype(e.dtype) for n, e in old.items()}

        return by_pair(network.graph, one)

    # single steps: nothing is ever pending --------------------------------------------------------

    def update(self, network, trace, factors, t):
        x, push = jax.tree.map(lambda a: a[None], (factors.x, factors.df))
        return self.close(network, trace, Moved(factors.d, x, push, t > 0), t, ())

    def gradient(self, network, before, after, step):
        return self.window(network, before, None, step, False)[0]


@dataclass(frozen=True, repr=False)
class EveryPath(Wide):
    """Real-time recurrent learning (see :func:`braintrace.rules.rtrl`)."""

    layers: str = 'joint'
    keep: int | None = None
    seed: int = 0
    name: ClassVar[str] = 'RTRL'
    made_by: ClassVar[str] = 'rtrl'

    @property
    def approximation(self) -> str:
        return '' if self.keep is None else f'all but {self.keep} ways into each hidden number'

    def widened(self, graph):
        found = all_numbers(graph, self.layers == 'joint')
        for relation in found.hidden_param_op_relations:
            for carrier in relation.groups:
                if self.keep is not None and self.keep > carrier.num_state:
                    raise OptionError(
                        f'keep is {self.keep}, and {carrier.name} has {carrier.num_state} hidden '
                        'numbers in a lane. Give an int from 1 to that, or leave keep out.'
                    )
        return found

    def _carried(self, d, carrier):
        if self.keep is None:
            return d
        mask = drawn(carrier.num_state, self.keep, self.seed)
        return jnp.where(mask, d, 0)


def drawn(number: int, keep: int, seed: int) -> np.ndarray:
    """``keep`` entries of each row of a square matrix, drawn once."""
    scores = np.random.default_rng(seed).random((number, number))
    return scores.argsort(-1).argsort(-1) < keep


@dataclass(frozen=True, repr=False)
class Reach(Wide):
    """SnAp-n for n >= 2 (see :func:`braintrace.rules.snap`)."""

    n: int
    name: ClassVar[str] = 'SnAp'
    made_by: ClassVar[str] = 'snap'
    approximation = ''

    def widened(self, graph):
        return reached_numbers(graph, self.n)

    def _carried(self, d, carrier):
        return d


def _with_history(
    network: Network, grads: OpGradients, trace: Trace, lam: Flows, alive: jax.Array
) -> OpGradients:
    """``grads + < lam , e >``."""

    def one(pair: Pair):
        slots, weights = Slots(pair), network.weights[pair.relation.key]
        old = slots.alive(pair.of(trace), alive)
        return slots.read(lam[flow(pair)], old, weights)

    return add_gradients(grads, by_op(pairs(network.graph), one))
