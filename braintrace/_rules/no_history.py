"""SnAp-0: every gradient is that of its own step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .contraction import same_step
from .rule import PositionWise, WritesAtOnce


@dataclass(frozen=True, repr=False)
class NoHistory(WritesAtOnce, PositionWise):
    """The same-step gradient alone, without a trace; ``rule=None`` means the same."""

    name: ClassVar[str] = 'same_step'
    made_by: ClassVar[str] = 'same_step'
    required: ClassVar[tuple[str, ...]] = ()
    probes: ClassVar[bool] = False
    traces: ClassVar[bool] = False
    credit = 'cut'
    approximation = 'there is no trace: every gradient holds the current step only'
    remembers = False

    def init(self, graph):
        return {}

    def update(self, network, carried, factors, t):
        return carried

    def gradient(self, network, before, after, step):
        _, _, signals = step.steps.all
        return same_step(network.graph, step.x, signals.dy, network.weights)

    def window(self, network, trace, pending, window, keep):
        return self.gradient(network, trace, trace, window), None

    def with_history(self, network, grads, trace, pending, lam, start):
        return grads

    def advance(self, network, trace, pending, window):
        return None

    def close(self, network, trace, pending, t, read):
        return trace
