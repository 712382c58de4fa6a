"""A compiled step for a rule whose trace follows every path of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .analysis.diagnostics import find_diagnostics
from .analysis.left_out import old_parts, plain_ways, untraced_uses
from .analysis.routes import find_routes
from .graph import CutRead, ETraceGraph, OpUse, Relation, Scope
from .program import dataflow as flow

__all__ = ['own_groups', 'paths_of', 'rescoped']


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
    scope: Scope,
    left_out: Mapping[str, str],
) -> ETraceGraph:
    """The step with these relations, in which nothing is cut; its routes follow from them."""
    program, plain = graph.program, plain_ways(graph.program, graph.ops)
    unhidden = old_parts(program)
    routes = find_routes(program, graph.ops, relations, unhidden.values(), (), plain)
    reads = {
        group.name: tuple(
            CutRead('not-hidden', state=program.carry_names[c])
            for c, ahead in unhidden.items()
            if any(ahead[program.carry[s]] for s in group.carried)
        )
        for group in graph.hidden_groups
    }
    new = replace(
        graph,
        hidden_param_op_relations=tuple(relations),
        routes=routes,
        diagnostics=(),
        mixing={},
        recurrent=dict.fromkeys(graph.recurrent, 0),
        cut_reads=reads,
        untraced=untraced_uses(program, graph.ops, relations, (), plain),
        scope=scope,
        left_out=left_out,
    )
    missing = [d for d in graph.diagnostics if d.kind == 'input-dependent-weight']
    return replace(new, diagnostics=find_diagnostics(new, missing, (), unhidden))


def paths_of(graph: ETraceGraph, op: OpUse) -> dict[str, tuple[str, ...]]:
    """The parameters behind each weight of an op, by name."""
    names = graph.program.param_names
    return {n: tuple(names[i] for i in behind) for n, behind in op.parameters.items() if behind}
