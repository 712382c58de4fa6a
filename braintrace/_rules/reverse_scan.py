"""The reverse scan over the hidden states of a window: nothing in it has a parameter's size.

delta_t = dy_t + lam_t . D_f,t      lam_{t-1} = c_t + lam_t D_t
push_t  = p_t . D_f,t               p_{t-1}   = p_t D_t

The loop holds the recursions alone; what they give at each step's y is made after it, for all
steps at once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph
from .coordinates import by_pair, pairs, to_y
from .lanes import of_groups, of_pairs, of_rows
from .pending import Pending, Segment, group_dtype
from .rule import Window
from .transition import (
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

__all__ = ['Credit', 'backwards']


class Credit(NamedTuple):
    """Signals of a window's losses: ``lam`` (group -> vector) at the states before it, ``delta``
    (relation -> ``(T, *y)``) at each step's y.
    """

    lam: dict[str, Vector]
    delta: dict[str, jax.Array]


class _State(NamedTuple):
    """The carry of the scan: what stands after a step."""

    lam: dict[str, Vector]
    p: dict[str, Transition]


def backwards(graph: ETraceGraph, window: Window, keep: bool) -> tuple[Credit, Pending | None]:
    """The credit of a window's losses, and with ``keep`` its steps as pending rows."""
    factors, signals, t, resets = window
    # the newest step stays apart from the rows where a state is read by no new state
    split = keep and any(not all(is_read(d)) for d in factors.d.values())
    dead = None if resets is None else _reset_later(resets)

    def back(after: _State, at):
        d, c, flags, is_last = at
        lam = {g: tuple(map(add, c[g], pull(s, d[g]))) for g, s in after.lam.items()}
        p = {g: filled(compose(s, d[g]), s) for g, s in after.p.items()}
        if split:  # p starts before the last step
            p = {g: _started(s, is_last) for g, s in p.items()}
        if flags is not None:  # nothing crosses a reset, in either direction
            reset, later = flags
            lam, p = of_groups(graph, ~reset, lam), of_groups(graph, ~(reset | later), p)
        return _State(lam, p), after

    flags = None if resets is None else (resets, dead)
    is_last = jnp.arange(len(t)) == len(t) - 1 if split else None
    start, at = _end(graph, window, keep, split), (factors.d, signals.c, flags, is_last)
    before, after = jax.lax.scan(back, start, at, len(t), reverse=True)
    credit = Credit(before.lam, _delta(graph, window, after.lam))
    if not keep:
        return credit, None
    return credit, _as_pending(graph, window, (before.p, after.p), dead, split)


def _reset_later(resets: jax.Array) -> jax.Array:
    """Of each step the lanes that a later step resets."""
    return jnp.flip(jnp.cumsum(jnp.flip(resets, 0), 0), 0) - resets > 0


def _delta(graph: ETraceGraph, window: Window, lam: dict[str, Vector]) -> dict[str, jax.Array]:
    """``dy_t + lam_t . D_f,t`` of every relation, at all steps."""

    def of_step(lam, df, dy):
        delta = dict(dy)
        for pair in pairs(graph):
            credit = dot(pair.gathered(lam), pair.of(df))
            if credit is not None:
                delta[pair.relation.key] += to_y(pair.op, credit)
        return delta

    dy = {r.key: window.signals.dy[r.key] for r in graph.hidden_param_op_relations}
    return jax.vmap(of_step, axis_size=len(window.t))(lam, window.factors.df, dy)


def _end(graph: ETraceGraph, window: Window, keep: bool, split: bool) -> _State:
    """The carry after the last step: ``lam = 0``, and ``p = 1`` (or 0, where it starts one step
    earlier); entries that stay zero by structure are None.
    """
    lam, p = {}, {}
    for group in graph.hidden_groups:
        zero = jnp.zeros(group.shape, group_dtype(graph, group))
        d, c = window.factors.d[group.name], window.signals.c[group.name]
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
    moves: tuple[dict[str, Transition], dict[str, Transition]],
    dead: jax.Array | None,
    split: bool,
) -> Pending:
    """A window's steps as pending rows. ``moves``: ``p``, from the states before the window and
    after each step to its end.
    """
    (factors, _, t, resets), (p, after) = window, moves
    related = {r.key: r.op for r in graph.hidden_param_op_relations}
    x = {key: rows for key, rows in factors.x.items() if key in related}
    alive = t[0] > 0 if resets is None else (t[0] > 0) & ~resets.any(0)
    of_last = jax.tree.map(lambda a: a[-1:], (x, factors.df))
    newest = Segment(jax.tree.map(lambda a: a[-1], factors.d), *of_last)
    if split and len(t) == 1:
        return Pending(alive, (newest,))

    def of_step(p, df, dead):
        pushes = by_pair(graph, lambda pair: apply(pair.gathered(p), pair.of(df)))
        return pushes if dead is None else of_pairs(graph, ~dead, pushes)

    q = jax.vmap(of_step, axis_size=len(t))(after, factors.df, dead)
    if dead is not None:
        x = {key: of_rows(graph, related[key], ~dead, rows) for key, rows in x.items()}
    # of the diagonal with which p started, only what a step carries on is left
    p = {
        g: tuple(
            tuple(e if there else None for e, there in zip(*row, strict=True))
            for row in zip(rows, closure(factors.d[g]), strict=True)
        )
        for g, rows in p.items()
    }
    if not split:
        return Pending(alive, (Segment(p, x, q),))
    return Pending(alive, (Segment(p, *jax.tree.map(lambda a: a[:-1], (x, q))), newest))
