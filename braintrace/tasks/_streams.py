"""Streams of sines and of noise, along which a learner updates its parameters while they go on."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from ..errors import OptionError
from ._task import Batch, Task, check_real, check_whole, over_steps, squared


def shifting_sine(
    steps: int = 10_000, shift_every: int = 1000, periods: tuple[float, float] = (8, 32)
) -> Task:
    """Predict the next value of a sine whose frequency shifts.

    ``x_t = sin(phi_t)``, ``phi_t = phi_{t-1} + omega``; every ``shift_every`` steps a new omega is
    drawn, uniform between ``2 pi / periods[1]`` and ``2 pi / periods[0]``, each in radians a step.
    The target of a step is ``x_{t+1}``, which takes two values of the past and omega. The mask
    weighs the second half of the stream alone: a learner shows there what it has learnt on the way.
    The score is the mean squared error. Persistence, which answers ``x_t``, has ``E (sin(phi +
    omega) - sin(phi))^2 = 1 - E cos(omega)``, so ``floor = 1 - (sin b - sin a) / (b - a)`` for
    omega between a and b.

    Raises :class:`braintrace.errors.OptionError` for numbers of steps that are no positive ints and
    for periods that are not two rising numbers above 2.

    >>> from braintrace import tasks
    >>> task = tasks.shifting_sine(2000)
    >>> task.stream, round(task.floor, 4)
    (True, 0.1308)
    """
    check_whole('steps', steps)
    check_whole('shift_every', shift_every)
    if not isinstance(periods, tuple) or len(periods) != 2:
        raise OptionError(f'periods is {periods!r}; give a pair (shortest, longest).')
    check_real('the shortest period', periods[0], above=2)
    check_real('the longest period', periods[1], above=periods[0])
    low, high = 2 * math.pi / periods[1], 2 * math.pi / periods[0]

    def draw(key: Array, batch_size: int, part: str) -> Batch:
        of_omega, of_phase = jax.random.split(key)
        blocks = -(-(steps + 1) // shift_every)
        omega = jax.random.uniform(of_omega, (blocks, batch_size), minval=low, maxval=high)
        start = jax.random.uniform(of_phase, (batch_size,), maxval=2 * math.pi)
        angle = shift_every * omega % (2 * math.pi)  # of a whole block: small, as float32 is short
        first = start + jnp.cumsum(angle, 0) - angle
        phase = first[:, None] + jnp.arange(shift_every)[:, None] * omega[:, None]
        values = jnp.sin(phase).reshape(-1, batch_size, 1)[: steps + 1]
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


def drifting_filter(steps: int = 1_000_000, taps: int = 6, period: int = 400_000) -> Task:
    """Follow a filter of past noise whose weights turn slowly.

    ``y_t = sum_k w_k(t) x_{t-k}``, k = 1 ... ``taps``, of white normal noise x, with the unit
    vector ``w(t) = cos(a_t) u + sin(a_t) v``, ``a_t = 2 pi t / period``, in a plane of orthonormal
    u and v that is drawn for each lane. The mask weighs the second half of the stream alone: a
    learner has to forget what it has learnt first. The score is the mean squared error. The present
    input tells nothing about the target; who always says 0 has its variance: ``floor = 1``.

    Raises :class:`braintrace.errors.OptionError` for numbers of steps that are no positive ints,
    and for fewer than two taps.

    >>> from braintrace import tasks
    >>> task = tasks.drifting_filter()
    >>> task.stream, task.steps, task.floor
    (True, 1000000, 1.0)
    """
    check_whole('steps', steps)
    check_whole('taps', taps, 2)
    check_whole('period', period)

    def draw(key: Array, batch_size: int, part: str) -> Batch:
        of_noise, of_plane = jax.random.split(key)
        noise = jax.random.normal(of_noise, (steps + taps, batch_size))
        plane = jnp.linalg.qr(jax.random.normal(of_plane, (batch_size, taps, 2)))[0]
        past = [noise[taps - k : taps - k + steps] for k in range(1, taps + 1)]
        along, across = (
            sum(plane[:, k, axis] * values for k, values in enumerate(past)) for axis in (0, 1)
        )
        turned = jnp.arange(steps) % period  # an int: a float32 of a long stream has no turns left
        angle = (turned * (2 * math.pi / period))[:, None]
        ys = jnp.cos(angle) * along + jnp.sin(angle) * across
        second_half = (jnp.arange(steps) >= steps // 2).astype(float)
        return Batch(noise[taps:, :, None], ys[..., None], second_half)

    def trivial(xs: Array) -> Array:
        return jnp.zeros_like(xs)

    score, name = over_steps(squared), 'drifting filter'
    return Task(name, steps, 1, 1, draw, squared, score, 'mse', 1.0, trivial, stream=True)
