"""Ops that forward by their own weights and send the error back through others."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph, OpUse


@jax.custom_jvp
def moving_with(value: jax.Array, made: jax.Array) -> jax.Array:
    """``value``, with the derivative of ``made``."""
    return value


moving_with.defjvp(lambda primals, tangents: (primals[0], tangents[1]))


def with_weights(op: OpUse, args: list, weights: Mapping) -> list:
    """The operands of an op, these weights in their places."""
    args = list(args)
    for name, k in op.slots.items():
        args[k] = weights[name]
    return args


def feedback_weights(
    graph: ETraceGraph, constants: Mapping, weights: Mapping, count: jax.Array | None
) -> dict[str, dict[str, jax.Array]]:
    """The weights of some ops through which errors go back, after ``count`` steps (None: 0)."""

    def one(key: str, name: str, number: int):
        drawn = constants[number]
        if graph.fading is None:
            return drawn
        steps = jnp.asarray(0 if count is None else count, jnp.result_type(float))
        left = (1 - graph.fading) ** steps
        own = jax.lax.stop_gradient(weights[key][name])
        return own + jnp.asarray(left, drawn.dtype) * drawn

    return {
        key: {name: one(key, name, number) for name, number in numbers.items()}
        for key, numbers in graph.feedback.items()
    }
