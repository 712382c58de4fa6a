"""The verifier: canonical form, schemas, engine, rules and reconciler in NumPy and nothing else."""

from .canonical import digest, emit, node, parse, parse_run
from .checks import Failure
from .derivation import derive
from .errors import ReceiptError
from .golden import generate
from .reconciler import Result, reconcile, reconcile_run
from .rules import RULES, Rule
from .schema import check
from .sidecar import import_run, import_sidecar

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
    'generate',
    'import_run',
    'import_sidecar',
    'node',
    'parse',
    'parse_run',
    'reconcile',
    'reconcile_run',
]
