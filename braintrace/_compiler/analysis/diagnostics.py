"""Everything that the compiler did that changes or limits a gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from ..graph import CutRead, Diagnostic, ETraceGraph, OpUse
from ..program import dataflow as flow
from ..program.program import Program
from .left_out import bent_weights
from .marks import find_marks
from .stacked import stacked_states

# reasons of routes that are told of, with the kind of the diagnostic
TOLD: dict[str, Literal['not-etp-op', 'mixing-tail', 'opaque-call', 'unused']] = {
    'not_etp_op': 'not-etp-op',
    'mixing_tail': 'mixing-tail',
    'opaque_call': 'opaque-call',
    'unused': 'unused',
}

# A value is trained or changes; it holds a parameter that is held fixed. Above these two stands a
# bit for each part of the carry.
LIVE, HELD, FIRST = 1, 2, 2


def find_diagnostics(
    graph: ETraceGraph,
    missing: Iterable[Diagnostic],
    cross: Iterable[tuple[int, int]],
    unhidden: Mapping[int, Sequence[int]],
) -> tuple[Diagnostic, ...]:
    """The diagnostics of a graph that has none yet, in the order in which they are told.

    ``missing``: why ops have no relation; ``cross`` and ``unhidden`` come from ``left_out``.
    """
    marks = tuple(find_marks(graph.program, graph.ops))
    return (
        *_mixing(graph.program, graph.mixing),
        *marks,
        *missing,
        *_cross_group(graph, cross),
        *_constant_weights(graph.program, graph.ops),
        *_through_unhidden(graph, unhidden),
        *_untraced(graph, {found.path for found in marks if found.kind == 'unmarked'}),
        *_nothing_traced(graph),
        *stacked_states(graph),
        *_partial_traces(graph),
        *_bent_weights(graph),
    )


def _mixing(program: Program, reasons: Mapping[int, str]) -> list[Diagnostic]:
    found = []
    for i, reason in sorted(reasons.items()):
        source, where = _reduction_behind(program, i), program.equations[i].where
        if source is None:
            found.append(Diagnostic('mixing', '', where, (i,), reason))
        else:
            where = program.equations[source].where or where
            found.append(Diagnostic('mixing', '', where, (source, i), reason))
    return found


def _reduction_behind(program: Program, i: int) -> int | None:
    """The nearest reduction before a widening equation, which only broadcasts its result."""

    def size(values: Iterable[int]) -> int:
        return max((program.avals[v].size for v in values), default=0)

    eqn = program.equations[i]
    if size(eqn.outs) <= size(eqn.ins):
        return None
    todo, seen = list(eqn.ins), set()
    while todo:
        producer = program.producer.get(todo.pop(0))
        if producer is not None and producer not in seen:
            seen.add(producer)
            made = program.equations[producer]
            if made.loop is None and size(made.ins) > size(made.outs):
                return producer
            todo.extend(u for o in made.outs for u in program.operands(producer, o))
    return None


def _cross_group(graph: ETraceGraph, pairs: Iterable[tuple[int, int]]) -> list[Diagnostic]:
    program, groups = graph.program, graph.hidden_groups
    return [
        Diagnostic(
            'cross-group',
            groups[r].name,
            _made_at(program, program.new_carry[groups[s].states[0]]),
            group=groups[s].name,
        )
        for r, s in pairs
    ]


def _made_at(program: Program, value: int) -> str:
    return program.equations[program.producer[value]].where if value in program.producer else ''


def _through_unhidden(graph: ETraceGraph, parts: Mapping[int, Sequence[int]]) -> list[Diagnostic]:
    program, places = graph.program, {}
    for op in reversed(graph.ops):
        places |= dict.fromkeys((i for ps in op.parameters.values() for i in ps), op.where)
    return [
        Diagnostic(
            'lost-relation',
            program.param_names[i],
            places.get(i, _made_at(program, program.new_carry[c])),
            reason='not-hidden',
            states=(program.carry_names[c],),
        )
        for c, ahead in parts.items()
        for i in program.trainable
        if ahead[program.params[i]] or program.param_names[i] in _taught(graph, c)
    ]


def _taught(graph: ETraceGraph, c: int) -> set[str]:
    """The parameters whose trace a part of the carry reads by an old state."""
    read = CutRead('not-hidden', state=graph.program.carry_names[c])
    return {
        path
        for rel in graph.hidden_param_op_relations
        if any(read in graph.cut_reads[group.name] for group in rel.groups)
        for paths in rel.paths.values()
        for path in paths
    }


def _untraced(graph: ETraceGraph, unmarked: Collection[str]) -> list[Diagnostic]:
    """``unmarked``: parameters whose plain equations are told of already."""
    found = {path: (TOLD.get(r.reason.partition(':')[0]), r) for path, r in graph.routes.items()}
    return [
        Diagnostic(kind, path, r.location)
        for path, (kind, r) in found.items()
        if kind and not (kind == 'not-etp-op' and path in unmarked)
    ]


def _nothing_traced(graph: ETraceGraph) -> list[Diagnostic]:
    """There are ops to train, and none has a trace."""
    if not graph.ops or not graph.hidden_groups or graph.hidden_param_op_relations:
        return []
    if _all_weights_constant(graph.program, graph.ops):
        return []
    return [Diagnostic('no-relation', location=graph.ops[0].where)]


def _partial_traces(graph: ETraceGraph) -> list[Diagnostic]:
    """Each traced parameter that also reaches a hidden state by plain equations, or is one."""
    found = []
    for path, uses in graph.untraced.items():
        route = graph.routes[path]
        plain = tuple(u.equation for u in uses if u.kind == 'plain' and u.equation is not None)
        states = tuple(use.state for use in uses if use.kind == 'state')
        if route.kind == 'trace' and (plain or states):
            found.append(Diagnostic('partial-trace', path, route.location, plain, states=states))
    return found


def _bent_weights(graph: ETraceGraph) -> list[Diagnostic]:
    """Each parameter whose gradient passes a reverse rule of the user's own that is not linear."""
    program = graph.program
    return [
        Diagnostic(
            'nonlinear-rule', program.param_names[k], program.equations[i].where, (i,), 'weight'
        )
        for i, behind in bent_weights(program, graph.ops).items()
        for k in behind
    ]


