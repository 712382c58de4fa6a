"""The Mackey-Glass equation as a stream."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..errors import OptionError
from ._task import Batch, Task, check_whole, over_steps, squared

BETA, GAMMA, POWER = 0.2, 0.1, 10
SHORTEST, LONGEST = 17, 300  # of delays: e^(gamma tau) has to fit a float32
FINE = 10  # steps of the solver in a unit of time
WARM = 500  # units of time before a stream begins
LEVEL, SIZES, ROUND = 0.9, (0.1, 0.4), 50  # of the sines that are the histories
LANES, LONG = 64, 3000  # of the draw that measures the floor


def mackey_glass(steps: int = 10_000, ahead: int = 6, tau: int = 17) -> Task:
    """Predict a chaotic series (Mackey & Glass, 1977, Science 197:287).

    ``dx/dt = beta x(t - tau) / (1 + x(t - tau)^10) - gamma x``, beta = 0.2, gamma = 0.1, 500 units
    of time behind a sine of random size and phase. A step is a unit; the input is x, scaled to a
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
        second_half = (jnp.arange(steps) >= steps // 2).astype(float)
        return Batch(values[:-ahead], values[ahead:], second_half)

    score, floor = over_steps(squared), 1 - rho**2
    name, sizes = f'Mackey-Glass {tau}, {ahead} ahead', (steps, 1, 1)
    return Task(name, *sizes, draw, squared, score, 'mse', floor, lambda xs: rho * xs, stream=True)


def history(xp, drawn, tau):
    """The values from -tau to 0 (m + 1, lanes) of two numbers in [0, 1) for each lane."""
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
