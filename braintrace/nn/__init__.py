"""Layers, cells and readouts on brainstate that apply their weights by ETP ops, so that a learner
can trace them.
"""

from .. import _brainstate  # noqa: F401  # before brainstate itself

# isort: split
from ._cells import GRUCell, LSTMCell, MiniGRU, VanillaRNNCell
from ._linear import Linear
from ._matrix_memory import GLACell, MambaCell
from ._readout import LeakyRateReadout

__all__ = [
    'GLACell',
    'GRUCell',
    'LSTMCell',
    'LeakyRateReadout',
    'Linear',
    'MambaCell',
    'MiniGRU',
    'VanillaRNNCell',
]
