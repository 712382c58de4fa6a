"""Streams, along which a learner updates its parameters while they go on."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from .._errors import OptionError
from ._task import Batch, Task, check_real, check_whole, over_steps, squared

__all__ = ['shifting_sine']


def shifting_sine(
    steps: int = 10_000, every: int = 1000, periods: tuple[float, float] = (8, 32)
) -> Task:
    """Predict the next value of a sine whose frequency shifts.

    ``x_t = sin(phi_t)``, ``phi_t = phi_{t-1} + omega``; every ``every`` steps a new omega is drawn,
    uniform between ``2 pi / periods[1]`` and ``2 pi / periods[0]``, each in radians a step. The
    target of a step is ``x_{t+1}``, which takes two values of the past and omega. The mask weighs
    the second half of the stream alone: a learner shows there what it has learnt on the way. The
    score is the mean squared error. Persistence, which answers ``x_t``, has ``E (sin(phi + omega) -
    sin(phi))^2 = 1 - E cos(omega)``, so ``floor = 1 - (sin b - sin a) / (b - a)`` for omega between
    a and b.

    Raises :class:`braintrace.OptionError` for numbers of steps that are no positive ints and for
    periods that are not two rising numbers above 2.

    >>> from braintrace import tasks
    >>> task = tasks.shifting_sine(2000)
    >>> task.stream, round(task.floor, 4)
    (True, 0.1308)
    """
    check_whole('steps', steps)
    check_whole('every', every)
    if not isinstance(periods, tuple) or len(periods) != 2:
        raise OptionError(f'periods is {periods!r}; give a pair (shortest, longest).')
    check_real('the shortest period', periods[0], above=2)
    check_real('the longest period', periods[1], above=periods[0])
    low, high = 2 * math.pi / periods[1], 2 * math.pi / periods[0]

    def draw(key: Array, batch: int, part: str) -> Batch:
        of_omega, of_phase = jax.random.split(key)
        blocks = -(-(steps + 1) // every)
        omega = jax.random.uniform(of_omega, (blocks, batch), minval=low, maxval=high)
        start = jax.random.uniform(of_phase, (batch,), maxval=2 * math.pi)
        angle = every * omega % (2 * math.pi)  # of a whole block: small, as float32 is short
        first = start + jnp.cumsum(angle, 0) - angle
        phase = first[:, None] + jnp.arange(every)[:, None] * omega[:, None]
        values = jnp.sin(phase).reshape(-1, batch, 1)[: steps + 1]
        second_half = (jnp.arange(steps) >= steps // 2).astype(float)
        return Batch(values[:-1], values[1:], second_half)

    floor = 1 - (math.sin(high) - math.sin(low)) / (high - low)
    score = over_steps(squared)
    return Task(
        'shifting sine',
        *(steps, 1, 1),
        draw,
        squared,
        score,
        'mse',
        floor,
        lambda xs: xs,
        stream=True,
    )
