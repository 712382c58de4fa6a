"""A compiled step for a rule whose trace follows every path of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .analysis.findings import bent_on_the_way, find_findings
from .equations.equation import Equation
from .graph import (
    Coordinates,
    Diagnostic,
    ETraceGraph,
    HiddenGroup,
    OpUse,
    Relation,
    Scope,
)
from .program import dataflow as flow


def own_groups(graph: ETraceGraph) -> dict[str, list[int]]:
    """For each owned op with parameters the hidden groups that its y reaches, by numbers: by any
    path within the step that passes no new state of another group.
    """
    program = graph.program
    new = [{program.new_carry[c] for c in group.carried} for group in graph.hidden_groups]
    found: dict[str, list[int]] = {
        op.key: [] for op in graph.ops if op.owned and any(op.parameters.values())
    }
    for g, mine in enumerate(new):
        others = set().union(*new) - mine

        def skip(i: int, k: int, others=others) -> bool:
            return program.equations[i].ins[k] in others

        reached = flow.backward(program, dict.fromkeys(mine, 1), flow.gradients(program), skip)
        for op in graph.ops:
            if op.key in found and reached[op.y]:
                found[op.key].append(g)
    return {key: groups for key, groups in found.items() if groups}


def rescoped(
    graph: ETraceGraph,
    relations: Sequence[Relation],
    scope: Scope | None,
    left_out: Mapping[str, str],
) -> ETraceGraph:
    """The step with these relations, in which nothing is cut; its routes follow from them."""
    # a trace is made of derivatives: what a rule does to a signal that is no product with one
    # stands in none
    bent = [(i, graph.program.equations[i]) for i in bent_on_the_way(graph.program)]
    new = replace(
        graph,
        hidden_param_op_relations=tuple(relations),
        findings=(),
        mixing={},
        recurrent=dict.fromkeys(graph.recurrent, 0),
        scope=scope,
    )
    missing = graph.found('input-dependent-weight')
    missing += [Diagnostic('nonlinear-rule', '', eqn.where, (i,)) for i, eqn in bent]
    lacks = [
        Diagnostic('rule', relation.key, reason='; '.join(dict.fromkeys(filter(None, texts))))
        for relation in relations
        if any(texts := [left_out.get(relation.key, ''), *(bent_text(eqn) for _, eqn in bent)])
    ]
    return replace(new, findings=(*find_findings(new, missing, (), ()), *lacks))


def bent_text(eqn: Equation) -> str:
    """What the report says of a reverse rule that is not linear."""
    return f'what {eqn.primitive.name} [{eqn.where}] does to a signal, which is not linear'


def jointly(graph: ETraceGraph) -> ETraceGraph:
    """The step with one relation for every op that reaches a hidden state, and one group of all
    hidden states.
    """
    group, reached = _all_states(graph), own_groups(graph)
    relations = []
    for op in graph.ops:
        if op.key in reached:
            # an op without lanes has an entry for each of them, as if its y were added an axis
            own, lanes = op.y_aval.shape, group.shape[:-1]
            added = int(bool(lanes) and own[:1] != lanes)
            coords = Coordinates((*lanes[:added], *own), group.shape, None, added)
            relations.append(Relation(op, (group,), (coords,), paths_of(graph, op), False))
    return rescoped(graph, relations, None, {})


def _all_states(graph: ETraceGraph) -> HiddenGroup:
    """All hidden states as one group: a vector for each lane."""
    program, states = graph.program, graph.states
    avals = [program.avals[program.carry[c]] for c in states]
    laned = graph.lanes is not None and graph.laned.issuperset(states)
    numbers = sum(math.prod(a.shape) for a in avals)
    shape = (graph.lanes, numbers // max(1, graph.lanes)) if laned else (numbers,)
    paths = tuple(program.carry_names[c] for c in states)
    reads = ((True,) * len(states),) * len(states)
    return HiddenGroup('all', paths, states, shape, avals[0].dtype, graph.derived.states, reads)


def paths_of(graph: ETraceGraph, op: OpUse) -> dict[str, tuple[str, ...]]:
    """The parameters behind each weight of an op, by name."""
    names = graph.program.param_names
    return {n: tuple(names[i] for i in behind) for n, behind in op.parameters.items() if behind}
