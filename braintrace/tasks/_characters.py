"""Characters of a text that is there wherever Python is."""

from __future__ import annotations

import functools
import string

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..errors import OptionError
from ._task import Batch, Task, check_whole, entropy, over_steps

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

    def trivial(xs: Array) -> Array:
        return jnp.broadcast_to(jnp.asarray(logits, xs.dtype), (*xs.shape[:2], CLASSES))

    share = np.bincount(parts['test'], minlength=CLASSES) / len(parts['test'])
    score, floor = over_steps(entropy), -float(share @ logits)
    sizes = steps, CLASSES, CLASSES
    return Task(f'characters {steps}', *sizes, draw, entropy, score, 'nats', floor, trivial)


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
