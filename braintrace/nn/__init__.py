"""Layers, cells and readouts on brainstate that apply their weights by ETP ops, so that a learner
can trace them.
"""

from .. import _brainstate  # noqa: F401  # before brainstate itself

# isort: split
from ._cells import GRUCell, LSTMCell, MiniGRU, VanillaRNNCell
from ._conv import Conv1d, Conv2d, Conv3d
from ._linear import Linear, ScaledWSLinear, SignedWLinear
from ._neurons import ALIF, GIF, IF, LIF
from ._projection import Projection
from ._readout import FilteredReadout, LeakyRateReadout, LeakySpikeReadout
from ._structured import Embedding, GroupedLinear, LoRA, SparseLinear
from ._synapses import COBA, CUBA, STP, DualExpon, Expon

__all__ = [
    'ALIF',
    'COBA',
    'CUBA',
    'Conv1d',
    'Conv2d',
    'Conv3d',
    'DualExpon',
    'Embedding',
    'Expon',
    'FilteredReadout',
    'GIF',
    'GRUCell',
    'GroupedLinear',
    'IF',
    'LIF',
    'LSTMCell',
    'LeakyRateReadout',
    'LeakySpikeReadout',
    'Linear',
    'LoRA',
    'MiniGRU',
    'Projection',
    'STP',
    'ScaledWSLinear',
    'SignedWLinear',
    'SparseLinear',
    'VanillaRNNCell',
]
