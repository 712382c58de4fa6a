"""Steps that are not yet written into a trace, and the reverse scan that makes them of a window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._compiler import ETraceGraph, HiddenGroup, OpUse
from .._executor import (
    VARIES,
    Factors,
    Transition,
    Vector,
    add,
    apply,
    closure,
    compose,
    dot,
    filled,
    identity,
    over_time,
    pull,
    reaches,
)
from .entries import Change
from .layout import (
    Pair,
    by_op,
    by_pair,
    chosen,
    is_laned,
    not_finite,
    of_groups,
    of_pairs,
    of_rows,
    pairs,
    to_y,
)
from .rule import Window

# pending steps ------------------------------------------------------------------------------------

SHORT = 8  # rows that are copied rather than contracted by themselves


def group_dtype(graph: ETraceGraph, group: HiddenGroup):
    """The dtype in which D of a group is multiplied, step after step: that of its states, and at
    least single precision.
    """
    avals, carry = graph.program.avals, graph.program.carry
    return _jax.wide(_jax.promoted(*(avals[carry[c]].dtype for c in group.states)))


class Pending(NamedTuple):
    """Some steps as one change of a stored trace, of which the lanes ``alive`` count:

        e = p e_stored + sum over rows k of x_k (x) q_k

    ``p`` (group -> transition): the decay of the stored trace; ``q`` (relation -> group -> vector):
    ``dh/dy_k`` of the h after the steps. Rows are in blocks: ``x`` has an array for each, by op,
    and ``q`` a vector, by pair.
    """

    alive: jax.Array
    p: dict[str, Transition]
    x: dict[str, tuple[jax.Array, ...]]
    q: dict[str, dict[str, tuple[Vector, ...]]]

    @classmethod
    def of_step(cls, graph: ETraceGraph, factors: Factors, alive: jax.Array) -> Pending:
        """One step."""
        x, q = jax.tree.map(lambda a: a[None], (factors.x, factors.df))
        related = {r.key for r in graph.hidden_param_op_relations}
        x = {key: (rows,) for key, rows in x.items() if key in related}
        return cls(alive, factors.d, x, by_pair(graph, lambda pair: (pair.of(q),)))

    def without(self, graph: ETraceGraph, dead: jax.Array) -> Pending:
        """The steps without the lanes that are reset after them."""
        ops, kept = {r.key: r.op for r in graph.hidden_param_op_relations}, ~dead
        x = {
            key: tuple(of_rows(graph, ops[key], kept[None], rows) for rows in blocks)
            for key, blocks in self.x.items()
        }
        q = of_pairs(graph, kept, self.q, rows=True)
        return Pending(self.alive & kept, of_groups(graph, kept, self.p), x, q)

    def spoiled(self, graph: ETraceGraph) -> list[jax.Array]:
        """Of each array the lanes in which a number is not finite."""
        found = []
        for group in graph.hidden_groups:
            axis = graph.batch_axis(group)
            found += [not_finite(a, axis) for a in jax.tree.leaves(self.p[group.name])]
        for pair in pairs(graph):
            axis = 1 + len(pair.op.repeats)
            q, x = jax.tree.leaves(pair.of(self.q)), self.x.get(pair.relation.key, ())
            found += [not_finite(a, axis if pair.laned else None) for a in q]
            found += [not_finite(a, axis if is_laned(graph, pair.op) else None) for a in x]
        return found

    def credit(
        self, graph: ETraceGraph, lam: dict[str, Vector]
    ) -> tuple[list[tuple[dict, dict]], dict[str, Vector]]:
        """A signal ``lam`` at the present states: of each block x and ``lam . q_k``, the signal at
        each row's y, where an op that gets none is left out; and the signal at the stored trace.
        """

        def sent(block: int) -> dict[str, jax.Array]:
            def one(pair: Pair):
                delta = dot(pair.gathered(lam, rows=True), pair.of(self.q)[block])
                return None if delta is None else jax.vmap(lambda d: to_y(pair, d))(delta)

            return by_op(pairs(graph), one)

        blocks = []
        for k in range(self.blocks):
            delta = sent(k)
            blocks.append(({key: x[k] for key, x in self.x.items() if key in delta}, delta))
        return blocks, {g: pull(s, self.p[g]) for g, s in lam.items()}

    @property
    def blocks(self) -> int:
        """The number of blocks; none where no op has a trace."""
        return next((len(q) for of_group in self.q.values() for q in of_group.values()), 0)

    def then(self, graph: ETraceGraph, later: Pending) -> Pending:
        """These steps and later ones: ``p <- p_later p``, ``q_k <- p_later q_k``, then the later
        rows; few rows become one block.
        """
        arrays = jax.tree.leaves((self.x, self.q, later.x, later.q))
        short = all(len(a) <= SHORT for a in arrays)

        def joined(a: tuple, b: tuple) -> tuple:
            return (jnp.concatenate([*a, *b]),) if short else (*a, *b)

        def one(pair: Pair) -> tuple[Vector, ...]:
            p = pair.gathered(later.p, rows=True)
            blocks = *(apply(p, q) for q in pair.of(self.q)), *pair.of(later.q)
            if not short:
                return blocks
            xs = *self.x.get(pair.relation.key, ()), *later.x.get(pair.relation.key, ())
            # an op without x has rows of q alone
            rows = zip(blocks, xs or (None,) * len(blocks), strict=True)
            numbers = [next((len(a) for a in (*q, x) if a is not None), 1) for q, x in rows]
            return (_rows_of(blocks, numbers),)

        p = {g: compose(move, self.p[g]) for g, move in later.p.items()}
        x = {key: joined(self.x[key], x) for key, x in later.x.items()}
        return Pending(self.alive & later.alive, p, x, by_pair(graph, one))

    def change(self, pair: Pair, states: Sequence[int]) -> Change:
        """The change by these steps of an entry, to numbers of these states."""
        qs, p = pair.of(self.q), pair.gathered(self.p)
        xs = self.x.get(pair.relation.key, (None,) * len(qs))
        blocks = tuple((x, tuple(q[s] for s in states)) for x, q in zip(xs, qs, strict=True))
        return Change(tuple(pair.vector(p[s]) for s in states), blocks)


def _rows_of(blocks: tuple[Vector, ...], lengths: list[int]) -> Vector:
    """Rows, block after block, as one block; None is so many rows of zeros."""

    def of_state(*rows: jax.Array | None) -> jax.Array | None:
        some = next((a for a in rows if a is not None), None)
        if some is None:
            return None
        zeros = lambda n: jnp.zeros((n, *some.shape[1:]), some.dtype)
        each = zip(rows, lengths, strict=True)
        return jnp.concatenate([zeros(n) if a is None else a for a, n in each])

    return tuple(map(of_state, *blocks))


class Newest(NamedTuple):
    """The last step before a single one, which writes it into the trace."""

    factors: Factors

    @classmethod
    def none(cls, graph: ETraceGraph) -> Newest:
        """No step."""

        def of_group(group: HiddenGroup) -> Transition:
            zero = jnp.zeros(group.shape, group_dtype(graph, group))
            return tuple(tuple(zero if there else None for there in row) for row in group.reads)

        def of_pair(pair: Pair) -> Vector:
            dtype = jnp.result_type(pair.op.y_aval.dtype, group_dtype(graph, pair.group))
            zero = jnp.zeros((*pair.op.repeats, *pair.coords.shape), dtype)
            return tuple(zero if there else None for there in pair.feeds)

        ops = {pair.relation.key: pair.op for pair in pairs(graph)}
        x = {
            key: jnp.zeros((*op.repeats, *op.x_aval.shape), op.x_aval.dtype)
            for key, op in ops.items()
            if op.x is not None
        }
        d = {group.name: of_group(group) for group in graph.hidden_groups}
        return cls(Factors(x, d, by_pair(graph, of_pair)))

    def lanes(self, graph: ETraceGraph) -> Newest:
        """The axis of the lanes in each array; -1 where there is none that is known."""
        x, d, df = self.factors
        graph = graph.restricted(df.keys())
        own = {pair.relation.key: pair.op for pair in pairs(graph)}
        axes = {g.name: graph.batch_axis(g) for g in graph.hidden_groups}

        def each(axis: int | None, tree):
            return jax.tree.map(lambda _: -1 if axis is None else axis, tree)

        def of_op(op: OpUse, laned: bool) -> int | None:
            return len(op.repeats) if laned else None

        return Newest(
            Factors(
                {key: each(of_op(own[key], is_laned(graph, own[key])), a) for key, a in x.items()},
                {g: each(axes[g], of_group) for g, of_group in d.items()},
                by_pair(graph, lambda pair: each(of_op(pair.op, pair.laned), pair.of(df))),
            )
        )

    def replaced(self, graph: ETraceGraph, factors: Factors) -> Newest:
        """Another step in its place."""
        old = self.factors
        d = {g: filled(of_group, old.d[g]) for g, of_group in factors.d.items()}
        df = by_pair(graph, lambda pair: filled(pair.of(factors.df), pair.of(old.df)))
        return Newest(Factors({key: factors.x[key] for key in old.x}, d, df))

    def pending(self, graph: ETraceGraph, t: jax.Array) -> Pending:
        """The step behind a stored trace, at step count ``t``, without the lanes that were reset
        since.
        """
        return Pending.of_step(graph, self.factors, t > 1).without(graph, t == 0)


# the reverse scan ---------------------------------------------------------------------------------
#
# The reverse scan over the hidden states of a window: nothing in it has a parameter's size.
#
# delta_t = dy_t + lam_t . D_f,t      lam_{t-1} = c_t + lam_t D_t
# push_t  = p_t . D_f,t               p_{t-1}   = p_t D_t


# What is after a step, the carry of the scan: lam (group -> vector) and p.
Ahead = tuple[dict[str, Vector], dict[str, Transition]]


def backwards(
    graph: ETraceGraph, window: Window, keep: bool, late: bool
) -> tuple[tuple[dict[str, Vector], dict[str, jax.Array]], Pending | None]:
    """The credit of a window's losses, and with ``keep`` its steps as one change of the trace, all
    but the last one if the trace is written ``late`` (None: there is no other). The credit is
    ``lam`` (group -> vector) at the states before it, and ``delta`` (op -> ``(T, *y)``) at each
    step's y.
    """
    length, resets, summed = len(window.t), window.resets, window.sums or {}
    keep = keep and not (late and length == 1)
    is_last = jnp.arange(length) == length - 1 if keep and late else None
    later = None if resets is None else reset_later(resets)
    once = _moves_once(graph, window)
    end, rows = _end(graph, window, keep, late, once), (window.steps.rows, later)
    without_x = {r.key for r in graph.hidden_param_op_relations if r.op.x is None}

    def sent(after: Ahead, row, later) -> tuple[dict, dict, tuple[dict, dict]]:
        """What a step sends to each y, and what h owes to each y. Of an op without x only the sum
        over the steps counts: the last pair holds what lam sends there, and what h owes.
        """
        (lam, p), (_, df, (dy, _, _)) = after, window.steps.open(row)
        delta, credits = {key: d for key, d in dy.items() if key not in summed}, {}
        for pair in pairs(graph):
            key, credit = pair.relation.key, dot(pair.gathered(lam), pair.of(df))
            if credit is not None and pair.op.x is None:
                credits.setdefault(key, {})[pair.group.name] = credit
            elif credit is not None:
                delta[key] += to_y(pair, credit)
        q: dict = {}
        if keep:
            q = by_pair(graph, lambda pair: apply(pair.gathered(p), pair.of(df)))
            # a lane that a later step resets owes nothing
            q = q if later is None else of_pairs(graph, ~later, q)
        return delta, q, (credits, {key: q.pop(key) for key in without_x if key in q})

    # What a step sends is made in the loop, or of the states after every step where these are
    # smaller: a second pass reads them then, all steps at once, each as large as its group.
    like = jax.eval_shape(sent, end, *jax.tree.map(lambda a: a[0], rows))
    made = sum(a.size for a in jax.tree.leaves(like[:2]))
    states = ((g, (end[0][g.name], end[1].get(g.name))) for g in graph.hidden_groups)
    whole = sum(math.prod(g.shape) * len(jax.tree.leaves(arrays)) for g, arrays in states)
    second = keep and 2 * whole <= made

    def back(carry, at):
        ((lam, p), sums), (row, later, reset, is_last) = carry, at
        d, _, (_, c, _) = window.steps.open(row)
        # lam = c + lam D and p = p D, D once where it can be
        before = {g: filled(tuple(map(add, c[g], pull(s, d[g]))), s) for g, s in lam.items()}
        moved = {g: filled(compose(s, (d | once)[g]), s) for g, s in p.items()}
        if is_last is not None:  # p starts before the last step
            moved = {g: _started(s, is_last) for g, s in moved.items()}
        if reset is not None:  # nothing crosses a reset, in either direction
            before = of_groups(graph, ~reset, before)
            moved = of_groups(graph, ~(reset | later), moved)
        if second:
            return ((before, moved), sums), (lam, p)
        *found, more = sent((lam, p), row, later)
        return ((before, moved), jax.tree.map(jnp.add, sums, more)), found

    none = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), None if second else like[2])
    ((lam, p), sums), found = over_time(
        back, (end, none), (*rows, resets, is_last), reverse=True, auto=graph.policy.at_once
    )
    if second:
        *found, each = jax.vmap(sent, axis_size=length)(found, *rows)
        sums = jax.tree.map(lambda a: a.sum(0), each)
    # ops without x have one row, the sum; the loop over time has summed what the losses send
    credits, owed = sums
    delta = found[0] | {key: dy[None] for key, dy in summed.items()}
    for pair in pairs(graph):
        key = pair.relation.key
        if pair.group.name in credits.get(key, {}):
            credit = to_y(pair, credits[key][pair.group.name])
            own = delta[key] if len(delta[key]) == 1 else delta[key].sum(0, keepdims=True)
            delta = delta | {key: own + credit[None]}
    if not keep:
        return (lam, delta), None
    q = found[1] | jax.tree.map(lambda a: a[None], owed)
    shapes = {g.name: g.shape for g in graph.hidden_groups}
    p = {
        g: jax.tree.map(lambda e, g=g: jnp.broadcast_to(e, shapes[g]), rows)
        for g, rows in p.items()
    }
    return (lam, delta), _as_pending(graph, window, (p, q), later, late)


def _moves_once(graph: ETraceGraph, window: Window) -> dict[str, Transition]:
    """D of the groups in which it is the same at all steps, with axes of size 1 where it is the
    same along them, as for all lanes: its powers are then found once for these.
    """
    if window.resets is not None or window.steps.once is None:
        return {}
    gathers = {p.group.name for p in pairs(graph) if p.coords.positions is not None}
    found = {g: d for g, d in window.steps.once[0].items() if g not in gathers}
    return {g: d for g, d in found.items() if all(x is not VARIES for x in jax.tree.leaves(d))}


def reset_later(resets: jax.Array) -> jax.Array:
    """Of each step the lanes that a later step resets."""
    flags = resets.astype(jnp.int32)
    return jax.lax.cumsum(flags, reverse=True) > flags


def _end(graph: ETraceGraph, window: Window, keep: bool, late: bool, once: dict) -> Ahead:
    """The carry after the last step: ``lam = 0``, and ``p = 1`` at the states of which there are
    entries (or 0, where it starts one step earlier); what stays zero by structure is None.
    ``once``: see :func:`_moves_once`.
    """
    (ds, _, signals), lam, p = window.steps.like, {}, {}
    traced: dict[str, set[int]] = {}
    for pair in pairs(graph):
        traced.setdefault(pair.group.name, set()).update(pair.states)
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
            shapes = {x.shape for x in jax.tree.leaves(once.get(group.name, ()))}
            zero = jnp.zeros(np.broadcast_shapes(*shapes or {group.shape}), zero.dtype)
            rows, own = identity(group.num_state, jnp.ones_like(zero)), traced.get(group.name, ())
            p[group.name] = tuple(
                tuple(
                    zero if (x is None and moves[s][r]) or (late and x is not None) else x
                    for r, x in enumerate(row)
                )
                if s in own
                else (None,) * len(row)
                for s, row in enumerate(rows)
            )
    return lam, p


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
    late: bool,
) -> Pending:
    """A window's steps as pending rows. ``made``: ``p``, which moves the states before it to its
    end, where h owes ``q`` to each step's y.
    """
    first, resets, (p, q) = window.first, window.resets, made
    related = {r.key: r.op for r in graph.hidden_param_op_relations}
    x = {key: rows for key, rows in window.x.items() if key in related}
    alive = first > 0 if resets is None else (first > 0) & ~resets.any(0)
    if dead is not None:
        x = {key: of_rows(graph, related[key], ~dead, rows) for key, rows in x.items()}
    # of p only what so many steps can carry on is left: a delay line keeps one entry in a row
    d, moves = window.steps.like[0], len(window.t) - late
    p = {g: tuple(map(chosen, rows, reaches(d[g], moves))) for g, rows in p.items()}
    if late:
        # the sums of ops without x leave the last step out, since p is zero there
        x = jax.tree.map(lambda a: a[:-1], x)
        q = {key: jax.tree.map(lambda a: a[:-1], q[key]) if key in x else q[key] for key in q}
    q = {key: {g: (rows,) for g, rows in of_op.items()} for key, of_op in q.items()}
    return Pending(alive, p, {key: (rows,) for key, rows in x.items()}, q)
