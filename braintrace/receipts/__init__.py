"""A training step that someone else can check: receipts, and a verifier in NumPy.

:func:`capture` makes steps of a learner that also return what they were made of, a
:class:`Recorder` writes it, and the verifier derives it again. A pass says that each recorded step
is arithmetically right and that the steps chain; it does not say that the data are real.

>>> from braintrace import receipts
>>> run = receipts.parse_run(receipts.verifier.generate('lif', 3))
>>> receipts.reconcile_run(run).verdict
'rederived'
>>> run[1]['gradients']['W_out']['data'][0] += 0.1
>>> receipts.reconcile_run(run).failures[0].rule
4
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
