"""Poisson inputs of tasks whose times are milliseconds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from ..errors import OptionError
from ._task import check_real

CUE, GAP, RECALL = 100, 50, 150  # milliseconds of a cue, of the gap before it, and of the answer
GROUP = 10  # inputs of a group that fires as one
ACTIVE, NOISE = 0.04, 0.01  # spikes a millisecond


def steps_of(dt: float, **times: float) -> list[int]:
    """Steps of ``dt`` milliseconds in each of the named times, which it has to divide."""
    check_real('dt', dt)
    for name, time in times.items():
        if abs(time / dt - round(time / dt)) > 1e-6:
            raise OptionError(
                f'dt is {dt} ms, which does not divide a {name} of {time} ms; give one that does.'
            )
    return [round(time / dt) for time in times.values()]


def firing(key: Array, rates: Array, dt: float) -> Array:
    """1 where a Poisson process of these spikes a millisecond has one within ``dt``, else 0."""
    return jax.random.bernoulli(key, -jnp.expm1(-rates * dt)).astype(float)
