"""The report of a compiled graph: what it holds, what its trace costs and what it leaves out, as rows of plain data."""
from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

from .._errors import OptionError
from .._tables import as_html, as_text
from .losses import Cut, cuts, op_name, readers, untraced_uses
from .reasons import FIXED, FORGETS, GATE, REASONS, TRACED
from .render import summary, tables

if TYPE_CHECKING:
    from .graph import Diagnostic, ETraceGraph

__all__ = ['GroupRow', 'ParameterRow', 'RelationRow', 'Report', 'TraceRow', 'make_report']


class TraceRule(Protocol):
    """What a report asks of a learning rule; ``approximation`` may say what it leaves out in every
    model ('': nothing), ``remembers`` whether a gradient holds anything of an earlier step.
    """
    name: Any

    def init(self, graph: Any) -> dict:
        """The empty trace: relation -> group -> slot."""


class NoRule:
    """Stands for the rule where there is none."""
    name = 'no rule'
    approximation = 'without a rule there is no trace: every gradient holds the current step only'

    def init(self, graph: ETraceGraph) -> dict:
        return {}


@dataclass(frozen=True)
class GroupRow:
    """A hidden group; ``left_out``: the places where its past is cut, empty where the trace carries the whole of it."""
    name: str
    members: tuple[str, ...]
    num_state: int
    shape: tuple[int, ...]
    dtype: str
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class TraceRow:
    """One array of the trace; ``batch_axis`` is None where it does not grow with the batch."""
    group: str
    slot: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    batch_axis: int | None

    def at(self, batch_size: int) -> TraceRow:
        """The same array at another batch size."""
        if self.batch_axis is None:
            return self
        shape = (*self.shape[:self.batch_axis], batch_size, *self.shape[self.batch_axis + 1:])
        return dataclasses.replace(self, shape=shape, bytes=math.prod(shape) * jnp.dtype(self.dtype).itemsize)


@dataclass(frozen=True)
class RelationRow:
    """An op with the parameters behind each of its weights, the groups that it feeds, and its trace.

    ``repeats``: lengths of the loops inside the step around the op.
    """
    key: str
    op: str
    parameters: dict[str, tuple[str, ...]]
    groups: tuple[str, ...]
    repeats: tuple[int, ...]
    trace: tuple[TraceRow, ...]
    location: str

    @property
    def bytes(self) -> int:
        """Bytes of this relation's trace."""
        return sum(row.bytes for row in self.trace)


@dataclass(frozen=True)
class ParameterRow:
    """A parameter's route, and how much of its history the gradient holds.

    ``history``: ``whole``, ``part`` or ``none``; ``not needed`` where the current step is the whole gradient. ``left_out`` says
    on which ways it is lost.
    """
    path: str
    shape: tuple[int, ...]
    dtype: str
    route: str
    reason: str
    meaning: str
    advice: str
    history: str
    left_out: tuple[str, ...]
    location: str


