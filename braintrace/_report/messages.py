"""The findings of the compiler in sentences."""

from __future__ import annotations

from collections.abc import Callable

from .._compiler import Diagnostic, ETraceGraph, OpUse

STEP_ONLY = 'its gradient holds the current step only'

# sentences that name the path and the group alone
PLAIN = {
    'cross-group': (
        '{group} reads the old {path} by a plain path between different shapes: what goes that way '
        'has no trace. Give both states one shape to trace it: where one is cut into parts, or '
        'joined of them, give each part a state of its own'
    ),
    'not-etp-op': (
        f'parameter {{path}} reaches a hidden state by a plain operation: {STEP_ONLY}. Apply it '
        'with a braintrace op (matmul, element_wise, ...) to give it a trace'
    ),
    'mixing-tail': (
        'parameter {path} belongs to an op whose result reaches hidden states only through '
        f'equations that mix its positions: {STEP_ONLY}'
    ),
    'opaque-call': (
        'parameter {path} belongs to an op inside a function with a derivative rule of its own: '
        'its gradient is what that rule says, for the current step only. Apply the op outside of '
        'that function to give it a trace'
    ),
    'unused': 'parameter {path} reaches neither an output nor a state: its gradient is zero',
    'no-relation': (
        'no weight of an ETP op reaches a hidden state position by position: nothing has a trace, '
        'and every gradient holds the current step only'
    ),
}
UNMARKED = {
    'while_loop': 'it stands in a loop of unknown length, where no trace exists. Use '
    'lax.fori_loop with a static number of steps, or lax.scan',
    'custom_rule': 'it is a function with a derivative rule of its own, and nothing inside is '
    'marked. Apply the parameter outside of it',
    'layout': 'no op has its layout. Products of any layout, convolutions without batch groups, '
    'and lookups of whole rows have one',
    'primitive': 'no op does that. Bring the parameter in by a product, or position by position',
}
MIXES = {
    'merges': 'merges positions of a hidden state',
    'merges-result': 'merges positions of the result of an op',
    'moves': 'moves values to other positions of a hidden state',
}
DEPENDENT = {
    '': (
        "{path}: the op's weight changes from step to step (it depends on an input or a state), "
        'so it has no trace'
    ),
    'structure': (
        "{path}: the places of the entries of the op's matrix change from step to step or with the "
        'lanes of a vmap, so the op has no trace. Keep them among the parameters, or constant'
    ),
}
NONLINEAR = {
    '': (
        '{name} has a derivative rule of its own that is not known to be linear, as a clip is: '
        'traces hold derivatives, so what the rule does to a signal on its way to earlier steps is '
        'not in them. Clip the whole gradient, or take exact windows '
        "(window=K, inside='exact')"
    ),
    'weight': (
        '{path} goes through {name}, whose derivative rule is not known to be linear, as a clip '
        'is: the rule is applied once to the gradient of all steps together, and not at each step. '
        'Clip the whole gradient'
    ),
}
STACKED = {
    'moved': (
        '{path} holds several states, and {name} moves them through the array from step to step in '
        'a way that is not taken apart: what they owe to earlier steps has no gradient. Give each '
        'row a leaf of the carry (a HiddenState) of its own'
    ),
    'read-as-old': (
        '{path} holds several states, and a part of its new value is read by {name} as if it were '
        'made of old ones: what it owes to earlier steps has no gradient there. Keep each of these '
        'states in a leaf of the carry (a HiddenState) of its own'
    ),
}


def message(graph: ETraceGraph, found: Diagnostic) -> str:
    """A diagnostic in words, without its place and the full stop."""
    if found.kind in PLAIN:
        return PLAIN[found.kind].format(path=found.path, group=found.group)
    return WRITERS[found.kind](graph, found)


def placed(text: str, location: str) -> str:
    return f'{text} [{location}]' if location else text


def op_text(op: OpUse) -> str:
    return f'{op.primitive.name} ({op.key})'


def use_text(graph: ETraceGraph, i: int | None, state: str = '') -> str:
    if i is None:
        return f'its use as the new state {state}'
    eqn, op = graph.program.equations[i], graph.op_at.get(i)
    return f'its use in {eqn.primitive.name if op is None else op_text(op)} [{eqn.where}]'


