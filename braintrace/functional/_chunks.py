"""Data as they come: chunks of a stream, checked and put on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from .._compiler import describe_aval, path_key, path_name
from .._errors import OptionError, StructureError
from .._saving import structure_diff
from .._windows import length_of


class Chunk(NamedTuple):
    """Steps of a stream, as ``sequence_update`` takes them: ``xs`` and ``ys`` with time in front,
    and ``mask``, 0 for what fills up a shorter chunk; :func:`chunks` makes them.

    >>> import numpy as np
    >>> from braintrace.functional import chunks
    >>> [(chunk.xs.shape, chunk.mask.tolist()) for chunk in chunks([(np.ones(2), np.ones(2))])]
    [((2,), [1.0, 1.0])]
    """

    xs: Any
    ys: Any
    mask: jax.Array


def chunks(source: Iterable, length: int | None = None) -> Iterator[Chunk]:
    """The pairs ``(xs, ys)`` of any iterator on the device, each as a :class:`Chunk` of ``length``
    steps (default: those of the first), so that one program serves all.

    A shorter chunk is filled up with its last step, where ``mask`` is 0: its losses do not count,
    but state and optimiser go on. An error of the iterator comes after the chunks before it; the
    iterator is never ahead of them, so its position may be saved with what was learnt.

    Raises :class:`braintrace.StructureError` for what is no pair, for a longer chunk, and for steps
    of another structure, shape or dtype than the first.

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
                f'chunk {k} has {steps} steps, more than {length}: it would compile anew. Cut it, '
                'or give the largest number as `length`.'
            )
        if steps < length:
            rows = np.minimum(np.arange(length), steps - 1)
            pair = jax.tree.map(lambda x, rows=rows: x[rows], pair)
        xs, ys, mask = jax.device_put((*pair, (np.arange(length) < steps).astype(float)))
        here = {'xs': describe(xs), 'ys': describe(ys)}
        first = first or here
        if wrong := structure_diff(first, here):
            lines = '\n  '.join(line.replace(' when saved, ', ' at first, ') for line in wrong)
            raise StructureError(f'chunk {k} has other steps than the first:\n  {lines}')
        yield Chunk(xs, ys, mask)


def describe(tree) -> dict[str, str]:
    """Path of each leaf -> dtype and shape."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_name(path_key(path)): describe_aval(leaf) for path, leaf in leaves}
