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
    compiled,
    step: Callable,
    given,
    world,
    part: Sequence,
    held: list,
    keep: bool,
    credit: Callable | None = None,
) -> Together:
    """Several steps under one pull-back, in which nothing is cut.

    ``step(cell, given, world, at) -> ((weighed loss, shown), world)`` is a step like that of
    ``Compiled.observe``; the first part of a world is the carry. ``keep``: with the factors of the
    steps. ``credit(world)`` is a further loss, of the world after them.
    """
    executor = compiled.executor

    def run(given, hidden, virtual, probes):
        one = partial(_one_step, compiled, step, given, held, keep)

        def turn(state, at):
            world, virtual = state
            at = *at, virtual
            # a loss without weight and its derivative need not be numbers
            if part.counts is None:
                world, shown = one(world, at)
            else:
                without = partial(one, counts=False)
                world, shown = jax.lax.cond(at[0].counts, one, without, world, at)
            # a virtual state counts at the border: inside, what it stands for is followed
            return (world, jax.tree.map(jnp.zeros_like, virtual)), shown

        start = executor.with_states(world[0], hidden), *world[1:]
        (end, _), (losses, *others) = jax.lax.scan(turn, (start, virtual), (part, probes))
        total = losses.sum()
        return total if credit is None else total + credit(end), (end, *others)

    zeros = executor.zero_probes()
    probes = {key: jnp.zeros((len(part.mask), *p.shape), p.dtype) for key, p in zeros.y.items()}
    args = given, executor.old_states(world[0]), zeros.virtual, probes
    total, pull, (end, shown, factors) = jax.vjp(run, *args, has_aux=True)
    direct, *lam, dy = pull(jnp.ones_like(total))
    of_state = dict(zip(compiled.graph.states, jax.tree.leaves(lam), strict=True))
    lam = {g.name: tuple(of_state[s] for s in g.states) for g in compiled.graph.hidden_groups}
    return Together(end, factors, dy, lam, direct, *shown)


def _one_step(compiled, step, given, held, keep, world, at, counts: bool = True):
    """``(world, (weighed loss, shown, factors))`` after a step; the loss may not count."""
    (part, probes, virtual), calls = at, []

    def cell(params, carry, inputs):
        params = [*params, *held]
        weights = compiled.executor.op_weights(stopped(params))
        outputs, carry_after, xs = compiled.executor.forward(
            params, weights, carry, inputs, Probes(probes, {}, virtual), True, part.done
        )
        factors = Factors({}, {}, {})
        if keep:
            factors = compiled.factors(*stopped((params, weights, carry, inputs)), xs)
        calls.append(factors._replace(x=xs))
        return outputs, carry_after

    (loss, shown), world = step(cell, given, world, part)
    return world, (loss if counts else jnp.zeros_like(loss), shown, *calls)
