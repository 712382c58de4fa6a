"""A step that is traced once and run in a loop. Sums of matrix products over the steps are made
after the loop, each as one product.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import properties_of

__all__ = ['TracedStep']


class Product(NamedTuple):
    """A matrix product of two values of the step, and the linear equations that lead from it to a
    term, innermost first.
    """

    eqn: Any
    then: tuple = ()

    def summed(self, left: jax.Array, right: jax.Array) -> jax.Array:
        """The sum over a leading axis of both operands."""
        params = dict(self.eqn.params)
        contracted, batch = params.pop('dimension_numbers')
        late = [
            [(*(d + 1 for d in dims), *also) for dims in pair]
            for pair, also in ((contracted, (0,)), (batch, ()))
        ]
        (total,) = _jax.bind(
            self.eqn.primitive,
            {**params, 'dimension_numbers': tuple(map(tuple, late))},
            self.eqn.ctx,
            left,
            right,
        )
        for eqn in self.then:
            (total,) = _jax.bind(eqn.primitive, eqn.params, eqn.ctx, total)
        return total


class TracedStep:
    """``step(constant, state, at) -> (state, terms, shown)`` on pytrees, traced for the shapes of
    these arguments.

    ``terms`` are summed over the steps of a loop. Where a term holds a matrix product that is
    larger than its operands together, the loop stacks the operands, and one product after it
    contracts the steps too.
    """

    def __init__(self, step: Callable, constant, state, at):
        avals, treedef = jax.tree.flatten((constant, state, at))
        trees = []

        def flat(*args):
            parts = [jax.tree.flatten(part) for part in step(*jax.tree.unflatten(treedef, args))]
            trees[:] = [tree for _, tree in parts]
            return [leaf for leaves, _ in parts for leaf in leaves]

        jaxpr, self._consts = _jax.opened(flat, avals)
        self._state, self._terms, self._shown = trees
        results = iter(jaxpr.outvars)
        state, terms, shown = (list(itertools.islice(results, t.num_leaves)) for t in trees)
        # each term as products to make after the loop and the loose rest to sum in it
        producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        varying = {*producer, *jaxpr.invars[len(jax.tree.leaves(constant)) :]}
        parts = [_parts(v, producer, varying) for v in terms]
        operands = [v for products, _ in parts for p in products for v in p.eqn.invars]
        loose = [v for _, rest in parts for v in rest]
        # a shown value that is an operand too is stacked once
        stacked = {id(v): v for v in (*shown, *operands)}
        self.operand_bytes = sum(
            _bytes(v)
            for v in {id(v): v for v in operands}.values()
            if id(v) not in set(map(id, shown))
        )
        self._zeros = [v.aval for v in loose]
        self._jaxpr = _jax.with_results(jaxpr, [*state, *loose, *stacked.values()])
        self._sizes = len(state), len(loose)
        place = {key: k for k, key in enumerate(stacked)}
        self._shown_at = [place[id(v)] for v in shown]
        self._rest = [len(rest) for _, rest in parts]
        self._products = [
            [(p, [place[id(v)] for v in p.eqn.invars]) for p in products] for products, _ in parts
        ]
        self._term_avals = [v.aval for v in terms]

    def zeros(self):
        """Terms before the first step."""
        return jax.tree.unflatten(
            self._terms, [jnp.zeros(a.shape, a.dtype) for a in self._term_avals]
        )

    def loop(self, constant, state, xs, length: int, counts: jax.Array | None = None):
        """``(state, sums of terms, shown)`` after some steps; ``xs`` and ``shown`` have time as
        first axis.

        ``counts``: bool ``(length,)``, the steps whose terms are summed; at the others a term need
        not be a number. None: all.
        """
        constant, (n, m) = jax.tree.leaves(constant), self._sizes

        def step(carry, at):
            (state, sums), (at, counted) = carry, at
            out = _jax.evaluate(
                self._jaxpr,
                self._consts,
                [*constant, *jax.tree.leaves(state), *jax.tree.leaves(at)],
            )
            sums = list(map(operator.add, sums, [_where(counted, x) for x in out[n : n + m]]))
            return (jax.tree.unflatten(self._state, out[:n]), sums), out[n + m :]

        carry = state, [jnp.zeros(a.shape, a.dtype) for a in self._zeros]
        if length == 1:
            (state, sums), stacked = step(carry, jax.tree.map(lambda a: a[0], (xs, counts)))
            stacked = [x[None] for x in stacked]
        else:
            (state, sums), stacked = jax.lax.scan(step, carry, (xs, counts))
        terms, sums = [], iter(sums)
        for rest, products in zip(self._rest, self._products, strict=True):
            terms.append(
                functools.reduce(
                    operator.add,
                    [next(sums) for _ in range(rest)]
                    + [
                        p.summed(*(_where(counts, stacked[i]) for i in operands))
                        for p, operands in products
                    ],
                )
            )
        return (
            state,
            jax.tree.unflatten(self._terms, terms),
            jax.tree.unflatten(self._shown, [stacked[i] for i in self._shown_at]),
        )


def _where(counts: jax.Array | None, x: jax.Array) -> jax.Array:
    """``x`` where a step counts (its axes come first), else zero."""
    return (
        x
        if counts is None
        else jnp.where(
            counts.reshape(counts.shape + (1,) * (x.ndim - counts.ndim)), x, jnp.zeros((), x.dtype)
        )
    )


def _parts(v, producer: dict, varying: set) -> tuple[list[Product], list]:
    """A term as products to make after the loop and values to sum in it."""
    eqn = None if isinstance(v, _jax.Literal) else producer.get(v)
    if eqn is None:
        return [], [v]
    if eqn.primitive.name == 'dot_general' and sum(map(_bytes, eqn.invars)) <= _bytes(v):
        return (
            ([Product(eqn)], [])
            if all(not isinstance(x, _jax.Literal) and x in varying for x in eqn.invars)
            else ([], [v])
        )
    does = properties_of(eqn)
    if does.sums:
        found = [_parts(x, producer, varying) for x in eqn.invars]
        products, rest = [p for ps, _ in found for p in ps], [x for _, xs in found for x in xs]
        return (products, rest) if products else ([], [v])
    # an equation that is linear in its one operand and keeps its size can wait for the loop's end
    one = len(eqn.invars) == 1 and math.prod(eqn.invars[0].aval.shape) == math.prod(v.aval.shape)
    if one and does.linear is not None:
        products, rest = _parts(eqn.invars[0], producer, varying)
        if products and not rest:
            return [p._replace(then=(*p.then, eqn)) for p in products], []
    return [], [v]


def _bytes(v) -> int:
    return math.prod(v.aval.shape) * v.aval.dtype.itemsize
