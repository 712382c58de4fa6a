"""Graphs for other rules: a wider scope, the own diagonal, filters."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import NotSupportedError, OptionError
from . import equations as lb
from .analyse import analyse_again
from .analysis.findings import bent_on_the_way, find_findings
from .analysis.sweeps import DPass, Following
from .equations import Equation, is_inexact, moved_operands
from .graph import Coordinates, Diagnostic, ETraceGraph, HiddenGroup, OpUse, Relation, Scope
from .program import dataflow as flow
from .program.builder import Splicing
from .program.program import Program
from .program.tracing import depends
from .stacked_states import MustSplit

# a wider scope ------------------------------------------------------------------------------------
#
# A compiled step for a rule whose trace follows every path of it.


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
    lanes = graph.lanes if graph.laned.issuperset(states) else None
    numbers = sum(math.prod(a.shape) for a in avals)
    shape = (numbers,) if lanes is None else (lanes, numbers // max(1, lanes))
    paths = tuple(program.carry_names[c] for c in states)
    reads = ((True,) * len(states),) * len(states)
    return HiddenGroup('all', paths, states, shape, avals[0].dtype, graph.derived.states, reads)


def paths_of(graph: ETraceGraph, op: OpUse) -> dict[str, tuple[str, ...]]:
    """The parameters behind each weight of an op, by name."""
    names = graph.program.param_names
    return {n: tuple(names[i] for i in behind) for n, behind in op.parameters.items() if behind}


# the own diagonal ---------------------------------------------------------------------------------
#
# What an element of y reads, through its own op, of the position that it feeds: the op's own
# diagonal, put into the step as paths that D follows.


MOST_RUNS = 16  # slices in place of a gather


def with_own_diagonal(graph: ETraceGraph) -> ETraceGraph:
    """The step in which element q of a traced op's y reads the elements k of x that come from the
    position which q feeds: ``y_q + dy_q/dx_k (x_k - stop(x_k))``, which is ``y_q``.
    """
    d_pass, edit = DPass(graph.program), Splicing(graph.program)
    d_pass.mixing.update(graph.mixing)
    following, found = Following(d_pass), False
    for relation in graph.hidden_param_op_relations:
        op, y = relation.op, relation.op.y
        if op.x is None or op.repeats or op.conditional or not is_inexact(op.x_aval):
            continue
        for group, coords in zip(relation.groups, relation.coordinates, strict=True):
            values = (graph.program.carry[c] for c in group.carried)
            sources = {v: lb.identity(group.shape) for v in values}
            for places in _own_places(following.follow(sources, op.x), coords):
                _check(op)
                ins = op.x, *op.trainable.values(), *op.structure.values()
                (zero,) = edit.put(op.equation + 1, _own_read(op, places), ins, extra=True)
                (y,) = edit.put(op.equation + 1, jnp.add, (y, zero))
                found = True
        if y != op.y:
            edit.rename(op.equation + 1, op.y, y)
    return analyse_again(graph, edit.result()) if found else graph


def _own_places(labels: lb.Labels, coords: Coordinates) -> Iterator[np.ndarray]:
    """For each element of y the flat place in x of an element that comes from its position, -1
    where there is none; an array for each such element.
    """
    if coords.added or not lb.has(labels):
        return
    fed = lb.identity(coords.shape) if coords.positions is None else coords.positions
    fed = np.asarray(fed).reshape(-1)
    places = np.flatnonzero(labels.reshape(-1) >= 0)
    of_place = labels.reshape(-1)[places]
    order = np.argsort(of_place, kind='stable')
    places, of_place = places[order], of_place[order]
    first, last = (np.searchsorted(of_place, fed, side) for side in ('left', 'right'))
    for n in range(int((last - first).max(initial=0))):
        there = first + n < last
        yield np.where(there, places[np.minimum(first + n, len(places) - 1)], -1).reshape(
            coords.shape
        )


def _own_read(op: OpUse, places: np.ndarray) -> Callable:
    """``fn(x, *weights, *structure)``: zeros like y that read its own places in x."""
    names = *op.trainable, *op.structure
    lanes = places.shape[0] if op.primitive.batched else 1
    of_x, of_y = (lanes, op.x_aval.size // lanes), (lanes, places.size // lanes)
    each = np.where(places < 0, -1, places - _starts(*of_x, places.ndim)).reshape(of_y)
    diagonal = _of_a_batch if op.primitive.original is None else _of_all
    if not (op.primitive.batched and (each == each[:1]).all()):
        diagonal = _of_all

    def read(x, *operands):
        values = dict(zip(names, jax.lax.stop_gradient(operands), strict=True))
        bound = op.bound({n: values[n] for n in op.structure})
        own = diagonal(bound, {n: values[n] for n in op.trainable}, each)
        there = jnp.concatenate(list(_parts(x.reshape(of_x), each)), 1)
        return (own * (there - jax.lax.stop_gradient(there))).reshape(places.shape)

    return read


def _starts(lanes: int, size: int, ndim: int) -> np.ndarray:
    """The flat place of each lane's first element, along axis 0."""
    return (np.arange(lanes) * size).reshape(-1, *[1] * (ndim - 1))


