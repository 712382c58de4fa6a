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

from ..._compiler import ETraceGraph, HiddenGroup
from ..._executor import Signals
from ..._rules import (
    Network,
    OpGradients,
    Pair,
    Trace,
    Window,
    Windowed,
    WritesAtOnce,
    add_gradients,
    after,
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


class WideCredit(NamedTuple):
    """Signals at the states before a window, and at each step's y."""

    lam: Flows
    delta: dict[str, jax.Array]


class Wide(WritesAtOnce, Windowed):
    """A rule whose trace follows every path between the numbers that it keeps."""

    required: ClassVar[tuple[str, ...]] = ('yw_to_w', 'xy_to_dw', 'init_drtrl')
    credit = 'whole'
    remembers = True
    delays: ClassVar[bool] = False

    @abstractmethod
    def _seen(self, graph: ETraceGraph) -> ETraceGraph:
        """The step with the numbers that the trace keeps."""

    def widened(self, graph):
        return self._seen(graph)

    def init(self, graph):
        return by_pair(graph, lambda pair: Slots(pair).zeros())

    # factors --------------------------------------------------------------------------------------

    def factors(self, executor, at, carried):
        d, df = derivatives(executor, at)
        carriers = {flow(pair): pair.group for pair in pairs(executor.graph)}
        return {name: self._carried(d[name], carriers[name]) for name in d}, df

    @abstractmethod
    def _carried(self, d: jax.Array, carrier: HiddenGroup) -> jax.Array:
        """The derivatives that carry the trace on."""

    # several steps --------------------------------------------------------------------------------

    def window(self, network, trace, pending, window, keep):
        credit, moved = self._backwards(network.graph, window, keep)
        grads = same_step(network.graph, window.x, credit.delta, network.weights)
        return self._with_history(network, grads, trace, credit.lam, window.t[0] > 0), moved

    def with_history(self, network, grads, trace, pending, lam, t, reset):
        return self._with_history(network, grads, trace, kept(network.graph, lam), t > 0)

    def advance(self, network, trace, pending, window):
        return self._backwards(network.graph, window, True)[1]

    def _backwards(
        self, graph: ETraceGraph, window: Window, keep: bool
    ) -> tuple[WideCredit, Moved | None]:
        """The reverse scan of a window over signals and transitions (see ``reverse_scan``)."""
        resets = window.resets
        later = None if resets is None else reset_later(resets)

        def back(after, at):
            (lam, p), (row, reset, later) = after, at
            opened = window.steps.open(row)
            made = _sent(graph, lam, opened), _pushed(graph, p, opened, later)
            return self._before(graph, after, opened, (reset, later)), made

        steps, end = (window.steps.rows, resets, later), _end(graph, window, keep)
        (lam, p), made = jax.lax.scan(back, end, steps, len(window.t), reverse=True)
        delta, push = made
        return WideCredit(lam, delta), _moved(graph, window, p, push, later) if keep else None

    def _before(
        self, graph: ETraceGraph, after: tuple[Flows, Flows], opened: tuple, resets: tuple
    ) -> tuple[Flows, Flows]:
        """``lam = c + lam D`` and ``p = p D``."""
        (lam, p), (d, _, signals), (reset, later) = after, opened, resets
        flows, credit = _flows(graph), self._credit(graph, d, signals)
        lam = {k: credit[k] + flows[k].pulled(s, d[k]) for k, s in lam.items()}
        p = {k: flows[k].joined(s, d[k]) for k, s in p.items()}
        if reset is not None:  # nothing crosses a reset, in either direction
            lam = {k: flows[k].in_lanes(~reset, s) for k, s in lam.items()}
            p = {k: flows[k].in_lanes(~(reset | later), s) for k, s in p.items()}
        return lam, p

    def _credit(self, graph: ETraceGraph, d: Flows, signals: Signals) -> Flows:
        """``dL/dh'`` of the kept numbers."""
        return kept(graph, signals.c)

    def _with_history(
        self,
        network: Network,
        grads: OpGradients,
        trace: Trace,
        lam: Flows,
        alive: jax.Array,
    ) -> OpGradients:
        """``grads + < lam , e >``."""
        for pair in pairs(network.graph):
            key, slots = pair.relation.key, Slots(pair)
            old = slots.alive(pair.of(trace), alive)
            found = slots.read(lam[flow(pair)], old, network.weights[key])
            grads = add_gradients(grads, {key: found})
        return grads

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

    def update(self, network, carried, factors, t):
        x, push = jax.tree.map(lambda a: a[None], (factors.x, factors.df))
        return self.close(network, carried, Moved(factors.d, x, push, t > 0), t, ())

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

    def _seen(self, graph):
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

    def _seen(self, graph):
        return reached_numbers(graph, self.n)

    def _carried(self, d, carrier):
        return d


def _flows(graph: ETraceGraph) -> dict[str, Slots]:
    return {flow(pair): Slots(pair) for pair in pairs(graph)}


def _end(graph: ETraceGraph, window: Window, keep: bool) -> tuple[Flows, Flows]:
    """``lam = 0`` and ``p = 1`` after the last step; without ``keep`` there is no p."""
    like, _, _ = window.steps.like
    one = {k: slots.identity(like[k].dtype) for k, slots in _flows(graph).items()}
    shared = {k: slots.shared for k, slots in _flows(graph).items()}
    lam = {k: jnp.zeros_like(p[..., 0] if shared[k] else p[0]) for k, p in one.items()}
    return lam, one if keep else {}


def _sent(graph: ETraceGraph, lam: Flows, opened: tuple) -> dict[str, jax.Array]:
    """``dy + lam D_f`` of each op that has a signal."""
    _, df, signals = opened
    delta = dict(signals.dy)
    for pair in pairs(graph):
        key = pair.relation.key
        if key in delta:
            delta[key] = delta[key] + Slots(pair).sent(lam[flow(pair)], pair.of(df))
    return delta


def _pushed(graph: ETraceGraph, p: Flows, opened: tuple, later) -> dict[str, dict]:
    """``p D_f`` of each pair, zero in the lanes that a later step resets."""
    _, df, _ = opened

    def one(pair: Pair):
        owed = Slots(pair).pushed(p[flow(pair)], pair.of(df))
        return owed if later is None else where_lanes(~later, pair.laned, owed, 1)

    return by_pair(graph, one) if p else {}


def _moved(graph: ETraceGraph, window: Window, p: Flows, push: dict, later) -> Moved:
    """A window as one change of the trace."""
    related = {r.key: r.op for r in graph.hidden_param_op_relations}
    x = {key: rows for key, rows in window.x.items() if key in related}
    alive = window.t[0] > 0
    if later is not None and window.resets is not None:
        x = {key: of_rows(graph, related[key], ~later, rows) for key, rows in x.items()}
        alive &= ~window.resets.any(0)
    return Moved(p, x, push, alive)
