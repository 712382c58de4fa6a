"""The report of a compiled graph: its contents, the cost of its trace, and what that leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._compiler import ETraceGraph
from .._rules import DRTRL, Rule
from .._tables import as_html, as_text
from . import contents
from .mermaid import to_mermaid
from .rows import ReportData
from .texts import explain, summary, tables


class Report(ReportData):
    """What :func:`braintrace.report` returns; prints as text, shows as tables in a notebook.

    ``memory`` is for ``batch_size``, None where the step has no batch axis. ``approximation``: what
    the ``rule`` leaves out in every model; ``axes``: a line for each of its other options.
    ``exact``: no gradient lacks a part of its history. ``groups``, ``relations``, ``parameters``,
    ``cuts`` and ``diagnostics`` have a row for each of these in the ``graph``.
    ``at(batch_size)``: the report at another batch size, with a mesh of devices also their
    ``share``, which ``share_of`` computes; :class:`braintrace.errors.OptionError` for a batch size
    where the step has no batch axis. ``as_dict()``: all of it, as for JSON.

    >>> import braintrace, jax.numpy as jnp
    >>> model, x = braintrace.nn.MinGRUCell(2, 4), jnp.zeros((3, 2))
    >>> report = braintrace.compile(model, 'D_RTRL', x, batch_size=3).report
    >>> report.exact, report.memory, report.at(64).memory
    (True, 288, 6144)
    >>> [(row.path, row.route, row.history) for row in report.parameters][:1]
    [('W/weight/bias', 'trace', 'whole')]
    """

    def __call__(self, batch_size: int | None = None) -> Report:
        return self if batch_size is None else self.at(batch_size)

    def __str__(self) -> str:
        return as_text(summary(self), tables(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(summary(self), tables(self))

    def show(self, level: int = 1, *, file=None) -> None:
        """Print the report, all of it at every level, to ``file`` or to stdout."""
        print(self, file=file)

    def explain(self, path: str | tuple) -> str:
        """One parameter in a few sentences: its route and why, its op and place, its trace, its
        losses, what to change.

        ``path``: as printed in the report, its end where only one parameter or module has that, or
        a tuple of keys; a path to several parameters explains each. Raises
        :class:`braintrace.errors.OptionError` with the nearest paths for an unknown one.

        >>> import brainstate, braintrace, jax.numpy as jnp
        >>> model = braintrace.nn.GRUCell(2, 4)
        >>> _ = brainstate.nn.init_all_states(model, batch_size=3)
        >>> graph = braintrace.compile_etrace_graph(model, jnp.zeros((3, 2)))
        >>> print(braintrace.report(graph).explain('Wr/weight/bias'))
        Wr/weight/bias float32[4] has route same-step (weight_then_weight): ...
        """
        return explain(self, path)

    def to_mermaid(self) -> str:
        """The graph as a Mermaid flowchart: parameters, ops, mixing equations, hidden groups;
        dashed where history is cut.

        >>> import brainstate, braintrace, jax.numpy as jnp
        >>> model = braintrace.nn.MinGRUCell(2, 4)
        >>> _ = brainstate.nn.init_all_states(model, batch_size=3)
        >>> graph = braintrace.compile_etrace_graph(model, jnp.zeros((3, 2)))
        >>> print(braintrace.report(graph).to_mermaid())
        flowchart LR
          ...
        """
        return to_mermaid(self.graph)


def report(graph: ETraceGraph, rule: Any = None, batch_size: int | None = None) -> Report:
    """Groups, relations, routes, cuts, diagnostics, exactness, and memory of the trace.

    ``graph``: of a compiled learner. ``rule``: a value of :mod:`braintrace.rules`, by default
    D_RTRL. ``batch_size``: by default as compiled. Raises :class:`braintrace.errors.OptionError`
    for one where the step has no batch axis.

    >>> import brainstate, braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.MinGRUCell(2, 4)
    >>> _ = brainstate.nn.init_all_states(model, batch_size=3)
    >>> graph = braintrace.compile_etrace_graph(model, jnp.zeros((3, 2)))
    >>> print(str(braintrace.report(graph, batch_size=64)).splitlines()[1])
    trace memory: 6.0 KiB at batch size 64, 96 B for each further sample
    """
    rule = DRTRL() if rule is None else rule
    graph = rule.scoped(graph) if isinstance(rule, Rule) else graph
    return make_report(graph, rule)(batch_size)


def make_report(graph: ETraceGraph, rule: Any, share_of: Callable | None = None) -> Report:
    """``rule`` may be None; the batch size is the compiled one. ``share_of(batch_size, param_specs,
    batch_axis, mesh)``: see :class:`Share`.
    """
    known, cuts = contents.known_rule(graph, rule), contents.cut_rows(graph)
    relations = contents.relation_rows(graph, known)
    return Report(
        rule=known.name,
        approximation=contents.approximation(graph, known),
        axes=contents.axis_lines(rule),
        batch_size=graph.lanes,
        groups=contents.group_rows(graph, cuts),
        relations=relations,
        parameters=contents.parameter_rows(graph, cuts, relations, known),
        cuts=cuts,
        diagnostics=contents.diagnostic_rows(graph),
        graph=graph,
        share_of=share_of,
    )
