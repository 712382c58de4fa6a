"""The report of a compiled graph: its contents, the cost of its trace, what that leaves out, and
one parameter in a few sentences.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax.numpy as jnp

from .._compiler import ETraceGraph, path_name, reach
from .._rules import DRTRL, Rule
from .._signatures import is_int
from .._tables import Table, as_html, as_text
from ..errors import OptionError
from . import contents
from .mermaid import to_mermaid
from .rows import (
    CutRow,
    DiagnosticRow,
    GroupRow,
    ParameterRow,
    RelationRow,
    Share,
    TraceRow,
    constant_text,
    message,
    op_text,
    placed,
)


@dataclass(frozen=True, repr=False)
class Report:
    """What :func:`braintrace.report` returns; prints as text, shows as tables in a notebook.

    ``memory`` is for ``batch_size``, None where the step has no batch axis. ``approximation``: what
    the ``rule`` leaves out in every model; ``axes``: a line for each of its other options.
    ``exact``: no gradient lacks a part of its history, and no trace is kept in fewer bits than its
    states and weights. ``groups``, ``relations``, ``parameters``,
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

    rule: str
    approximation: str
    axes: tuple[str, ...]
    batch_size: int | None
    groups: tuple[GroupRow, ...]
    relations: tuple[RelationRow, ...]
    parameters: tuple[ParameterRow, ...]
    cuts: tuple[CutRow, ...]
    diagnostics: tuple[DiagnosticRow, ...]
    graph: ETraceGraph = field(compare=False)
    share: Share | None = None
    share_of: Callable | None = field(default=None, compare=False, repr=False)

    @property
    def memory(self) -> int:
        """Bytes of the whole trace; nothing is allocated."""
        return sum(row.bytes for row in self.relations)

    @property
    def memory_of_sample(self) -> int:
        """Bytes of the trace that one more sample in the batch adds."""
        return self.at(1).memory - self.at(0).memory if self.batch_size is not None else 0

    @property
    def exact(self) -> bool:
        """Whether every gradient holds the whole past.

        It is False as well where weights of ops are constants, and no parameter has a past, and
        where a trace is kept in fewer bits than its states and weights.
        """
        if any(row.left_out for row in self.parameters) or self.rounding:
            return False
        constant = any(found.kind == 'constant-weight' for found in self.diagnostics)
        return not constant or any(row.history == 'whole' for row in self.parameters)

    @property
    def rounding(self) -> list[str]:
        """What rounding leaves of the numbers of traces that are narrower than their states."""
        rows = (row for relation in self.relations for row in relation.trace if row.rounds)
        return list(dict.fromkeys(rounding_text(row) for row in rows))

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

    def at(self, batch_size: int, *, param_specs=None, batch_axis=None, mesh=None) -> Self:
        """This report at another batch size; shapes of states stay as they were compiled.

        With a ``mesh``, also of no devices (``jax.sharding.AbstractMesh``), it has ``share``: what
        a device holds and sends where ``partition_specs`` of the learner puts the arrays, given
        ``param_specs`` (None: each device has all parameters) and ``batch_axis``. In bytes:
        ``share.held``, its parts of params, carry, trace and t, and ``share.gradient``, what it
        exchanges for each gradient; with ``share.units_apart`` inputs and states at each step,
        which ``gradient`` leaves out.

        >>> import braintrace, jax, jax.numpy as jnp
        >>> model, x = braintrace.nn.MinGRUCell(2, 4), jnp.zeros((3, 2))
        >>> report = braintrace.compile(model, 'D_RTRL', x, batch_size=3).report
        >>> mesh = jax.sharding.AbstractMesh((8,), ('data',))
        >>> report.at(64, batch_axis='data', mesh=mesh).share
        Share(devices=8, held=1024, gradient=96, units_apart=False)
        """
        if not is_int(batch_size, 0):
            raise OptionError(f'batch_size is {batch_size!r}; give an int >= 0.')
        if self.batch_size is None:
            raise OptionError(
                'the step has no batch axis that its ops share, or samples that reach each other, '
                f'so its trace is not known at batch size {batch_size}: it takes {self.memory} '
                'bytes as compiled. Compile it at that size, or under jax.vmap count that for each '
                'mapped sample.'
            )
        relations = tuple(
            dataclasses.replace(r, trace=tuple(t.at(batch_size) for t in r.trace))
            for r in self.relations
        )
        share = None
        if mesh is None and (param_specs is not None or batch_axis is not None):
            raise OptionError(
                'param_specs and batch_axis say where arrays lie on a mesh, and mesh is left out. '
                'Give one; a `jax.sharding.AbstractMesh` needs no devices.'
            )
        if mesh is not None:
            if self.share_of is None:
                raise OptionError(
                    'a report of a graph knows no mesh; ask that of a learner: `learner.report.at('
                    'batch_size, param_specs=..., batch_axis=..., mesh=...)`.'
                )
            share = self.share_of(batch_size, param_specs, batch_axis, mesh)
        return dataclasses.replace(self, batch_size=batch_size, relations=relations, share=share)

    def as_dict(self) -> dict:
        """Everything as dicts, lists, strings, numbers and None, as for JSON."""
        return {**_plain(self), 'memory': self.memory, 'exact': self.exact}

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
        rows = {row.path: row for row in self.parameters}
        return '\n\n'.join(_paragraph(self, rows[name]) for name in _leaves(self.graph, path))

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


