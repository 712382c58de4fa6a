"""Receipts of online learning, checked: every number of a recorded step is derived again.

Canonical form, schemas, engine, rules and reconciler need NumPy and nothing else.

>>> reconcile(None).verdict
'malformed'
"""

from ._version import __version__ as __version__
from .arrays import node
from .canonical import digest, emit, parse, parse_run
from .checks import Failure
from .derivation import derive
from .errors import ReceiptError
from .reconciler import Result, reconcile, reconcile_run
from .rules import RULES, Rule
from .schema import check

__all__ = [
    'RULES',
    'Failure',
    'ReceiptError',
    'Result',
    'Rule',
    'check',
    'derive',
    'digest',
    'emit',
    'node',
    'parse',
    'parse_run',
    'reconcile',
    'reconcile_run',
]