def _parts(x: jax.Array, each: np.ndarray) -> Iterator[jax.Array]:
    """``x[lane, each[lane]]``, runs of places as slices."""
    same = (each == each[:1]).all()
    runs = np.split(each[0], np.flatnonzero(np.diff(each[0]) != 1) + 1) if same else []
    if not same or len(runs) > MOST_RUNS or (each < 0).any():
        yield x.at[np.arange(len(x))[:, None], np.maximum(each, 0)].get(mode='promise_in_bounds')
        return
    for run in runs:
        yield jax.lax.slice_in_dim(x, int(run[0]), int(run[-1]) + 1, axis=1)


def _of_a_batch(op: OpUse, weights: dict, each: np.ndarray) -> jax.Array:
    """``dy_q/dx_k(q)`` of an op that is linear in x: a batch with one such place in each sample."""
    shape = len(each[0]), *op.x_aval.shape[1:]
    ones = jax.nn.one_hot(each[0], op.x_aval.size // len(each), dtype=op.x_aval.dtype)
    return jnp.diagonal(_linear(op, weights, ones.reshape(shape)).reshape(len(ones), -1))[None]


def _of_all(op: OpUse, weights: dict, each: np.ndarray) -> jax.Array:
    """The same for any op, one place of every lane after the other."""
    size = op.x_aval.size // len(each)

    def at(q):
        ones = jax.nn.one_hot(jnp.asarray(each)[:, q], size, dtype=op.x_aval.dtype)
        return _linear(op, weights, ones.reshape(op.x_aval.shape)).reshape(len(each), -1)[:, q]

    return jax.vmap(at, out_axes=1)(jnp.arange(len(each[0])))


def _linear(op: OpUse, weights: dict, x: jax.Array, at=None) -> jax.Array:
    """The derivative of y along x."""
    at = jnp.zeros_like(x) if at is None else at
    return jax.jvp(lambda x: op.impl(x, weights), (at,), (x,))[1]


def _check(op: OpUse) -> None:
    empty = op.empty()

    def along(at, x, weights):
        return _linear(empty, weights, x, at[0])

    if any(depends(along, [op.x_aval], op.x_aval, op.weight_avals)):
        raise NotSupportedError(
            f'{op.where}: {op.primitive.name} is not linear in its input, so it has no diagonal of '
            "its own that the weights alone give. Use d_rtrl(), or windows with inside='exact'."
        )


# filters ------------------------------------------------------------------------------------------
#
# A filter of what readouts read: hidden states that are always zero, put into the step.


FILTER = '(filter)'  # the first part of the name of a filter's state


def readouts(graph: ETraceGraph) -> tuple[OpUse, ...]:
    """The owned ops that read, as floats, what another op made, and whose own result no op reads,
    in the step or through a state.
    """
    program = graph.program
    start = {op.y: 1 << k for k, op in enumerate(graph.ops)}
    while True:
        facts = flow.forward(program, start, flow.gradients(program))
        carried = zip(program.carry, program.new_carry, strict=True)
        new = {old: facts[v] for old, v in carried if facts[v] & ~start.get(old, 0)}
        if not new:
            break
        start = start | {old: found | start.get(old, 0) for old, found in new.items()}
    read = flow.union(facts, (v for i in program.ops for v in program.equations[i].ins))
    last = (op for k, op in enumerate(graph.ops) if op.owned and not read >> k & 1)
    return tuple(op for op in last if op.x is not None and is_inexact(op.x_aval) and facts[op.x])


def with_filter(graph: ETraceGraph, kappa: float) -> ETraceGraph:
    """The step in which each readout that leaks reads ``x + r`` in place of x, where ``r = (x -
    stop(x)) + kappa (r' - stop(r'))`` is a state whose value is always zero: it counts with x as
    often as a readout that leaks with ``kappa`` remembers it.

    An x that is put together of several values has a filter for each of them.
    """
    found = [(op, op.x) for op in readouts(graph) if op.x is not None and not op.repeats]
    reading = [(op, x) for op, x in found if _is_kept(graph.program, op)]
    every = dict.fromkeys(v for _, x in reading for v in _pieces(graph.program, x))
    made = _filtered(graph, kappa, reading, every)
    # a value that no traced op reaches position by position needs no filter
    traced = {c for r in made.hidden_param_op_relations for g in r.groups for c in g.states}
    states = range(len(graph.program.carry), len(made.program.carry))
    needed = [v for c, v in zip(states, every, strict=True) if c in traced]
    if not needed:
        raise OptionError(_nothing_to_filter(graph, kappa))
    return made if len(needed) == len(every) else _filtered(graph, kappa, reading, needed)


def _is_kept(program: Program, op: OpUse) -> bool:
    """Whether a hidden state keeps an op's result: only then a later step remembers its x."""
    ahead = flow.backward(program, dict.fromkeys(program.new_states, 1), flow.gradients(program))
    return bool(ahead[op.y])


def _nothing_to_filter(graph: ETraceGraph, kappa: float) -> str:
    found = ', '.join(f'{op.key} ({op.where})' for op in readouts(graph)) or 'none'
    return (
        f'kappa is {kappa}, and no readout that leaks reads position by position what an op with a '
        f'trace made; the readouts are: {found}. A readout is an op that reads what other '
        'ops made, and whose result no op reads (`braintrace.matmul(h, W)`; a plain `h @ W` is '
        'none); its result has to be kept in a hidden state, as in braintrace.nn.LeakyRateReadout, '
        'and its x to be a state, or made of states of one shape element by element. A readout '
        'that does not leak, or that filters in front of its weights '
        '(braintrace.nn.FilteredReadout), needs no kappa; for another take exact windows '
        "(inside='exact')."
    )


def _pieces(program: Program, value: int) -> Iterator[int]:
    """The values that a value is put together of."""
    i = program.producer.get(value)
    if i is None or not _puts_together(program, i):
        yield value
    else:
        for v in program.equations[i].ins:
            yield from _pieces(program, v)


def _puts_together(program: Program, i: int) -> bool:
    eqn = program.equations[i]
    moves_all = moved_operands(eqn) == tuple(range(len(eqn.ins)))
    return eqn.does.assembles and not eqn.does.repeats and moves_all and not eqn.scope


def _filtered(
    graph: ETraceGraph, kappa: float, reading: list[tuple[OpUse, int]], values: Collection[int]
) -> ETraceGraph:
    """The step in which these values are filtered where readouts read them."""
    program, edit = graph.program, Splicing(graph.program)
    old = {v: edit.value(program.avals[v]) for v in values}
    new: dict[int, int] = {}
    reads: dict[int, int] = {}
    keys: dict[int, tuple[str, ...]] = {}
    x_of: dict[int, int] = {}  # y of a readout -> its new x

    def filtered(x, r):
        stop = jax.lax.stop_gradient
        r = x - stop(x) + kappa * (r - stop(r))
        return r, stop(x) + r

    for op, x in sorted(reading, key=lambda each: each[0].equation):
        pieces = list(dict.fromkeys(_pieces(program, x)))
        for k, v in enumerate(pieces):
            if v in old and v not in new:
                new[v], reads[v] = edit.put(op.equation, filtered, (v, old[v]))
                keys[v] = FILTER, op.key if len(pieces) == 1 else f'{op.key}[{k}]'
        together = partial(_together, program, x, pieces)
        (x_of[op.y],) = edit.put(op.equation, together, [reads.get(v, v) for v in pieces])
    spliced = edit.result(
        carry=(*program.carry, *old.values()),
        carry_keys=(*program.carry_keys, *(keys[v] for v in old)),
        hidden=(*program.hidden, *range(len(program.carry), len(program.carry) + len(old))),
        virtual=program.virtual + len(old),
    )
    equations = tuple(_reading(eqn, x_of) for eqn in spliced.equations)
    new_carry = (*spliced.new_carry, *(new[v] for v in old))
    try:
        return analyse_again(graph, replace(spliced, equations=equations, new_carry=new_carry))
    except MustSplit:
        raise OptionError(_nothing_to_filter(graph, kappa)) from None


def _together(program: Program, value: int, pieces: Sequence[int], *xs: jax.Array) -> jax.Array:
    """A value, put together of other pieces."""
    if value in pieces:
        return xs[pieces.index(value)]
    eqn = program.equations[program.producer[value]]
    outs = eqn.evaluate([_together(program, v, pieces, *xs) for v in eqn.ins])
    return outs[eqn.outs.index(value)]


def _reading(eqn: Equation, x_of: Mapping[int, int]) -> Equation:
    """An equation that, if it is one of these readouts, reads its new x."""
    found = [x for y, x in x_of.items() if y in eqn.outs]
    if not found:
        return eqn
    k = eqn.primitive.x_invar_index
    return replace(eqn, ins=(*eqn.ins[:k], *found, *eqn.ins[k + 1 :]))
