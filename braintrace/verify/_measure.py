"""What the doctor measures over a window: what the loss reads of the past, norms of the trace."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import ETraceGraph, functional
from ._sequence import as_inputs, one_step, scalar, split_floats
from .cut import CutStep

__all__ = ['Mass', 'history_mass', 'trace_norms']


class Mass(NamedTuple):
    """Squared norms of the gradient's history; groups in rows, parameters in columns."""
    kept: np.ndarray
    dropped: np.ndarray


def history_mass(cell: Callable, cut: CutStep, params, carry, xs, ys, loss: Callable) -> Mass:
    """What the losses read of the past, ``sum_t dL^t/dh^{t-1} dh^{t-1}/dw``, group by group: the
    part that D_RTRL keeps, and the rest.

    Both factors are taken along every path and along the paths that are kept; in each product no
    state's unit is left.
    """
    weights, groups = split_floats(params), cut.graph.hidden_groups
    of_group = [g for g, group in enumerate(groups) for _ in group.states]

    def carries(step, values):
        """The carry in front of every step."""
        w = weights.rebuild(values)
        return jax.lax.scan(lambda c, x: (step(w, c, x), c), carry, xs)[1]

    def states(step, values):
        """The hidden states in front of every step."""
        return jax.vmap(cut.hidden)(carries(step, values))

    def signals(outputs, before):
        def one(at):
            c, x, y = at
            read = jax.grad(lambda c: scalar(loss(outputs(params, c, x), y)), allow_int=True)
            return cut.hidden(read(c))
        return jax.lax.map(one, (before, xs, ys))

    def history(step, outputs):
        """The gradients through the old states of each group, stacked."""
        before, back = jax.vjp(lambda values: states(step, values), weights.values)
        read = signals(outputs, jax.lax.stop_gradient(carries(step, weights.values)))

        def through(group):
            return back([jnp.where(group == g, s, 0).astype(h.dtype)
                         for g, s, h in zip(of_group, read, before)])[0]
        return jax.lax.map(through, jnp.arange(len(groups)))

    def squares(grads):
        return jnp.stack([jnp.sum(jnp.abs(g) ** 2, range(1, g.ndim)) for g in grads], -1)

    def measure():
        whole = history(lambda w, c, x: one_step(cell, w, c, x)[1],
                        lambda w, c, x: one_step(cell, w, c, x)[0])
        kept = history(cut.state_step, cut.loss_step)
        return squares(kept), squares(jax.tree.map(jnp.subtract, whole, kept))
    return Mass(*(np.asarray(m, float) for m in jax.jit(measure)()))


def trace_norms(learner: functional.OnlineLearner, graph: ETraceGraph, params, state, xs):
    """For each relation the norm and the largest entry of its trace after every step, the largest number that fits; and the new states.

    A dict relation -> (norms, largest entries, limit), and a dict of the hidden states over time, by position in the carry.
    """
    weights = {op.key: {n: jnp.zeros(a.shape, a.dtype) for n, a in op.weight_avals.items()} for op in graph.ops}

    def entries(state) -> dict:
        trace = learner.rule.written(graph, state.trace, weights, state.t)
        return {rel.key: list(map(_numbers, jax.tree.leaves(trace[rel.key]))) for rel in graph.hidden_param_op_relations}

    def step(state, x):
        state = learner.step(params, state, *as_inputs(x))[1]
        states = graph.program.apart(jax.tree.leaves(state.carry))
        norms = {k: _norm(a) for k, a in entries(state).items()}
        return state, (norms, {c: states[c] for c in graph.program.hidden})

    norms, hidden = jax.jit(lambda state, xs: jax.lax.scan(step, state, xs)[1])(state, xs)
    limits = {k: min(float(jnp.finfo(a.dtype).max) for a in es) for k, es in jax.eval_shape(entries, state).items()}
    return {k: (*np.asarray(n, float).T, limits[k]) for k, n in norms.items()}, {c: np.asarray(h) for c, h in hidden.items()}


def _numbers(stored):
    """A stored array as numbers: bfloat16 is kept as its bits."""
    return jax.lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored


def _norm(entries: list):
    """The norm and the largest entry of some arrays; the norm is scaled, so that it fits where the entries do."""
    wide = [jnp.abs(a).astype(jnp.promote_types(jnp.abs(a).dtype, jnp.float32)) for a in entries]
    largest = jnp.stack([a.max(initial=0) for a in wide]).max()
    by = jnp.where(largest > 0, largest, 1)
    return jnp.stack([by * jnp.sqrt(sum(((a / by) ** 2).sum() for a in wide)), largest])
