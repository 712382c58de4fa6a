"""Steps that are not yet written into a trace, as rows of factors."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph, HiddenGroup
from .._executor import Factors
from .coordinates import Pair, by_pair, pairs, to_y
from .lanes import of_groups, of_pairs, of_rows
from .transition import Transition, Vector, apply, compose, dot, filled, identity, pull
from .writing import Change

__all__ = ['Pending', 'Steps', 'group_dtype']


def group_dtype(graph: ETraceGraph, group: HiddenGroup):
    """The common dtype of a group's states and of its D."""
    avals, carry = graph.program.avals, graph.program.carry
    return jnp.result_type(*(avals[carry[c]].dtype for c in group.states))


class Pending(NamedTuple):
    """Steps since the trace was written. The trace that counts is

        e = p e_stored + sum over rows k of x_k (x) q_k

    ``p`` (group -> transition): the decay of the stored trace, in which the lanes ``alive`` count;
    ``q`` (relation -> group -> vector): ``dh/dy_k`` of the present h.

    ``last``: the factors of the newest step, where it is still to be applied to this ``e``. A state
    that no new state reads (the h of an LSTM) needs no rows then: that step makes its entry of the
    others'.
    """

    alive: jax.Array
    p: dict[str, Transition]
    x: dict[str, jax.Array]
    q: dict[str, dict[str, Vector]]
    last: Factors | None = None

    def settled(self, graph: ETraceGraph) -> Pending:
        """The same steps, the last one a row too: ``p <- D p``, ``q_k <- D q_k``, and a row of x
        and D_f.
        """
        if self.last is None:
            return self
        x, q = jax.tree.map(lambda a: a[None], (self.last.x, self.last.df))
        row = Pending(self.alive, self.last.d, {key: x[key] for key in self.x}, q)
        return self._replace(last=None).joined_to(graph, row)

    def _number(self, pair: Pair) -> int:
        """The number of rows of a pair."""
        rows = self.x.get(pair.relation.key), pair.of(self.q)
        return next((len(a) for a in jax.tree.leaves(rows)), 0)

    def without(self, graph: ETraceGraph, dead: jax.Array) -> Pending:
        """The steps, all of them rows, without the lanes that are reset."""
        ops, kept = {r.key: r.op for r in graph.hidden_param_op_relations}, ~dead
        x = {key: of_rows(graph, ops[key], kept[None], rows) for key, rows in self.x.items()}
        alive, p = self.alive & kept, of_groups(graph, kept, self.p)
        return Pending(alive, p, x, of_pairs(graph, kept, self.q, rows=True))

    def credit(self, graph: ETraceGraph, lam: dict[str, Vector]) -> dict[str, jax.Array]:
        """``delta_k = lam . q_k``: a signal at the present states, sent to each row's y."""
        found: dict[str, list] = {r.key: [] for r in graph.hidden_param_op_relations}
        for pair in pairs(graph):
            delta = dot(pair.gathered(lam, rows=True), pair.of(self.q))
            if delta is None:
                shape = (self._number(pair), *pair.op.repeats, *pair.coords.shape)
                delta = jnp.zeros(shape, pair.op.y_aval.dtype)
            found[pair.relation.key].append(jax.vmap(lambda d, op=pair.op: to_y(op, d))(delta))
        return {key: sum(parts) for key, parts in found.items()}

    def pulled(self, lam: dict[str, Vector]) -> dict[str, Vector]:
        """``lam p``: a signal at the present states, pulled back to the stored trace."""
        return {g: pull(s, self.p[g]) for g, s in lam.items()}

    def joined_to(self, graph: ETraceGraph, later: Pending) -> Pending:
        """These steps, all of them rows, and the later ones of a window: ``p <- p_later p``,
        ``q_k <- p_later q_k``, then the rows of the window.
        """

        def one(pair: Pair) -> Vector:
            moved = apply(pair.gathered(later.p, rows=True), pair.of(self.q))
            rows = zip(moved, pair.of(later.q), strict=True)
            numbers = self._number(pair), later._number(pair)
            return tuple(_joined(a, b, *numbers) for a, b in rows)

        p = {g: compose(move, self.p[g]) for g, move in later.p.items()}
        x = {key: jnp.concatenate([self.x[key], x]) for key, x in later.x.items()}
        return Pending(self.alive, p, x, by_pair(graph, one), later.last)

    def change(self, pair: Pair) -> Change:
        """The change of one entry by these steps."""
        x, then = self.x.get(pair.relation.key), None
        if self.last is not None:
            newest, q = self.last.x.get(pair.relation.key), pair.of(self.last.df)
            then = Change(pair.gathered(self.last.d), *jax.tree.map(lambda a: a[None], (newest, q)))
        return Change(pair.gathered(self.p), x, pair.of(self.q), then)


