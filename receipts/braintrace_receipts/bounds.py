"""Numbers with a bound: what an honest machine may be off by, carried to first order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

UNIT = {'float64': 2.0**-53, 'float32': 2.0**-24, 'tf32': 2.0**-11, 'bfloat16': 2.0**-8}
TINY = {'float64': 2.0**-1022, 'float32': 2.0**-126}  # what is smaller may count as zero
MOST = 64  # the largest k
WARM_UP = 1 / 128  # a warm-up may be off by this share of itself at most


ROOM = 2**24  # numbers that formulas may hold at once beside those of a receipt ...
SHARE = 4  # ... and for each number that it has


class TooLarge(Exception):
    """An array that a formula would make is out of proportion to the receipt."""


class Room:
    """How many numbers formulas may hold, and how many they do."""

    def __init__(self, most: int):
        self.most, self.held = most, 0


_room: ContextVar[Room | None] = ContextVar('room', default=None)


@contextmanager
def room_for(numbers: int) -> Iterator[None]:
    """Formulas hold no more than is in proportion to a receipt of so many numbers."""
    before = _room.set(Room(ROOM + SHARE * numbers))
    try:
        yield
    finally:
        _room.reset(before)


def asked(*shape: int) -> None:
    """Whether there is room for an array, before it is made."""
    room, size = _room.get(), math.prod(shape)
    if room is not None and room.held + size > room.most:
        said = f'{room.held + size:,} numbers at once, where {room.most:,} may be'
        raise TooLarge(f'its formulas would make {said}')


class Num:
    """A float64 value and the sum of the sizes of the terms that made it.

    Someone who computes the same in a format of unit roundoff u, in any order, is off by at most
    ``k u terms`` for a small k. Each operation adds the terms that it makes itself to what those
    of its operands become by its derivative. ``floor``, the smallest normal number over u, stands
    for a term that was flushed to zero.
    """

    __slots__ = ('floor', 'room', 'terms', 'value')
    __array_priority__ = 1000  # an ndarray on the left leaves the operation to this class

    def __init__(self, value: np.ndarray, terms: np.ndarray, floor: float = 0.0):
        self.value, self.terms, self.floor, self.room = value, terms, floor, _room.get()
        if self.room is not None:
            self.room.held += value.size

    def __del__(self) -> None:
        if self.room is not None:
            self.room.held -= self.value.size

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the value."""
        return self.value.shape

    def _with(self, other) -> Num:
        """The other operand of an operation element by element."""
        found = other if isinstance(other, Num) else exact(other, self.floor)
        asked(*np.broadcast_shapes(self.shape, found.shape))
        return found

    def _made(self, value: np.ndarray, terms: np.ndarray, own: np.ndarray) -> Num:
        return Num(value, terms + own + self.floor, self.floor)

    def __add__(self, other) -> Num:
        other = self._with(other)
        own = np.abs(self.value) + np.abs(other.value)
        return self._made(self.value + other.value, self.terms + other.terms, own)

    __radd__ = __add__

    def __neg__(self) -> Num:
        return Num(-self.value, self.terms, self.floor)

    def __sub__(self, other) -> Num:
        return self + -self._with(other)

    def __rsub__(self, other) -> Num:
        return -self + other

    def __mul__(self, other) -> Num:
        other = self._with(other)
        a, b = np.abs(self.value), np.abs(other.value)
        return self._made(self.value * other.value, a * other.terms + self.terms * b, a * b)

    __rmul__ = __mul__

    def __truediv__(self, other) -> Num:
        other = self._with(other)
        value, b = self.value / other.value, np.abs(other.value)
        terms = self.terms / b + np.abs(value) * other.terms / b
        return self._made(value, terms, np.abs(value))

    def __rtruediv__(self, other) -> Num:
        return self._with(other) / self

    def __matmul__(self, other: Num) -> Num:
        asked(*self.shape[:-1], *other.shape[1:])
        a, b = np.abs(self.value), np.abs(other.value)
        terms = a @ (other.terms + b) + self.terms @ b
        return Num(
            self.value @ other.value,
            terms + self.value.shape[-1] * self.floor,
            self.floor,
        )

    def moved(self, move: Callable) -> Num:
        """With its elements at other places."""
        return Num(move(self.value), move(self.terms), self.floor)

    def __getitem__(self, at) -> Num:
        return self.moved(lambda array: array[at])

    @property
    def T(self) -> Num:  # noqa: N802
        """Transposed."""
        return self.moved(np.transpose)

    def sum(self, axis=None) -> Num:
        """Along an axis; the terms of the sum are the summands."""
        asked(self.value.size)
        terms = self.terms + np.abs(self.value)
        n = self.value.size if axis is None else self.value.shape[axis]
        return Num(self.value.sum(axis), terms.sum(axis) + n * self.floor, self.floor)

    def to(self, shape: tuple[int, ...]) -> Num:
        """Broadcast."""
        return self.moved(lambda array: np.broadcast_to(array, shape))

    def reshape(self, shape: tuple[int, ...]) -> Num:
        """In another shape."""
        asked(self.value.size)
        return self.moved(lambda array: array.reshape(shape))

    def map(self, f: Callable, slope: Callable) -> Num:
        """A function; ``slope`` bounds the size of its derivative."""
        asked(self.value.size)
        value = f(self.value)
        carried = np.where(self.terms > 0, np.abs(slope(self.value)) * self.terms, 0.0)
        return self._made(value, carried, np.abs(value))

    def sqrt(self) -> Num:
        """The root; a zero that has terms counts as the largest number that it may stand for."""
        near = np.maximum(self.value, self.terms * UNIT['float32'])
        return self.map(np.sqrt, lambda _: 0.5 / np.sqrt(near))


def exact(x, floor: float = 0.0) -> Num:
    """What is in the receipt: no error."""
    x = np.asarray(x, float)
    return Num(x, np.zeros(x.shape), floor)


def constant(x, floor: float = 0.0) -> Num:
    """A number that is written in float64 and rounded to the format before it is used."""
    x = np.asarray(x, float)
    return Num(x, np.abs(x), floor)


def warm_up(keep: float, count, floor: float) -> Num:
    """``1 - keep^count``, made of a rounded ``keep``: near 1 few digits are left. It is one number
    and no sum, so a sixteenth of k roundings is enough; and it may lose no more than two digits.
    """
    power = float(keep) ** np.asarray(count, float)
    terms = ((count + 1) * power + np.abs(1 - power)) / 16
    return Num(1 - power, np.minimum(terms, most_terms(WARM_UP * (1 - power), floor)), floor)


def most_terms(size, floor: float):
    """The terms whose bound is a size at the largest k."""
    unit = next((u for name, u in UNIT.items() if TINY.get(name, 0) == floor * u), 0.0)
    return np.asarray(size) / (MOST * unit) if unit else np.inf


def where(flags, a: Num, b: Num) -> Num:
    """Elements of ``a`` where a flag is set, else of ``b``."""
    return Num(np.where(flags, a.value, b.value), np.where(flags, a.terms, b.terms), a.floor)


def total(parts) -> Num | None:
    """The sum of those that are not None (a zero by structure); None if none is left."""
    found = None
    for part in parts:
        if part is not None:
            found = part if found is None else found + part
    return found


def far(stored: np.ndarray, num: Num, ku: float) -> tuple[np.ndarray, np.ndarray]:
    """Where a stored array is further away than it may be, and the bound; the one comparison.

    A bound that is no finite number holds nothing.
    """
    bound = ku * num.terms
    near = np.abs(stored - num.value) <= bound
    return ~(near & np.isfinite(bound)), bound
