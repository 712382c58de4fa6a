"""A report as text: tables, and the path of one parameter."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from .._compiler import ETraceGraph, path_name, reach
from .._tables import Table
from ..errors import OptionError
from .rows import (
    GroupRow,
    ParameterRow,
    ReportData,
    Share,
    TraceRow,
    constant_text,
    message,
    op_text,
    placed,
)

# tables -------------------------------------------------------------------------------------------
#
# The printed form of a report: a summary and tables.


Rows = list[tuple[str, ...]]


def size_text(count: int) -> str:
    """Bytes for people: ``288 B``, ``1.5 KiB``."""
    size, units = float(count), ['B', 'KiB', 'MiB', 'GiB', 'TiB']
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f'{count} B' if count < 1024 else f'{size:.1f} {units[0]}'


def trace_text(row: TraceRow) -> str:
    return f'{row.slot} {row.dtype}{list(row.shape)}'


def summary(report: ReportData) -> list[str]:
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


def memory_text(report: ReportData) -> str:
    memory = f'trace memory: {size_text(report.memory)}'
    if report.batch_size is None:
        return f'{memory}; the step has no batch axis that its ops share'
    more = size_text(report.memory_of_lane)
    return f'{memory} at batch size {report.batch_size}, {more} for each further sample'


def tables(report: ReportData) -> list[Table]:
    parts = groups_table, relations_table, parameters_table, cuts_table, diagnostics_table
    return [part(report) for part in parts]


def groups_table(report: ReportData) -> Table:
    columns = 'group', 'states', 'shape', 'dtype', 'members'
    rows: Rows = [
        (g.name, str(g.num_state), str(list(g.shape)), g.dtype, members_text(g))
        for g in report.groups
    ]
    return Table('hidden groups', columns, rows)


def members_text(row: GroupRow) -> str:
    made = f'; made of them, without a trace: {", ".join(row.derived)}' if row.derived else ''
    return ', '.join(row.members) + made


def relations_table(report: ReportData) -> Table:
    columns = 'parameters', 'op', 'groups', 'trace', 'bytes', 'place'
    rows: Rows = [
        (
            '; '.join(f'{n} <- {" + ".join(p)}' for n, p in r.parameters.items()),
            r.op + ''.join(f' x{n}' for n in r.repeats),
            '; '.join(r.groups),
            '; '.join(map(trace_text, r.trace)),
            str(r.bytes),
            r.location,
        )
        for r in report.relations
    ]
    return Table('relations', columns, rows)


def parameters_table(report: ReportData) -> Table:
    columns = 'parameter', 'shape', 'dtype', 'route', 'reason', 'history', 'place'
    rows: Rows = [
        (p.path, str(list(p.shape)), p.dtype, p.route, p.reason, p.history, p.location)
        for p in report.parameters
    ]
    return Table('parameters', columns, rows)


def cuts_table(report: ReportData) -> Table:
    columns = 'what', 'why', 'reads', 'leads to', 'place'
    rows: Rows = [
        (c.what, c.reason, '; '.join(c.reads), '; '.join(c.reaches), c.location)
        for c in report.cuts
    ]
    return Table('cut', columns, rows)


def diagnostics_table(report: ReportData) -> Table:
    """Without cuts: they have a table."""
    columns = 'level', 'kind', 'message', 'place'
    rows: Rows = [
        (d.level, d.kind, d.message, d.location) for d in report.diagnostics if d.kind != 'mixing'
    ]
    return Table('diagnostics', columns, rows)


# the path of one parameter ------------------------------------------------------------------------
#
# One parameter of a compiled graph in a few sentences.


def explain(report: ReportData, path: str | tuple) -> str:
    """A paragraph for each leaf under ``path``."""
    rows = {row.path: row for row in report.parameters}
    return '\n\n'.join(_paragraph(report, rows[name]) for name in _leaves(report.graph, path))


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


def _paragraph(report: ReportData, row: ParameterRow) -> str:
    graph = report.graph
    reason = '' if row.route == 'trace' else f' ({row.reason})'
    parts = [
        f'{row.path} {row.dtype}{list(row.shape)} has route {row.route}{reason}: {row.meaning}.'
    ]
    # where it is used
    number = graph.program.param_names.index(row.path)
    uses = [
        (op, slot) for op in graph.ops for slot, behind in op.parameters.items() if number in behind
    ]
    parts += [f'It is the {slot} of {op_text(op)} [{op.where}].' for op, slot in uses]
    parts += [] if uses or not row.location else [f'It is used at {row.location}.']
    # its trace, or the ops that keep it from having one
    parts += _traces(report, row)
    ops = graph.op_at
    for op, _ in uses if row.reason == 'weight_then_weight' else ():
        behind = reach(graph.program, op.y, ops)
        met = {i for v in behind for i in graph.program.consumers.get(v, ()) if i in ops}
        ways = ', '.join(f'{op_text(ops[i])} [{ops[i].where}]' for i in sorted(met))
        parts += [f'{op_text(op)} leads to {ways}.'] if ways else []
    # the losses, and what would change that
    if row.history == 'whole':
        parts.append('Nothing is left out.')
    elif row.history == 'part':
        kinds = {left.kind for left in row.left_out}
        parts.append(f'Left out: {"; ".join(map(str, row.left_out))}.')
        if 'cut' in kinds:
            parts.append('To lose nothing there, let each unit read only itself from step to step.')
        if 'use' in kinds:
            parts.append(
                'Apply every use of it with a braintrace op whose result reaches the state '
                'directly.'
            )
    return ' '.join([*parts, *([row.advice] if row.advice else [])])


def _traces(report: ReportData, row: ParameterRow) -> list[str]:
    parts, groups = [], {g.name: _group(g) for g in report.groups}
    for rel in report.relations:
        if any(row.path in paths for paths in rel.parameters.values()):
            at = '' if report.batch_size is None else f' at batch size {report.batch_size}'
            kept = (
                f': {", ".join(map(trace_text, rel.trace))}, {size_text(rel.bytes)}{at}'
                if rel.trace
                else ''
            )
            parts.append(
                f'The trace of {rel.key} serves '
                f'{", ".join(groups[g] for g in rel.groups)}{kept} ({report.rule}).'
            )
    return parts


def _group(row: GroupRow) -> str:
    made = f' (of which {", ".join(row.derived)} is made)' if row.derived else ''
    return f'hidden group {row.name}{made}'
