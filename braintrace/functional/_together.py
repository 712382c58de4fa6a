"""A window of observed steps under one pull-back: reverse mode, in which nothing is cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from .._executor import Factors, Probes, stopped
from .._windows import Sequence, Together

__all__ = ['observe_together']


def observe_together(
    compiled, step: Callable, given, world, part: Sequence, held: list, keep: bool
) -> Together:
    """Several steps under one pull-back, in which nothing is cut.

    ``step(cell, given, world, at) -> ((weighed loss, shown), world)`` is a step like that of
    ``Compiled.observe``; the first part of a world is the carry. ``keep``: with the factors of the
    steps.
    """
    executor = compiled.executor

    def run(given, hidden, probes):
        one = partial(_one_step, compiled, step, given, held, keep)

        def turn(world, at):
            # a loss without weight and its derivative need not be numbers
            if part.counts is None:
                return one(world, at)
            return jax.lax.cond(at[0].counts, one, partial(one, counts=False), world, at)

        start = executor.with_states(world[0], hidden), *world[1:]
        end, (losses, *others) = jax.lax.scan(turn, start, (part, probes))
        return losses.sum(), (end, *others)

    probes = {
        key: jnp.zeros((len(part.mask), *p.shape), p.dtype)
        for key, p in executor.zero_probes().y.items()
    }
    hidden = executor.old_states(world[0])
    total, pull, (end, shown, factors) = jax.vjp(run, given, hidden, probes, has_aux=True)
    direct, lam, dy = pull(jnp.ones_like(total))
    of_state = dict(zip(compiled.graph.states, lam, strict=True))
    lam = {g.name: tuple(of_state[s] for s in g.states) for g in compiled.graph.hidden_groups}
    return Together(end, factors, dy, lam, direct, *shown)


def _one_step(compiled, step, given, held, keep, world, at, counts: bool = True):
    """``(world, (weighed loss, shown, factors))`` after a step; the loss may not count."""
    (part, probes), calls = at, []

    def cell(params, carry, inputs):
        params = [*params, *held]
        weights = compiled.executor.op_weights(stopped(params))
        outputs, carry_after, xs = compiled.executor.forward(
            params, weights, carry, inputs, Probes(probes, {}), whole=True
        )
        factors = Factors({}, {}, {})
        if keep:
            factors = compiled.factors(*stopped((params, weights, carry, inputs)), xs)
        calls.append(factors._replace(x=xs))
        return outputs, carry_after

    (loss, shown), world = step(cell, given, world, part)
    return world, (loss if counts else jnp.zeros_like(loss), shown, *calls)
