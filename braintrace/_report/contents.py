"""From a graph and a rule to the rows of a report."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from .._compiler import (
    ETraceGraph,
    Groups,
    kind_of,
    members,
    readers,
)
from .._rules import ByPart, Rule, entry_dtype, held_dtype, pairs, rule_at
from ..errors import OptionError
from .rows import (
    FORGETS,
    GATE,
    UNREAD,
    UNUSED,
    CutRow,
    GroupRow,
    LeftOut,
    ParameterRow,
    RelationRow,
    TraceRow,
    chain_text,
    message,
    op_text,
    placed,
)

AXES = {  # of the value of a rule's axis that is not as by default
    'whole': 'credit whole: the signal follows every path of the step',
    'own': "scope own: of an op that reads its own group each position's own weight is kept in D",
}


def known(graph: ETraceGraph, rule: Any) -> tuple[str, Callable[[ETraceGraph], dict], str, bool]:
    """``(name, init, approximation, remembers)`` of a rule, as far as a report needs it: a rule of
    the user's own needs only a name and ``init``; None: there is no rule.

    ``init(graph)``: the empty trace, relation -> group -> slot; ``approximation``: what the rule
    leaves out in every model; ``remembers``: whether a gradient holds anything of an earlier step.
    """
    if rule is None:
        left_out = 'without a rule there is no trace: every gradient holds the current step only'
        return 'no rule', lambda graph: {}, left_out, True
    if isinstance(rule, type) or not callable(getattr(rule, 'init', None)):
        raise OptionError(
            f'rule is {rule!r}; give a value of braintrace.rules, such as '
            'braintrace.rules.d_rtrl().'
        )
    unknown = f'nothing is known of what {rule.name} leaves out'
    view, remembers = getattr(rule, 'view', None), getattr(rule, 'remembers', True)
    notes = [getattr(rule, 'approximation', unknown), *(view.notes(graph) if view else ())]
    name = getattr(rule, 'title', rule.name)
    return str(name), rule.init, '; '.join(filter(None, notes)), remembers


def axis_lines(graph: ETraceGraph, rule: Any) -> tuple[str, ...]:
    """A line for each axis of a rule that is not as by default and says nothing of what is left
    out, and for each of several rules the ops that learn by it.
    """
    scope = getattr(getattr(rule, 'view', None), 'scope', '')
    axes = tuple(AXES[value] for value in (getattr(rule, 'credit', ''), scope) if value in AXES)
    return (*axes, *(rule.lines(graph) if isinstance(rule, ByPart) else ()))


def forgotten(graph: ETraceGraph, rule: Any, remembers: bool) -> frozenset[str]:
    """The ops whose gradients hold nothing of an earlier step under this rule."""
    relations = graph.hidden_param_op_relations
    if isinstance(rule, Rule):
        return frozenset(r.key for r in relations if not rule_at(rule, r).remembers)
    return frozenset(() if remembers else (r.key for r in relations))


# ---- cuts and groups ----


def cut_rows(graph: ETraceGraph) -> tuple[CutRow, ...]:
    """Every place where history is cut: equations in program order, then other reads of a group."""
    number = {group.name: g for g, group in enumerate(graph.hidden_groups)}
    mixing = {d.equations[-1]: d for d in graph.found('mixing')}
    # the groups whose past is read at each place: an equation, a state, or anything else
    reads: dict[tuple, Groups] = {}
    for d in graph.found('cut'):
        place = d.reason, d.equations, d.states
        reads[place] = reads.get(place, 0) | 1 << number[d.group]
    # equations of one kind at one place are one row
    found: dict[CutRow, tuple[Groups, Groups]] = {}
    for i, reached in sorted(graph.recurrent.items()):
        reading = reads.pop(('', (i,), ()), 0)
        if reading or i in mixing:
            op = graph.op_at.get(i)
            if op is not None:
                why = kind_of('cut').meaning
                row = CutRow(op_text(op), why, (), (), op.where, op.primitive.name, op.key)
            else:
                d = mixing[i]
                row = CutRow(chain_text(graph, d), d.row.meaning, (), (), d.location)
            before = found.get(row, (0, 0))
            found[row] = before[0] | reading, before[1] | reached
    for (reason, _, states), groups in reads.items():
        kind = kind_of('cut', reason)
        what = kind.says.format(states=', '.join(states))
        found[CutRow(what, kind.meaning, (), (), '')] = groups, 0

    def names(groups: Groups) -> tuple[str, ...]:
        return tuple(graph.hidden_groups[g].name for g in members(groups))

    return tuple(
        dataclasses.replace(row, reads=names(reading), reaches=names(reached))
        for row, (reading, reached) in found.items()
    )


def group_rows(graph: ETraceGraph, cuts: Iterable[CutRow]) -> tuple[GroupRow, ...]:
    return tuple(
        GroupRow(
            group.name,
            group.paths,
            group.num_state,
            tuple(group.shape),
            str(group.dtype),
            tuple(str(cut) for cut in cuts if group.name in cut.reads),
            tuple(graph.program.carry_names[c] for c in group.derived),
        )
        for group in graph.hidden_groups
    )


# ---- relations and their trace ----


def batch_size(graph: ETraceGraph) -> int | None:
    """The batch size, if the trace grows by as much for each sample: not where the samples of an op
    reach states of others, or each sample has an op of its own, nor where a rule that follows every
    path meets a batch that is not axis 0.
    """
    if graph.lanes is None or graph.lanes < 2:
        return graph.lanes
    compiled = graph.seen[1] if graph.seen else graph
    if graph.scope is not None and any(compiled.batch_axes.values()):
        return None
    single = set()
    for pair in pairs(compiled):
        if pair.lane is None:
            continue
        if pair.lane.size == 1:
            single.add(int(pair.lane.reshape(())))
        own = pair.coords.added if pair.coords.axis == 0 else 0  # the place of y's axis 0
        if pair.lane.size == graph.lanes and pair.lane.shape[own : own + 1] == (1,):
            x, y = (() if a is None else a.shape[:1] for a in (pair.op.x_aval, pair.op.y_aval))
            by_sample = pair.op.primitive.batched and x == y
            if (by_sample or pair.op.is_its_weight) and y == (graph.lanes,):
                return None
    return None if len(single) == graph.lanes else graph.lanes


def relation_rows(graph: ETraceGraph, init: Callable) -> tuple[RelationRow, ...]:
    relations = graph.hidden_param_op_relations
    trace = once = _trace_shapes(graph, init)
    if any(rel.op.repeats for rel in relations):
        # as if no op was in a loop: these traces lack the leading axes of loops
        flat = (
            dataclasses.replace(rel, op=dataclasses.replace(rel.op, repeats=()))
            for rel in relations
        )
        plain = dataclasses.replace(graph, hidden_param_op_relations=tuple(flat))
        once = _trace_shapes(plain, init)
    rows: dict[str, list[TraceRow]] = {rel.key: [] for rel in relations}
    for pair in pairs(graph):
        rel, group, along = pair.relation, pair.group, graph.batch_axis(pair.group)
        batched = along is not None and pair.coords.leads(along)
        # the axis of the batch where an entry is at the coordinates
        later = []
        if pair.lane is not None and pair.lane.size == graph.lanes:
            later = [k for k, size in enumerate(pair.lane.shape) if k and size == graph.lanes]
        for slot, arrays in trace.get(rel.key, {}).get(group.name, {}).items():
            # an array, or a tuple of one for each state of which there are entries
            first, *_ = jax.tree.leaves(arrays) or (None,)
            if first is None:
                continue
            shape = (*first.shape, len(arrays)) if isinstance(arrays, tuple) else first.shape
            size = math.prod(shape) * first.dtype.itemsize
            # after the axes of loops is the batch, if the trace has one
            axis = first.ndim - jax.tree.leaves(once[rel.key][group.name][slot])[0].ndim
            batch = axis if batched and first.shape[axis : axis + 1] == (graph.lanes,) else None
            coords = pair.coords.shape
            if batch is None and later and first.shape[axis : axis + len(coords)] == coords:
                batch = axis + later[0]
            weight = rel.op.weight_avals.get(slot)
            if weight is not None and first.shape == weight.shape and not rel.op.is_its_weight:
                batch = None  # one for all samples
            dtype, rounds = held_dtype(first.dtype), ''
            if jnp.issubdtype(dtype, jnp.inexact):
                own = entry_dtype(graph, pair, dtype)
                rounds = str(own) if jnp.finfo(dtype).bits < jnp.finfo(own).bits else ''
            row = TraceRow(group.name, slot, tuple(shape), str(dtype), size, batch, rounds)
            rows[rel.key].append(row)
    return tuple(
        RelationRow(
            rel.key,
            rel.primitive.name,
            dict(rel.paths),
            tuple(group.name for group in rel.groups),
            rel.op.repeats,
            tuple(rows[rel.key]),
            rel.op.where,
        )
        for rel in relations
    )


def _trace_shapes(graph: ETraceGraph, init: Callable) -> dict:
    """Shapes and dtypes: relation -> group -> slot. A trace in float64 is one wherever this is
    called.
    """
    avals, program = graph.program.avals, graph.program
    dtypes = [avals[v].dtype for v in (*program.params, *program.carry)]
    dtypes += [a.dtype for op in graph.ops for a in (op.y_aval, *op.weight_avals.values())]
    wide = any(jnp.issubdtype(d, jnp.inexact) and jnp.finfo(d).bits == 64 for d in dtypes)
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        return jax.eval_shape(lambda: init(graph))


# ---- parameters ----


def parameter_rows(
    graph: ETraceGraph,
    cuts: Sequence[CutRow],
    relations: Sequence[RelationRow],
    approximation: str,
    forgotten: Set[str],
) -> tuple[ParameterRow, ...]:
    rows, program = [], graph.program
    # the parameters of ops that read a hidden state, as the reset gate of a GRU does
    cut = {i for found in graph.found('cut') for i in found.equations}
    of_cut_ops = (op.parameters.values() for op in graph.ops if op.equation in cut)
    gates = {program.param_names[i] for several in of_cut_ops for each in several for i in each}
    routes = {d.path: d for d in graph.findings if d.row.route}
    lacks = {d.path: LeftOut('rule', d.reason) for d in graph.found('rule')}
    for path, value in zip(graph.program.param_names, graph.program.params, strict=True):
        route, aval = graph.routes[path], graph.program.avals[value]
        own = [rel for rel in relations if any(path in ps for ps in rel.parameters.values())]
        # what the gradient lacks, and how much of the history is left
        lost = [
            LeftOut('cut', f'through {cut}')
            for rel in own
            for group in rel.groups
            for cut in cuts
            if group in cut.reads
        ]
        lost += _lost_uses(graph, path)
        if own and approximation:
            lost.append(LeftOut('rule', approximation))
        lost += [lacks[rel.key] for rel in own if rel.key in lacks]
        carried = any(rel.trace and rel.key not in forgotten for rel in own)
        history = ('part' if lost else 'whole') if carried else 'none' if lost else 'not needed'
        # its meaning, and what to change
        first_use = (program.equations[i].where for i, _ in readers(program, value))
        meaning, advice = routes[path].row.meaning, routes[path].row.advice
        if route.kind == 'trace' and all(rel.key in forgotten for rel in own):
            meaning, advice = FORGETS
        elif route.kind == 'trace' and not carried:
            meaning, advice = UNREAD if lost else UNUSED
        rows.append(
            ParameterRow(
                path,
                tuple(aval.shape),
                str(aval.dtype),
                route.kind,
                route.reason,
                meaning,
                GATE if route.reason == 'weight_then_weight' and path in gates else advice,
                history,
                tuple(dict.fromkeys(lost)),
                route.location or next(first_use, ''),
            )
        )
    return tuple(rows)


def _lost_uses(graph: ETraceGraph, path: str) -> Iterator[LeftOut]:
    """The uses of a parameter without a trace, and the ways to later steps on which it is lost."""
    number = graph.program.param_names.index(path)
    if number not in graph.program.trainable:
        return
    for use in graph.found('use'):
        if use.path == path:
            yield LeftOut('use', message(graph, use))
    # an op that has a trace to only some of its groups lacks that to the others
    traced = {
        rel.op.equation
        for rel in graph.hidden_param_op_relations
        if any(number in sources for sources in rel.op.parameters.values())
    }
    for found in graph.found('lost-relation', 'nonlinear-rule'):
        if found.path == path or not traced.isdisjoint(found.equations):
            yield LeftOut('lost', placed(message(graph, found), found.location))
