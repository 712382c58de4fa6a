"""Parts of trace rules, and whole rules derived from an op's function alone in the three layouts of
a trace.

``parameter``: an entry for each entry of a trainable. It is exact where such an entry feeds one
element of y per sample; ``places`` say which one. ``effective``: an entry for each pair of an
element of x and an element of y, for an op that is linear in x; the gradient is pulled back from
there. ``position``: an entry for each pair of an element of y and an entry of a trainable, which is
the whole Jacobian dy/dw; it is exact for every op, and the largest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# parts that the built-in primitives share ---------------------------------------------------------


def add_bias(y, bias):
    """Add a bias along the last axis of ``y``."""
    return y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)


def bias_at(index: int, **names: int) -> Callable[[dict], dict[str, int]]:
    """Make a ``trainable_invars_fn`` of the operands ``names``, and of a bias at ``index`` where
    ``has_bias`` is set.
    """
    return lambda params: {**names, 'bias': index} if params.get('has_bias', False) else {**names}


def samples(fn: Callable) -> Callable:
    """Map ``fn``, a function of one sample, over a batch in axis 0 of x and of y."""

    def impl(x, *operands, **params):
        axes = (0, *(None for _ in operands))
        return jax.vmap(functools.partial(fn, **params), in_axes=axes)(x, *operands)

    return impl


def zeros_trace(shape, var, num_hidden_state: int):
    """Zeros of ``shape`` and a last axis of states, in a variable's dtype."""
    return jnp.zeros((*shape, num_hidden_state), var.aval.dtype)


def output_trace(x_var, y_var, weight_vars, num_hidden_state):
    """The ``init_pp`` of every op: zeros of y's shape and a last axis of states."""
    return zeros_trace(y_var.aval.shape, y_var, num_hidden_state)


# a trace of the parameter's shape -----------------------------------------------------------------


def parameter_trace(batched: bool) -> Callable:
    """Make the ``init_drtrl`` of a trace with the parameters' shapes for each sample."""

    def init_drtrl(x_var, y_var, weight_vars, num_hidden_state):
        batch = x_var.aval.shape[:1] if batched else ()
        return {
            name: zeros_trace((*batch, *var.aval.shape), var, num_hidden_state)
            for name, var in weight_vars.items()
        }

    return init_drtrl


def over_columns(hidden_dim, trace, **params):
    """The ``yw_to_w`` of a bias and of matrices whose last axis is y's."""
    return {
        name: value * (hidden_dim if name == 'bias' else jnp.expand_dims(hidden_dim, -2))
        for name, value in trace.items()
    }


def at_places(hidden_dim, trace, *, places, **params):
    """The ``yw_to_w`` that spreads factors at y to the entries by the equation's ``places``."""
    return {
        name: e * (hidden_dim if name == 'bias' else places.spread(name, hidden_dim))
        for name, e in trace.items()
    }


# a trace for each pair of an element of y and an entry of a trainable -----------------------------


def position_rules(of_weights: Callable, batched: bool) -> dict[str, Any]:
    """Trace rules of ``of_weights(x, weights, **params) -> y``, which has a batch in front where
    ``batched``. The layout is ``(batch, *y, size)``.
    """

    def instant_drtrl(x, hidden_dim, weights, **params):
        y, pull = jax.vjp(lambda w: of_weights(x, w, **params), weights)
        # One row of the basis for each element of y, scaled by that element's factor.
        d = hidden_dim.astype(y.dtype)
        basis = jnp.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape) * d
        entry = {
            name: g.reshape(*y.shape, weights[name].size)
            for name, g in jax.vmap(pull)(basis)[0].items()
        }
        return {name: e.sum(0) for name, e in entry.items()} if batched else entry

    def yw_to_w(hidden_dim, trace, **params):
        return {name: e * hidden_dim[..., None] for name, e in trace.items()}

    def solve_drtrl(signal, trace, weights, **params):
        found = {}
        for name, e in yw_to_w(signal, trace).items():
            flat, weight = e.sum(tuple(range(e.ndim - 1))), weights[name]
            if flat.size == weight.size:
                found[name] = flat.reshape(weight.shape)
                continue
            # The op saw the weight broadcast to y's shape: its gradient is the sum of the copies.
            copies = lambda w: jnp.broadcast_to(w, signal.shape)
            pull = jax.vjp(copies, weight.astype(flat.dtype))[1]
            found[name] = pull(flat.reshape(signal.shape))[0]
        return found

    def init_drtrl(x_var, y_var, weight_vars, num_hidden_state):
        y = y_var.aval.shape
        return {
            name: zeros_trace((*y, math.prod(w.aval.shape)), w, num_hidden_state)
            for name, w in weight_vars.items()
        }

    return {
        'instant_drtrl': instant_drtrl,
        'yw_to_w': yw_to_w,
        'solve_drtrl': solve_drtrl,
        'init_drtrl': init_drtrl,
    }


