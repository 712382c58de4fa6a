"""The findings of the compiler in sentences: the words of ``_compiler/kinds.py``, filled in."""

from __future__ import annotations

from .._compiler import WINDOWS, Diagnostic, ETraceGraph, OpUse

# of a traced parameter under a rule that remembers nothing
FORGETS = (
    'its trace remembers no earlier step under this rule: its gradient holds the current step only',
    'Give ES_D_RTRL a decay above 0 (a rank above 1), or use D_RTRL.',
)

# what to do where the op in question reads the hidden state itself, as the reset gate of a GRU does
GATE = (
    'Apply its result behind the other op, as in h = tanh(op1(x) + gate * op2(h)), '
    f'take {WINDOWS}, or accept this.'
)


def message(graph: ETraceGraph, found: Diagnostic) -> str:
    """A finding in words, without its place and the full stop."""
    return found.row.says.format(**_words(graph, found))


def constant_text(graph: ETraceGraph, found: Diagnostic) -> str:
    """Which weight of an op nothing trains."""
    return found.row.meaning.format(**_words(graph, found))


def placed(text: str, location: str) -> str:
    return f'{text} [{location}]' if location else text


def op_text(op: OpUse) -> str:
    return f'{op.primitive.name} ({op.key})'


def chain_text(graph: ETraceGraph, found: Diagnostic) -> str:
    """The mixing equations as the user wrote them: one, or a reduction and the broadcast of its
    result.
    """
    names = [graph.program.equations[i].primitive.name for i in found.equations]
    return ', spread by '.join(names)


def _words(graph: ETraceGraph, found: Diagnostic) -> dict[str, str]:
    """What stands in the braces of a sentence."""
    states = ', '.join(found.states)
    words = {
        'path': found.path,
        'group': found.group,
        'slot': found.slot,
        'states': states,
        'reason': found.reason,
        'made': f'state {states}, which is no ParamState and not among the parameters'
        if states
        else 'a constant: no ParamState, and not among the parameters',
    }
    if found.equations:
        eqn, op = graph.program.equations[found.equations[0]], graph.op_at.get(found.equations[0])
        name = eqn.primitive.name
        words |= {'name': name, 'where': eqn.where, 'what': name if op is None else op_text(op)}
        words['chain'] = chain_text(graph, found)
    if found.kind == 'lost-relation' and found.equations:
        shape = next(g.shape for g in graph.hidden_groups if g.name == found.group)
        words |= {'y': str(list(op.y_aval.shape)), 'shape': str(list(shape))}
    if found.kind == 'partial-trace':
        own = [d for d in graph.found('use') if d.path == found.path and d.reason]
        words['uses'] = ' and '.join(dict.fromkeys(message(graph, use) for use in own))
    if found.kind == 'marked':
        of = [r for r in graph.hidden_param_op_relations if r.op.equation == found.equations[0]]
        groups = ', '.join(group.name for rel in of for group in rel.groups)
        words['op'] = op.primitive.name
        words['trace'] = f'with a trace to {groups}' if groups else 'without a trace'
    return words
