"""What the doctor measures over a window: masses of Jacobians, norms of the trace."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from .. import ETraceGraph, functional
from ._activity import root_mean_square
from ._sequence import as_inputs, one_step, split_floats
from .cut import CutStep

__all__ = ['Mass', 'jacobian_mass', 'trace_norms']

EXACT = 256              # rows of the Jacobian up to which each one is computed
PROBES = 32              # random combinations of a group's rows beyond that


class Mass(NamedTuple):
    """Squared norms of ``dh^T/dw``, rows by group and columns by float leaf of the parameters: what is kept, and what is dropped."""
    kept: np.ndarray
    dropped: np.ndarray


def jacobian_mass(cell: Callable, cut: CutStep, params, carry, xs, hidden: dict[int, np.ndarray]) -> Mass:
    """The Jacobian of the last hidden states, split into its part along the paths that D_RTRL keeps and the rest.

    Each state is divided by its root mean square over the window, so that its unit has no say; ``hidden``: as of :func:`trace_norms`.
    """
    weights = split_floats(params)
    units = [root_mean_square(hidden[c]) for group in cut.graph.hidden_groups for c in group.states]

    def last(step):
        def run(values):
            w = weights.rebuild(values)
            end = cut.hidden(jax.lax.scan(lambda c, x: (step(w, c, x), None), carry, xs)[0])
            return [h / jnp.asarray(unit, h.dtype) for h, unit in zip(end, units, strict=True)]
        return run

    def measure(rows):
        end, whole = jax.vjp(last(lambda w, c, x: one_step(cell, w, c, x)[1]), weights.values)
        _, kept = jax.vjp(last(cut.state_step), weights.values)
        unravel = ravel_pytree(end)[1]

        def row(v):
            a, b = whole(unravel(v))[0], kept(unravel(v))[0]
            return [jnp.stack([jnp.sum(jnp.abs(g) ** 2) for g in gs]) for gs in (b, jax.tree.map(jnp.subtract, a, b))]
        return jax.lax.map(row, rows)

    sizes = [group.num_state * int(np.prod(group.shape)) for group in cut.graph.hidden_groups]
    rows, group, scale = _rows(sizes)
    dtype = jnp.result_type(*cut.hidden(carry))
    kept, dropped = (np.asarray(m, float) * scale[:, None] for m in jax.jit(measure)(jnp.asarray(rows, dtype)))
    return Mass(*(np.stack([m[group == g].sum(0) for g in range(len(sizes))]) for m in (kept, dropped)))


def _rows(sizes: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Combinations of the Jacobian's rows, the group of each and its weight in a sum of squares."""
    total, ends = sum(sizes), np.cumsum(sizes)
    group = np.repeat(np.arange(len(sizes)), sizes)
    if total <= EXACT:
        return np.eye(total), group, np.ones(total)
    rng = np.random.default_rng(0)
    rows = np.zeros((PROBES * len(sizes), total))
    for g, (end, size) in enumerate(zip(ends, sizes)):
        rows[g * PROBES:(g + 1) * PROBES, end - size:end] = rng.choice([-1., 1.], (PROBES, size))
    return rows, np.repeat(np.arange(len(sizes)), PROBES), np.full(len(rows), 1 / PROBES)


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
