"""Pattern generation: a target that follows from the time alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ._spikes import firing, steps_of
from ._task import Batch, Task, check_whole, over_steps, squared

LENGTH, PHASE = 1000, 200  # milliseconds of a sequence, and of each group's turn
UNITS = 4  # inputs of a group
TICK, NOISE = 0.1, 0.01  # spikes a millisecond of the group whose turn it is, and of the others
HERTZ = (1, 2, 3, 5)


def pattern_generation(dt: float = 5, outputs: int = 1, seed: int = 0) -> Task:
    """Generate one fixed pattern, a task like one that e-prop was shown on (Bellec et al., 2020,
    Nature Communications 11:3625); its numbers are our own choice.

    Each of the ``outputs`` is asked for a sum of sines of 1, 2, 3 and 5 Hz over one second, with
    amplitudes uniform in [0.5, 2] and phases uniform in [0, 2 pi], drawn once by ``seed`` for all
    sequences and parts and scaled to a mean of 0 and a variance of 1. The input is a clock: five
    groups of four Poisson inputs fire one after the other at 100 Hz, 200 ms each; all others fire
    at 10 Hz, here, so that sequences differ. An input of a step of ``dt`` milliseconds is 1 where a
    Poisson process has a spike within it. The score is the mean squared error, in units of the
    target's variance. Who always says the mean, 0, has ``floor = 1``.

    Raises :class:`braintrace.errors.OptionError` for a ``dt`` that does not divide 200 ms, and for
    ``outputs`` or a ``seed`` that are no such numbers.

    >>> from braintrace import tasks
    >>> task = tasks.pattern_generation()
    >>> task.steps, task.inputs, task.outputs
    (200, 20, 1)
    """
    check_whole('outputs', outputs)
    check_whole('seed', seed, 0)
    (turn,) = steps_of(dt, turn=PHASE)
    groups = LENGTH // PHASE
    steps = groups * turn
    target = jnp.asarray(pattern(steps, outputs, seed))
    clock = jax.nn.one_hot(jnp.arange(steps) // turn, groups).repeat(UNITS, -1)
    rates = NOISE + (TICK - NOISE) * clock

    def draw(key: Array, batch_size: int, part: str) -> Batch:
        xs = firing(key, jnp.broadcast_to(rates[:, None], (steps, batch_size, groups * UNITS)), dt)
        ys = jnp.broadcast_to(target[:, None], (steps, batch_size, outputs))
        return Batch(xs, ys, jnp.ones(steps))

    def trivial(xs: Array) -> Array:
        return jnp.zeros((*xs.shape[:2], outputs))

    score, sizes = over_steps(squared), (steps, groups * UNITS, outputs)
    return Task('pattern', *sizes, draw, squared, score, 'mse', 1.0, trivial)


def pattern(steps: int, outputs: int, seed: int) -> np.ndarray:
    """The target (steps, outputs)."""
    rng = np.random.default_rng(seed)
    size = rng.uniform(0.5, 2, (len(HERTZ), outputs))
    phase = rng.uniform(0, 2 * np.pi, (len(HERTZ), outputs))
    angle = 2 * np.pi * np.arange(steps)[:, None] / steps * HERTZ
    waves = (size * np.sin(angle[..., None] + phase)).sum(1)
    return ((waves - waves.mean(0)) / waves.std(0)).astype(np.float32)
