"""The printed form of a report: a summary and tables."""

from __future__ import annotations

from .._tables import Table
from .messages import constant_text
from .rows import GroupRow, ReportData, Share, TraceRow

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
    return f'each of {share.devices} devices holds {held}, and exchanges {sent} for each gradient'


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
