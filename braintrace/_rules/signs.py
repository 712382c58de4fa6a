"""KF-RTRL: the trace as one product of two factors, mixed by random signs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp

from .._executor import Factors, apply, dot, filled
from .contraction import add_gradients, factored_gradient, represented, without_x
from .coordinates import Pair, by_pair, pairs
from .factored import alive, apart, at_entries, empty_factors, joined
from .inside import KEY, Inside, balance, key_and_rest, norms
from .kept import derivatives, flow, kept
from .rule import Trace
from .scopes import all_numbers
from .slots import EINSUM


@dataclass(frozen=True, repr=False)
class Signs(Inside):
    """KF-RTRL (see :func:`braintrace.rules.signs`).

    ex^t = s1 p ex^{t-1} + s2 r x^t        ef^t = s1/p D^t ef^{t-1} + s2/r D_f^t

    D is that of one position, or with ``scope='all'`` of all hidden numbers of a lane, which are
    the last axis of ef then. The x of a weight whose gradient reads none, as that of a bias, is 1:
    slot ``one`` is its ex.
    """

    scope: str = 'position'
    seed: int = 0
    name: ClassVar[str] = 'signs'
    made_by: ClassVar[str] = 'signs'
    required: ClassVar[tuple[str, ...]] = ('xy_to_dw', 'init_pp')
    approximation = 'nothing on average: the trace is a random estimate, unbiased'

    @property
    def credit(self) -> str:
        return 'whole' if self.scope == 'all' else 'cut'

    def widened(self, graph):
        return all_numbers(graph, True) if self.scope == 'all' else graph

    def factors(self, executor, at, carried):
        return derivatives(executor, at) if self.scope == 'all' else executor.d_factors(*at)

    def init(self, graph):
        def one(pair: Pair) -> dict:
            slots = empty_factors(pair)
            if without_x(pair.op):
                shape = (*(1 for _ in pair.op.repeats), *((graph.lanes,) if pair.laned else ()))
                slots['one'] = jnp.zeros(shape, jnp.finfo(slots['f'].dtype).dtype)
            return slots

        return {**by_pair(graph, one), KEY: jax.random.key(self.seed)}

    def update(self, network, carried, factors, t):
        key, trace = key_and_rest(carried)
        key, fresh = jax.random.split(key)
        old, number = alive(network, self._apart(trace), t > 0), itertools.count()

        def one(pair: Pair) -> dict:
            own = jax.random.fold_in(fresh, next(number))
            return self._mixed(pair, pair.of(old), factors, (own, t.shape if pair.laned else ()))

        new = by_pair(network.graph, one)
        return {**(new if self.scope == 'all' else joined(new)), KEY: key}

    def _apart(self, trace: Trace) -> Trace:
        """The slots with one f for each state of a position."""
        return trace if self.scope == 'all' else apart(trace)

    def _mixed(self, pair: Pair, old: dict, factors, draw: tuple) -> dict:
        """The two factors after a step; ``draw``: a key, and the shape of the lanes."""
        x, (moved, new) = factors.x, self._factors(pair, old['f'], factors)
        if 'x' not in old:  # a sum of outputs is a sum: nothing is mixed
            return {'f': jax.tree.map(jnp.add, moved, new)}
        x = {'x': jnp.broadcast_to(represented(pair.op, x[pair.relation.key]), old['x'].shape)}
        if 'one' in old:
            x['one'] = jnp.ones_like(old['one'])
        ex = {name: old[name] for name in x}
        norm = partial(norms, lanes=len(pair.op.repeats) if draw[1] else None)
        p, over_p = balance(norm(ex.values()), norm(jax.tree.leaves(moved)))
        r, over_r = balance(norm(x.values()), norm(jax.tree.leaves(new)))
        s1, s2 = jax.random.rademacher(draw[0], (2, *draw[1]), p.dtype)

        def mixed(a, e, b, q):
            a, b = (_beside(pair, c, e) for c in (a, b))
            return (a * e + b * q).astype(e.dtype)

        f = jax.tree.map(lambda m, q: mixed(s1 * over_p, m, s2 * over_r, q), moved, new)
        return {'f': f, **{n: mixed(s1 * p, e, s2 * r, x[n]) for n, e in ex.items()}}

    def _factors(self, pair: Pair, f, factors: Factors) -> tuple:
        """``D ef`` and ``D_f``, like ef."""
        d, df = factors.d, pair.of(factors.df)
        if self.scope == 'all':
            sums = 'bij,b...j->b...i' if pair.laned else 'ij,...j->...i'
            moved = EINSUM(sums, d[flow(pair)], f).astype(f.dtype)
            return moved, jnp.moveaxis(df, 0, -1).astype(f.dtype)
        given = zip(df, f, strict=True)
        new = tuple(None if q is None else jnp.broadcast_to(q, e.shape) for q, e in given)
        return filled(apply(pair.gathered(d), f), f), filled(new, f)

    def history(self, network, grads, carried, lam, t):
        """``grads + < lam , ex (x) ef >``."""
        _, trace = key_and_rest(carried)
        slots, weights = alive(network, self._apart(trace), t > 0), network.weights
        flows = kept(network.graph, lam) if self.scope == 'all' else {}
        for pair in pairs(network.graph):
            key, own = pair.relation.key, pair.of(slots)
            if self.scope == 'all':
                sums = 'bk,b...k->b...' if pair.laned else 'k,...k->...'
                d = EINSUM(sums, flows[flow(pair)], own['f'])
            else:
                d = dot(at_entries(pair, lam), own['f'])
            if d is not None:
                grads = add_gradients(grads, {key: self._read(pair, own, d, weights[key])})
        return grads

    def _read(self, pair: Pair, own: dict, d: jax.Array, weights: dict) -> dict:
        """``ex (x) d``."""
        x, d = jax.tree.map(lambda a: a[None], (own.get('x'), d))
        got = factored_gradient(pair, x, d, weights)
        if 'one' in own:
            one = factored_gradient(pair, x, d * _beside(pair, own['one'], d[0])[None], weights)
            got |= {name: one[name] for name in without_x(pair.op)}
        return got


def _beside(pair: Pair, c: jax.Array, e: jax.Array) -> jax.Array:
    """A number for each lane, or one for all, with the axes of an array of the pair."""
    if c.ndim == int(pair.laned):
        c = c.reshape((1,) * len(pair.op.repeats) + c.shape)
    return c.reshape(c.shape + (1,) * (e.ndim - c.ndim))
