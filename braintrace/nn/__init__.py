"""Layers, cells, neurons, synapses and readouts as brainstate modules that apply their weights by
ETP ops, so that a learner can trace them.

Everything works on one sample or on a batch in axis 0. Layers, neurons and synapses take units of
``saiunit`` too, cells take plain numbers. A module with states needs ``init_state`` before its
first step, which :func:`braintrace.compile` calls for a whole model.

>>> import brainstate, jax.numpy as jnp
>>> from braintrace import nn
>>> model = brainstate.nn.Sequential(nn.Linear(3, 8), nn.LIF(8), nn.FilteredReadout(8, 2))
>>> _ = brainstate.nn.init_all_states(model, batch_size=16)
>>> model(jnp.ones((16, 3))).shape
(16, 2)
"""

from .. import _brainstate  # noqa: F401  # before brainstate itself

# isort: split
from typing import TYPE_CHECKING

from .._public_names import instead_of as _instead_of
from .._public_names import lacking as _lacking
from ._cells import CFNCell, GRUCell, MGUCell, MinimalRNNCell, VanillaRNNCell
from ._continuous import CTRNNCell, LTCCell
from ._conv import Conv1d, Conv2d, Conv3d
from ._delay import Delay
from ._diagonal import ELSTMCell, MinGRUCell, MinLSTMCell
from ._legendre import LMUCell
from ._linear import Linear, ScaledWSLinear, SignedWLinear
from ._load import load_weights
from ._lstm import LSTMCell, URLSTMCell
from ._matrix_memory import DeltaNetCell, GLACell, MambaCell
from ._neurons import ALIF, BRF, GIF, IF, LIF, AdLIF
from ._projection import Projection
from ._readout import FilteredReadout, LeakyRateReadout, LeakySpikeReadout
from ._rotations import LRUCell, RTUCell, S5Cell
from ._structured import Embedding, GroupedLinear, LoRA, SparseLinear
from ._synapses import COBA, CUBA, STP, DualExpon, Expon
from .surrogate import spike_function

__all__ = [
    'ALIF',
    'AdLIF',
    'BRF',
    'CFNCell',
    'COBA',
    'CUBA',
    'CTRNNCell',
    'Conv1d',
    'Conv2d',
    'Conv3d',
    'Delay',
    'DeltaNetCell',
    'DualExpon',
    'ELSTMCell',
    'Embedding',
    'Expon',
    'FilteredReadout',
    'GIF',
    'GLACell',
    'GRUCell',
    'GroupedLinear',
    'IF',
    'LIF',
    'LMUCell',
    'LRUCell',
    'LSTMCell',
    'LTCCell',
    'LeakyRateReadout',
    'LeakySpikeReadout',
    'Linear',
    'LoRA',
    'MGUCell',
    'MambaCell',
    'MinGRUCell',
    'MinLSTMCell',
    'MinimalRNNCell',
    'Projection',
    'RTUCell',
    'S5Cell',
    'STP',
    'ScaledWSLinear',
    'SignedWLinear',
    'SparseLinear',
    'URLSTMCell',
    'VanillaRNNCell',
    'load_weights',
    'spike_function',
]


if not TYPE_CHECKING:
    __getattr__ = _lacking(__name__, __all__, _instead_of)
