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
    compiled, step: Callable, given, world, part: Sequence, held: list, tracing: tuple
) -> Together:
    """Several steps under one pull-back, in which nothing is cut.

    ``step(cell, given, world, at) -> ((weighed loss, shown), world)`` is a step like that of
    ``Compiled.observe``; the first part of a world is the carry. ``tracing``: whether the factors
    of the steps are kept; and the trace that moves inside, with the step counts, or None.
    """
    executor, (keep, moving) = compiled.executor, tracing
    trace, ts = (None, None) if moving is None else moving

    def run(given, hidden, probes):
        one = partial(_one_step, compiled, step, given, held, keep)

        def turn(world, at):
            # a loss without weight and its derivative need not be numbers
            if part.counts is None:
                return one(world, at)
            return jax.lax.cond(at[0].counts, one, partial(one, counts=False), world, at)

        start = (executor.with_states(world[0], hidden), *world[1:]), trace
        end, (losses, *others) = jax.lax.scan(turn, start, (part, probes, ts))
        return losses.sum(), (end, *others)

    probes = {
        key: jnp.zeros((len(part.mask), *p.shape), p.dtype)
        for key, p in executor.zero_probes().y.items()
    }
    hidden = executor.old_states(world[0])
    total, pull, ((end, trace), shown, factors) = jax.vjp(run, given, hidden, probes, has_aux=True)
    direct, lam, dy = pull(jnp.ones_like(total))
    of_state = dict(zip(compiled.graph.states, lam, strict=True))
    lam = {g.name: tuple(of_state[s] for s in g.states) for g in compiled.graph.hidden_groups}
    losses, aux = shown
    return Together(end, factors, dy, lam, direct, losses, aux, trace)


def _one_step(compiled, step, given, held, keep, state, at, counts: bool = True):
    """``(state, (weighed loss, shown, factors))`` after a step; the loss may not count."""
    (world, trace), (part, probes, t), calls = state, at, []

    def cell(params, carry, inputs):
        params = [*params, *held]
        weights = compiled.executor.op_weights(stopped(params))
        outputs, carry_after, xs = compiled.executor.forward(
            params, weights, carry, inputs, Probes(probes, {}), whole=True
        )
        factors, new = Factors({}, {}, {}), None
        if keep:
            at = stopped((params, weights, carry, inputs))
            factors = compiled.factors(*at, xs, (trace, t))
        if t is not None:
            new = compiled.rule.update(compiled.network(*at[:2]), trace, factors, t)
            factors = Factors({}, {}, {})
        calls.append((factors._replace(x=xs), new))
        return outputs, carry_after

    (loss, shown), world = step(cell, given, world, part)
    ((factors, trace),) = calls
    return (world, trace), (loss if counts else jnp.zeros_like(loss), shown, factors)
