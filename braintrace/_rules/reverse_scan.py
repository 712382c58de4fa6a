"""The reverse scan over the hidden states of a window: nothing in it has a parameter's size.

delta_t = dy_t + lam_t . D_f,t      lam_{t-1} = c_t + lam_t D_t
push_t  = p_t . D_f,t               p_{t-1}   = p_t D_t
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
    (op -> ``(T, *y)``) at each step's y.
    """

    lam: dict[str, Vector]
    delta: dict[str, jax.Array]


class _State(NamedTuple):
    """The carry of the scan: what stands after a step."""

    lam: dict[str, Vector]
    p: dict[str, Transition]


def backwards(graph: ETraceGraph, window: Window, keep: bool) -> tuple[Credit, Pending | None]:
    """The credit of a window's losses, and with ``keep`` its steps as pending rows."""
    t, resets, (ds, _, _) = window.t, window.resets, window.steps.like
    # the newest step stays apart from the rows where a state is read by no new state
    split = keep and any(not all(is_read(d)) for d in ds.values())
    dead = None if resets is None else _reset_later(resets)

    def made(after: _State, row, later):
        """What a step sends to each y, and with ``keep`` what h owes to each y."""
        _, df, (dy, _, _) = window.steps.open(row)
        delta, pushes = _delta(graph, after.lam, df, dy), {}
        if keep:
            pushes = by_pair(graph, lambda pair: apply(pair.gathered(after.p), pair.of(df)))
            pushes = pushes if later is None else of_pairs(graph, ~later, pushes)
        return delta, pushes

    def back(after: _State, at):
        row, later, reset, is_last = at
        d, _, (_, c, _) = window.steps.open(row)
        lam = {g: tuple(map(add, c[g], pull(s, d[g]))) for g, s in after.lam.items()}
        p = {g: filled(compose(s, d[g]), s) for g, s in after.p.items()}
        if split:  # p starts before the last step
            p = {g: _started(s, is_last) for g, s in p.items()}
        if reset is not None:  # nothing crosses a reset, in either direction
            lam, p = of_groups(graph, ~reset, lam), of_groups(graph, ~(reset | later), p)
        return _State(lam, p), after if late else made(after, row, later)

    is_last = jnp.arange(len(t)) == len(t) - 1 if split else None
    end, of_y = _end(graph, window, keep, split), (window.steps.rows, dead)
    # rows for wide ys are made after the loop, of the smaller ones for the states
    one = jax.tree.map(lambda a: a[0], of_y)
    late = keep and 2 * _size(end) <= _size(jax.eval_shape(made, end, *one))
    before, found = jax.lax.scan(back, end, (*of_y, resets, is_last), reverse=True)
    delta, q = jax.vmap(made, axis_size=len(t))(found, *of_y) if late else found
    credit = Credit(before.lam, delta)
    if not keep:
        return credit, None
    return credit, _as_pending(graph, window, (before.p, q), dead, split)


def _size(tree) -> int:
    return sum(a.size for a in jax.tree.leaves(tree))


def _reset_later(resets: jax.Array) -> jax.Array:
    """Of each step the lanes that a later step resets."""
    return jnp.flip(jnp.cumsum(jnp.flip(resets, 0), 0), 0) - resets > 0


def _delta(graph: ETraceGraph, lam: dict[str, Vector], df: dict, dy: dict) -> dict[str, jax.Array]:
    """``dy + lam . D_f`` of every op."""
    delta = dict(dy)
    for pair in pairs(graph):
        credit = dot(pair.gathered(lam), pair.of(df))
        if credit is not None:
            delta[pair.relation.key] += to_y(pair.op, credit)
    return delta


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
    return Pending(alive, (Segment(p, *jax.tree.map(lambda a: a[:-1], (x, q))), last))
