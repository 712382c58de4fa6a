"""The reverse scan over the hidden states of a window: nothing in it has a parameter's size.

delta_t = dy_t + lam_t . D_f,t      lam_{t-1} = c_t + lam_t D_t
push_t  = p_t . D_f,t               p_{t-1}   = p_t D_t
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph
from .._executor import (
    Transition,
    Vector,
    add,
    apply,
    closure,
    compose,
    dot,
    filled,
    identity,
    is_read,
    pull,
)
from .coordinates import by_pair, pairs, to_y
from .lanes import of_groups, of_pairs, of_rows
from .pending import Pending, Segment, group_dtype
from .rule import Window


class Credit(NamedTuple):
    """Signals of a window's losses: ``lam`` (group -> vector) at the states before it, ``delta``
    (op -> ``(T, *y)``) at each step's y.
    """

    lam: dict[str, Vector]
    delta: dict[str, jax.Array]


class _State(NamedTuple):
    """The carry of the scan: what stands after a step."""

    lam: dict[str, Vector]
    p: dict[str, Transition]


class _Sent(NamedTuple):
    """What a step sends to each y, ``delta``, and what h owes to each y, ``q``.

    Of an op without x only the sum over the steps counts: ``sums`` holds the parts that lam makes
    of delta, and q, for these.
    """

    delta: dict[str, jax.Array]
    q: dict[str, dict[str, Vector]]
    sums: tuple[dict, dict]


def backwards(graph: ETraceGraph, window: Window, keep: bool) -> tuple[Credit, Pending | None]:
    """The credit of a window's losses, and with ``keep`` its steps as pending rows."""
    length, resets = len(window.t), window.resets
    # the newest step stays apart from the rows where a state is read by no new state
    split = keep and any(not all(is_read(d)) for d in window.steps.like[0].values())
    is_last = jnp.arange(length) == length - 1 if split else None
    later = None if resets is None else reset_later(resets)
    end, rows = _end(graph, window, keep, split), (window.steps.rows, later)

    def sent(after: _State, row, later) -> _Sent:
        return _sent(graph, after, window.steps.open(row), later, keep)

    # What a step sends is made in the loop, or of the states after every step where these are
    # smaller: a second pass reads them then, all steps at once.
    like = jax.eval_shape(sent, end, *jax.tree.map(lambda a: a[0], rows))
    late = keep and 2 * _size(end) <= _size((like.delta, like.q))

    def back(carry, at):
        (after, sums), (row, later, reset, is_last) = carry, at
        d, _, (_, c, _) = window.steps.open(row)
        before = _before(graph, after, (d, c), (reset, later), is_last)
        if late:
            return (before, sums), after
        made = sent(after, row, later)
        return (before, jax.tree.map(jnp.add, sums, made.sums)), made[:2]

    none = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), None if late else like.sums)
    (before, sums), found = jax.lax.scan(back, (end, none), (*rows, resets, is_last), reverse=True)
    if late:
        *found, each = jax.vmap(sent, axis_size=length)(found, *rows)
        sums = jax.tree.map(lambda a: a.sum(0), each)
    delta, q = _with_sums(graph, found[0], found[1], sums)
    credit = Credit(before.lam, delta)
    return credit, _as_pending(graph, window, (before.p, q), later, split) if keep else None


def _sent(graph: ETraceGraph, after: _State, opened: tuple, later, keep: bool) -> _Sent:
    """What a step sends; ``later``: the lanes that a later step resets."""
    _, df, (dy, _, _) = opened
    delta, credits = dict(dy), {}
    for pair in pairs(graph):
        key, credit = pair.relation.key, dot(pair.gathered(after.lam), pair.of(df))
        if credit is not None and pair.op.x is None:
            credits.setdefault(key, {})[pair.group.name] = credit
        elif credit is not None:
            delta[key] += to_y(pair, credit)
    q: dict = {}
    if keep:
        q = by_pair(graph, lambda pair: apply(pair.gathered(after.p), pair.of(df)))
        q = q if later is None else of_pairs(graph, ~later, q)
    without_x = {r.key for r in graph.hidden_param_op_relations if r.op.x is None}
    summed = {key: q.pop(key) for key in without_x if key in q}
    return _Sent(delta, q, (credits, summed))


