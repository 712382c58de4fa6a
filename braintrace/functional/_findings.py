"""What the compiler found, as warnings and, under a strict policy, as an error."""
from __future__ import annotations

from .._compiler import USE, ETraceGraph, untraced_uses
from .._errors import UntracedParameterError
from .._warnings import tell

__all__ = ['check_strict', 'tell_findings']

LOST = {'mixing', 'lost-relation', 'cross-group', 'input-dependent-weight', 'stacked-state', 'constant-weight'}


def tell_findings(graph: ETraceGraph, warned: set) -> None:
    """One warning for each thing that the user can mend and has not been told, at the line that compiles."""
    for note in graph.diagnostics:
        key = (note.kind, note.path, note.location)
        if note.level == 'warning' and key not in warned:
            place = f' [{note.location}]' if note.location else ''
            tell(f'{note.message}{place}.')
            warned.add(key)


def check_strict(graph: ETraceGraph) -> None:
    """Refuse every lost or approximated path, but those that the rule itself leaves out: what an op reads of a hidden state."""
    lost = [f'  {row.path} is {row.reason} [{row.location}]: {row.meaning}. {row.advice}' for row in graph.report().parameters
            if row.route == 'same-step' and row.reason != 'no_hidden_state']
    lost += [f'  {p} has a trace, but not for {text}.' for p, texts in untraced_uses(graph).items() if graph.routes[p].kind == 'trace'
             for text in texts if text.startswith(USE)]
    lost += [f'  {d.message} [{d.location}].' for d in graph.diagnostics if d.kind in LOST]
    if lost:
        raise UntracedParameterError('the policy is strict, and the history of these is lost or incomplete:\n' + '\n'.join(lost)
                                     + '\nChange the model, or compile with policy=braintrace.Policy(strict=False).')
