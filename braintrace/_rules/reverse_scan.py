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
from .pending import Pending, group_dtype
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
    """The carry of the scan."""

    lam: dict[str, Vector]
    p: dict[str, Transition]
    dead: jax.Array | None  # lanes that are reset at a later step


def backwards(graph: ETraceGraph, window: Window, keep: bool) -> tuple[Credit, Pending | None]:
    """The credit of a window's losses, and with ``keep`` its steps as pending rows."""
    resets = window.resets
    # the newest step stays apart from the rows where a state is read by no new state
    split = keep and any(not all(is_read(d)) for d in window.steps.like[0].values())

    def back(after: _State, at):
        row, reset, is_last = at
        d, df, (dy, c, _) = window.steps.open(row)
        delta = dict(dy)
        for pair in pairs(graph):
            credit = dot(pair.gathered(after.lam), pair.of(df))
            if credit is not None:
                delta[pair.relation.key] += to_y(pair.op, credit)
        pushes = {}
        if keep:
            pushes = by_pair(graph, lambda pair: apply(pair.gathered(after.p), pair.of(df)))
            if reset is not None:
                pushes = of_pairs(graph, ~after.dead, pushes)

        lam = {g: tuple(map(add, c[g], pull(s, d[g]))) for g, s in after.lam.items()}
        p = {g: filled(compose(s, d[g]), s) for g, s in after.p.items()}
        if split:  # p starts before the last step
            p = {g: _started(s, is_last) for g, s in p.items()}
        if reset is None:
            return _State(lam, p, None), (delta, pushes)
        # nothing crosses a reset, in either direction
        dead = after.dead | reset
        lam, p = of_groups(graph, ~reset, lam), of_groups(graph, ~dead, p)
        return _State(lam, p, dead), (delta, pushes)

    number = len(window.t)
    at = window.steps.rows, resets, jnp.arange(number) == number - 1 if split else None
    before, (delta, pushes) = jax.lax.scan(back, _end(graph, window, keep, split), at, reverse=True)
    credit = Credit(before.lam, delta)
    if not keep:
        return credit, None
    return credit, _as_pending(graph, window, before.p, pushes, split)


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
    dead = None if window.resets is None else jnp.zeros_like(window.resets[0])
    return _State(lam, p, dead)


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
    graph: ETraceGraph, window: Window, p: dict[str, Transition], pushes: dict, split: bool
) -> Pending:
    """A window's steps as pending rows: ``p`` moves the states before it to its end, where h owes
    ``pushes`` to each step's y.
    """
    t, resets = window.t, window.resets
    related = {r.key: r.op for r in graph.hidden_param_op_relations}
    x = {key: rows for key, rows in window.x.items() if key in related}
    alive = t[0] > 0
    if resets is not None:
        # the lanes that no later step resets
        kept = ~(jnp.flip(jnp.cumsum(jnp.flip(resets, 0), 0), 0) - resets > 0)
        x = {key: of_rows(graph, related[key], kept, rows) for key, rows in x.items()}
        alive = alive & ~resets.any(0)
    last = None
    if split:
        last = window.newest
        x, pushes = jax.tree.map(lambda a: a[:-1], (x, pushes))
    if len(t) > split:
        # of the diagonal with which p started, only what a step carries on is left
        p = {
            g: tuple(
                tuple(e if there else None for e, there in zip(*row, strict=True))
                for row in zip(rows, closure(window.steps.like[0][g]), strict=True)
            )
            for g, rows in p.items()
        }
    return Pending(alive, p, x, pushes, last)