def _plain(value):
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if f.name not in ('graph', 'share_of')]
        value = {name: getattr(value, name) for name in names}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


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
    (name, init, left_out, remembers), cuts = contents.known(graph, rule), contents.cut_rows(graph)
    relations = contents.relation_rows(graph, init)
    here = [found.reason for found in graph.found('rule')]
    return Report(
        rule=name,
        approximation='; '.join(dict.fromkeys(filter(None, [left_out, *here]))),
        axes=contents.axis_lines(graph, rule),
        batch_size=contents.batch_size(graph),
        groups=contents.group_rows(graph, cuts),
        relations=relations,
        parameters=contents.parameter_rows(
            graph, cuts, relations, left_out, contents.forgotten(graph, rule, remembers)
        ),
        cuts=cuts,
        diagnostics=tuple(  # equal rows of several equations at one line are one row
            dict.fromkeys(
                DiagnosticRow(d.kind, d.level, message(graph, d), d.path, d.location)
                for d in graph.diagnostics
            )
        ),
        graph=graph,
        share_of=share_of,
    )


# as text ------------------------------------------------------------------------------------------


def size_text(count: int) -> str:
    """Bytes for people: ``288 B``, ``1.5 KiB``."""
    size, units = float(count), ['B', 'KiB', 'MiB', 'GiB', 'TiB']
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f'{count} B' if count < 1024 else f'{size:.1f} {units[0]}'


def trace_text(row: TraceRow) -> str:
    return f'{row.slot} {row.dtype}{list(row.shape)}'


def rounding_text(row: TraceRow) -> str:
    """How far a number of a trace is off that is rounded at each write."""
    eps = float(jnp.finfo(row.dtype).eps)
    return (
        f'rounded: the trace is kept in {row.dtype}, its states and weights in {row.rounds}; a '
        f'number that remembers n writes is off by about {20 * eps:.1g} % x sqrt(n), by '
        f'{70 * eps**0.5:.1g} % at most'
    )


