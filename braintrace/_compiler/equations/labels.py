"""Labels of positions, and their algebra.

A label array has an integer for each element of a value: the position of some source (a hidden
state, or the result of an op) that the element depends on.

- ``NONE``: no position;
- a number from 0: this one position, counted flat;
- ``MANY``: several positions, or an unknown number of them.

``None`` in place of an array says ``NONE`` for all elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..primitives import NONE

MANY = -2
Labels = np.ndarray | None
BIG = np.iinfo(np.int64).max


def identity(shape) -> np.ndarray:
    """Each element has its own flat position."""
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


def nothing(shape) -> np.ndarray:
    return np.full(shape, NONE, np.int64)


def many(shape) -> np.ndarray:
    return np.full(shape, MANY, np.int64)


def has(labels: Labels) -> bool:
    """Whether any element has a position. An array without elements counts, so that relations are
    found.
    """
    return labels is not None and (not labels.size or bool((labels != NONE).any()))


def meet(labels: Labels) -> bool:
    return labels is not None and bool((labels == MANY).any())


def merge(a: Labels, b: Labels) -> Labels:
    """Labels of a sum: different ones become ``MANY``."""
    if a is None or b is None or a is b:
        return b if a is None else a
    return np.where(a == NONE, b, np.where((b == NONE) | (a == b), a, MANY))


def disagree(a: Labels, b: Labels) -> bool:
    """Whether some element has different positions in two arrays, or several in one of them."""
    return meet(merge(a, b))


def in_place(labels: np.ndarray) -> bool:
    """Whether every element has its own position, or none."""
    return not disagree(labels, identity(labels.shape))


def merge_axes(labels: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Merge along axes; an axis of size 1 is only a reshape."""
    axes = tuple(axes)
    low = np.where(labels == NONE, BIG, labels).min(axis=axes, initial=BIG)
    high = labels.max(axis=axes, initial=NONE)
    several = (labels == MANY).any(axis=axes) | ((high != NONE) & (low != high))
    return np.where(several, MANY, high)


def transposed(labels: np.ndarray, source: np.ndarray, shape) -> np.ndarray:
    """The transpose of moving elements: each source merges the labels of the elements that came
    from it.

    ``source`` has the flat source of each element, or ``NONE``.
    """
    size = int(np.prod(shape))
    flat, where = labels.reshape(-1), source.reshape(-1)
    used = (where != NONE) & (flat != NONE)
    flat, where = flat[used], where[used]
    found = np.full(size, NONE, np.int64)
    if np.bincount(where, minlength=1).max() <= 1:  # each source went to one element at most
        found[where] = flat
        return found.reshape(shape)
    # The positions of a source are one where the lowest is the highest. MANY counts as infinite for
    # the lowest, so that it does not pass for a position, and is noted apart.
    low, several = np.full(size, BIG), np.zeros(size, bool)
    np.minimum.at(low, where, np.where(flat == MANY, BIG, flat))
    np.maximum.at(found, where, flat)
    np.logical_or.at(several, where, flat == MANY)
    return np.where(several | ((found != NONE) & (low != found)), MANY, found).reshape(shape)


def joined(labels: Sequence[Labels], shapes: Sequence) -> list[np.ndarray]:
    return [nothing(s) if lab is None else lab for lab, s in zip(labels, shapes, strict=True)]
