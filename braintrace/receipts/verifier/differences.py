"""Where two receipts differ, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import array_of
from .errors import ReceiptError

__all__ = ['Difference', 'differences']


@dataclass(frozen=True)
class Difference:
    """A place where two values differ. ``size``: the largest difference as a share of the largest
    number there, infinite for what is no number; ``count``: of elements.
    """

    path: str
    a: Any
    b: Any
    size: float = math.inf
    count: int = 1


MISSING = '(none)'


def differences(a: Any, b: Any) -> list[Difference]:
    """Where two JSON values differ, worst first; arrays are compared by their numbers."""
    return sorted(_found(a, b, ''), key=lambda one: -one.size)


def _found(a: Any, b: Any, path: str) -> Iterator[Difference]:
    arrays = _array(a), _array(b)
    if arrays[0] is not None and arrays[1] is not None:
        yield from _numbers(*arrays, path)
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in {**a, **b}:
            at = f'{path}/{key}' if path else key
            yield from _found(a.get(key, MISSING), b.get(key, MISSING), at)
    elif isinstance(a, list) and isinstance(b, list):
        for i in range(max(len(a), len(b))):
            left, right = (value[i] if i < len(value) else MISSING for value in (a, b))
            yield from _found(left, right, f'{path}[{i}]')
    elif type(a) is not type(b) or a != b:
        yield Difference(path, a, b)


def _array(value: Any) -> np.ndarray | None:
    """The numbers of a number or of an array node, if it is one."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return np.asarray(float(value))
    if not isinstance(value, Mapping) or 'data' not in value:
        return None
    try:
        return array_of(value)
    except (ReceiptError, TypeError, ValueError, KeyError, OverflowError):
        return None


def _numbers(a: np.ndarray, b: np.ndarray, path: str) -> Iterator[Difference]:
    if a.shape != b.shape:
        yield Difference(path, f'shape {list(a.shape)}', f'shape {list(b.shape)}')
        return
    a, b = a.astype(float), b.astype(float)
    apart = np.abs(a - b)
    bad = (a != b) | (np.signbit(a) != np.signbit(b))
    if not bad.any():
        return
    worst = np.unravel_index(int(np.argmax(np.where(bad, apart, -1.0))), a.shape)
    scale = max(np.abs(a).max(), np.abs(b).max())
    index = f'[{", ".join(map(str, worst))}]' if worst else ''
    size = float(apart[worst] / scale) if scale else 0.0
    found = float(a[worst]), float(b[worst])
    yield Difference(f'{path}{index}', *found, size, int(bad.sum()))
