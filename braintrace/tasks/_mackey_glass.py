"""The Mackey-Glass equation as a stream."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ._task import Batch, Task, check_whole, over_steps, squared

__all__ = ['mackey_glass']

BETA, GAMMA, POWER = 0.2, 0.1, 10
FINE = 10  # steps of the solver in a unit of time
WARM = 500  # units of time before a stream begins
LEVEL, SIZES, ROUND = 0.9, (0.1, 0.4), 50  # of the sines that are the histories
LANES, LONG = 64, 3000  # of the draw that measures the floor


def mackey_glass(steps: int = 10_000, ahead: int = 6, tau: int = 17) -> Task:
    """Predict a chaotic series (Mackey & Glass, 1977, Science 197:287).

    ``dx/dt = beta x(t - tau) / (1 + x(t - tau)^10) - gamma x``, beta = 0.2, gamma = 0.1, with
    sines of random size and phase as histories, after 500 units of time. A step is a unit; the input
    is x, scaled to a mean of 0 and a variance of 1, and the target its value ``ahead`` steps later.
    The mask weighs the second half of the stream alone. The score is the mean squared error, in
    units of the variance. The best linear guess from the present value alone, ``rho x_t``, is
    better than persistence and than the mean: ``floor = 1 - rho^2``. ``rho``, the correlation of
    x_t and x_{t + ahead}, has no closed form; it is measured, as are mean and variance, over 64
    series of 3000 steps, the same in each process.

    The solver is exact in the linear term and takes the delayed one by the trapezoidal rule on a
    grid of a tenth of a unit. A random reservoir predicts this series well (Jaeger & Haas, 2004,
    Science 304:78): compare with a learner that trains its readout alone.

    Raises :class:`braintrace.OptionError` for sizes that are no positive ints, and for a ``tau``
    below 17, with which the series is not chaotic.

    >>> from braintrace import tasks
    >>> task = tasks.mackey_glass(2000)
    >>> task.stream, round(task.floor, 2)
    (True, 0.56)
    """
    check_whole('steps', steps)
    check_whole('ahead', ahead)
    check_whole('tau', tau, 17)
    mean, deviation, rho = measured(tau, ahead)
    warm, turns = WARM // tau, -(-(steps + ahead) // tau)
    decay, weights = (jnp.asarray(a, jnp.float32) for a in solver(tau))

    def draw(key: Array, batch: int, part: str) -> Batch:
        def turn(values: Array, _: None) -> tuple[Array, Array]:
            values = later(values, decay, weights)
            return values, values[FINE::FINE]

        start = history(jnp, jax.random.uniform(key, (2, batch)), tau)
        series = jax.lax.scan(turn, start, length=warm + turns)[1][warm:]
        values = (series.reshape(-1, batch, 1)[: steps + ahead] - mean) / deviation
        second_half = (jnp.arange(steps) >= steps // 2).astype(float)
        return Batch(values[:-ahead], values[ahead:], second_half)

    score, floor = over_steps(squared), 1 - rho**2
    name, sizes = f'Mackey-Glass {tau}, {ahead} ahead', (steps, 1, 1)
    return Task(name, *sizes, draw, squared, score, 'mse', floor, lambda xs: rho * xs, stream=True)


@functools.cache
def solver(tau: int) -> tuple[np.ndarray, np.ndarray]:
    """``decay`` (m + 1, 1) and ``weights`` (m + 1, m + 1) that advance m + 1 values by tau.

    ``x(t + k h) = e^(-gamma k h) x(t) + int_0^(k h) e^(-gamma (k h - s)) f(x(t + s - tau)) ds``,
    and the delayed values on that interval are all in the history: the method of steps.
    """
    ticks = np.arange(tau * FINE + 1)
    since = (ticks[:, None] - ticks) / FINE
    weights = np.where(since >= 0, np.exp(-GAMMA * since.clip(0)), 0.0) / FINE
    weights[:, 0] /= 2
    np.fill_diagonal(weights, weights.diagonal() / 2)
    weights[0] = 0
    return np.exp(-GAMMA * ticks / FINE)[:, None], weights


def history(xp, drawn, tau):
    """The values from -tau to 0 (m + 1, lanes) of two numbers in [0, 1) for each lane."""
    size = SIZES[0] + (SIZES[1] - SIZES[0]) * drawn[0]
    ticks = np.arange(tau * FINE + 1)[:, None] / FINE
    return LEVEL + size * xp.sin(2 * np.pi * (ticks / ROUND + drawn[1]))


def later(past, decay, weights):
    """The values from t to t + tau (m + 1, lanes), of those from t - tau to t, of NumPy or JAX."""
    return decay * past[-1] + weights @ (BETA * past / (1 + past**POWER))


@functools.cache
def measured(tau: int, ahead: int) -> tuple[float, float, float]:
    """Mean, standard deviation, and the correlation with the value ``ahead`` units later."""
    rng = np.random.default_rng(0)
    now, series = history(np, rng.random((2, LANES)), tau), []
    for _ in range((WARM + LONG + ahead) // tau + 1):
        now = later(now, *solver(tau))
        series.append(now[FINE::FINE])
    values = np.concatenate(series)[WARM:]
    mean, deviation = values.mean(), values.std()
    scaled = (values - mean) / deviation
    return float(mean), float(deviation), float((scaled[:-ahead] * scaled[ahead:]).mean())
