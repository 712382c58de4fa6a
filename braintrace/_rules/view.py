"""What a rule changes in the compiled step before it looks at it."""

from __future__ import annotations

from dataclasses import dataclass

from .._compiler import ETraceGraph, with_filter, with_own_diagonal
from .feedback import Feedback


@dataclass(frozen=True)
class View:
    """How a rule sees a step; by default as it was compiled.

    ``own``: with the own diagonal of each recurrent op. ``kappa``: of the filter of what readouts
    read, 0 for none. ``feedback``: the weights through which errors go back, None for the ops' own.
    """

    own: bool = False
    kappa: float = 0.0
    feedback: Feedback | None = None

    def of(self, graph: ETraceGraph) -> ETraceGraph:
        """The step in this view, also if it is in this view already."""
        program = graph.program
        if self.own and not any(eqn.extra for eqn in program.equations):
            graph = with_own_diagonal(graph)
        if self.kappa and not program.virtual:
            graph = with_filter(graph, self.kappa)
        return graph if self.feedback is None or graph.feedback else self.feedback.of(graph)

    def notes(self, graph: ETraceGraph) -> list[str]:
        """What of this view changes gradients, in phrases for the report of a step in this view."""
        program, found = graph.program, []
        if self.kappa:
            places = ', '.join(program.carry_keys[c][-1] for c in program.virtual_states)
            found.append(f'kappa {self.kappa:g} at {places}')
        if graph.feedback:
            places = ', '.join(graph.feedback)
            found.append(f'the error reaches h through B in place of W at {places}')
        return found
