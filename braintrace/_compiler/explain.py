"""One parameter of a compiled graph in a few sentences."""
from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from .._errors import OptionError
from . import flow
from .losses import USE, op_name
from .program import path_name
from .reasons import FIXED
from .render import size_text, trace_text

if TYPE_CHECKING:
    from .graph import ETraceGraph, OpUse
    from .report import ParameterRow, Report

__all__ = ['explain']


def explain(graph: ETraceGraph, report: Report, path) -> str:
    """Route, reason, op, place, trace, what is left out and what to change; a paragraph for each leaf under ``path``."""
    rows = {row.path: row for row in report.parameters}
    return '\n\n'.join(_paragraph(graph, report, rows[name]) for name in _leaves(graph, path))


def _leaves(graph: ETraceGraph, path) -> list[str]:
    """The parameters that a path names: one, or all below it.

    A path is a tuple of keys, its printed form, or an end of that.
    """
    names, keys = graph.program.param_names, graph.program.param_keys
    wanted = path_name(tuple(map(str, path)), 'params') if isinstance(path, tuple) else str(path)
    exact = [n for n, k in zip(names, keys, strict=True) if wanted in (n, '/'.join(k))]
    found = exact or _below(names, wanted)
    if found:
        return found
    nodes = sorted({*names, *(n[:k] for n in names for k, c in enumerate(n) if c == '/')})
    ends = [n for n in nodes if n.endswith(f'/{wanted}')]
    ends = [n for n in ends if not any(n.startswith(f'{other}/') for other in ends)]
    if len(ends) == 1:
        return [n for n in names if n == ends[0]] or _below(names, ends[0])
    if ends:
        raise OptionError(f'{wanted!r} is the end of {ends}; give more of one.')
    near = difflib.get_close_matches(wanted, nodes, n=3, cutoff=0.)
    what = f'{wanted!r} is no parameter of the step; nearest are {near}.' if near else 'the step has no parameters.'
    fixed = [f'Beside them, {d.message} [{d.location}].' for d in graph.diagnostics if d.kind == FIXED]
    raise OptionError(' '.join([what, *fixed]))


def _below(names, node: str) -> list[str]:
    return [n for n in names if n.startswith(f'{node}/')]


def _paragraph(graph: ETraceGraph, report: Report, row: ParameterRow) -> str:
    reason = '' if row.route == 'trace' else f' ({row.reason})'
    parts = [f'{row.path} {row.dtype}{list(row.shape)} has route {row.route}{reason}: {row.meaning}.']
    number = graph.program.param_names.index(row.path)
    uses = [(op, slot) for op in graph.ops for slot, behind in op.parameters.items() if number in behind]
    parts += [f'It is the {slot} of {op_name(op)} [{op.where}].' for op, slot in uses]
    parts += [] if uses or not row.location else [f'It is used at {row.location}.']
    parts += _traces(report, row)
    parts += [f'{op_name(op)} leads to {ways}.' for op, ways in ((op, _next_ops(graph, op)) for op, _ in uses)
              if row.reason == 'weight_then_weight' and ways]
    parts += _verdict(report, row)
    return ' '.join([*parts, *([row.advice] if row.advice else [])])


def _verdict(report: Report, row: ParameterRow) -> list[str]:
    """What a trace leaves out, and what would make it whole."""
    if row.history == 'whole':
        return ['Nothing is left out.']
    if row.history != 'part':
        return []
    parts = [f'Left out: {"; ".join(row.left_out)}.']
    if any(str(c) in text for c in report.cuts for text in row.left_out):
        parts.append('To lose nothing there, let each unit read only itself from step to step.')
    if any(text.startswith(USE) for text in row.left_out):
        parts.append('Apply every use of it with a braintrace op whose result reaches the state directly.')
    return parts


def _traces(report: Report, row: ParameterRow) -> list[str]:
    parts = []
    for rel in report.relations:
        if any(row.path in paths for paths in rel.parameters.values()):
            at = '' if report.batch_size is None else f' at batch size {report.batch_size}'
            kept = f': {", ".join(map(trace_text, rel.trace))}, {size_text(rel.bytes)}{at}' if rel.trace else ''
            parts.append(f'The trace of {rel.key} serves {", ".join(f"hidden group {g}" for g in rel.groups)}{kept} ({report.rule}).')
    return parts


def _next_ops(graph: ETraceGraph, op: OpUse) -> str:
    """The ops that an op's result meets first."""
    program, ops = graph.program, {o.equation: o for o in graph.ops}
    read = {i for v in flow.reach(program, op.y, ops) for i in program.consumers.get(v, ()) if i in ops}
    return ', '.join(f'{op_name(ops[i])} [{ops[i].where}]' for i in sorted(read))