def summary(report: Report) -> list[str]:
    """The lines above the tables: the trace's memory, and what the gradients leave out."""
    graph = report.graph
    lines = [
        f'{report.rule}: {len(report.groups)} hidden group(s), {len(report.relations)} '
        f'relation(s), {len(report.parameters)} parameter(s)',
        memory_text(report),
        *([] if report.share is None else [share_text(report.share)]),
        *report.axes,
    ]
    if graph.scope is not None:
        lines.append(graph.scope.text)
    constants = [found for found in graph.diagnostics if found.kind == 'constant-weight']
    fixed = list(dict.fromkeys(f'  {constant_text(graph, d)} [{d.location}]' for d in constants))
    if report.exact:
        but = ['but nothing trains these weights:', *fixed] if fixed else []
        return [*lines, 'exact: every gradient holds the whole past', *but]
    if fixed:
        lines += ['nothing trains these weights:', *fixed]
    lines += report.rounding
    if not any(row.left_out for row in report.parameters):
        return lines
    lines.append('approximate: some gradients leave out a part of the past (column `history`)')
    if report.approximation:
        lines.append(f'  {report.approximation}')
    if any(c.reads for c in report.cuts):
        lines.append('  what goes from one step to the next through the places listed under `cut`')
    without = [row.path for row in report.parameters if row.history == 'none']
    if without:
        lines.append('  the whole past of ' + ', '.join(without))
    return lines


def share_text(share: Share) -> str:
    held, sent = size_text(share.held), size_text(share.gradient)
    text = f'each of {share.devices} devices holds {held}, and exchanges {sent} for each gradient'
    return f'{text}, and inputs and states at each step' if share.units_apart else text


def memory_text(report: Report) -> str:
    memory = f'trace memory: {size_text(report.memory)}'
    if report.batch_size is None:
        return f'{memory}; the step has no batch axis that its ops share'
    more = size_text(report.memory_of_sample)
    return f'{memory} at batch size {report.batch_size}, {more} for each further sample'


def tables(report: Report) -> list[Table]:
    """The printed form of a report below its summary; cuts are no diagnostics there."""
    return [
        Table(
            'hidden groups',
            ('group', 'states', 'shape', 'dtype', 'members'),
            [
                (g.name, str(g.num_state), str(list(g.shape)), g.dtype, members_text(g))
                for g in report.groups
            ],
        ),
        Table(
            'relations',
            ('parameters', 'op', 'groups', 'trace', 'bytes', 'place'),
            [
                (
                    '; '.join(f'{n} <- {" + ".join(p)}' for n, p in r.parameters.items()),
                    r.op + ''.join(f' x{n}' for n in r.repeats),
                    '; '.join(r.groups),
                    '; '.join(map(trace_text, r.trace)),
                    str(r.bytes),
                    r.location,
                )
                for r in report.relations
            ],
        ),
        Table(
            'parameters',
            ('parameter', 'shape', 'dtype', 'route', 'reason', 'history', 'place'),
            [
                (p.path, str(list(p.shape)), p.dtype, p.route, p.reason, p.history, p.location)
                for p in report.parameters
            ],
        ),
        Table(
            'cut',
            ('what', 'why', 'reads', 'leads to', 'place'),
            [
                (c.what, c.reason, '; '.join(c.reads), '; '.join(c.reaches), c.location)
                for c in report.cuts
            ],
        ),
        Table(
            'diagnostics',
            ('level', 'kind', 'message', 'place'),
            [
                (d.level, d.kind, d.message, d.location)
                for d in report.diagnostics
                if d.kind != 'mixing'
            ],
        ),
    ]


def members_text(row: GroupRow) -> str:
    made = f'; made of them, without a trace: {", ".join(row.derived)}' if row.derived else ''
    return ', '.join(row.members) + made


# the path of one parameter ------------------------------------------------------------------------