def _joined(a: jax.Array | None, b: jax.Array | None, first: int, second: int):
    """Rows ``a``, then rows ``b``; None is ``first`` or ``second`` rows of zeros."""
    if a is None and b is None:
        return None
    if a is None:
        a = jnp.zeros((first, *b.shape[1:]), b.dtype)
    if b is None:
        b = jnp.zeros((second, *a.shape[1:]), a.dtype)
    return jnp.concatenate([a, b])


class Steps(NamedTuple):
    """Room for single steps beside a trace, the first ``number`` rows filled and the rest zero.
    Each row is an array of its own, and so is each state's part of q.
    """

    alive: jax.Array
    p: dict[str, Transition]
    x: dict[str, tuple[jax.Array, ...]]
    q: dict[str, dict[str, tuple[Vector, ...]]]
    number: jax.Array

    @classmethod
    def empty(cls, graph: ETraceGraph, rows: int, t: jax.Array) -> Steps:
        none = (0 * t).sum()  # mapped, if t is: every array of a state must be

        def zeros(shape, dtype):
            return jnp.zeros(shape, dtype) + none.astype(dtype)

        def of_x(op):
            shape = (*op.repeats, *op.x_aval.shape)
            return tuple(zeros(shape, op.x_aval.dtype) for _ in range(rows))

        def of_q(pair: Pair):
            dtype = jnp.result_type(pair.op.y_aval.dtype, group_dtype(graph, pair.group))
            shape = (*pair.op.repeats, *pair.coords.shape)
            row = [zeros(shape, dtype) for _ in range(rows)]
            return tuple((a,) * pair.group.num_state for a in row)

        ops = {pair.relation.key: pair.op for pair in pairs(graph)}
        p = {
            g.name: jax.tree.map(lambda e, g=g: zeros(g.shape, e.dtype) + e, _no_step(graph, g))
            for g in graph.hidden_groups
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
        q = {
            key: {
                g: tuple(jnp.stack(of_state) for of_state in zip(*rows, strict=True))
                for g, rows in by_group.items()
            }
            for key, by_group in self.q.items()
        }
        return Pending(self.alive, self.p, x, q).without(graph, t == 0)

    def with_room(self, graph: ETraceGraph, t: jax.Array) -> tuple[Pending, jax.Array]:
        """The pending steps and their number before the step at ``t``: none if the rows were full,
        since the trace is written then.
        """
        pending, full = self.pending(graph, t), self.is_full
        x, q = jax.tree.map(lambda rows: jnp.where(full, 0, rows), (pending.x, pending.q))
        p = {
            g.name: jax.tree.map(
                lambda a, b: jnp.where(full, a, b), _no_step(graph, g), pending.p[g.name]
            )
            for g in graph.hidden_groups
        }
        alive = jnp.where(full, t > 0, pending.alive)
        return Pending(alive, p, x, q), jnp.where(full, 0, self.number)

    def added(self, graph: ETraceGraph, factors: Factors, t: jax.Array) -> Steps:
        """One step more: ``p <- D p``, ``q_k <- D q_k``, and a row of x and D_f."""
        pending, number = self.with_room(graph, t)

        def placed(rows, new):
            return tuple(
                jnp.where(number == i, new.astype(row.dtype), row) for i, row in enumerate(rows)
            )

        def one(pair: Pair):
            old = pair.of(pending.q)
            moved = filled(apply(pair.gathered(factors.d, rows=True), old), old)
            new = filled(pair.of(factors.df), tuple(o[0] for o in old))
            return tuple(zip(*map(placed, moved, new), strict=True))

        p = {g: filled(compose(d, pending.p[g]), pending.p[g]) for g, d in factors.d.items()}
        x = {key: placed(rows, factors.x[key]) for key, rows in pending.x.items()}
        return Steps(pending.alive, p, x, by_pair(graph, one), number + 1)


def _no_step(graph: ETraceGraph, group: HiddenGroup) -> Transition:
    """The transition of a group over no step, as numbers."""
    dtype = group_dtype(graph, group)
    return identity(group.num_state, jnp.ones((), dtype), jnp.zeros((), dtype))
