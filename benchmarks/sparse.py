"""A step of a spiking network with millions of synapses, beside the same step written by hand.

python benchmarks/sparse.py [--synapses N] [--degree K] [--steps T] [--rules ES D] [--json FILE]

Prints ratios of CPU seconds, and writes JSON where it is asked for. The network is a recurrent layer
of leaky neurons with a synaptic current, sparse at random, and a dense readout; a step gives the loss
and the gradients. References, written by hand: the step of ES_D_RTRL in NumPy's place by kernels of
`numba` (where installed), a pass over the synapses by XLA, and one read and write of D_RTRL's trace.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import braintrace
from braintrace import functional, rules

MEMBRANE, SYNAPSE, DECAY = float(np.exp(-1 / 20)), float(np.exp(-1 / 5)), 0.9
GAIN = 1 - MEMBRANE


@jax.custom_jvp
def spike(v):
    """1 where v is positive, with a triangle as its derivative."""
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals, tangents):
    (v,), (dot,) = primals, tangents
    return spike(v), 0.3 * jnp.maximum(0.0, 1 - jnp.abs(v)) * dot


class Network:
    """Sizes, places and numbers of one network; every neuron sends to ``degree`` others."""

    def __init__(self, neurons: int, degree: int, order: str = 'row'):
        self.neurons, self.entries, rng = neurons, neurons * degree, np.random.default_rng(0)
        columns = rng.integers(0, neurons, (neurons, degree), dtype=np.int32)
        columns.sort(1)
        rows, columns = np.repeat(np.arange(neurons, dtype=np.int32), degree), columns.ravel()
        if order == 'column':
            by_column = np.argsort(columns, kind='stable')
            rows, columns = rows[by_column], columns[by_column]
        self.structure = jax.tree.map(
            jnp.asarray, braintrace.SparseStructure(rows, columns, (neurons, neurons))
        )
        weights = rng.uniform(0.5, 1.5, self.entries).astype(np.float32) * 0.5 / np.sqrt(degree)
        self.weights = jnp.asarray(weights, jnp.float32)
        self.readout = jnp.asarray(rng.normal(size=(neurons, 2)) / np.sqrt(neurons), jnp.float32)
        self.start = {
            'v': jnp.asarray(rng.uniform(0, 1, neurons), jnp.float32),
            's': jnp.asarray(rng.uniform(0, 1, neurons), jnp.float32),
            'z': jnp.zeros(neurons),
        }
        self.input = jnp.asarray(rng.uniform(0, 0.12, neurons), jnp.float32)

    @property
    def params(self):
        return {'w': self.weights, 'readout': self.readout, 'places': self.structure}


def cell(params, carry, x):
    y = braintrace.sparse_matmul(carry['z'], params['w'], sparse_mat=params['places'])
    s = SYNAPSE * carry['s'] + y
    v = MEMBRANE * carry['v'] * (1 - carry['z']) + GAIN * s + x
    z = spike(v - 1.0)
    return z @ params['readout'], {'v': v, 's': s, 'z': z}


def loss(output, target):
    return jnp.mean((output - target) ** 2)


# the step by hand ---------------------------------------------------------------------------------


def kernels():
    """Both passes over the synapses by numba, or None."""
    from braintrace._etrace_op import sparse_kernels

    return sparse_kernels()


def passes(by_kernels: bool):
    """``forward(z, w, structure)`` and ``outer(x, d, structure)``."""
    from braintrace._etrace_op import sparse as library

    get = dict(mode='promise_in_bounds', wrap_negative_indices=False)

    def forward(z, w, structure):
        products = z.at[structure.rows].get(**get)[:, None] * w[:, None]
        zeros = jnp.zeros((structure.shape[1], 1), w.dtype)
        return zeros.at[structure.columns].add(products, **get)[:, 0]

    def outer(x, d, structure):
        x, d = jax.lax.optimization_barrier((x, d))
        return x.at[structure.rows].get(**get) * d.at[structure.columns].get(**get)

    return forward, outer


def by_hand(forward, outer, params, carry, trace, x, target):
    """ES_D_RTRL's loss, gradients and next state; the recurrence through spikes is cut."""
    (v, s, z), (ex, ev, es, t) = (carry[n] for n in 'vsz'), trace
    new_s = SYNAPSE * s + forward(z, params['w'], params['places'])
    new_v = MEMBRANE * v * (1 - z) + GAIN * new_s + x
    new_z, slope = spike(new_v - 1.0), 0.3 * jnp.maximum(0.0, 1 - jnp.abs(new_v - 1.0))
    error = new_z @ params['readout'] - target
    to_output = 2 * error / error.size
    ex = DECAY * ex + z
    fs = DECAY * SYNAPSE * es + (1 - DECAY)
    fv = DECAY * (MEMBRANE * (1 - z) * ev + GAIN * SYNAPSE * es) + (1 - DECAY) * GAIN
    d = (params['readout'] @ to_output) * slope * fv / (1 - DECAY ** (t + 1.0))
    grads = {
        'w': outer(ex, d, params['places']),
        'readout': new_z[:, None] * to_output,
    }
    return (error**2).mean(), grads, {'v': new_v, 's': new_s, 'z': new_z}, (ex, fv, fs, t + 1)
