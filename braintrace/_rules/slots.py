"""Entries of a trace that keep many hidden numbers, as one array with an axis of slots.

A stored array has its slots behind the lanes, or first where it has no lanes. Vectors and
transitions of a relation have slots in front of its coordinates: ``(K, *y)`` and ``(K, K, *y)``;
where every element of y keeps the same numbers they are ``(lanes, K)`` and ``(lanes, K, K)``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .coordinates import Pair, to_y
from .entries import accumulate, transport, zeros
from .lanes import where_lanes
from .reading import solve
from .storage import Entry, Stored, entry_dtype

EINSUM = functools.partial(jnp.einsum, precision='highest')

TOGETHER = 8  # slots that are summed in one expression, which XLA fuses


class Slots:
    """The algebra of the entries of a relation with one carrier."""

    def __init__(self, pair: Pair):
        self.pair, self.op, self.coords = pair, pair.op, pair.coords
        self.number, self.shared = pair.group.num_state, pair.group.kept.rows is None
        self.axis = int(pair.laned)  # of the slots of a stored array

    def zeros(self) -> Entry:
        """The empty entry: ``init_drtrl``, the states as slots."""
        entry = zeros(self.op, self.coords, self.number)
        dtype = self.pair.group.dtype
        return {
            n: jnp.moveaxis(e, -1, self.axis).astype(entry_dtype(e.dtype, dtype))
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
        rule = transport(self.op, self.coords)

        def plus(total, at):
            return jax.tree.map(jnp.add, total, rule(*at)), None

        like = jax.eval_shape(rule, *jax.tree.map(lambda a: a[0], (row, entry)))
        none = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
        return jax.lax.scan(plus, none, (row, entry), unroll=min(self.number, TOGETHER))[0]

    def fresh(self, xs, pushes: jax.Array, weights: Entry) -> Entry:
        """``sum_t x_t (x) push_t``: time in front, then slots."""

        def one(push):
            (entry,) = accumulate(self.op, self.coords, xs, (push,), weights)
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
        dtype = self.op.y_aval.dtype
        old = Stored({n: (e,) for n, e in total.items()}, jnp.array(True), dtype)
        return solve(self.op, self.coords, (jnp.ones(self.coords.shape, dtype),), old, weights)
