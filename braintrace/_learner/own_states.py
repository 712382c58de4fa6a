"""The states that a learner has beside its model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate

from .._compiler import ETraceGraph
from .._errors import OptionError, StructureError
from .._synthetic import SyntheticGradient
from .._windows import check_synthesizer


class ETraceState(brainstate.ShortTermState):
    """The eligibility trace and the step count of a learner."""


class StructureState(brainstate.State):
    """The places of the entries of sparse matrices that a model holds as constants: a state, so
    that jitted functions take them as arguments instead of millions of literals.
    """


class SyntheticState(brainstate.State):
    """The parameters of a synthesizer for the groups of a graph, by default of a linear one."""

    def __init__(self, graph: ETraceGraph, synthesizer: SyntheticGradient | None):
        shapes = signal_shapes(graph)
        if synthesizer is None:
            synthesizer = SyntheticGradient(shapes, lanes=graph.lanes is not None)
        elif synthesizer.group_shapes != shapes:
            raise StructureError(
                f'the synthesizer is for groups {synthesizer.group_shapes}, and the model has '
                f'{shapes}. Make it with `learner.group_signal_shapes()`.'
            )
        super().__init__(synthesizer.param_values())
        self.apply = synthesizer.apply


def signal_shapes(graph: ETraceGraph) -> dict[str, tuple[int, ...]]:
    """Group -> shape of its states, ``(*shape, S)``."""
    return {g.name: (*g.shape, g.num_state) for g in graph.hidden_groups}


def synthesizer_of(learner: Any, exact: bool) -> Callable | None:
    """The function that makes a learner's synthetic gradients, for a call with these options."""
    if exact and learner.modulates:
        raise OptionError(
            f"inside is 'exact' for {type(learner).__name__}, whose modulator meets the trace "
            "of its own step; an exact window has none inside. Give inside='trace', or another "
            'learner.'
        )
    apply = learner.synthetic.apply if learner.bootstraps else None
    check_synthesizer(apply, exact, learner.rule)
    return apply
