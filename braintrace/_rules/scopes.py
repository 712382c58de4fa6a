"""Which hidden numbers the entries of a trace keep, beyond their own position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._compiler import (
    Coordinates,
    ETraceGraph,
    HiddenGroup,
    Kept,
    OpUse,
    Relation,
    Scope,
    is_complex,
    own_groups,
    paths_of,
    rescoped,
)
from .._errors import NotSupportedError
from .._executor import Dependence, Numbers, dependence

BETWEEN = 'influence between groups of hidden states, beyond the current step'


def all_numbers(graph: ETraceGraph, jointly: bool) -> ETraceGraph:
    """Every element of y keeps all hidden numbers of a lane; not ``jointly``: those of each group
    that its op reaches.
    """
    found, groups = _dependence(graph), _numbers_of_groups(graph)
    each = [_carrier([g], [n]) for g, n in zip(graph.hidden_groups, groups, strict=True)]
    joint = [_carrier(graph.hidden_groups, groups)]
    relations, left_out = [], {}
    for op, own in _own(graph):
        carriers = joint if jointly else [each[g] for g in own]
        relations.append(_relation(graph, op, carriers, found))
        if _flows_out(op, carriers, found):
            left_out[op.key] = BETWEEN
    return _with(graph, relations, found, left_out)


def reached_numbers(graph: ETraceGraph, n: int) -> ETraceGraph:
    """Every element of y keeps what it changes within n steps, in each group that its op
    reaches.
    """
    found, groups = _dependence(graph), _numbers_of_groups(graph)
    relations, left_out = [], {}
    for op, own in _own(graph):
        carriers, texts = [], []
        for g in own:
            reads = found.reads[np.ix_(groups[g], groups[g])]
            feeds = found.feeds[op.key][groups[g]]
            kept, whole = _reached(reads, feeds.reshape(len(feeds), -1), n)
            texts += [] if whole else [f'influence that needs more than {n} steps to arrive']
            # a dense layer keeps everything: one transition serves every y
            rows = None if kept.all() else _as_rows(kept, groups[g]).reshape(*feeds.shape[1:], -1)
            carriers.append(_carrier([graph.hidden_groups[g]], [groups[g]], rows))
        relations.append(_relation(graph, op, carriers, found))
        texts += [BETWEEN] if _flows_out(op, carriers, found) else []
        if texts:
            left_out[op.key] = '; '.join(dict.fromkeys(texts))
    return _with(graph, relations, found, left_out)


def _flows_out(op: OpUse, carriers: Sequence[HiddenGroup], found: Dependence) -> bool:
    """Whether other groups than those of a carrier read it, or the op."""
    beside = np.ones(len(found.reads), bool)
    for carrier in carriers:
        others = np.ones(len(found.reads), bool)
        others[carrier.kept.numbers] = beside[carrier.kept.numbers] = False
        if found.reads[np.ix_(others, ~others)].any():
            return True
    return bool(found.feeds[op.key][beside].any())


def _reached(reads: np.ndarray, feeds: np.ndarray, n: int) -> tuple[np.ndarray, bool]:
    """What each element of y changes within n steps, and whether that is all that it ever
    changes.
    """
    kept = feeds
    for _ in range(n - 1):
        kept = kept | _product(reads, kept)
    return kept, not (_product(reads, kept) & ~kept).any()


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
                f'{op.where}: {op.primitive.name} ({op.key}) stands in a loop of '
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
        f'trace of this rule {lane_by_lane}. Name it in braintrace.Policy(lanes=...) if it is, or '
        'use braintrace.rules.d_rtrl().'
    )


def _own(graph: ETraceGraph) -> list[tuple[OpUse, list[int]]]:
    """The ops that get a relation, with the groups that each reaches."""
    found = own_groups(graph)
    return [(op, found[op.key]) for op in graph.ops if op.key in found]


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
    return Relation(op, tuple(carriers), (coords,) * len(carriers), paths_of(graph, op), False)


def _with(
    graph: ETraceGraph,
    relations: Sequence[Relation],
    found: Dependence,
    left_out: dict[str, str],
) -> ETraceGraph:
    reads, feeds = _needed(found, relations)
    colours = coloured((reads, found.reads), (feeds, found.feeds), found.laned)
    scope = Scope(reads, feeds, colours, found.laned, _text(relations, colours))
    return rescoped(graph, relations, scope, left_out)


def _needed(found: Dependence, relations: Sequence[Relation]) -> tuple[np.ndarray, dict]:
    """The derivatives that a trace needs of those that there are."""
    reads, feeds = np.zeros_like(found.reads), {}
    for relation in relations:
        here = np.zeros_like(found.feeds[relation.key])
        for carrier in relation.groups:
            for rows in _distinct(carrier.kept):
                reads[np.ix_(rows, rows)] = True
            here |= _kept(carrier.kept, here.shape)
        feeds[relation.key] = here & found.feeds[relation.key]
    return reads & found.reads, feeds


def _distinct(kept: Kept) -> list[np.ndarray]:
    """The sets of numbers that are kept together."""
    if kept.rows is None:
        return [kept.numbers]
    rows = np.unique(kept.rows.reshape(-1, kept.size), axis=0)
    return [row[row >= 0] for row in rows]


def _kept(kept: Kept, shape: tuple[int, ...]) -> np.ndarray:
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
    ]
    every = np.concatenate(sizes) if sizes else np.zeros(1)
    pulls = int(colours.max(initial=-1)) + 1
    return (
        f'an entry of the trace keeps {every.mean():.3g} hidden numbers on average, '
        f'{int(every.max())} at most; {pulls} VJPs each step'
    )
