"""Layers, cells and readouts on brainstate that apply their weights by ETP ops, so that a learner
can trace them.
"""

from .. import _brainstate  # noqa: F401  # before brainstate itself

# isort: split
from ._cells import GRUCell, LSTMCell, MiniGRU, VanillaRNNCell
from ._conv import Conv1d, Conv2d, Conv3d
from ._linear import Linear, ScaledWSLinear, SignedWLinear
from ._readout import LeakyRateReadout
from ._structured import Embedding, GroupedLinear, LoRA, SparseLinear

__all__ = [
    'Conv1d',
    'Conv2d',
    'Conv3d',
    'Embedding',
    'GRUCell',
    'GroupedLinear',
    'LSTMCell',
    'LeakyRateReadout',
    'Linear',
    'LoRA',
    'MiniGRU',
    'ScaledWSLinear',
    'SignedWLinear',
    'SparseLinear',
    'VanillaRNNCell',
]
