"""What a rule changes in the compiled step before it looks at it."""

from __future__ import annotations

from dataclasses import dataclass

from .._compiler import ETraceGraph, with_own_diagonal

__all__ = ['View']


@dataclass(frozen=True)
class View:
    """How a rule sees a step; by default as it was compiled.

    ``own``: with the own diagonal of each recurrent op.
    """

    own: bool = False

    def of(self, graph: ETraceGraph) -> ETraceGraph:
        """The step in this view."""
        return with_own_diagonal(graph) if self.own else graph
