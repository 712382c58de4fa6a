"""Rules that move within a step: none at all, and those whose trace moves inside of the loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar, final

import jax
import jax.numpy as jnp

from ..._rules import Network, OpGradients, Trace, WritesAtOnce, same_step

# inside of the loop -------------------------------------------------------------------------------
#
# Rules whose trace moves within each observed step, by random signs.


KEY = '(key)'  # beside a trace's relations: the random key of the next step


class Inside(WritesAtOnce):
    """A rule without pending steps: a loop over time carries its trace, and adds the gradient of
    each step.
    """

    inside: ClassVar[bool] = True
    probes: ClassVar[bool] = False
    remembers = True

    @final
    def close(self, network, trace, pending, t, read):
        return trace

    @final
    def gradient(self, network, before, after, step):
        _, _, signals = step.steps.all
        grads = same_step(network.graph, step.x, signals.dy, network.weights)
        c = jax.tree.map(lambda a: a[0], signals.c)
        return self.history(network, grads, before, c, step.t[0])

    @final
    def with_history(self, network, grads, trace, pending, lam, start):
        return self.history(network, grads, trace, lam, start.t)

    @abstractmethod
    def history(
        self, network: Network, grads: OpGradients, carried: Trace, lam: dict, t: jax.Array
    ) -> OpGradients:
        """``grads`` and what the signal of each group sends through the trace."""

    @final
    def window(self, network, trace, pending, window, keep):
        raise TypeError(f'the trace of {self.name} moves within each step, not after a window')

    @final
    def advance(self, network, trace, pending, window):
        raise TypeError(f'the trace of {self.name} moves within each step, not after a window')


def key_and_rest(trace: dict) -> tuple[jax.Array, Trace]:
    """The random key in a trace, and the trace without it."""
    return trace[KEY], {key: part for key, part in trace.items() if key != KEY}


def norms(arrays: Iterable[jax.Array], lanes: int | None) -> jax.Array:
    """The Euclidean norm of several arrays as one vector, for each lane along axis ``lanes``."""

    def squares(x: jax.Array) -> jax.Array:
        x = jnp.abs(x) ** 2
        return (
            x.sum()
            if lanes is None
            else jnp.moveaxis(x, lanes, 0).reshape(x.shape[lanes], -1).sum(1)
        )

    return jnp.sqrt(sum(map(squares, arrays)))


def balance(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``r`` and ``1/r`` with ``r^2 = b/a``: scaled by them, two factors with norms a and b are of
    one size. Both are 0 where a factor is zero, since then so is the product.
    """
    there = (a > 0) & (b > 0)
    a, b = jnp.where(there, a, 1), jnp.where(there, b, 1)
    return jnp.where(there, jnp.sqrt(b / a), 0), jnp.where(there, jnp.sqrt(a / b), 0)
