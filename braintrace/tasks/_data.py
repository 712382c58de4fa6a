"""Tasks of data that other packages bring: characters of a text, handwritten digits."""

from __future__ import annotations

import functools
import string
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..errors import OptionError
from ._spiking import firing
from ._task import Batch, Task, check_whole, different, judged

ALPHABET = string.ascii_letters + string.digits + string.punctuation + ' '
OTHER = len(ALPHABET)
CLASSES = OTHER + 1
BLOCK = 2000  # characters that stay together in one part
TURN = 10  # of so many blocks one is held out for validation, and one for the test


def characters(steps: int = 100) -> Task:
    """The next character of an English text: Python's reference manual as the standard library has
    it (``pydoc_data.topics``), about 350,000 characters.

    Topics are sorted, no paragraph comes twice, and white space is one blank. The 96 classes are
    the printable characters of ASCII and one for all others, the same in each version of Python;
    inputs are one-hot. Of each 20,000 characters 2,000 belong to the validation part, 2,000 to the
    test part. A sequence begins at a random place of its part. The score is the cross-entropy in
    nats a character, a mean over all steps. Who knows the frequencies of the training part alone
    has on the test part ``floor = - sum_c p_test(c) ln p_train(c)``, near 3.27: the text differs a
    little between versions of Python.

    Raises :class:`braintrace.errors.OptionError` unless ``steps`` is a positive int below the
    length of the held-out parts, and an ``ImportError`` where Python comes without ``pydoc_data``.

    >>> from braintrace import tasks
    >>> task = tasks.characters(50)
    >>> task.inputs, task.outputs, 3.2 < task.floor < 3.35
    (96, 96, True)
    """
    check_whole('steps', steps)
    parts = text()
    least = min(len(codes) for codes in parts.values())
    if steps >= least:
        raise OptionError(
            f'steps is {steps}, but the shortest part has {least} characters; give fewer steps.'
        )
    logits = np.log(frequencies(parts['train']))

    def draw(key: Array, batch_size: int, part: str) -> Batch:
        codes = parts[part]
        start = jax.random.randint(key, (batch_size,), 0, len(codes) - steps)
        shown = jnp.asarray(codes)[start + jnp.arange(steps + 1)[:, None]].astype(int)
        return Batch(jax.nn.one_hot(shown[:-1], CLASSES), shown[1:], jnp.ones(steps))

    share = np.bincount(parts['test'], minlength=CLASSES) / len(parts['test'])
    name, sizes = f'characters {steps}', (steps, CLASSES, CLASSES)
    return judged(name, sizes, draw, 'nats', -float(share @ logits), logits)


@functools.cache
def text() -> dict[str, np.ndarray]:
    """The class of each character, by part."""
    try:
        from pydoc_data.topics import topics
    except ImportError as e:
        raise ImportError(
            'the text is that of pydoc_data, a part of the standard library that this Python '
            'lacks; install all of it.'
        ) from e
    paragraphs = (p for name in sorted(topics) for p in topics[name].split('\n\n'))
    whole = ' '.join(dict.fromkeys(' '.join(p.split()) for p in paragraphs if p.strip()))
    number = dict(zip(ALPHABET, range(OTHER)))
    codes = np.array([number.get(c, OTHER) for c in whole], np.uint8)
    turn = np.arange(len(codes)) // BLOCK % TURN
    held = {'validation': turn == TURN // 2, 'test': turn == TURN - 1}
    train = ~(held['validation'] | held['test'])
    return {'train': codes[train]} | {part: codes[those] for part, those in held.items()}


def frequencies(codes: np.ndarray) -> np.ndarray:
    """The share of each class, with one more of each, so that none has a share of 0."""
    counts = np.bincount(codes, minlength=CLASSES) + 1
    return counts / counts.sum()


SIDE, DIGITS = 8, 10
HELD = 30  # images of each class in the validation part, and in the test part
BY = {'rows': SIDE, 'pixels': 1, 'spikes': SIDE}  # pixels that are shown at once
UNITS, ROW, RATE = 5, 20, 0.1  # inputs of a pixel, milliseconds of a row, spikes a millisecond


def digits(by: Literal['rows', 'pixels', 'spikes'] = 'rows') -> Task:
    """The 1,797 images of 8 x 8 pixels of scikit-learn (Alpaydin & Kaynak, 1998), in [0, 1], read
    row by row, pixel by pixel, or as spikes; the class is asked for at the end.

    ``'rows'`` and ``'pixels'`` show numbers, and ask at the last step. ``'spikes'`` has steps of a
    millisecond: each row is shown for 20 ms, each of its pixels to five Poisson inputs that fire at
    100 Hz where it is brightest, and the class is asked for in 20 ms of silence after the last
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
        chosen = different(key, batch_size, labels, part, 'images')
        xs = jnp.asarray(pictures)[chosen].reshape(batch_size, rows, width).swapaxes(0, 1)
        if spikes:
            rates = RATE * xs.repeat(ROW, 0).repeat(UNITS, 2)
            silent = jnp.zeros((ROW, batch_size, inputs))
            xs = firing(jax.random.fold_in(key, 1), jnp.concatenate([rates, silent]), 1)
        ys = jnp.broadcast_to(jnp.asarray(labels)[chosen], (steps, batch_size))
        return Batch(xs, ys, (jnp.arange(steps) >= steps - asked).astype(float))

    name, sizes = f'digits by {by}', (steps, inputs, DIGITS)
    return judged(name, sizes, draw, 'accuracy', 1 / DIGITS, jax.nn.one_hot(0, DIGITS))


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
    of_class = [order[labels[order] == digit] for digit in range(DIGITS)]
    cuts = {'test': (0, HELD), 'validation': (HELD, 2 * HELD), 'train': (2 * HELD, None)}
    chosen = {
        part: np.concatenate([those[slice(*cut)] for those in of_class])
        for part, cut in cuts.items()
    }
    return {part: (pictures[i] / SIDE / 2, labels[i]) for part, i in chosen.items()}
