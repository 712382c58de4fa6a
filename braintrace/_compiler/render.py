"""What a report shows: a summary and tables."""
from __future__ import annotations

from typing import TYPE_CHECKING

from .._tables import Table

if TYPE_CHECKING:
    from .report import Report

__all__ = ['size_text', 'summary', 'tables', 'trace_text']


def size_text(count: int) -> str:
    """Bytes for people: ``288 B``, ``1.5 KiB``."""
    size, units = float(count), ['B', 'KiB', 'MiB', 'GiB', 'TiB']
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f'{count} B' if count < 1024 else f'{size:.1f} {units[0]}'


def trace_text(row) -> str:
    """One array of the trace: slot, dtype and shape."""
    return f'{row.slot} {row.dtype}{list(row.shape)}'


def summary(report: Report) -> list[str]:
    """What stands above the tables: the trace's memory, and what the gradients leave out."""
    lines = [f'{report.rule}: {len(report.groups)} hidden group(s), {len(report.relations)} relation(s), '
             f'{len(report.parameters)} parameter(s)', memory_text(report)]
    fixed = [f'  {d.message.partition(". ")[0]} [{d.location}]' for d in report.constants]
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


def memory_text(report: Report) -> str:
    """The trace's memory and how it grows with the batch."""
    if report.batch_size is None:
        return f'trace memory: {size_text(report.memory)}; the step has no batch axis that its ops share'
    return (f'trace memory: {size_text(report.memory)} at batch size {report.batch_size}, '
            f'{size_text(report.memory_of_lane)} for each further sample')


def tables(report: Report) -> list[Table]:
    """The parts of a report."""
    return [
        Table('hidden groups', ('group', 'states', 'shape', 'dtype', 'members'), [
            (g.name, str(g.num_state), str(list(g.shape)), g.dtype, ', '.join(g.members)) for g in report.groups]),
        Table('relations', ('parameters', 'op', 'groups', 'trace', 'bytes', 'place'), [
            ('; '.join(f'{n} <- {" + ".join(p)}' for n, p in r.parameters.items()), r.op + ''.join(f' x{n}' for n in r.repeats),
             '; '.join(r.groups), '; '.join(map(trace_text, r.trace)), str(r.bytes), r.location) for r in report.relations]),
        Table('parameters', ('parameter', 'shape', 'dtype', 'route', 'reason', 'history', 'place'), [
            (p.path, str(list(p.shape)), p.dtype, p.route, p.reason, p.history, p.location) for p in report.parameters]),
        Table('cut', ('what', 'why', 'reads', 'leads to', 'place'), [
            (c.what, c.reason, '; '.join(c.reads), '; '.join(c.reaches), c.location) for c in report.cuts]),
        Table('diagnostics', ('level', 'kind', 'message', 'place'), [
            (d.level, d.kind, d.message, d.location) for d in report.diagnostics if d.kind != 'mixing']),
    ]
