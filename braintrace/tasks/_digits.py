"""Handwritten digits as sequences."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..errors import OptionError
from ._spikes import firing
from ._task import Batch, Task, accuracy, entropy

SIDE, CLASSES = 8, 10
HELD = 30  # images of each class in the validation part, and in the test part
BY = {'rows': SIDE, 'pixels': 1, 'spikes': SIDE}  # pixels that are shown at once
UNITS, ROW, RATE = 5, 20, 0.1  # inputs of a pixel, milliseconds of a row, spikes a millisecond


def digits(by: Literal['rows', 'pixels', 'spikes'] = 'rows') -> Task:
    """The 1,797 images of 8 x 8 pixels of scikit-learn (Alpaydin & Kaynak, 1998), in [0, 1], read
    row by row, pixel by pixel, or as spikes; the class is asked for at the end.

    ``'rows'`` and ``'pixels'`` show numbers, and ask at the last step. ``'spikes'`` has steps of a
    millisecond: each row is shown for 20 ms, each of its pixels to five Poisson inputs that fire at
    100 Hz where it is brightest, and the class is asked for in 20 ms of silence behind the last
    row. Rows and not whole images, so that the early ones have to be kept: a logistic regression on
    the counts of all spikes has 93 % on the validation part, on those of the last row 45 %.

    The validation and the test part have 30 images of each class, the training part all others; a
    batch has no image twice. The score is the accuracy; who always says the same class has ``floor
    = 1 / 10`` in both held-out parts.

    Raises :class:`braintrace.errors.OptionError` for another ``by``, for a batch that is larger
    than its part, and an ``ImportError`` without scikit-learn.

    >>> from braintrace import tasks
    >>> made = [tasks.digits(by) for by in ('rows', 'pixels', 'spikes')]
    >>> [(task.steps, task.inputs) for task in made]
    [(8, 8), (64, 1), (180, 40)]
    """
    if by not in BY:
        raise OptionError(f"by is {by!r}; give 'rows', 'pixels' or 'spikes'.")
    width = BY[by]
    spikes = by == 'spikes'
    rows = SIDE * SIDE // width
    steps, inputs, asked = ((rows + 1) * ROW, width * UNITS, ROW) if spikes else (rows, width, 1)
    parts = images()

    def draw(key: Array, batch_size: int, part: str) -> Batch:
        pictures, labels = parts[part]
        if batch_size > len(labels):
            raise OptionError(
                f'batch_size is {batch_size}, but the {part} part has {len(labels)} images.'
            )
        chosen = jax.random.choice(key, len(labels), (batch_size,), replace=False)
        xs = jnp.asarray(pictures)[chosen].reshape(batch_size, rows, width).swapaxes(0, 1)
        if spikes:
            rates = RATE * xs.repeat(ROW, 0).repeat(UNITS, 2)
            silent = jnp.zeros((ROW, batch_size, inputs))
            xs = firing(jax.random.fold_in(key, 1), jnp.concatenate([rates, silent]), 1)
        ys = jnp.broadcast_to(jnp.asarray(labels)[chosen], (steps, batch_size))
        return Batch(xs, ys, (jnp.arange(steps) >= steps - asked).astype(float))

    def trivial(xs: Array) -> Array:
        return jnp.broadcast_to(jax.nn.one_hot(0, CLASSES), (*xs.shape[:2], CLASSES))

    name, sizes = f'digits by {by}', (steps, inputs, CLASSES)
    return Task(name, *sizes, draw, entropy, accuracy, 'accuracy', 1 / CLASSES, trivial)


@functools.cache
def images() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images (n, 64) and labels (n,) by part."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise ImportError(
            'the digits are those of scikit-learn, which is not installed; run '
            '`pip install "braintrace-online[examples]"`.'
        ) from e
    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    of_class = [order[labels[order] == digit] for digit in range(CLASSES)]
    cuts = {'test': (0, HELD), 'validation': (HELD, 2 * HELD), 'train': (2 * HELD, None)}
    chosen = {
        part: np.concatenate([those[slice(*cut)] for those in of_class])
        for part, cut in cuts.items()
    }
    return {part: (pictures[i] / SIDE / 2, labels[i]) for part, i in chosen.items()}
