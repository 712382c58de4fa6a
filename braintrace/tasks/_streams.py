"""Streams of sines, of noise and of chaos, along which a learner updates its parameters while they
go on.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..errors import OptionError
from ._task import Batch, Task, check_real, check_whole, judged


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
        return Batch(values[:-1], values[1:], second_half(steps))

    floor = 1 - (math.sin(high) - math.sin(low)) / (high - low)
    same = lambda xs: xs
    return judged('shifting sine', (steps, 1, 1), draw, 'mse', floor, same, stream=True)


def drifting_filter(steps: int = 1_000_000, taps: int = 6, period: int = 400_000) -> Task:
    """Follow a filter of past noise whose weights turn slowly.

    ``y_t = sum_k w_k(t) x_{t-k}``, k = 1 ... ``taps``, of white normal noise x, with the unit
    vector ``w(t) = cos(a_t) u + sin(a_t) v``, ``a_t = 2 pi t / period``, in a plane of orthonormal
    u and v that is drawn for each sample. The mask weighs the second half of the stream alone: a
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
        return Batch(noise[taps:, :, None], ys[..., None], second_half(steps))

    return judged('drifting filter', (steps, 1, 1), draw, 'mse', 1.0, [0.0], stream=True)


def second_half(steps: int) -> Array:
    """The mask of a stream: what a learner has learnt on the way shows there."""
    return (jnp.arange(steps) >= steps // 2).astype(float)


BETA, GAMMA, POWER = 0.2, 0.1, 10
SHORTEST, LONGEST = 17, 300  # of delays: e^(gamma tau) has to fit a float32
FINE = 10  # steps of the solver in a unit of time
WARM = 500  # units of time before a stream begins
LEVEL, SIZES, ROUND = 0.9, (0.1, 0.4), 50  # of the sines that are the histories
LANES, LONG = 64, 3000  # of the draw that measures the floor


def mackey_glass(steps: int = 10_000, ahead: int = 6, tau: int = 17) -> Task:
    """Predict a chaotic series (Mackey & Glass, 1977, Science 197:287).

    ``dx/dt = beta x(t - tau) / (1 + x(t - tau)^10) - gamma x``, beta = 0.2, gamma = 0.1, 500 units
    of time after a sine of random size and phase. A step is a unit; the input is x, scaled to a
    mean of 0 and a variance of 1, and the target its value ``ahead`` steps later. The mask weighs
    the second half of the stream alone. The score is the mean squared error, in units of the
    variance. The best linear guess from the present value alone, ``rho x_t``, is better than
    persistence and than the mean: ``floor = 1 - rho^2``. ``rho``, the correlation of x_t and
    x_{t + ahead}, has no closed form; it is measured, as are mean and variance, over 64 series of
    3000 steps, the same in each process.

    The solver is exact in the linear term and takes the delayed one by the trapezoidal rule on a
    grid of a tenth of a unit. A random reservoir predicts this series well (Jaeger & Haas, 2004,
    Science 304:78): compare with a learner that trains its readout alone.

    Raises :class:`braintrace.errors.OptionError` for sizes that are no positive ints, and for a
    ``tau`` below 17, where the series is not chaotic, or above 300.

    >>> from braintrace import tasks
    >>> task = tasks.mackey_glass(2000)
    >>> task.stream, round(task.floor, 2)
    (True, 0.56)
    """
    check_whole('steps', steps)
    check_whole('ahead', ahead)
    check_whole('tau', tau)
    if not SHORTEST <= tau <= LONGEST:
        raise OptionError(f'tau is {tau}; give {SHORTEST} to {LONGEST}: chaos begins at 17.')
    mean, deviation, rho = measured(tau, ahead)
    warm, turns = WARM // tau, -(-(steps + ahead) // tau)

    def draw(key: Array, batch_size: int, part: str) -> Batch:
        def turn(values: Array, _: None) -> tuple[Array, Array]:
            values = later(jnp, values)
            return values, values[FINE::FINE]

        start = history(jnp, jax.random.uniform(key, (2, batch_size)), tau)
        series = jax.lax.scan(turn, start, length=warm + turns)[1][warm:]
        values = (series.reshape(-1, batch_size, 1)[: steps + ahead] - mean) / deviation
        return Batch(values[:-ahead], values[ahead:], second_half(steps))

    name, linear = f'Mackey-Glass {tau}, {ahead} ahead', lambda xs: rho * xs
    return judged(name, (steps, 1, 1), draw, 'mse', 1 - rho**2, linear, stream=True)


def history(xp, drawn, tau):
    """The values from -tau to 0 (m + 1, batch) of two numbers in [0, 1) for each sample."""
    size = SIZES[0] + (SIZES[1] - SIZES[0]) * drawn[0]
    ticks = np.arange(tau * FINE + 1)[:, None] / FINE
    return LEVEL + size * xp.sin(2 * np.pi * (ticks / ROUND + drawn[1]))


def later(xp, past):
    """The values from t to t + tau, of those from t - tau to t: the method of steps.

    ``x(t + s) = e^(-gamma s) (x(t) + int_0^s e^(gamma r) f(x(t + r - tau)) dr)``, and the delayed
    values on that interval are all in the past.
    """
    growth = np.exp(GAMMA / FINE * np.arange(len(past)))[:, None].astype(past.dtype)
    flow = growth * BETA * past / (1 + past**POWER)
    areas = xp.cumsum((flow[1:] + flow[:-1]) / 2 / FINE, 0)
    return (past[-1] + xp.concatenate([xp.zeros_like(past[:1]), areas])) / growth


@functools.cache
def measured(tau: int, ahead: int) -> tuple[float, float, float]:
    """Mean, standard deviation, and the correlation with the value ``ahead`` units later."""
    rng = np.random.default_rng(0)
    now, series = history(np, rng.random((2, LANES)), tau), []
    for _ in range((WARM + LONG + ahead) // tau + 1):
        now = later(np, now)
        series.append(now[FINE::FINE])
    values = np.concatenate(series)[WARM:]
    mean, deviation = values.mean(), values.std()
    scaled = (values - mean) / deviation
    return float(mean), float(deviation), float((scaled[:-ahead] * scaled[ahead:]).mean())