def _leaves(graph: ETraceGraph, path: str | tuple) -> list[str]:
    """The parameters below a path: a tuple of keys, its printed form, or an end of that."""
    names, keys = graph.program.param_names, graph.program.param_keys
    wanted = path_name(tuple(map(str, path)), 'params') if isinstance(path, tuple) else str(path)
    exact = [n for n, k in zip(names, keys, strict=True) if wanted in (n, '/'.join(k))]
    found = exact or _below(names, wanted)
    if found:
        return found
    # the end of a path, of one node alone: of nodes inside each other the outermost counts
    nodes = sorted({*names, *(n[:k] for n in names for k, c in enumerate(n) if c == '/')})
    ends = [n for n in nodes if n.endswith(f'/{wanted}')]
    ends = [n for n in ends if not any(n.startswith(f'{other}/') for other in ends)]
    if len(ends) == 1:
        return [n for n in names if n == ends[0]] or _below(names, ends[0])
    if ends:
        raise OptionError(f'{wanted!r} is the end of {ends}; give more of one.')
    # no parameter has this path; it may be a constant weight
    near = difflib.get_close_matches(wanted, nodes, n=3, cutoff=0.0)
    what = (
        f'{wanted!r} is no parameter of the step; nearest are {near}.'
        if near
        else 'the step has no parameters.'
    )
    constants = dict.fromkeys(
        f'Beside them, {placed(message(graph, found), found.location)}.'
        for found in graph.diagnostics
        if found.kind == 'constant-weight'
    )
    raise OptionError(' '.join([what, *constants]))


def _below(names: Sequence[str], node: str) -> list[str]:
    return [n for n in names if n.startswith(f'{node}/')]


def _paragraph(report: Report, row: ParameterRow) -> str:
    """A parameter's route and why, its op and place, its trace, its losses, what to change."""
    graph = report.graph
    reason = '' if row.route == 'trace' else f' ({row.reason})'
    parts = [
        f'{row.path} {row.dtype}{list(row.shape)} has route {row.route}{reason}: {row.meaning}.'
    ]
    # where it is used
    number = graph.program.param_names.index(row.path)
    uses = [(op, slot) for op in graph.ops for slot, of in op.parameters.items() if number in of]
    parts += [f'It is the {slot} of {op_text(op)} [{op.where}].' for op, slot in uses]
    parts += [] if uses or not row.location else [f'It is used at {row.location}.']
    # its trace
    made = {
        g.name: f' (of which {", ".join(g.derived)} is made)' if g.derived else ''
        for g in report.groups
    }
    at = '' if report.batch_size is None else f' at batch size {report.batch_size}'
    for rel in report.relations:
        if any(row.path in paths for paths in rel.parameters.values()):
            groups = ', '.join(f'hidden group {name}{made[name]}' for name in rel.groups)
            arrays = ', '.join(map(trace_text, rel.trace))
            kept = f': {arrays}, {size_text(rel.bytes)}{at}' if rel.trace else ''
            parts.append(f'The trace of {rel.key} serves {groups}{kept} ({report.rule}).')
    # or the ops that keep it from having one
    ops = graph.op_at
    for op, _ in uses if row.reason == 'weight_then_weight' else ():
        reached = reach(graph.program, op.y, ops)
        met = {i for v in reached for i in graph.program.consumers.get(v, ()) if i in ops}
        ways = ', '.join(f'{op_text(ops[i])} [{ops[i].where}]' for i in sorted(met))
        parts += [f'{op_text(op)} leads to {ways}.'] if ways else []
    # the losses, and what would change that
    if row.history == 'whole':
        parts.append('Nothing is left out.')
    elif row.history == 'part':
        kinds = {left.kind for left in row.left_out}
        parts.append(f'Left out: {"; ".join(map(str, row.left_out))}.')
        served = {
            group
            for rel in report.relations
            if any(row.path in paths for paths in rel.parameters.values())
            for group in rel.groups
        }
        leaky = [found for found in graph.found('leaky-readout') if found.group in served]
        readouts = {found.path for found in leaky}
        if any(c.op not in readouts for c in report.cuts if served.intersection(c.reads)):
            parts.append('To lose nothing there, let each unit read only itself from step to step.')
        parts += dict.fromkeys(f'{found.states[0]} leaks. {found.row.advice}' for found in leaky)
        if 'use' in kinds:
            parts.append(
                'Apply every use of it with a braintrace op whose result reaches the state '
                'directly.'
            )
    return ' '.join([*parts, *([row.advice] if row.advice else [])])
