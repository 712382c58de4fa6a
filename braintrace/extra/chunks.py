"""Data as they come: chunks of a stream, checked and put on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax
import numpy as np

from .._windows import length_of
from ..errors import OptionError, StructureError
from .saving import rows, structure_diff


def chunks(source: Iterable, length: int | None = None) -> Iterator[tuple]:
    """``(xs, ys, mask)`` for each pair ``(xs, ys)`` of an iterator, ``source``, time in front: on
    the device, and of ``length`` steps (default: those of the first), so that one program serves
    all.

    A shorter chunk is filled up with its last step, where ``mask`` is 0: its losses do not count,
    but state and optimiser go on. An error of the iterator comes after the chunks before it; the
    iterator is never ahead of them, so its position may be saved with what was learnt.

    Raises :class:`braintrace.errors.StructureError` for what is no pair, for a longer chunk, and
    for steps of another structure, shape or dtype than the first,
    :class:`braintrace.errors.OptionError` for another ``source`` or ``length``.

    >>> import numpy as np
    >>> from braintrace.functional import chunks
    >>> data = iter([(np.ones((4, 2)), np.ones(4)), (np.ones((3, 2)), np.ones(3))])
    >>> for xs, ys, mask in chunks(data):
    ...     print(xs.shape, ys.shape, mask)
    (4, 2) (4,) [1. 1. 1. 1.]
    (4, 2) (4,) [1. 1. 1. 0.]
    """
    if length is not None and (type(length) is not int or length < 1):
        raise OptionError(f'length is {length!r}; give a number of steps >= 1, or None.')
    if not isinstance(source, Iterable):
        raise OptionError(f'source is a {type(source).__name__}; give an iterator of (xs, ys).')
    first: dict[str, dict] = {}
    for k, pair in enumerate(source):
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise StructureError(
                f'chunk {k} is a {type(pair).__name__}; an iterator gives pairs (xs, ys).'
            )
        steps = length_of(*pair)
        length = length or steps
        if steps > length:
            raise StructureError(
                f'chunk {k} has {steps} steps, more than {length}: it would compile again. Cut it, '
                'or give the largest number as `length`.'
            )
        if steps < length:
            at = np.minimum(np.arange(length), steps - 1)
            pair = jax.tree.map(lambda x, at=at: x[at], pair)
        # On a CPU an array of NumPy is used where it lies: who fills one buffer again and again
        # would change a chunk that is still being learnt.
        pair = jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, pair)
        xs, ys, mask = jax.device_put((*pair, (np.arange(length) < steps).astype(float)))
        here = {'xs': rows(xs, '.'), 'ys': rows(ys, '.')}
        first = first or here
        if wrong := structure_diff(first, here):
            lines = '\n  '.join(line.replace(' when saved, ', ' at first, ') for line in wrong)
            raise StructureError(
                f'the steps of chunk {k} differ from those of the first:\n  {lines}'
            )
        yield xs, ys, mask
