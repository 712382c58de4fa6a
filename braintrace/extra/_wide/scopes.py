"""What a wide rule keeps beside the own position: selections, slots, scopes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._compiler import (
    Coordinates,
    Diagnostic,
    ETraceGraph,
    HiddenGroup,
    Kept,
    OpUse,
    Relation,
    backward,
    find_findings,
    gradients,
    is_complex,
)
from ..._executor import Executor
from ..._rules import (
    Entry,
    OpTrace,
    Pair,
    by_pair,
    entry_dtype,
    pairs,
    to_y,
    where_lanes,
)
from ...errors import NotSupportedError
from .dependence import Dependence, Numbers, dependence

# selections ---------------------------------------------------------------------------------------
#
# Between the hidden numbers of a step and those that an entry of a trace keeps.


@dataclass(frozen=True, eq=False)
class Scope:
    """How the derivative of a step is taken where a trace keeps more than its own position.

    ``reads`` (N, N) and ``feeds`` (op -> ``(N, *y)``): which derivatives of a new hidden number a
    trace needs. ``colours`` (N,): the number of the VJP that makes those of it. ``laned``: the ops
    whose y has lanes. ``text``: what the report says of it.
    """

    reads: np.ndarray
    feeds: dict[str, np.ndarray]
    colours: np.ndarray
    laned: frozenset[str]
    text: str = ''


Flows = dict[str, Any]  # by carrier, with the relation in front where entries have rows


def flow(pair: Pair) -> str:
    """The name of what moves by one transition."""
    name = pair.group.name
    return name if pair.kept.rows is None else f'{pair.relation.key} -> {name}'


def derivatives(executor: Executor, at: tuple) -> tuple[Flows, dict[str, dict]]:
    """D of each flow, and D_f of each pair, of the step ``at``."""
    graph = executor.graph
    scope, numbers = graph.scope, Numbers.of(graph)
    if scope is None:
        raise NotSupportedError('the graph has no scope; this rule takes the derivatives of one.')
    uncut = executor.uncut(*at)
    m = int(scope.colours.max(initial=-1)) + 1
    ones = numbers.split(np.eye(m)[:, scope.colours])
    basis = [jnp.asarray(b, h.dtype) for b, h in zip(ones, uncut.new, strict=True)]
    old, to_y = jax.vmap(uncut.pull)(basis)
    old = numbers.joined(old)
    d: Flows = {}
    for pair in pairs(graph):
        if flow(pair) not in d:
            d[flow(pair)] = _transition(scope, pair, old)
    return d, by_pair(graph, lambda pair: _fed(graph, scope, numbers, pair, to_y, uncut.along))


def _transition(scope: Scope, pair: Pair, old: jax.Array) -> jax.Array:
    """D of a carrier from the VJPs ``old`` of each colour."""
    own = pair.kept
    if own.rows is None:
        at = own.numbers
        found = jnp.moveaxis(old[scope.colours[at]], 0, -2)[..., at]
        return jnp.where(scope.reads[np.ix_(at, at)], found, 0)
    rows = np.moveaxis(own.rows, -1, 0)
    new, past = np.broadcast_arrays(rows[:, None], rows[None])
    there = (new >= 0) & (past >= 0) & scope.reads[new, past]
    lanes, wide = _lanes(pair)
    found = old[(wide(scope.colours[new], 2), *lanes, wide(past, 2))]
    return jnp.where(wide(there, 2), found, 0)


def _lanes(pair: Pair) -> tuple[tuple, Callable[[np.ndarray, int], np.ndarray]]:
    """The index that takes each lane, () without lanes, and what gives an array with axes of y the
    axis of the lanes in front of these.
    """
    if not pair.laned:
        return (), lambda a, axis: a
    lanes, *others = pair.coords.shape
    return (np.arange(lanes).reshape(lanes, *(1 for _ in others)),), np.expand_dims


def _fed(
    graph: ETraceGraph, scope: Scope, numbers: Numbers, pair: Pair, to_y: dict, along: Callable
) -> jax.Array:
    """D_f of a pair: ``(K, *coords)``."""
    own, key = pair.kept, pair.relation.key
    if pair.laned and key not in scope.laned:
        rows = _fed_in_each_lane(graph, numbers, pair, along(key))
    else:
        rows = to_y[key][scope.colours]
    lanes, wide = _lanes(pair)
    if own.rows is None:
        rows, there = rows[own.numbers], scope.feeds[key][own.numbers]
    else:
        slots = np.moveaxis(own.rows, -1, 0)
        at = np.indices(slots.shape)[1:]
        there = (slots >= 0) & scope.feeds[key][(slots, *at)]
        rows = rows[(wide(slots, 1), *lanes, *(wide(a, 1) for a in at))]
    return jnp.where(wide(there, 1), rows, 0)


def _fed_in_each_lane(
    graph: ETraceGraph, numbers: Numbers, pair: Pair, along: Callable
) -> jax.Array:
    """``(N, lanes, *y)`` of a y without lanes, of one element after the other."""
    shape = pair.op.y_aval.shape
    each = np.eye(int(np.prod(shape))).reshape(-1, *shape)
    real = jnp.finfo(pair.op.y_aval.dtype).dtype
    found = jax.vmap(along)(jnp.asarray(each, real))
    rows = numbers.joined([found[c] for c in graph.states])
    return jnp.moveaxis(rows, 0, -1).swapaxes(0, 1).reshape(-1, *numbers.front, *shape)


def kept(graph: ETraceGraph, of_groups: dict) -> Flows:
    """Signals by group and state at the numbers of each own."""
    numbers = Numbers.of(graph)
    of_state = {
        c: s for g in graph.hidden_groups for c, s in zip(g.states, of_groups[g.name], strict=True)
    }
    avals = [graph.program.avals[graph.program.carry[c]] for c in graph.states]
    every = numbers.joined(
        [
            jnp.zeros(a.shape, a.dtype) if of_state[c] is None else of_state[c]
            for c, a in zip(graph.states, avals, strict=True)
        ]
    )
    return {flow(pair): _kept(pair, every) for pair in pairs(graph)}


def _kept(pair: Pair, every: jax.Array) -> jax.Array:
    """A signal at all hidden numbers, at those that a pair keeps."""
    own = pair.kept
    if own.rows is None:
        return every[..., own.numbers]
    slots, (lanes, wide) = np.moveaxis(own.rows, -1, 0), _lanes(pair)
    return jnp.where(wide(slots >= 0, 1), every[(*lanes, wide(slots, 1))], 0)


# slots --------------------------------------------------------------------------------------------
#
# Entries of a trace that keep many hidden numbers, as one array with an axis of slots.
#
# A stored array has its slots behind the lanes, or first where it has no lanes. Vectors and
# transitions of a relation have slots in front of its coordinates: ``(K, *y)`` and ``(K, K, *y)``;
# where every element of y keeps the same numbers they are ``(lanes, K)`` and ``(lanes, K, K)``.


EINSUM = functools.partial(jnp.einsum, precision='highest')

TOGETHER = 8  # slots that are summed in one expression, which XLA fuses


class Slots:
    """The algebra of the entries of a relation with one carrier."""

    def __init__(self, pair: Pair):
        self.pair, self.op, self.coords = pair, pair.op, pair.coords
        self.number, self.shared = pair.group.num_state, pair.kept.rows is None
        self.axis = int(pair.laned)  # of the slots of a stored array

    def zeros(self, graph: ETraceGraph) -> Entry:
        """The empty entry: ``init_drtrl``, the states as slots."""
        entry = OpTrace(self.op, self.coords).zeros(self.number)
        return {
            n: jnp.moveaxis(e, -1, self.axis).astype(entry_dtype(graph, self.pair, e.dtype))
            for n, e in entry.items()
        }

    def alive(self, entry: Entry, flags: jax.Array) -> Entry:
        """The entry, zero in lanes without a past."""
        return {n: where_lanes(flags, self.pair.laned, e) for n, e in entry.items()}

    def in_lanes(self, flags: jax.Array, values: jax.Array) -> jax.Array:
        """A vector or transition of the carrier, zero but in the flagged lanes."""
        axis = 0 if self.shared else values.ndim - len(self.coords.shape)
        return where_lanes(flags, self.pair.laned, values, axis)

    def identity(self, dtype) -> jax.Array:
        one = jnp.eye(self.number, dtype=dtype)
        if self.shared:
            lanes = self.coords.shape[: self.axis]
            return jnp.broadcast_to(one, (*lanes, *one.shape))
        one = one.reshape(*one.shape, *(1 for _ in self.coords.shape))
        return jnp.broadcast_to(one, (*one.shape[:2], *self.coords.shape))

    def pulled(self, signal: jax.Array, p: jax.Array) -> jax.Array:
        """``lam D``: a signal through a transition."""
        return EINSUM('...k,...kj->...j' if self.shared else 'k...,kj...->j...', signal, p)

    def joined(self, later: jax.Array, p: jax.Array) -> jax.Array:
        """The product of two transitions."""
        return EINSUM('...ik,...kj->...ij' if self.shared else 'ik...,kj...->ij...', later, p)

    def pushed(self, p: jax.Array, df: jax.Array) -> jax.Array:
        """``p D_f``: what h owes to y after a transition."""
        if not self.shared:
            return EINSUM('ik...,k...->i...', p, df)
        return EINSUM('bik,kb...->ib...' if self.axis else 'ik,k...->i...', p, df)

    def sent(self, signal: jax.Array, df: jax.Array) -> jax.Array:
        """``lam D_f`` at y."""
        if not self.shared:
            found = (signal * df).sum(0)
        else:
            found = EINSUM('bk,kb...->b...' if self.axis else 'k,k...->...', signal, df)
        return to_y(self.pair, found)

    def moved(self, p: jax.Array, entry: Entry) -> Entry:
        """``p e``: slot k is the sum over slots j of ``yw_to_w(p[k, j], e_j)``."""
        if self.shared:
            sums = 'bkj,bj...->bk...' if self.axis else 'kj,j...->k...'
            return {n: EINSUM(sums, p, e).astype(e.dtype) for n, e in entry.items()}
        first = {n: jnp.moveaxis(e, self.axis, 0) for n, e in entry.items()}
        moved = jax.lax.map(functools.partial(self._sum, entry=first), p)
        return {n: jnp.moveaxis(e, 0, self.axis).astype(entry[n].dtype) for n, e in moved.items()}

    def _sum(self, row: jax.Array, entry: Entry) -> Entry:
        """The sum over slots of ``yw_to_w(row_j, e_j)``, slots first."""
        rule = OpTrace(self.op, self.coords).transport

        def plus(total, at):
            return jax.tree.map(jnp.add, total, rule(*at)), None

        like = jax.eval_shape(rule, *jax.tree.map(lambda a: a[0], (row, entry)))
        none = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
        return jax.lax.scan(plus, none, (row, entry), unroll=min(self.number, TOGETHER))[0]

    def fresh(self, xs, pushes: jax.Array, weights: Entry) -> Entry:
        """``sum_t x_t (x) push_t``: time in front, then slots."""

        def one(push):
            (entry,) = OpTrace(self.op, self.coords, weights).accumulate(xs, (push,))
            return entry

        found = jax.vmap(one, 1)(pushes)
        return {n: jnp.moveaxis(e, 0, self.axis) for n, e in found.items()}

    def read(self, signal: jax.Array, entry: Entry, weights: Entry) -> Entry:
        """``< signal , e >``, summed over slots, lanes and y."""
        if self.shared:
            sums = 'bk,bk...->b...' if self.axis else 'k,k...->...'
            total = {n: EINSUM(sums, signal, e).astype(e.dtype) for n, e in entry.items()}
        else:
            total = self._sum(signal, {n: jnp.moveaxis(e, self.axis, 0) for n, e in entry.items()})
        ones = jnp.ones(self.coords.shape, self.op.y_aval.dtype)
        stored = {n: (e,) for n, e in total.items()}
        return OpTrace(self.op, self.coords, weights).solve((ones,), stored, jnp.array(True))


# scopes -------------------------------------------------------------------------------------------
#
# Which hidden numbers the entries of a trace keep, beyond their own position.


BETWEEN = 'influence between groups of hidden states, beyond the current step'


def all_numbers(graph: ETraceGraph, jointly: bool) -> ETraceGraph:
    """Every element of y keeps all hidden numbers of a lane; not ``jointly``: those of each group
    that its op reaches.
    """
    found, groups = _dependence(graph), _numbers_of_groups(graph)
    each = [_carrier([g], [n]) for g, n in zip(graph.hidden_groups, groups, strict=True)]
    joint = [_carrier(graph.hidden_groups, groups)]
    return _scoped(graph, found, lambda op, own: (joint if jointly else [each[g] for g in own], []))


def reached_numbers(graph: ETraceGraph, n: int) -> ETraceGraph:
    """Every element of y keeps what it changes within n steps, in each group that its op
    reaches.
    """
    found, groups = _dependence(graph), _numbers_of_groups(graph)

    def carriers_of(op: OpUse, own: list[int]) -> tuple[list[HiddenGroup], list[str]]:
        carriers, texts = [], []
        for g in own:
            reads = found.reads[np.ix_(groups[g], groups[g])]
            feeds = found.feeds[op.key][groups[g]]
            changed = feeds.reshape(len(feeds), -1)
            for _ in range(n - 1):
                changed = changed | _product(reads, changed)
            if (_product(reads, changed) & ~changed).any():
                texts.append(f'influence that needs more than {n} steps to arrive')
            rows = None  # a dense layer keeps everything: one transition serves every y
            if not changed.all():
                rows = _as_rows(changed, groups[g]).reshape(*feeds.shape[1:], -1)
            carriers.append(_carrier([graph.hidden_groups[g]], [groups[g]], rows))
        return carriers, texts

    return _scoped(graph, found, carriers_of)


def _scoped(
    graph: ETraceGraph,
    found: Dependence,
    carriers_of: Callable[[OpUse, list[int]], tuple[list[HiddenGroup], list[str]]],
) -> ETraceGraph:
    """The step with what ``carriers_of(op, its groups)`` says that a trace keeps, and in texts what
    that leaves out.
    """
    relations, left_out = [], {}
    for op, own in _own(graph):
        carriers, texts = carriers_of(op, own)
        relations.append(_relation(graph, op, carriers, found))
        texts += [BETWEEN] if _flows_out(op, carriers, found) else []
        if texts:
            left_out[op.key] = '; '.join(dict.fromkeys(texts))
    reads, feeds = _needed(found, relations)
    colours = coloured((reads, found.reads), (feeds, found.feeds), found.laned)
    scope = Scope(reads, feeds, colours, found.laned, _text(relations, colours))
    return _rescoped(graph, relations, scope, left_out)


def _flows_out(op: OpUse, carriers: Sequence[HiddenGroup], found: Dependence) -> bool:
    """Whether other groups than those of a carrier read it, or the op."""
    beside = np.ones(len(found.reads), bool)
    for kept in (carrier.kept for carrier in carriers if carrier.kept is not None):
        others = np.ones(len(found.reads), bool)
        others[kept.numbers] = beside[kept.numbers] = False
        if found.reads[np.ix_(others, ~others)].any():
            return True
    return bool(found.feeds[op.key][beside].any())


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float32) @ b.astype(np.float32) > 0


def _as_rows(kept: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """``(y, K)``: the numbers that each element of y keeps, ascending, then -1."""
    most = max(1, int(kept.sum(0).max(initial=0)))
    rows = np.full((kept.shape[1], most), -1)
    for q in range(kept.shape[1]):
        own = numbers[kept[:, q]]
        rows[q, : len(own)] = own
    return rows


# ---- what the compiled step must be --------------------------------------------------------------


def _dependence(graph: ETraceGraph) -> Dependence:
    program = graph.program
    for c in graph.states:
        aval = program.avals[program.carry[c]]
        if is_complex(aval):
            raise NotSupportedError(
                f'hidden state {program.carry_names[c]} is {aval.dtype}, and a trace of this rule '
                'is made of real numbers. Keep its real and imaginary part as two states, or use '
                'braintrace.rules.d_rtrl().'
            )
    for op, _ in _own(graph):
        if op.repeats:
            raise NotSupportedError(
                f'{op.where}: {op.primitive.name} ({op.key}) is in a loop of '
                f'{" x ".join(map(str, op.repeats))} turns, where this rule keeps no trace. Unroll '
                f'it: policy=braintrace.Policy(unroll={max(op.repeats)}), or use '
                'braintrace.rules.d_rtrl().'
            )
    without = [c for c in graph.states if c not in graph.laned]
    if without and len(without) < len(graph.states):
        raise NotSupportedError(_without_lanes(graph, without))
    return dependence(graph)


def _without_lanes(graph: ETraceGraph, without: Sequence[int]) -> str:
    """Why some states have no lanes, and what to do."""
    program, lane_by_lane = graph.program, 'takes the derivative of a step lane by lane'
    names = ', '.join(program.carry_names[c] for c in without)
    shapes = [program.avals[program.carry[c]].shape for c in without]
    if all(program.new_carry[c] == program.carry[c] for c in without):
        return (
            f'the step never changes the hidden state {names}, so it does not show that its axis 0 '
            f'is the batch, and a trace of this rule {lane_by_lane}. Keep it in params '
            '(`trainable` may hold it fixed), leave it out of `hidden`, or use '
            'braintrace.rules.d_rtrl().'
        )
    if any(shape[:1] != (graph.lanes,) for shape in shapes):
        return (
            f'the hidden state {names} has the shape {", ".join(str(list(s)) for s in shapes)}, '
            f'and the batch of {graph.lanes} is not its axis 0: a trace of this rule '
            f'{lane_by_lane}. Put the batch first, or use braintrace.rules.d_rtrl().'
        )
    return (
        f'axis 0 of the hidden state {names} is not known to be the batch, that of others is: a '
        f'trace of this rule {lane_by_lane}. Name it in braintrace.Policy(batched=...), or '
        'use braintrace.rules.d_rtrl().'
    )


def _own(graph: ETraceGraph) -> list[tuple[OpUse, list[int]]]:
    """The ops that get a relation, those that are owned and have parameters, each with the hidden
    groups, by numbers, that its y reaches by any path within the step that passes no new state of
    another group.
    """
    program = graph.program
    new = [{program.new_carry[c] for c in group.carried} for group in graph.hidden_groups]
    ops = [op for op in graph.ops if op.owned and any(op.parameters.values())]
    found: dict[str, list[int]] = {op.key: [] for op in ops}
    for g, mine in enumerate(new):
        others = set().union(*new) - mine

        def skip(i: int, k: int, others=others) -> bool:
            return program.equations[i].ins[k] in others

        reached = backward(program, dict.fromkeys(mine, 1), gradients(program), skip)
        for op in ops:
            if reached[op.y]:
                found[op.key].append(g)
    return [(op, found[op.key]) for op in ops if found[op.key]]


def _numbers_of_groups(graph: ETraceGraph) -> list[np.ndarray]:
    ends = np.cumsum([0, *Numbers.of(graph).sizes])
    of_state = {c: np.arange(*ends[k : k + 2]) for k, c in enumerate(graph.states)}
    return [np.concatenate([of_state[c] for c in group.states]) for group in graph.hidden_groups]


# ---- the parts of the new graph ------------------------------------------------------------------


def _carrier(
    groups: Sequence[HiddenGroup], numbers: Sequence[np.ndarray], rows: np.ndarray | None = None
) -> HiddenGroup:
    """Groups as one; their numbers in the order of the states."""
    first = groups[0]
    return HiddenGroup(
        name=','.join(group.name for group in groups),
        paths=tuple(path for group in groups for path in group.paths),
        states=tuple(c for group in groups for c in group.states),
        shape=first.shape,
        dtype=first.dtype,
        derived=tuple(c for group in groups for c in group.derived),
        reads=(),
        kept=Kept(np.sort(np.concatenate(numbers)), rows),
    )


def _relation(
    graph: ETraceGraph, op: OpUse, carriers: Sequence[HiddenGroup], found: Dependence
) -> Relation:
    lanes, shape = Numbers.of(graph).front, tuple(op.y_aval.shape)
    shared = bool(lanes) and op.key not in found.laned
    shape = (*lanes, *shape) if shared else shape
    coords = Coordinates(shape, shape, None, added=int(shared))
    return Relation(op, tuple(carriers), (coords,) * len(carriers), _paths(graph, op), False)


def _paths(graph: ETraceGraph, op: OpUse) -> dict[str, tuple[str, ...]]:
    """The parameters behind each weight of an op, by name."""
    names = graph.program.param_names
    return {n: tuple(names[i] for i in behind) for n, behind in op.parameters.items() if behind}


def _rescoped(
    graph: ETraceGraph,
    relations: Sequence[Relation],
    scope: Scope | None,
    left_out: Mapping[str, str],
) -> ETraceGraph:
    """The step with these relations, in which nothing is cut; its routes follow from them."""
    new = replace(
        graph,
        hidden_param_op_relations=tuple(relations),
        findings=(),
        mixing={},
        recurrent=dict.fromkeys(graph.recurrent, 0),
        batch_axes=dict.fromkeys(graph.laned, 0),  # the only ones that these rules follow
        scope=scope,
    )
    lacks = [
        Diagnostic('rule', relation.key, reason=left_out[relation.key])
        for relation in relations
        if left_out.get(relation.key)
    ]
    missing = graph.found('input-dependent-weight')
    return replace(new, findings=(*find_findings(new, missing, (), ()), *lacks))


def as_one_group(graph: ETraceGraph) -> ETraceGraph:
    """The step with one relation for every op that reaches a hidden state, and one group of all
    hidden states: a vector for each lane.
    """
    program, states = graph.program, graph.states
    avals = [program.avals[program.carry[c]] for c in states]
    lanes = graph.lanes if graph.laned.issuperset(states) else None
    numbers = sum(math.prod(a.shape) for a in avals)
    shape = (numbers,) if lanes is None else (lanes, numbers // max(1, lanes))
    paths = tuple(program.carry_names[c] for c in states)
    reads = ((True,) * len(states),) * len(states)
    group = HiddenGroup('all', paths, states, shape, avals[0].dtype, graph.derived.states, reads)
    relations = []
    # weights that are y, of which each sample has its own, as coordinates know and no shape tells
    laned = {pair[0].key for pair in graph.pairs if pair[4] and not pair[2].added}
    for op, _ in _own(graph):
        # an op without lanes has an entry for each of them, as if its y were added an axis
        own, front = op.y_aval.shape, shape[:-1]
        together = own[:1] == front and not (op.is_its_weight and op.key not in laned)
        added = int(bool(front) and not together)
        coords = Coordinates((*front[:added], *own), shape, None, added)
        relations.append(Relation(op, (group,), (coords,), _paths(graph, op), False))
    return _rescoped(graph, relations, None, {})


def _needed(found: Dependence, relations: Sequence[Relation]) -> tuple[np.ndarray, dict]:
    """The derivatives that a trace needs of those that there are."""
    reads, feeds = np.zeros_like(found.reads), {}
    for relation in relations:
        here = np.zeros_like(found.feeds[relation.key])
        for kept in (carrier.kept for carrier in relation.groups if carrier.kept is not None):
            there = _where_kept(kept, here.shape)
            together = there.reshape(len(there), -1)
            reads |= _product(together, together.T)
            here |= there
        feeds[relation.key] = here & found.feeds[relation.key]
    return reads & found.reads, feeds


def _where_kept(kept: Kept, shape: tuple[int, ...]) -> np.ndarray:
    """``(N, *y)``: whether an element of y keeps a number."""
    found = np.zeros((shape[0], int(np.prod(shape[1:]))), bool)
    if kept.rows is None:
        found[kept.numbers] = True
    else:
        rows = kept.rows.reshape(-1, kept.size)
        q, k = np.nonzero(rows >= 0)
        found[rows[q, k], q] = True
    return found.reshape(shape)


def coloured(reads: tuple, feeds: tuple, laned: frozenset[str]) -> np.ndarray:
    """The colour of each new number: numbers of one colour share one VJP, since none reads what a
    trace needs of another. Each of the pairs is what is needed and what there is.
    """
    needed, there = (
        np.concatenate(
            [r, *(f[key].reshape(len(r), -1) for key in feeds[0] if key in laned or not laned)], 1
        ).astype(np.float32)
        for r, f in zip(reads, feeds, strict=True)
    )
    meets = needed @ there.T > 0
    meets |= meets.T
    colours = np.full(len(meets), -1)
    for n in range(len(meets)):
        taken = set(colours[meets[n]].tolist())
        colours[n] = next(c for c in range(n + 1) if c not in taken)
    return colours


def _text(relations: Sequence[Relation], colours: np.ndarray) -> str:
    """What the report says: hidden numbers that an entry keeps, and the number of VJPs."""
    sizes = [
        np.full(1, c.num_state) if c.kept.rows is None else (c.kept.rows >= 0).sum(-1).ravel()
        for relation in relations
        for c in relation.groups
        if c.kept is not None
    ]
    every = np.concatenate(sizes) if sizes else np.zeros(1)
    pulls = int(colours.max(initial=-1)) + 1
    return (
        f'an entry of the trace keeps {every.mean():.3g} hidden numbers on average, '
        f'{int(every.max())} at most; {pulls} VJPs each step'
    )
