"""The protocol of an online learning rule, as pure functions over factors."""
from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import jax

from .._compiler import ETraceGraph
from .._executor import Factors, Signals

__all__ = ['MOST_PENDING', 'OpGradients', 'Rule', 'Trace', 'Weights']

MOST_PENDING = 64                 # updates between two writes of the trace: each is compiled by itself
Weights = dict[str, dict[str, jax.Array]]
OpGradients = dict[str, dict[str, jax.Array]]
Trace = dict[str, dict[str, dict[str, Any]]]


class Rule(ABC):
    """An online learning rule: ``init``, ``update``, ``gradient`` for single steps, ``window`` for several at once.

    A trace is a dict relation -> group -> slot; a slot holds an array, or a tuple of one for each state of the group. ``t`` counts a
    lane's trace steps since its last reset, before the step at hand; where it is 0 the stored trace counts as zero, whatever it holds,
    so that a reset never touches the trace.

    ``approximation``: what the rule leaves out in every model, as one phrase for the report; empty:
    nothing. ``remembers``: whether anything of an earlier step is in a gradient.
    """
    name: ClassVar[str]
    approximation: str
    remembers: bool = True
    required: ClassVar[tuple[str, ...]]
    probes: ClassVar[bool]

    def check(self, graph: ETraceGraph) -> None:
        """Raise :class:`braintrace.MissingRuleError` where a traced primitive lacks a rule that this algorithm needs."""
        for relation in graph.hidden_param_op_relations:
            for slot in self.required:
                relation.primitive.rule(slot, self.name)

    @abstractmethod
    def init(self, graph: ETraceGraph) -> Trace:
        """The trace before the first step: zeros."""

    def carried(self, graph: ETraceGraph, trace: Trace, t: jax.Array) -> Any:
        """What a learner carries from one single step to the next: the trace, perhaps with room for steps not yet written into it."""
        return trace

    def written(self, graph: ETraceGraph, carried: Any, weights: Weights, t: jax.Array) -> Trace:
        """The trace of what a learner carries."""
        return carried

    @abstractmethod
    def update(self, graph: ETraceGraph, carried: Any, factors: Factors, weights: Weights, t: jax.Array) -> Any:
        """What is carried after one step."""

    @abstractmethod
    def gradient(self, graph: ETraceGraph, before: Any, after: Any, factors: Factors, signals: Signals, weights: Weights,
                 t: jax.Array) -> OpGradients:
        """The gradient of one step's loss for the weights of every owned op; ``before`` and ``after``: what is carried."""

    @abstractmethod
    def window(self, graph: ETraceGraph, trace: Trace, pending: Any, factors: Factors, signals: Signals, weights: Weights, t: jax.Array,
               resets: jax.Array | None, keep: bool) -> tuple[OpGradients, Any]:
        """The sum of the gradients of several steps with constant weights, and what is pending after them.

        ``factors``, ``signals``, ``t`` and ``resets`` (flags: reset before the step) have a leading time axis. ``pending`` holds the
        steps since the trace was written; None: there are none. Without ``keep`` what is returned as
        pending is of no use.
        """

    @abstractmethod
    def close(self, graph: ETraceGraph, trace: Trace, pending: Any, weights: Weights, t: jax.Array, read: Any) -> Trace:
        """The trace with all that is pending written into it, after ``read`` was made of it (see ``kernels.after``)."""

    def delay(self, graph: ETraceGraph, every: int, asked: int | None) -> int:
        """In how many updates of ``every`` steps the trace is written once: as asked, or what is best; 1 where it is small."""
        return 1 if asked is None else asked
