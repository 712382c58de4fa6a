"""The verifier: canonical form, schemas, engine, rules and reconciler in NumPy and nothing else."""

from .canonical import digest, emit, node, parse, parse_run
from .errors import ReceiptError
from .schema import check

__all__ = ['ReceiptError', 'check', 'digest', 'emit', 'node', 'parse', 'parse_run']
