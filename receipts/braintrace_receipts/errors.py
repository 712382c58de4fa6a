"""What is refused before any rule runs, the caps on what is read, and words for values."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

MAX_LINE = 64 * 2**20  # bytes of one receipt
MAX_DEPTH = 32  # of nested lists and objects
MAX_NUMBERS = 2**23  # that are in one line
MAX_PARTS = 2**20  # quotes, lists and objects of one line
MAX_ELEMENTS = 2**24  # of one array
MAX_TOTAL = 2**24  # elements of all arrays of one receipt
MAX_LANES = 10_000
MAX_NAMES = 1_000  # relations, groups; letters of a name
MAX_RECORDS = 100_000  # of one run
MAX_RUN = 2**32  # bytes of one run
MAX_INTEGER = 2**63


class ReceiptError(ValueError):
    """What is no receipt: ``code`` for programs, ``path`` of the value, ``message``, ``hint``.

    >>> ReceiptError('schema', 'step', 'a bool where an integer is due').path
    'step'
    """

    def __init__(self, code: str, path: str, message: str, hint: str = ''):
        super().__init__(': '.join(part for part in (path, message) if part))
        self.code, self.path, self.message, self.hint = code, path, message, hint


class Problem(NamedTuple):
    """One thing that is wrong with a value: where, and what."""

    path: str
    message: str


def is_int(value: Any) -> bool:
    """An integer, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """An integer or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Finite, and no integer that is too large for a float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def join(path: str, key: Any) -> str:
    """``path.key``, also for a key that is no string."""
    name = key if isinstance(key, str) else f'({described(key)})'
    return f'{path}.{name}' if path else name


def described(value: Any) -> str:
    """A value in a few words, whatever it is."""
    if value is None or isinstance(value, bool):
        return {None: 'null', True: 'true', False: 'false'}[value]
    if isinstance(value, int) and value.bit_length() > 64:
        return f'an integer of {value.bit_length()} bits'
    if isinstance(value, int | float):
        return f'{value!r}'
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + '...')
    if isinstance(value, list) and all(isinstance(part, str) for part in value[:9]):
        return f'[{", ".join(described(part) for part in value[:8])}]'
    if isinstance(value, list | tuple | dict):
        return f'{"an object" if isinstance(value, dict) else "a list"} of {len(value)}'
    return f'a {type(value).__name__}'