# a trace for each pair of an element of x and an element of y -------------------------------------


def effective_rules(fn: Callable, order: Callable, batched: bool) -> dict[str, Any]:
    """Trace rules of ``fn(x, *order(weights))``, a function of one sample that is linear in x.

    The layout is ``(batch, x size, y size)``. The first weight in the order of names, the holder,
    holds the trace for all weights; the traces of the others are empty. A bias is not part of
    ``fn``: it has a trace of y's shape.
    """

    def holder(names) -> str:
        return min(name for name in names if name != 'bias')

    def dtypes(weights: dict) -> dict:
        # the holder's slot has the common dtype of all weights
        found = {name: w.dtype for name, w in weights.items()}
        common = jnp.result_type(*(dtype for name, dtype in found.items() if name != 'bias'))
        return found | {holder(weights): common}

    def instant_drtrl(x, hidden_dim, weights, *, places, **params):
        # For one sample this is the outer product of x and d; a batch is summed.
        lanes = math.prod(x.shape[: x.ndim - len(places.x)])
        x, d = x.reshape(lanes, math.prod(places.x)), hidden_dim.reshape(lanes, math.prod(places.y))
        entry = {name: jnp.zeros((0,), d.dtype) for name in weights}
        entry |= {holder(weights): x.T @ d, 'bias': d.sum(0).reshape(places.y)}
        return {name: entry[name].astype(dtype) for name, dtype in dtypes(weights).items()}

    def yw_to_w(hidden_dim, trace, *, places, **params):
        lead = hidden_dim.shape[: hidden_dim.ndim - len(places.y)]
        of_columns = hidden_dim.reshape(*lead, 1, math.prod(places.y))
        factors = {holder(trace): of_columns, 'bias': hidden_dim}
        return {name: e * factors[name] if name in factors else e for name, e in trace.items()}

    def solve_drtrl(signal, trace, weights, *, places, **params):
        scaled = yw_to_w(signal, trace, places=places)
        summed = {name: e.sum(0) if batched else e for name, e in scaled.items()}

        def matrix_of(weights: dict) -> jax.Array:
            # The rows of the matrix from x to y are ``fn`` of each unit vector.
            size, dtype = math.prod(places.x), jax.tree.leaves(weights)[0].dtype
            basis = jnp.eye(size, dtype=dtype).reshape(size, *places.x)
            rows = jax.vmap(lambda x: fn(x, *order(weights), **params))(basis)
            return rows.reshape(size, math.prod(places.y))

        own = {name: w for name, w in weights.items() if name != 'bias'}
        matrix, pull = jax.vjp(matrix_of, own)
        found = pull(summed[holder(weights)].astype(matrix.dtype))[0]
        return found | {name: e for name, e in summed.items() if name == 'bias'}

    def init_drtrl(x_var, y_var, weight_vars, num_hidden_state, *, places):
        lead = y_var.aval.shape[: len(y_var.aval.shape) - len(places.y)]
        shapes = {holder(weight_vars): (math.prod(places.x), math.prod(places.y)), 'bias': places.y}
        return {
            name: jnp.zeros((*lead, *shapes.get(name, (0,)), num_hidden_state), dtype)
            for name, dtype in dtypes({n: w.aval for n, w in weight_vars.items()}).items()
        }

    return {
        'instant_drtrl': instant_drtrl,
        'yw_to_w': yw_to_w,
        'solve_drtrl': solve_drtrl,
        'init_drtrl': init_drtrl,
    }
