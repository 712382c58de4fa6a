"""A training step that someone else can check: receipts of the steps of a learner.

:func:`capture` makes steps of a learner that also return what they were made of, and a
:class:`Recorder` writes it. The verifier is a package of its own, ``braintrace_receipts``, which
needs NumPy alone and derives each step again. A pass says that each recorded step is arithmetically
right and that the steps chain; it does not say that the data are real.

>>> import io, jax, jax.numpy as jnp, braintrace, braintrace_receipts
>>> from braintrace import receipts
>>> cell = receipts.Cell.lif()
>>> learner = braintrace.functional.online(cell)
>>> params, x, y = cell.init(jax.random.key(0), 3, 4, 2), jnp.ones((5, 3)), jnp.ones((5, 2))
>>> state = learner.init(params, cell.carry(params, 5), x)
>>> recording, file = receipts.capture(learner), io.BytesIO()
>>> _, record = recording.grad(params, state, x, y)
>>> receipts.Recorder(file, recording).write(params, state, x, y, record)
>>> receipt = braintrace_receipts.parse(file.getvalue())
>>> braintrace_receipts.reconcile(receipt).verdict
'rederived'
>>> receipt['gradients']['W_out']['data'][0] += 0.1
>>> braintrace_receipts.reconcile(receipt).failures[0].rule
4
"""

from typing import TYPE_CHECKING

from .._public_names import lacking as _lacking

try:
    import braintrace_receipts as _verifier
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'braintrace.receipts writes what braintrace-receipts reads, and that is not installed: '
        "pip install 'braintrace-online[receipts]', or ./receipts of the repository."
    ) from error

from ._audit import Audit, audit
from ._capture import Block, Record, Recording, Run, capture
from ._cells import Cell
from ._recorder import Recorder

del _verifier

__all__ = [
    'Audit',
    'Block',
    'Cell',
    'Record',
    'Recorder',
    'Recording',
    'Run',
    'audit',
    'capture',
]

if not TYPE_CHECKING:
    __getattr__ = _lacking(__name__, __all__)
