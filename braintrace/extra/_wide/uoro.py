"""Rules with random signs: UORO, and KF-RTRL."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._compiler import ETraceGraph, OpUse, Relation, is_complex
from ..._executor import Factors, apply, dot, filled
from ..._rules import (
    Pair,
    Stepwise,
    Trace,
    alive,
    apart,
    at_entries,
    by_op,
    by_pair,
    empty_factors,
    entry_dtype,
    factored_gradient,
    joined,
    op_gradient,
    outside_loops,
    pairs,
    represented,
    where_lanes,
    without_x,
)
from ...errors import NotSupportedError
from .dependence import lanes_meet
from .scopes import EINSUM, all_numbers, as_one_group, derivatives, flow, kept

# random signs -------------------------------------------------------------------------------------

KEY = '(key)'  # beside a trace's relations: the random key of the next step


def key_and_rest(trace: dict) -> tuple[jax.Array, Trace]:
    """The random key in a trace, and the trace without it."""
    return trace[KEY], {key: part for key, part in trace.items() if key != KEY}


def norms(arrays: Iterable[jax.Array], lanes: int | None) -> jax.Array:
    """The Euclidean norm of several arrays as one vector, for each lane along axis ``lanes``."""

    def squares(x: jax.Array) -> jax.Array:
        x = jnp.abs(x) ** 2
        return (
            x.sum()
            if lanes is None
            else jnp.moveaxis(x, lanes, 0).reshape(x.shape[lanes], -1).sum(1)
        )

    return jnp.sqrt(sum(map(squares, arrays)))


def balance(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``r`` and ``1/r`` with ``r^2 = b/a``: scaled by them, two factors with norms a and b are of
    one size. Both are 0 where a factor is zero, since then so is the product.
    """
    there = (a > 0) & (b > 0)
    a, b = jnp.where(there, a, 1), jnp.where(there, b, 1)
    return jnp.where(there, jnp.sqrt(b / a), 0), jnp.where(there, jnp.sqrt(a / b), 0)


# signs --------------------------------------------------------------------------------------------
#
# KF-RTRL: the trace as one product of two factors, mixed by random signs.


@dataclass(frozen=True, repr=False)
class Signs(Stepwise):
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

    def factors(self, executor, at, trace):
        return derivatives(executor, at) if self.scope == 'all' else executor.d_factors(*at)

    def init(self, graph):
        def one(pair: Pair) -> dict:
            slots = empty_factors(graph, pair)
            if without_x(pair.op):
                shape = (*(1 for _ in pair.op.repeats), *((graph.lanes,) if pair.laned else ()))
                slots['one'] = jnp.zeros(shape, jnp.finfo(slots['f'].dtype).dtype)
            return slots

        return {**by_pair(graph, one), KEY: jax.random.key(self.seed)}

    def update(self, network, trace, factors, t):
        key, trace = key_and_rest(trace)
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

    def history(self, network, trace, lam, t):
        """``< lam , ex (x) ef >``."""
        _, trace = key_and_rest(trace)
        slots = alive(network, self._apart(trace), t > 0)
        flows = kept(network.graph, lam) if self.scope == 'all' else {}

        def one(pair: Pair):
            own, weights = pair.of(slots), network.weights[pair.relation.key]
            if self.scope == 'all':
                sums = 'bk,b...k->b...' if pair.laned else 'k,...k->...'
                d = EINSUM(sums, flows[flow(pair)], own['f'])
            else:
                d = dot(at_entries(pair, lam), own['f'])
            return None if d is None else self._read(pair, own, d, weights)

        return by_op(pairs(network.graph), one)

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


# the rules ----------------------------------------------------------------------------------------
#
# UORO: the whole influence as one product of a vector of states and one of weights, mixed by
# random signs.


STATES = '(states)'  # beside a trace's relations: the vector s, by path of the hidden state


