"""A training step that someone else can check: receipts, and a verifier in NumPy.

:func:`capture` makes steps of a learner that also return what they were made of, a
:class:`Recorder` writes it, and the verifier derives it again.
"""

from ._audit import Audit, audit
from ._capture import Block, Record, Recording, Run, capture
from ._cells import Cell
from ._recorder import Recorder
from .verifier import (
    Failure,
    ReceiptError,
    Result,
    derive,
    digest,
    emit,
    import_run,
    import_sidecar,
    parse,
    parse_run,
    reconcile,
    reconcile_run,
)

__all__ = [
    'Audit',
    'Block',
    'Cell',
    'Failure',
    'ReceiptError',
    'Record',
    'Recorder',
    'Recording',
    'Result',
    'Run',
    'audit',
    'capture',
    'derive',
    'digest',
    'emit',
    'import_run',
    'import_sidecar',
    'parse',
    'parse_run',
    'reconcile',
    'reconcile_run',
]
