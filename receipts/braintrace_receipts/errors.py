"""What is refused before any rule runs, and the caps on what is read."""

from __future__ import annotations

MAX_LINE = 64 * 2**20  # bytes of one receipt
MAX_DEPTH = 32  # of nested lists and objects
MAX_NUMBERS = 2**23  # that stand in one line
MAX_PARTS = 2**20  # quotes, lists and objects of one line
MAX_ELEMENTS = 2**24  # of one array
MAX_TOTAL = 2**25  # elements of all arrays of one receipt
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
