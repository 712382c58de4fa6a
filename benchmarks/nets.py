"""The networks of the leaderboard: a cell, and a readout of the task's width."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from braintrace import nn
from braintrace.tasks import Task

LIF, ALIF = 50, 50
TAU, TAU_ADAPTATION, TAU_OUT = 2, 200, 2  # in steps of 10 ms
THRESHOLD, RATE = 0.6, 0.1  # spikes in 10 ms


class Gated(brainstate.nn.Module):
    """A GRU whose update gates start with memories from one step to the task's length."""

    def __init__(self, task: Task, units: int):
        super().__init__()
        self.cell = nn.GRUCell(task.inputs, units, timescale=(1.0, reach(task)))
        self.readout = nn.Linear(units, task.outputs)

    def update(self, x):
        return self.readout(self.cell(x))


class Rotations(brainstate.nn.Module):
    """An LRU that reads fixed random features of the input, and a readout of one hidden layer.
    ``noise``: what is added to inputs while it is trained.
    """

    def __init__(self, task: Task, units: int, features: int, hidden: int, noise: float = 0.0):
        super().__init__()
        rng = np.random.default_rng(0)
        self.features = jnp.asarray(rng.normal(size=(task.inputs + 1, features)), jnp.float32)
        radii = {'r_min': 0.8, 'r_max': float(np.exp(-0.25 / reach(task)))}
        self.cell = nn.LRUCell(features, units, **radii, max_phase=1.0)
        self.hidden = nn.Linear(features, hidden)
        self.readout = nn.Linear(hidden, task.outputs, w_init=small)
        self.noise = noise

    def update(self, x):
        if self.noise and brainstate.environ.get('fit', False):
            x = x + self.noise * brainstate.random.normal(size=x.shape)
        one = jnp.ones((*x.shape[:-1], 1))
        features = jax.nn.relu(jnp.concatenate([x, one], -1) @ self.features)
        return self.readout(jax.nn.relu(self.hidden(self.cell(features))))


class Spiking(brainstate.nn.Module):
    """LIF and ALIF units that read the input and all spikes, as in the e-prop paper, and a leaky
    readout: filtered before its weights, or behind them (``leaky``), with the same outputs.
    ``fine``: steps in 10 ms.
    """

    def __init__(self, task: Task, leaky: bool = False, fine: int = 1):
        super().__init__()
        units, left = LIF + ALIF, np.exp(-1 / TAU / fine)
        taus = fine * TAU, fine * TAU_ADAPTATION
        adapts = 1.7 * (1 - np.exp(-1 / taus[1])) / (1 - left) * (np.arange(units) >= LIF)
        scale = 1 / (1 - left)  # inputs are added as they are
        self.map = nn.Linear(task.inputs + units, units, w_init=of_two_parts(task.inputs, units))
        self.units = nn.ALIF(units, *taus, adapts, R=scale, V_th=THRESHOLD)
        readout = nn.LeakyRateReadout if leaky else nn.FilteredReadout
        self.readout = readout(units, task.outputs, fine * TAU_OUT)
        self.rate = RATE / fine

    def update(self, x):
        spikes = self.units.get_spike()
        return self.readout(self.units(self.map(jnp.concatenate([x, spikes], -1))))


class Rated(Spiking):
    """The same, and how far the share of the batch that fires is from ``rate``, squared, as a mean
    over units.
    """

    def update(self, x):
        outputs = super().update(x)
        return outputs, jnp.mean((self.units.get_spike().mean(0) - self.rate) ** 2)


class Cell(brainstate.nn.Module):
    """A cell and a linear readout."""

    def __init__(self, task: Task, cell: brainstate.nn.Module, units: int):
        super().__init__()
        self.cell, self.readout = cell, nn.Linear(units, task.outputs)

    def update(self, x):
        return self.readout(self.cell(x))


def minimal(task: Task, leaky: bool) -> Cell:
    """Gates that read the input alone, with memories from one step to the task's length."""
    return Cell(task, nn.MinLSTMCell(task.inputs, 32, timescale=(1.0, reach(task))), 32)


class Sparse(brainstate.nn.Module):
    """Leaky tanh units, of whose recurrent weights one in ten is there."""

    def __init__(self, task: Task, units: int, share: float = 0.1, leak: float = 0.8):
        super().__init__()
        rng = np.random.default_rng(0)
        there = rng.random((units, units)) < share
        drawn = np.asarray(brainstate.random.normal(size=there.shape))
        matrix = u.sparse.CSR.fromdense(jnp.asarray(there * drawn / np.sqrt(share * units)))
        self.leak = leak
        self.into = nn.Linear(task.inputs, units)
        self.recurrent = nn.SparseLinear(matrix)
        self.readout = nn.Linear(units, task.outputs)
        self.size = units

    def init_state(self, batch_size=None):
        shape = (self.size,) if batch_size is None else (batch_size, self.size)
        self.h = brainstate.HiddenState(jnp.zeros(shape))

    def update(self, x):
        new = jnp.tanh(self.into(x) + self.recurrent(self.h.value))
        self.h.value = self.leak * self.h.value + (1 - self.leak) * new
        return self.readout(self.h.value)


def reach(task: Task) -> float:
    """The steps over which a task asks for memory; a sine is told by a few of its values."""
    return 8.0 if task.stream else max(2.0, task.steps)


def small(shape):
    return brainstate.random.normal(size=shape) * 0.01


def of_two_parts(inputs: int, units: int):
    """Weights of inputs and of spikes, each normal with a variance of one over its rows."""

    def draw(shape):
        rows = np.sqrt(np.repeat([inputs, units], [inputs, units]))[:, None]
        return brainstate.random.normal(size=shape) / rows

    return draw


SLOW = {'r_min': 0.98, 'r_max': 0.999, 'max_phase': 2 * np.pi}
NETS = {
    'GRU 64': lambda task, leaky: Gated(task, 64),
    'GRU 16': lambda task, leaky: Gated(task, 16),
    'LRU 64': lambda task, leaky: Rotations(task, 64, 32, 64),
    'LRU 64, wide, noise': lambda task, leaky: Rotations(task, 64, 64, 256, 0.1),
    'LIF + ALIF 100': Spiking,
    'LIF + ALIF 100, rates': Rated,
    'LIF + ALIF 100, fine': lambda task, leaky: Rated(task, leaky, 10),
    'LRU 96': lambda task, leaky: Cell(task, nn.LRUCell(task.inputs, 96, **SLOW), task.inputs),
    'LRU 32, linear': lambda task, leaky: nn.LRUCell(task.inputs, 32, r_max=0.99),
    'minLSTM 32': minimal,
    'sparse 32': lambda task, leaky: Sparse(task, 32),
}