def mixing_text(graph: ETraceGraph, found: Diagnostic) -> str:
    """The mixing equations as the user wrote them: one, or a reduction and the broadcast of its
    result.
    """
    names = [graph.program.equations[i].primitive.name for i in found.equations]
    return ', spread by '.join(names)


def _mixing(graph: ETraceGraph, found: Diagnostic) -> str:
    text = f'{mixing_text(graph, found)} {MIXES[found.reason]}: it carries no trace'
    behind = ', so history is lost there. Mix positions in front of the op, or behind the state'
    return text + (behind if found.reason == 'merges-result' else '')


def _lost(graph: ETraceGraph, found: Diagnostic) -> str:
    if found.reason == 'not-hidden':
        return (
            f'parameter {found.path}: {found.states[0]} is no hidden state: what goes through it '
            'to later steps has no gradient. Make it one, or stop the gradient that goes into it'
        )
    op = graph.op_at[found.equations[0]]
    group = next(group for group in graph.hidden_groups if group.name == found.group)
    y, state = list(op.y_aval.shape), list(group.shape)
    return (
        f'{found.path}: no trace to {found.group}: an element of its result {y} feeds several '
        f'positions of the state {state}, each of which reads many others too, and a trace has '
        'room for a few. Apply an op of its own to each of them'
    )


def constant_text(graph: ETraceGraph, found: Diagnostic) -> str:
    name = graph.program.equations[found.equations[0]].primitive.name
    made = 'a constant: no ParamState, and not among the parameters'
    if found.states:
        states = ', '.join(found.states)
        made = f'state {states}, which is no ParamState and not among the parameters'
    return f'the {found.slot} of {name} is {made}'


def _constant(graph: ETraceGraph, found: Diagnostic) -> str:
    return (
        f'{constant_text(graph, found)}. Nothing trains it, and no trace is kept for it. Keep it '
        'in a brainstate.ParamState (functional: in params) to train it; if it is to stay as it '
        'is, apply it with a plain operation'
    )


def _stacked(graph: ETraceGraph, found: Diagnostic) -> str:
    name = graph.program.equations[found.equations[0]].primitive.name
    return STACKED[found.reason].format(path=found.path, name=name)


def _nonlinear(graph: ETraceGraph, found: Diagnostic) -> str:
    name = graph.program.equations[found.equations[0]].primitive.name
    return NONLINEAR[found.reason].format(name=name, path=found.path)


def _partial(graph: ETraceGraph, found: Diagnostic) -> str:
    plain = [use_text(graph, i) for i in found.equations]
    uses = dict.fromkeys(plain + [use_text(graph, None, state) for state in found.states])
    return (
        f'parameter {found.path} has a trace, but not for {" and ".join(uses)}, where {STEP_ONLY}'
    )


def _marked(graph: ETraceGraph, found: Diagnostic) -> str:
    op = graph.op_at[found.equations[0]]
    groups = [
        group.name
        for rel in graph.hidden_param_op_relations
        if rel.op.equation == op.equation
        for group in rel.groups
    ]
    trace = f'with a trace to {", ".join(groups)}' if groups else 'without a trace'
    return f'{found.reason} with parameter {found.path} became {op.primitive.name}, {trace}'


def _unmarked(graph: ETraceGraph, found: Diagnostic) -> str:
    name = graph.program.equations[found.equations[0]].primitive.name
    why = UNMARKED.get(found.reason, UNMARKED['primitive'])
    return f'parameter {found.path} is not marked in {name}, so there {STEP_ONLY}: {why}'


def _closed_over(graph: ETraceGraph, found: Diagnostic) -> str:
    name = graph.program.equations[found.equations[0]].primitive.name
    return (
        f'{name} reads a constant matrix, which nothing trains. If it is a weight that the cell '
        'closes over, keep it in params (a brainstate.ParamState)'
    )


def _dependent(graph: ETraceGraph, found: Diagnostic) -> str:
    return DEPENDENT[found.reason].format(path=found.path)


WRITERS: dict[str, Callable[[ETraceGraph, Diagnostic], str]] = {
    'mixing': _mixing,
    'input-dependent-weight': _dependent,
    'lost-relation': _lost,
    'constant-weight': _constant,
    'stacked-state': _stacked,
    'nonlinear-rule': _nonlinear,
    'partial-trace': _partial,
    'marked': _marked,
    'unmarked': _unmarked,
    'closed-over': _closed_over,
}
