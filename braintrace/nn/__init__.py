"""Layers, cells and readouts on brainstate that apply their weights by ETP ops, so that a learner
can trace them.
"""

from .. import _brainstate  # noqa: F401  # before brainstate itself

# isort: split
from ._cells import CFNCell, GRUCell, MGUCell, MiniGRU, MinimalRNNCell, VanillaRNNCell
from ._conversion import load_public
from ._diagonal import MinGRUCell, MinLSTMCell
from ._linear import Linear
from ._lstm import LSTMCell, MiniLSTM, URLSTMCell
from ._readout import LeakyRateReadout
from ._rotations import LRUCell, RTUCell, S5Cell

ValinaRNNCell = VanillaRNNCell  # as the public package spells it

__all__ = [
    'CFNCell',
    'GRUCell',
    'LRUCell',
    'LSTMCell',
    'LeakyRateReadout',
    'Linear',
    'MGUCell',
    'MinGRUCell',
    'MinLSTMCell',
    'MiniGRU',
    'MiniLSTM',
    'MinimalRNNCell',
    'RTUCell',
    'S5Cell',
    'URLSTMCell',
    'ValinaRNNCell',
    'VanillaRNNCell',
    'load_public',
]
