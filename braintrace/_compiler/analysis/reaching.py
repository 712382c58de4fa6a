"""The step without cuts: every op that reaches a hidden state has a trace, of all states."""

from __future__ import annotations

import math
from dataclasses import replace

from ..graph import Coordinates, ETraceGraph, HiddenGroup, OpUse, Relation, Route

__all__ = ['every_reaching']

CUT = {'weight_then_weight', 'mixing_tail', 'lost_relation'}  # reasons that go with the cuts
TOLD = {'mixing', 'cross-group', 'no-relation', 'mixing-tail'}


def every_reaching(graph: ETraceGraph) -> ETraceGraph:
    """A view of a step in which nothing is cut: one relation for every owned op that reaches a
    hidden state, with one group of all hidden states.
    """
    group = _all_states(graph)
    ops = [op for op in graph.ops if op.owned and graph.recurrent[op.equation]]
    relations = tuple(_relation(graph, op, group) for op in ops)
    traced = {path: r for r in relations for paths in r.paths.values() for path in paths}
    routes = {
        path: Route('trace', traced[path].primitive.name, traced[path].op.where)
        if path in traced and route.kind == 'same-step'
        else route
        for path, route in graph.routes.items()
    }
    return replace(
        graph,
        hidden_param_op_relations=relations,
        routes=routes,
        recurrent=dict.fromkeys(graph.recurrent, 0),
        cut_reads={
            name: tuple(read for read in reads if read.kind == 'not-hidden')
            for name, reads in graph.cut_reads.items()
        },
        untraced={
            path: tuple(use for use in uses if use.kind == 'plain')
            for path, uses in graph.untraced.items()
        },
        diagnostics=tuple(
            d
            for d in graph.diagnostics
            if d.kind not in TOLD and not (d.kind == 'lost-relation' and d.reason != 'not-hidden')
        ),
    )


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


def _relation(graph: ETraceGraph, op: OpUse, group: HiddenGroup) -> Relation:
    names = graph.program.param_names
    paths = {
        name: tuple(names[i] for i in behind) for name, behind in op.parameters.items() if behind
    }
    # an op without lanes has an entry for each of them, as if its y were added an axis
    own, lanes = op.y_aval.shape, group.shape[:-1]
    added = int(bool(lanes) and own[:1] != lanes)
    coords = Coordinates((*lanes[:added], *own), group.shape, None, added)
    return Relation(op, (group,), (coords,), paths, False)