@dataclass(frozen=True, repr=False)
class Report:
    """What :meth:`braintrace.ETraceGraph.report` returns; prints as text, shows as tables in a notebook.

    ``batch_size`` is the one that ``memory`` is for, None where the step has no batch axis. ``approximation`` is what the rule
    leaves out in every model, ``exact`` says that no parameter's gradient lacks a part of its history.

    >>> import braintrace, jax.numpy as jnp
    >>> learner = braintrace.compile(braintrace.nn.MiniGRU(2, 4), 'D_RTRL', jnp.zeros((3, 2)), batch_size=3)
    >>> report = learner.report
    >>> report.exact, report.memory, report.at(64).memory
    (True, 288, 6144)
    >>> [(row.path, row.route, row.history) for row in report.parameters][:1]
    [('W/weight/bias', 'trace', 'whole')]
    """
    rule: str
    approximation: str
    batch_size: int | None
    groups: tuple[GroupRow, ...]
    relations: tuple[RelationRow, ...]
    parameters: tuple[ParameterRow, ...]
    cuts: tuple[Cut, ...]
    diagnostics: tuple[Diagnostic, ...]

    @property
    def memory(self) -> int:
        """Bytes of the whole trace; nothing is allocated to know it."""
        return sum(row.bytes for row in self.relations)

    @property
    def memory_of_lane(self) -> int:
        """Bytes of the trace that one more sample in the batch adds."""
        return self.at(1).memory - self.at(0).memory if self.batch_size is not None else 0

    @property
    def exact(self) -> bool:
        """Whether every gradient is that of the whole past.

        It is False as well where weights of ops are constants, and no parameter has a past.
        """
        untrained = self.constants and all(row.history == 'not needed' for row in self.parameters)
        return not untrained and not any(row.left_out for row in self.parameters)

    @property
    def constants(self) -> tuple[Diagnostic, ...]:
        """What is said of weights of ops that are constants, or states that no step changes."""
        return tuple(d for d in self.diagnostics if d.kind == FIXED)

    def __call__(self, batch_size: int | None = None) -> Report:
        """This report, with the trace of another batch size if one is given."""
        return self if batch_size is None else self.at(batch_size)

    def at(self, batch_size: int) -> Report:
        """This report with the trace of another batch size; shapes of states stay those that were compiled."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 0:
            raise OptionError(f'batch_size is {batch_size!r}; give an int >= 0.')
        if self.batch_size is None:
            raise OptionError(f'the step has no batch axis that its ops share, so its trace has no other batch size than {batch_size}: it '
                              f'takes {self.memory} bytes as compiled. Under jax.vmap count that for each lane.')
        relations = tuple(dataclasses.replace(r, trace=tuple(t.at(batch_size) for t in r.trace)) for r in self.relations)
        return dataclasses.replace(self, batch_size=batch_size, relations=relations)

    def as_dict(self) -> dict:
        """Everything as dicts, lists, strings, numbers and None, as for JSON."""
        return {**_plain(self), 'memory': self.memory, 'exact': self.exact}

    def __str__(self) -> str:
        return as_text(summary(self), tables(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(summary(self), tables(self))


def _plain(value):
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def make_report(graph: ETraceGraph, given: TraceRule | None, batch_size: int | None) -> Report:
    """The report of a graph under a rule, at the batch size that was compiled or at another one."""
    rule: TraceRule = NoRule() if given is None else given
    if isinstance(rule, type) or not callable(getattr(rule, 'init', None)):
        raise OptionError(f'rule is {rule!r}; give a value of braintrace.rules, such as braintrace.rules.d_rtrl().')
    approximation = getattr(rule, 'approximation', f'nothing is known of what {rule.name} leaves out')
    places = cuts(graph)
    groups = tuple(GroupRow(g.name, g.paths, g.num_state, tuple(g.shape), str(g.dtype), tuple(str(c) for c in places if g.name in c.reads))
                   for g in graph.hidden_groups)
    traces = trace_shapes(graph, rule)
    loops = any(rel.op.repeats for rel in graph.hidden_param_op_relations)
    relations = _relation_rows(graph, traces, trace_shapes(_without_loops(graph), rule) if loops else traces)
    parameters = _parameter_rows(graph, groups, relations, approximation,
                                 getattr(rule, 'remembers', True))
    report = Report(str(rule.name), approximation, graph.lanes, groups, relations, parameters,
                    places, tuple(dict.fromkeys(graph.diagnostics)))
    return report if batch_size is None else report.at(batch_size)


def trace_shapes(graph: ETraceGraph, rule: TraceRule) -> dict:
    """Shapes and dtypes of the trace: relation -> group -> slot; a trace in float64 is one wherever this is called."""
    dtypes = [a.dtype for op in graph.ops for a in (op.y_aval, *op.weight_avals.values())]
    wide = any(jnp.issubdtype(d, jnp.inexact) and jnp.finfo(d).bits == 64 for d in dtypes)
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        return jax.eval_shape(lambda: rule.init(graph))


def _without_loops(graph: ETraceGraph) -> ETraceGraph:
    """The graph as if no op stood in a loop: what its trace has fewer axes, loops have added in front of the batch."""
    relations = tuple(dataclasses.replace(rel, op=dataclasses.replace(rel.op, repeats=())) for rel in graph.hidden_param_op_relations)
    return dataclasses.replace(graph, hidden_param_op_relations=relations)


def _relation_rows(graph: ETraceGraph, traces: dict, once: dict) -> tuple[RelationRow, ...]:
    rows = []
    for rel in graph.hidden_param_op_relations:
        trace = []
        for group, coords in zip(rel.groups, rel.coordinates, strict=True):
            lanes = graph.lanes_of(group)
            for slot, arrays in traces.get(rel.key, {}).get(group.name, {}).items():
                a, *_ = jax.tree.leaves(arrays)
                axis = a.ndim - jax.tree.leaves(once[rel.key][group.name][slot])[0].ndim
                laned = coords.has_lanes(lanes) and a.shape[axis:axis + 1] == (lanes,)
                shape = (*a.shape, len(arrays)) if isinstance(arrays, tuple) else tuple(a.shape)
                trace.append(TraceRow(group.name, slot, shape, str(a.dtype), math.prod(shape) * a.dtype.itemsize,
                                      axis if laned else None))
        rows.append(RelationRow(rel.key, rel.primitive.name, dict(rel.paths), tuple(g.name for g in rel.groups), rel.op.repeats,
                                tuple(trace), rel.op.where))
    return tuple(rows)


def _parameter_rows(graph: ETraceGraph, groups: tuple[GroupRow, ...], relations: tuple[RelationRow, ...],
                    approximation: str, remembers: bool) -> tuple[ParameterRow, ...]:
    program, untraced, cut = graph.program, untraced_uses(graph), {g.name: g.left_out for g in groups}
    gates = {program.param_names[i] for op in graph.ops if any(op_name(op) in texts for texts in graph.cut_reads.values())
             for behind in op.parameters.values() for i in behind}
    rows = []
    for path, value in zip(program.param_names, program.params, strict=True):
        route, aval, relevant = graph.routes[path], program.avals[value], relations_of(relations, path)
        carried = remembers and any(rel.trace for rel in relevant)
        lost = [f'through {text}' for rel in relevant for g in rel.groups for text in cut[g]] + list(untraced.get(path, ()))
        lost += [approximation] if relevant and approximation else []
        history = ('part' if lost else 'whole') if carried else 'none' if lost else 'not needed'
        meaning, advice = TRACED if route.kind == 'trace' else REASONS.get(route.reason.partition(':')[0], (route.reason, ''))
        if route.reason == 'weight_then_weight' and path in gates:
            advice = GATE
        if route.kind == 'trace' and not remembers:
            meaning, advice = FORGETS
        rows.append(ParameterRow(path, tuple(aval.shape), str(aval.dtype), route.kind, route.reason, meaning, advice, history,
                                 tuple(dict.fromkeys(lost)), route.location or _first_use(graph, value)))
    return tuple(rows)


def _first_use(graph: ETraceGraph, value: int) -> str:
    """The place of the first equation that reads a value."""
    return next((graph.program.equations[i].where for i, _ in readers(graph.program, value)), '')


def relations_of(relations: Iterable[RelationRow], path: str) -> list[RelationRow]:
    """The relations of a parameter."""
    return [rel for rel in relations if any(path in paths for paths in rel.parameters.values())]
