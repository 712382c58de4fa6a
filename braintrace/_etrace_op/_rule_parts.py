"""Parts of trace rules that the built-in primitives share."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def add_bias(y, bias):
    """Add a bias along the last axis of ``y``."""
    return y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)


def bias_at(index: int, **names: int) -> Callable[[dict], dict[str, int]]:
    """Make a ``trainable_invars_fn`` of the operands ``names``, and of a bias at ``index`` where
    ``has_bias`` is set.
    """

    def trainable_invars(params: dict) -> dict[str, int]:
        return {**names, 'bias': index} if params.get('has_bias', False) else dict(names)

    return trainable_invars


def vjp_of(impl: Callable, trainable_invars: Callable[[dict], dict[str, int]]) -> Callable:
    """Make the ``xy_to_dw`` of ``impl(x, *trainables)``: its VJP, which sums over a batch."""

    def xy_to_dw(x, hidden_dim, weights, **params):
        invars = trainable_invars(params)
        order = sorted(invars, key=invars.__getitem__)

        def forward(weights):
            return impl(x, *(weights[name] for name in order), **params)

        return jax.vjp(forward, weights)[1](hidden_dim)[0]

    return xy_to_dw


def over_columns(hidden_dim, trace):
    """The ``yw_to_w`` of a bias and of matrices whose last axis is y's."""
    return {
        name: value * (hidden_dim if name == 'bias' else jnp.expand_dims(hidden_dim, -2))
        for name, value in trace.items()
    }


def zeros_trace(shape, var, num_hidden_state: int):
    """Zeros of ``shape`` and a last axis of states, in a variable's dtype."""
    return jnp.zeros((*shape, num_hidden_state), var.aval.dtype)


def parameter_trace(batched: bool) -> Callable:
    """Make the ``init_drtrl`` of a trace with the parameters' shapes for each sample."""

    def init_drtrl(x_var, y_var, weight_vars, num_hidden_state):
        batch = x_var.aval.shape[:1] if batched else ()
        return {
            name: zeros_trace((*batch, *var.aval.shape), var, num_hidden_state)
            for name, var in weight_vars.items()
        }

    return init_drtrl


def output_trace(x_var, y_var, weight_vars, num_hidden_state):
    """The ``init_pp`` of every op: zeros of y's shape and a last axis of states."""
    return zeros_trace(y_var.aval.shape, y_var, num_hidden_state)
