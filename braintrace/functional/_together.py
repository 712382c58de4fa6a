"""A window of observed steps under one pull-back: reverse mode, in which nothing is cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._executor import Factors, Probes, stopped
from .._windows import Sequence, Together


class Border(NamedTuple):
    """What a window does with traces: ``keep`` the factors of its steps; the trace that moves
    inside (``moving``, with the step count before each step), None for none; ``credit(world)``, a
    further loss of the world after it, None for none.
    """

    keep: bool
    moving: tuple[Any, jax.Array] | None = None
    credit: Callable | None = None


def observe_together(
    compiled, step: Callable, given, world, part: Sequence, held: list, border: Border
) -> Together:
    """Several steps under one pull-back, in which nothing is cut.

    ``step(cell, given, world, at) -> (([weighed loss, penalty], shown), world)`` is a step like
    that of ``Compiled.observe``, with or without a penalty; the first part of a world is the carry.
    """
    executor, zeros = compiled.executor, compiled.executor.zero_probes()
    trace, ts = border.moving or (None, None)

    def run(given, hidden, virtual, probes):
        one = partial(_one_step, compiled, step, given, held, border.keep)

        def turn(state, at):
            *state, virtual = state
            at = *at, virtual
            # a loss without weight and its derivative need not be numbers
            if part.counts is None:
                state, shown = one(state, at)
            else:
                without = partial(one, counts=False)
                state, shown = jax.lax.cond(at[0].counts, one, without, state, at)
            # a virtual state counts at the border: inside, what it stands for is followed
            return (*state, jax.tree.map(jnp.zeros_like, virtual)), shown

        start = (executor.with_states(world[0], hidden), *world[1:]), trace, virtual
        (end, last, _), (losses, *others) = jax.lax.scan(turn, start, (part, probes, ts))
        total = losses.sum()
        return total if border.credit is None else total + border.credit(end), (end, last, *others)

    probes = {key: jnp.zeros((len(part.mask), *p.shape), p.dtype) for key, p in zeros.y.items()}
    args = given, executor.old_states(world[0]), zeros.virtual, probes
    total, pull, (end, last, (losses, aux), factors) = jax.vjp(run, *args, has_aux=True)
    direct, *lam, dy = pull(jnp.ones_like(total))
    of_state = dict(zip(compiled.graph.states, jax.tree.leaves(lam), strict=True))
    lam = {g.name: tuple(of_state[s] for s in g.states) for g in compiled.graph.hidden_groups}
    return Together(end, factors, dy, lam, direct, losses, aux, last)


def _one_step(compiled, step, given, held, keep, state, at, counts: bool = True):
    """``(state, (weighed loss, shown, factors))`` after a step; the loss may not count."""
    (world, trace), (part, probes, t, virtual), calls = state, at, []

    def cell(params, carry, inputs):
        params = [*params, *held]
        weights = compiled.executor.op_weights(stopped(params))
        outputs, carry_after, xs = compiled.executor.forward(
            params, weights, carry, inputs, Probes(probes, {}, virtual), True, part.done
        )
        factors, new, of_step = Factors({}, {}, {}), None, (params, weights, carry, inputs)
        if keep:
            factors = compiled.factors(*stopped(of_step), xs, (trace, t))
        if t is not None:
            new = compiled.rule.update(compiled.network(*stopped(of_step[:2])), trace, factors, t)
            factors = Factors({}, {}, {})
        calls.append((factors._replace(x=xs), new))
        return outputs, carry_after

    ((loss, *penalty), shown), world = step(cell, given, world, part)
    ((factors, trace),) = calls
    loss = sum(penalty, loss if counts else jnp.zeros_like(loss))
    return [world, trace], (loss, shown, factors)