@dataclass(frozen=True, repr=False)
class OneProduct(Stepwise):
    """UORO (see :func:`braintrace.rules.uoro`).

    s^t = r0 J^t s^{t-1} + r1 v^t        m^t = m^{t-1} / r0 + (v^t D_f^t (x) x^t) / r1
    """

    pair: str = 'sample'
    seed: int = 0
    name: ClassVar[str] = 'UORO'
    made_by: ClassVar[str] = 'uoro'
    required: ClassVar[tuple[str, ...]] = ('xy_to_dw',)
    credit = 'whole'
    approximation = 'nothing on average: the trace is a random estimate, unbiased'

    def widened(self, graph):
        for group in graph.hidden_groups:
            if is_complex(group):
                raise NotSupportedError(
                    f'hidden state {group.paths[0]} is complex, and UORO follows real ones. Keep '
                    'its real and its imaginary part as two states.'
                )
        if self.lanes(graph) is not None:
            _check_lanes(graph)
        return as_one_group(graph)

    def lanes(self, graph: ETraceGraph) -> int | None:
        """The number of pairs, one for each lane; None: one pair for all."""
        return graph.lanes if self.pair == 'sample' else None

    # the trace ------------------------------------------------------------------------------------

    def init(self, graph):
        program, lanes = graph.program, self.lanes(graph)
        avals = {program.carry_names[c]: program.avals[program.carry[c]] for c in graph.states}

        def zeros(pair: Pair) -> dict:
            front = () if lanes is None or has_lanes(pair.relation) else (lanes,)
            return {
                n: jnp.zeros((*front, *w.shape), entry_dtype(graph, pair, w.dtype))
                for n, w in pair.op.weight_avals.items()
            }

        m = by_pair(graph, zeros)
        s = {name: jnp.zeros(a.shape, a.dtype) for name, a in avals.items()}
        return {**m, STATES: s, KEY: jax.random.key(self.seed)}

    def _alive(self, graph: ETraceGraph, trace: dict[str, Any], t: jax.Array) -> tuple[list, dict]:
        """``s`` in the order of the states, and ``m`` by op; zero where there is no past."""
        names, past = graph.program.carry_names, t > 0
        s = [where_lanes(past, c in graph.laned, trace[STATES][names[c]]) for c in graph.states]
        laned = self.lanes(graph) is not None
        m = {}
        for r in graph.hidden_param_op_relations:
            own = trace[r.key][r.groups[0].name]
            m[r.key] = {n: where_lanes(past, laned, e) for n, e in own.items()}
        return s, m

    # a step ---------------------------------------------------------------------------------------

    def factors(self, executor, at, moving):
        trace, t = moving
        graph = executor.graph
        s, _ = self._alive(graph, trace, t)
        _, fresh = jax.random.split(jax.random.clone(trace[KEY]))  # `update` splits it too
        signs = [
            jax.random.rademacher(jax.random.fold_in(fresh, k), e.shape, e.dtype)
            for k, e in enumerate(s)
        ]
        uncut = executor.uncut(*at)
        _, sent = uncut.pull(signs)
        lanes = self.lanes(graph)
        together = lambda rel: lanes is None or leads(rel.op, lanes) or has_lanes(rel)
        apart = [rel.key for rel in graph.hidden_param_op_relations if not together(rel)]
        if apart:

            def of_lane(b):
                flags = jnp.arange(lanes) == b
                only = [where_lanes(flags, True, v) for v in signs]
                _, sent = uncut.pull(only)
                return {key: sent[key] for key in apart}

            sent = {**sent, **jax.vmap(of_lane)(jnp.arange(lanes))}
        return {'moved': uncut.push(s), 'signs': signs}, sent

    def update(self, network, trace, factors, t):
        graph, (x, made, sent) = network.graph, factors
        lanes = self.lanes(graph)
        key, _ = jax.random.split(trace[KEY])
        _, m = self._alive(graph, trace, t)
        new = {
            rel.key: _by_lane(rel, lanes, x.get(rel.key), sent[rel.key], network.weights[rel.key])
            for rel in graph.hidden_param_op_relations
        }
        moved, signs = made['moved'], made['signs']
        norm = partial(norms, lanes=None if lanes is None else 0)
        r0, over_r0 = balance(norm(moved), norm(jax.tree.leaves(m)))
        r1, over_r1 = balance(norm(signs), norm(jax.tree.leaves(new)))

        def mixed(a, e, b, q):
            a, b = (c.reshape(c.shape + (1,) * (e.ndim - c.ndim)) for c in (a, b))
            return (a * e + b * q).astype(e.dtype)

        names = graph.program.carry_names
        s = {
            names[c]: mixed(r0, e, r1, v)
            for c, e, v in zip(graph.states, moved, signs, strict=True)
        }
        m = jax.tree.map(lambda e, q: mixed(over_r0, e, over_r1, q), m, new)
        groups = {r.key: r.groups[0].name for r in graph.hidden_param_op_relations}
        return {**{k: {groups[k]: e} for k, e in m.items()}, STATES: s, KEY: key}

    def history(self, network, trace, lam, t):
        """``< lam , s > m``."""
        graph, lanes = network.graph, self.lanes(network.graph)
        of_state = {
            c: x for g in graph.hidden_groups for c, x in zip(g.states, lam[g.name], strict=True)
        }
        s, m = self._alive(graph, trace, t)
        products = [
            (of_state[c] * e).reshape(1 if lanes is None else lanes, -1).sum(1)
            for c, e in zip(graph.states, s, strict=True)
            if of_state[c] is not None
        ]
        if not products:
            return {}
        total = sum(products)
        total = total[0] if lanes is None else total

        def history(relation: Relation, e):
            if lanes is None:
                return total * e
            if has_lanes(relation):
                return total.astype(e.dtype).reshape(lanes, *(1 for _ in e.shape[1:])) * e
            return jnp.tensordot(total.astype(e.dtype), e, 1)

        return {
            rel.key: {n: history(rel, e) for n, e in m[rel.key].items()}
            for rel in graph.hidden_param_op_relations
        }


