"""Sums of a step's values over the steps of a block."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import properties_of
from .partition import Dataflow, nbytes


class Product(NamedTuple):
    """A matrix product of two values of the step, and the linear equations that lead from it to a
    term, innermost first: one product contracts the steps too.
    """

    eqn: Any
    then: tuple = ()

    @property
    def wanted(self) -> list:
        """The values that are wanted of each step."""
        return self.eqn.invars

    def total(self, blocks, env: dict, counts: jax.Array | None, length: int) -> jax.Array:
        """The sum over the steps that count."""
        params = dict(self.eqn.params)
        contracted, batch = params['dimension_numbers']
        params['dimension_numbers'] = tuple(
            tuple((*(d + 1 for d in dims), *also) for dims in pair)
            for pair, also in ((contracted, (0,)), (batch, ()))
        )
        operands = [where_counted(counts, blocks.each(v, env, length)) for v in self.eqn.invars]
        (total,) = _jax.bind(self.eqn.primitive, params, self.eqn.ctx, *operands)
        for eqn in self.then:
            (total,) = _jax.bind(eqn.primitive, eqn.params, eqn.ctx, total)
        return total


class Single(NamedTuple):
    """A value; where it is larger than the ``operands`` of which the equation ``eqn`` makes it, it
    is made step by step.
    """

    value: Any
    eqn: Any = None
    operands: tuple = ()

    @property
    def wanted(self) -> list:
        """The values that are wanted of each step."""
        return [self.value] if self.eqn is None else list(self.operands)

    def total(self, blocks, env: dict, counts: jax.Array | None, length: int) -> jax.Array:
        """The sum over the steps that count."""
        if self.eqn is None:
            return where_counted(counts, blocks.each(self.value, env, length)).sum(0)

        def step(total, at):
            values, here = at
            inside = dict(zip(self.operands, values, strict=True))
            blocks.evaluate([self.eqn], inside)
            return total + where_counted(here, inside[self.value]), None

        empty = jnp.zeros(self.value.aval.shape, self.value.aval.dtype)
        return jax.lax.scan(step, empty, ([env[v] for v in self.operands], counts), length)[0]


Term = list  # of products and singles


def where_counted(counts: jax.Array | None, x: jax.Array) -> jax.Array:
    """``x`` where a step counts (its axes come first), else zero."""
    if counts is None:
        return x
    flags = counts.reshape(counts.shape + (1,) * (x.ndim - counts.ndim))
    return jnp.where(flags, x, jnp.zeros((), x.dtype))


def terms_of(v, flow: Dataflow) -> Term:
    """A term as a sum of products and single values."""
    eqn = None if isinstance(v, _jax.Literal) else flow.made.get(v)
    if eqn is None or not flow.varies(v):
        return [Single(v)]
    if eqn.primitive.name == 'dot_general' and all(map(flow.varies, eqn.invars)):
        return [Product(eqn)]
    does = properties_of(eqn)
    if does.sums:
        parts = [part for x in eqn.invars for part in terms_of(x, flow)]
        if any(isinstance(part, Product) for part in parts):
            return parts
    # an equation that is linear in its one operand and keeps its size can wait for the sum
    one = len(eqn.invars) == 1 and math.prod(eqn.invars[0].aval.shape) == math.prod(v.aval.shape)
    if one and does.linear is not None:
        parts = terms_of(eqn.invars[0], flow)
        if all(isinstance(part, Product) for part in parts):
            return [part._replace(then=(*part.then, eqn)) for part in parts]
    operands = tuple(flow.sources(v))
    if operands and nbytes(v) > sum(map(nbytes, operands)):
        return [Single(v, eqn, operands)]
    return [Single(v)]