# ---- weights that nothing trains ----


def _constant_weights(program: Program, ops: Iterable[OpUse]) -> list[Diagnostic]:
    """Each weight of an op that is no parameter, and that no step changes."""
    origins = _origins(program)
    return [
        _constant_weight(program, op, slot, origins[value])
        for op in ops
        for slot, value in op.trainable.items()
        if not origins[value] & (LIVE | HELD)
    ]


def _all_weights_constant(program: Program, ops: Iterable[OpUse]) -> bool:
    origins = _origins(program)
    return not any(origins[v] & LIVE for op in ops for v in op.trainable.values())


def _origins(program: Program) -> list[int]:
    """The bits of each value, see above."""
    start = {v: LIVE if i in program.trainable else HELD for i, v in enumerate(program.params)}
    start |= dict.fromkeys(program.inputs, LIVE)
    for c, v in enumerate(program.carry):
        kept = program.new_carry[c] == v and c not in program.hidden
        start[v] = 1 << FIRST + c if kept else LIVE

    def keep(i: int, found: int) -> int:
        return found | LIVE if program.equations[i].effects else found

    return flow.forward(program, start, keep)


def _constant_weight(program: Program, op: OpUse, slot: str, made_of: int) -> Diagnostic:
    states = tuple(program.carry_names[c] for c in flow.members(made_of >> FIRST))
    path = states[0] if states else ''
    return Diagnostic('constant-weight', path, op.where, (op.equation,), slot=slot, states=states)