def _check_lanes(graph: ETraceGraph) -> None:
    """Refuse a pair for each lane where lanes read one another."""
    shared = [c for c in graph.states if c not in graph.laned]
    if shared:
        what = (
            f'axis 0 of hidden state {graph.program.carry_names[shared[0]]} is not known to be the '
            'batch'
        )
    elif where := lanes_meet(graph):
        what = f'the lanes of a batch {where}'
    else:
        return
    raise NotSupportedError(
        f"{what}, and UORO has a pair for each sample. Use one for all: uoro(pair='batch')."
    )


def leads(op: OpUse, lanes: int) -> bool:
    """Whether the lanes are axis 0 of an op's x and y, and the op acts lane by lane."""
    fold = op.primitive.fold_axes
    leading = op.primitive.batched and op.x is not None
    leading = leading and (fold is None or fold(op.params) == (0, 0))
    return leading and op.x_aval.shape[:1] == op.y_aval.shape[:1] == (lanes,)


def has_lanes(relation: Relation) -> bool:
    """Whether the lanes are axis 0 of an op's weight, each of which makes its own lane of y."""
    return relation.op.is_its_weight and not relation.coordinates[0].added


def _by_lane(
    relation: Relation, lanes: int | None, x, d: jax.Array, weights: dict
) -> dict[str, Any]:
    """``d (x) x`` in the layout of the weights, for each lane."""
    op = relation.op
    if lanes is None or has_lanes(relation):
        return op_gradient(op, None if x is None else x[None], d[None], weights)
    if not leads(op, lanes):  # d has the lanes in front
        return jax.vmap(
            lambda d: op_gradient(op, None if x is None else x[None], d[None], weights)
        )(d)
    axis = len(op.repeats)

    def one(x, d):  # a lane as a batch of one, the turns of loops around the op as steps
        x, d = (a.reshape(-1, 1, *a.shape[axis:]) for a in (x, d))
        return op_gradient(outside_loops(op), x, d, weights)

    return jax.vmap(one, (axis, axis))(x, d)