def _with_sums(graph: ETraceGraph, delta: dict, q: dict, sums: tuple[dict, dict]) -> tuple:
    """``delta`` and ``q`` of all steps; ops without x have one row, the sum."""
    credits, summed = sums
    for pair in pairs(graph):
        key = pair.relation.key
        if key in credits and pair.group.name in credits[key]:
            credit = to_y(pair, credits[key][pair.group.name])
            own = delta[key] if len(delta[key]) == 1 else delta[key].sum(0, keepdims=True)
            delta = delta | {key: own + credit[None]}
    return delta, q | jax.tree.map(lambda a: a[None], summed)


def _before(graph: ETraceGraph, after: _State, step: tuple, resets: tuple, is_last) -> _State:
    """The state before a step: ``lam = c + lam D`` and ``p = p D``."""
    (d, c), (reset, later) = step, resets
    lam = {g: tuple(map(add, c[g], pull(s, d[g]))) for g, s in after.lam.items()}
    p = {g: filled(compose(s, d[g]), s) for g, s in after.p.items()}
    if is_last is not None:  # p starts before the last step
        p = {g: _started(s, is_last) for g, s in p.items()}
    if reset is not None:  # nothing crosses a reset, in either direction
        lam, p = of_groups(graph, ~reset, lam), of_groups(graph, ~(reset | later), p)
    return _State(lam, p)


def _size(tree) -> int:
    return sum(a.size for a in jax.tree.leaves(tree))


def reset_later(resets: jax.Array) -> jax.Array:
    """Of each step the lanes that a later step resets."""
    flags = resets.astype(jnp.int32)
    return jax.lax.cumsum(flags, reverse=True) > flags


def _end(graph: ETraceGraph, window: Window, keep: bool, split: bool) -> _State:
    """The carry after the last step: ``lam = 0``, and ``p = 1`` (or 0, where it starts one step
    earlier); entries that stay zero by structure are None.
    """
    (ds, _, signals), lam, p = window.steps.like, {}, {}
    for group in graph.hidden_groups:
        zero = jnp.zeros(group.shape, group_dtype(graph, group))
        d, c = ds[group.name], signals.c[group.name]
        moves, states = closure(d), range(group.num_state)
        # a signal reaches a state directly, or through a later state that reads it
        reached = [
            c[r] is not None or any(c[s] is not None and moves[s][r] for s in states)
            for r in states
        ]
        lam[group.name] = tuple(zero if there else None for there in reached)
        if keep:
            one = zero if split else jnp.ones_like(zero)
            rows = identity(group.num_state, one)
            p[group.name] = tuple(
                tuple(zero if x is None and moves[s][r] else x for r, x in enumerate(row))
                if not split or is_read(d)[s]
                else (None,) * len(row)
                for s, row in enumerate(rows)
            )
    return _State(lam, p)


def _started(p: Transition, here: jax.Array) -> Transition:
    """The identity where ``p`` starts ``here``, and ``p`` at earlier steps."""
    return tuple(
        tuple(
            None if x is None else jnp.where(here, jnp.asarray(s == r, x.dtype), x)
            for r, x in enumerate(row)
        )
        for s, row in enumerate(p)
    )


def _as_pending(
    graph: ETraceGraph,
    window: Window,
    made: tuple[dict[str, Transition], dict],
    dead: jax.Array | None,
    split: bool,
) -> Pending:
    """A window's steps as pending rows. ``made``: ``p``, which moves the states before it to its
    end, where h owes ``q`` to each step's y.
    """
    t, resets, newest, (p, q) = window.t, window.resets, window.newest, made
    related = {r.key: r.op for r in graph.hidden_param_op_relations}
    x = {key: rows for key, rows in window.x.items() if key in related}
    alive = t[0] > 0 if resets is None else (t[0] > 0) & ~resets.any(0)
    of_last = {key: newest.x[key] for key in x}, newest.df
    last = Segment(newest.d, *jax.tree.map(lambda a: a[None], of_last))
    if split and len(t) == 1:
        return Pending(alive, (last,))
    if dead is not None:
        x = {key: of_rows(graph, related[key], ~dead, rows) for key, rows in x.items()}
    # of the diagonal with which p started, only what a step carries on is left
    p = {
        g: tuple(
            tuple(e if there else None for e, there in zip(*row, strict=True))
            for row in zip(rows, closure(newest.d[g]), strict=True)
        )
        for g, rows in p.items()
    }
    if not split:
        return Pending(alive, (Segment(p, x, q),))
    # the sums of ops without x leave the last step out, since p is zero there
    older = {
        key: rows if key not in x else jax.tree.map(lambda a: a[:-1], rows)
        for key, rows in q.items()
    }
    return Pending(alive, (Segment(p, jax.tree.map(lambda a: a[:-1], x), older), last))
