"""Steps that are not yet written into a trace: single ones, and those of a window."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._compiler import ETraceGraph, HiddenGroup
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
    is_read,
    over_time,
    pull,
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
#
# Steps that are not yet written into a trace, as rows of factors.


SHORT = 8  # rows that are copied rather than contracted by themselves


def group_dtype(graph: ETraceGraph, group: HiddenGroup):
    """The dtype in which D of a group is multiplied, step after step: that of its states, and at
    least single precision.
    """
    avals, carry = graph.program.avals, graph.program.carry
    return _jax.wide(_jax.promoted(*(avals[carry[c]].dtype for c in group.states)))


class Segment(NamedTuple):
    """Some steps, one after the other, as one change of the trace:

        e <- p e + sum over rows k of x_k (x) q_k

    ``p`` (group -> transition): the decay of the trace before them; ``q`` (relation -> group ->
    vector): ``dh/dy_k`` of the h after them.
    """

    p: dict[str, Transition]
    x: dict[str, jax.Array]
    q: dict[str, dict[str, Vector]]

    def number(self, pair: Pair) -> int:
        """The number of rows of a pair."""
        rows = self.x.get(pair.relation.key), pair.of(self.q)
        return next((len(a) for a in jax.tree.leaves(rows)), 0)

    @property
    def is_short(self) -> bool:
        """Whether its rows are few enough to be copied."""
        return all(len(a) <= SHORT for a in jax.tree.leaves((self.x, self.q)))

    def without(self, graph: ETraceGraph, dead: jax.Array) -> Segment:
        """The steps without the lanes that are reset."""
        ops, kept = {r.key: r.op for r in graph.hidden_param_op_relations}, ~dead
        x = {key: of_rows(graph, ops[key], kept[None], rows) for key, rows in self.x.items()}
        q = of_pairs(graph, kept, self.q, rows=True)
        return Segment(of_groups(graph, kept, self.p), x, q)

    def credit(self, graph: ETraceGraph, lam: dict[str, Vector]) -> dict[str, jax.Array]:
        """``delta_k = lam . q_k``: a signal at the states after them, sent to each row's y; an op
        that gets none is left out.
        """

        def one(pair: Pair):
            delta = dot(pair.gathered(lam, rows=True), pair.of(self.q))
            return None if delta is None else jax.vmap(lambda d: to_y(pair, d))(delta)

        return by_op(pairs(graph), one)

    def read_by(self, graph: ETraceGraph, later: Segment) -> Segment:
        """The change of the states that a later one reads; the others are left out."""
        read = {g: is_read(p) for g, p in later.p.items()}
        p = {g: chosen(rows, read[g], (None,) * len(rows)) for g, rows in self.p.items()}
        q = by_pair(graph, lambda pair: chosen(pair.of(self.q), read[pair.group.name]))
        return Segment(p, self.x, q)

    def then(self, graph: ETraceGraph, later: Segment) -> Segment:
        """These steps and later ones as one change: ``p <- p_later p``, ``q_k <- p_later q_k``,
        then the later rows.
        """

        def one(pair: Pair) -> Vector:
            moved = apply(pair.gathered(later.p, rows=True), pair.of(self.q))
            rows = zip(moved, pair.of(later.q), strict=True)
            numbers = self.number(pair), later.number(pair)
            return tuple(_joined(a, b, *numbers) for a, b in rows)

        p = {g: compose(move, self.p[g]) for g, move in later.p.items()}
        x = {key: jnp.concatenate([self.x[key], x]) for key, x in later.x.items()}
        return Segment(p, x, by_pair(graph, one))


class Pending(NamedTuple):
    """Steps since the trace was written: changes in the order of time, of a stored trace in which
    the lanes ``alive`` count.

    The newest step is a change of its own where no new state reads some state (the h of an LSTM):
    that state needs no rows of older steps then, since the newest makes its entry of the others'.
    """

    alive: jax.Array
    segments: tuple[Segment, ...]

    def without(self, graph: ETraceGraph, dead: jax.Array) -> Pending:
        """The steps without the lanes that are reset."""
        return Pending(self.alive & ~dead, tuple(s.without(graph, dead) for s in self.segments))

    def spoiled(self, graph: ETraceGraph) -> list[jax.Array]:
        """Of each array the lanes in which a number is not finite."""
        found = []
        for segment in self.segments:
            for group in graph.hidden_groups:
                axis = graph.batch_axis(group)
                found += [not_finite(a, axis) for a in jax.tree.leaves(segment.p[group.name])]
            for r in graph.hidden_param_op_relations:
                if r.key in segment.x:
                    axis = 1 + len(r.op.repeats) if is_laned(graph, r.op) else None
                    found.append(not_finite(segment.x[r.key], axis))
            for pair in pairs(graph):
                axis = 1 + len(pair.op.repeats) if pair.laned else None
                found += [not_finite(a, axis) for a in jax.tree.leaves(pair.of(segment.q))]
        return found

    def credit(self, graph: ETraceGraph, lam: dict[str, Vector]) -> tuple[list, dict[str, Vector]]:
        """A signal at the present states: for each segment x and the signal at each row's y, and
        the signal at the stored trace.
        """
        found = []
        for segment in reversed(self.segments):
            delta = segment.credit(graph, lam)
            found.append(({key: x for key, x in segment.x.items() if key in delta}, delta))
            lam = {g: pull(s, segment.p[g]) for g, s in lam.items()}
        return found[::-1], lam

    def joined_to(self, graph: ETraceGraph, later: Pending) -> Pending:
        """These steps and later ones; few rows become one change."""
        *older, newest = *self.segments, *later.segments
        # from the newest back, each change keeps the states that the one after it reads
        after, body = newest, []
        for segment in reversed(older):
            after = segment.read_by(graph, after)
            body.insert(0, after)
        if all(all(is_read(p)) for p in newest.p.values()):
            body.append(newest)
        segments = body[:1]
        for segment in body[1:]:
            if segments[-1].is_short and segment.is_short:
                segments[-1] = segments[-1].then(graph, segment)
            else:
                segments.append(segment)
        if not body or body[-1] is not newest:
            segments.append(newest)
        return Pending(self.alive, tuple(segments))

    def change(self, pair: Pair) -> tuple[Change, ...]:
        """The changes of one entry by these steps."""
        return tuple(
            Change(pair.gathered(s.p), s.x.get(pair.relation.key), pair.of(s.q))
            for s in self.segments
        )


def _joined(a: jax.Array | None, b: jax.Array | None, first: int, second: int):
    """Rows ``a``, then rows ``b``; None is ``first`` or ``second`` rows of zeros."""
    if a is None:
        if b is None:
            return None
        a = jnp.zeros((first, *b.shape[1:]), b.dtype)
    if b is None:
        b = jnp.zeros((second, *a.shape[1:]), a.dtype)
    return jnp.concatenate([a, b])


class PendingSteps(NamedTuple):
    """Room for single steps beside a trace, the first ``number`` rows filled and the rest zero.
    Each row is an array of its own, and so is each state's part of q.
    """

    alive: jax.Array
    p: dict[str, Transition]
    x: dict[str, tuple[jax.Array, ...]]
    q: dict[str, dict[str, tuple[Vector, ...]]]
    number: jax.Array

    @classmethod
    def empty(cls, graph: ETraceGraph, rows: int, t: jax.Array) -> PendingSteps:
        none = (0 * t).sum()  # mapped, if t is: every array of a state must be

        def zeros(shape, dtype):
            return jax.lax.broadcast(none.astype(dtype), shape)

        def of_x(op):
            shape = (*op.repeats, *op.x_aval.shape)
            return tuple(zeros(shape, op.x_aval.dtype) for _ in range(rows))

        def of_q(pair: Pair):
            dtype = jnp.result_type(pair.op.y_aval.dtype, group_dtype(graph, pair.group))
            shape = (*pair.op.repeats, *pair.coords.shape)
            row = [zeros(shape, dtype) for _ in range(rows)]
            return tuple((a,) * pair.group.num_state for a in row)

        ops = {pair.relation.key: pair.op for pair in pairs(graph)}
        no_step, shapes = _no_step(graph), {g.name: g.shape for g in graph.hidden_groups}
        p = {
            g: jax.tree.map(lambda e, g=g: zeros(shapes[g], e.dtype) + e, rows)
            for g, rows in no_step.items()
        }
        x = {key: of_x(op) for key, op in ops.items() if op.x is not None}
        return cls(t > 0, p, x, by_pair(graph, of_q), none)

    @property
    def rows(self) -> int:
        """The number of steps that there is room for."""
        return len(next(rows for of_group in self.q.values() for rows in of_group.values()))

    @property
    def is_full(self) -> jax.Array:
        return self.number == self.rows

    def pending(self, graph: ETraceGraph, t: jax.Array) -> Pending:
        """The steps as pending rows, without the lanes that were reset since."""
        x = {key: jnp.stack(rows) for key, rows in self.x.items()}
        stacked = lambda pair: tuple(map(jnp.stack, zip(*pair.of(self.q), strict=True)))
        q = by_pair(graph, stacked)
        return Pending(self.alive, (Segment(self.p, x, q),)).without(graph, t == 0)

    def with_room(self, graph: ETraceGraph, t: jax.Array) -> tuple[Pending, jax.Array]:
        """The pending steps and their number before the step at ``t``: none if the rows were full,
        since the trace is written then.
        """
        pending, full = self.pending(graph, t), self.is_full
        (segment,) = pending.segments
        x, q = jax.tree.map(lambda rows: jnp.where(full, 0, rows), (segment.x, segment.q))
        p = jax.tree.map(lambda a, b: jnp.where(full, a, b), _no_step(graph), segment.p)
        alive = jnp.where(full, t > 0, pending.alive)
        return Pending(alive, (Segment(p, x, q),)), jnp.where(full, 0, self.number)

    def added(self, graph: ETraceGraph, factors: Factors, t: jax.Array) -> PendingSteps:
        """One step more: ``p <- D p``, ``q_k <- D q_k``, and a row of x and D_f."""
        pending, number = self.with_room(graph, t)
        (segment,) = pending.segments

        def placed(rows, new):
            return tuple(
                jnp.where(number == i, new.astype(row.dtype), row) for i, row in enumerate(rows)
            )

        def one(pair: Pair):
            old = pair.of(segment.q)
            moved = filled(apply(pair.gathered(factors.d, rows=True), old), old)
            new = filled(pair.of(factors.df), tuple(o[0] for o in old))
            return tuple(zip(*map(placed, moved, new), strict=True))

        p = {g: filled(compose(d, segment.p[g]), segment.p[g]) for g, d in factors.d.items()}
        x = {key: placed(rows, factors.x[key]) for key, rows in segment.x.items()}
        return PendingSteps(pending.alive, p, x, by_pair(graph, one), number + 1)


def _no_step(graph: ETraceGraph) -> dict[str, Transition]:
    """The transition of each group over no step, as numbers where some steps have any."""
    found, there = {}, lambda read: True if read else None
    for group in graph.hidden_groups:
        dtype, moves = group_dtype(graph, group), closure(jax.tree.map(there, group.reads))
        rows = identity(group.num_state, jnp.ones((), dtype), jnp.zeros((), dtype))
        found[group.name] = tuple(
            chosen(row, [s == r or moves[s][r] for r in range(len(row))])
            for s, row in enumerate(rows)
        )
    return found


# the reverse scan ---------------------------------------------------------------------------------
#
# The reverse scan over the hidden states of a window: nothing in it has a parameter's size.
#
# delta_t = dy_t + lam_t . D_f,t      lam_{t-1} = c_t + lam_t D_t
# push_t  = p_t . D_f,t               p_{t-1}   = p_t D_t


# What stands after a step, the carry of the scan: lam (group -> vector) and p.
Ahead = tuple[dict[str, Vector], dict[str, Transition]]


def backwards(
    graph: ETraceGraph, window: Window, keep: bool
) -> tuple[tuple[dict[str, Vector], dict[str, jax.Array]], Pending | None]:
    """The credit of a window's losses, and with ``keep`` its steps as pending rows. The credit is
    ``lam`` (group -> vector) at the states before it, and ``delta`` (op -> ``(T, *y)``) at each
    step's y.
    """
    length, resets, summed = len(window.t), window.resets, window.sums or {}
    # the newest step stays apart from the rows where a state is read by no new state
    split = keep and any(not all(is_read(d)) for d in window.steps.like[0].values())
    is_last = jnp.arange(length) == length - 1 if split else None
    later = None if resets is None else reset_later(resets)
    once = _moves_once(graph, window)
    end, rows = _end(graph, window, keep, split, once), (window.steps.rows, later)
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
    late = keep and 2 * whole <= made

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
        if late:
            return ((before, moved), sums), (lam, p)
        *found, more = sent((lam, p), row, later)
        return ((before, moved), jax.tree.map(jnp.add, sums, more)), found

    none = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), None if late else like[2])
    ((lam, p), sums), found = over_time(
        back, (end, none), (*rows, resets, is_last), reverse=True, auto=graph.policy.at_once
    )
    if late:
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
    return (lam, delta), _as_pending(graph, window, (p, q), later, split)


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


def _end(graph: ETraceGraph, window: Window, keep: bool, split: bool, once: dict) -> Ahead:
    """The carry after the last step: ``lam = 0``, and ``p = 1`` (or 0, where it starts one step
    earlier); entries that stay zero by structure are None. ``once``: see :func:`_moves_once`.
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
            shapes = {x.shape for x in jax.tree.leaves(once.get(group.name, ()))}
            zero = jnp.zeros(np.broadcast_shapes(*shapes or {group.shape}), zero.dtype)
            one = zero if split else jnp.ones_like(zero)
            rows = identity(group.num_state, one)
            p[group.name] = tuple(
                tuple(zero if x is None and moves[s][r] else x for r, x in enumerate(row))
                if not split or is_read(d)[s]
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
    p = {g: tuple(map(chosen, rows, closure(newest.d[g]))) for g, rows in p.items()}
    if not split:
        return Pending(alive, (Segment(p, x, q),))
    # the sums of ops without x leave the last step out, since p is zero there
    older = {
        key: rows if key not in x else jax.tree.map(lambda a: a[:-1], rows)
        for key, rows in q.items()
    }
    return Pending(alive, (Segment(p, jax.tree.map(lambda a: a[:-1], x), older), last))
