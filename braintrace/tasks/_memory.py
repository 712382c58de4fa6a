"""Copy memory and the adding problem."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from ._task import Batch, Task, check_whole, judged


def copy_memory(delay: int = 20, length: int = 10, symbols: int = 8) -> Task:
    """Copy memory: repeat ``length`` symbols ``delay`` steps after the last of them
    (Hochreiter & Schmidhuber, 1997; in this form Arjovsky et al., 2016, arXiv:1511.06464).

    Inputs are one-hot: the symbols, the blank, the marker; T = delay + 2 length. The first
    ``length`` steps show the symbols, each of ``symbols`` with equal chances, the last ``length``
    follow the marker and ask for them; all others are blank, and so are their targets. The score is
    the cross-entropy in nats, a mean over all steps. Who knows the times alone guesses the symbols:
    ``floor = length ln(symbols) / T``.

    Raises :class:`braintrace.errors.OptionError` for sizes that are no positive ints, or one
    symbol.

    >>> from braintrace import tasks
    >>> task = tasks.copy_memory(20)
    >>> task.steps, task.inputs, task.outputs, round(task.floor, 3)
    (40, 10, 9, 0.52)
    """
    check_whole('delay', delay)
    check_whole('length', length)
    check_whole('symbols', symbols, 2)
    steps, blank, marker = delay + 2 * length, symbols, symbols + 1
    recall = jnp.arange(steps) >= delay + length

    def draw(key: Array, batch_size: int, part: str) -> Batch:
        shown = jax.random.randint(key, (length, batch_size), 0, symbols)
        seen = jnp.full((steps, batch_size), blank).at[:length].set(shown)
        seen = seen.at[delay + length - 1].set(marker)
        wanted = jnp.full((steps, batch_size), blank).at[-length:].set(shown)
        return Batch(jax.nn.one_hot(seen, symbols + 2), wanted, jnp.ones(steps))

    certain = 50.0 * jax.nn.one_hot(blank, symbols + 1)
    guess = jnp.where(recall[:, None, None], -certain, certain)
    floor = length * math.log(symbols) / steps
    name = f'copy {delay}' if length == 10 else f'copy {length} over {delay}'
    return judged(name, (steps, symbols + 2, symbols + 1), draw, 'nats', floor, guess)


def adding(steps: int = 100) -> Task:
    """The adding problem: the sum of the two numbers that are marked (Hochreiter & Schmidhuber,
    1997; as in Le et al., 2015, arXiv:1504.00941).

    Inputs are a number, uniform in [0, 1), and a mark, 1 at one step of each half. The target is
    the sum, asked for at the last step. The score is the mean squared error. Who always answers 1,
    the mean, has the variance of a sum of two uniform numbers: ``floor = 2 / 12``.

    Raises :class:`braintrace.errors.OptionError` unless ``steps`` is an int of at least 2.

    >>> from braintrace import tasks
    >>> round(tasks.adding(100).floor, 4)
    0.1667
    """
    check_whole('steps', steps, 2)
    half = steps // 2

    def draw(key: Array, batch_size: int, part: str) -> Batch:
        of_numbers, of_first, of_second = jax.random.split(key, 3)
        numbers = jax.random.uniform(of_numbers, (steps, batch_size))
        first = jax.random.randint(of_first, (batch_size,), 0, half)
        second = jax.random.randint(of_second, (batch_size,), half, steps)
        marks = jax.nn.one_hot(first, steps, axis=0) + jax.nn.one_hot(second, steps, axis=0)
        total = (numbers * marks).sum(0)
        ys = jnp.broadcast_to(total[None, :, None], (steps, batch_size, 1))
        last = jnp.zeros(steps).at[-1].set(1)
        return Batch(jnp.stack([numbers, marks], -1), ys, last)

    return judged(f'adding {steps}', (steps, 2, 1), draw, 'mse', 1 / 6, [1.0])
