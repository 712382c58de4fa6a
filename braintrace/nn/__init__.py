"""Layers, cells and readouts on brainstate that apply their weights by ETP ops, so that a learner
can trace them.
"""

from .. import _brainstate  # noqa: F401  # before brainstate itself

# isort: split
from ._cells import GRUCell, LSTMCell, MiniGRU, VanillaRNNCell
from ._linear import Linear
from ._neurons import ALIF, GIF, IF, LIF
from ._readout import FilteredReadout, LeakyRateReadout, LeakySpikeReadout

__all__ = [
    'ALIF',
    'FilteredReadout',
    'GIF',
    'GRUCell',
    'IF',
    'LIF',
    'LSTMCell',
    'LeakyRateReadout',
    'LeakySpikeReadout',
    'Linear',
    'MiniGRU',
    'VanillaRNNCell',
]
