"""Measurements of the doctor over a window: the history that the losses read, norms of traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import ETraceGraph, functional
from ._sequence import one_step, scalar, split_floats
from .cut import CutStep


class Mass(NamedTuple):
    """Squared norms of the gradient's history, groups in rows and parameters in columns."""

    kept: np.ndarray
    dropped: np.ndarray


def history_mass(
    cell: Callable, cut: CutStep, credit: str | None, params, carry, xs, ys, loss: Callable
) -> Mass:
    """The history that the losses read, ``sum_t dL^t/dh^{t-1} dh^{t-1}/dw``, group by group: the
    part that a trace along the kept paths keeps, and the rest.

    Both factors are taken along every path for the whole, and along the kept paths for the kept
    part; with ``credit='whole'`` the first is the same, and with None nothing is kept. A state's
    unit cancels in each product.
    """
    groups, weights = cut.graph.hidden_groups, split_floats(params)
    of_group = [g for g, group in enumerate(groups) for _ in group.carried]

    def states(w, c, x):
        return one_step(cell, w, c, x)[1]

    def outputs(w, c, x):
        return one_step(cell, w, c, x)[0]

    def history(step: Callable, outputs: Callable) -> list:
        """The gradient of each parameter through the old states of each group, groups in axis 0."""

        def carries(values):
            """The carry before every step."""
            w = weights.rebuild(values)
            return jax.lax.scan(lambda c, x: (step(w, c, x), c), carry, xs)[1]

        def signals(at) -> list:
            """The derivative of a step's loss by the hidden states before it."""
            c, x, y = at
            to_loss = lambda c: scalar(loss(outputs(params, c, x), y))
            return cut.hidden(jax.grad(to_loss, allow_int=True)(c))

        # dh/dw over the whole window as one pullback, and dL/dh step by step at the same carries.
        hidden, back = jax.vjp(lambda w: jax.vmap(cut.hidden)(carries(w)), weights.values)
        fixed = jax.lax.stop_gradient(carries(weights.values))
        read = jax.lax.map(signals, (fixed, xs, ys))

        def through(group):
            """The pullback with the signals of one group alone."""
            own = [
                jnp.where(group == g, s, 0).astype(h.dtype)
                for g, s, h in zip(of_group, read, hidden)
            ]
            return back(own)[0]

        return jax.lax.map(through, jnp.arange(len(groups)))

    def measure():
        whole = history(states, outputs)
        if credit is None:
            kept = jax.tree.map(jnp.zeros_like, whole)
        else:
            kept = history(cut.state_step, outputs if credit == 'whole' else cut.loss_step)
        return _squares(kept), _squares(jax.tree.map(jnp.subtract, whole, kept))

    return Mass(*(np.asarray(m, float) for m in jax.jit(measure)()))


def _squares(grads: list) -> jax.Array:
    """Squared norms, groups in rows and parameters in columns."""
    return jnp.stack([jnp.sum(jnp.abs(g) ** 2, range(1, g.ndim)) for g in grads], -1)


def trace_norms(learner: functional.OnlineLearner, graph: ETraceGraph, params, state, xs):
    """The size of every trace and the hidden states, after each step of a window.

    Returns a dict relation -> (norms, largest entries, largest number of the dtype), and a dict of
    the hidden states over time by position in the carry.
    """

    def entries(state) -> dict:
        trace = learner.first.written(jax.tree.leaves(params), state.trace, state.t)
        return {
            rel.key: list(map(_numbers, jax.tree.leaves(trace[rel.key])))
            for rel in graph.hidden_param_op_relations
            if rel.key in trace
        }

    def step(state, x):
        state = learner.step(params, state, *x)[1]
        states = graph.program.apart(jax.tree.leaves(state.carry))
        norms = {k: _norm(a) for k, a in entries(state).items()}
        return state, (norms, {c: states[c] for c in graph.program.hidden})

    norms, hidden = jax.jit(lambda state, xs: jax.lax.scan(step, state, xs)[1])(state, xs)
    limits = {
        k: min(float(jnp.finfo(a.dtype).max) for a in es)
        for k, es in jax.eval_shape(entries, state).items()
    }
    return {k: (*np.asarray(n, float).T, limits[k]) for k, n in norms.items()}, {
        c: np.asarray(h) for c, h in hidden.items()
    }


def _numbers(stored):
    """The numbers of a stored array; a trace in bfloat16 is stored as its bits."""
    return (
        jax.lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored
    )


def _norm(entries: list):
    """The norm and the largest entry of some arrays; the squares are scaled, so that they overflow
    no sooner than the entries.
    """
    wide = [jnp.abs(a).astype(jnp.promote_types(jnp.abs(a).dtype, jnp.float32)) for a in entries]
    largest = jnp.stack([a.max(initial=0) for a in wide]).max()
    by = jnp.where(largest > 0, largest, 1)
    return jnp.stack([by * jnp.sqrt(sum(((a / by) ** 2).sum() for a in wide)), largest])
