"""The networks of all benchmarks, in names that every ``braintrace`` package has.

``traced[0]`` counts the runs of ``cell`` in Python; a compiled call does not raise it.
"""

from __future__ import annotations

from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace

OUTPUTS = 10
GATES = {'rnn': ('w', 1), 'gru': ('zrh', 1), 'lstm': ('w', 4)}  # ops, and their width in units
traced = [0]


class Spec(NamedTuple):
    """A network and its data. ``kind`` is 'rnn' (leaky, one op), 'gru' (three ops) or 'lstm' (one
    op, two hidden states).
    """

    kind: str
    units: int
    inputs: int
    steps: int
    batch: int = 16
    layers: int = 1

    @property
    def name(self) -> str:
        return f'{self.kind} {self.units}' + (f', {self.layers} layers' if self.layers > 1 else '')

    @property
    def states(self) -> list[str]:
        each = ('state', 'memory') if self.kind == 'lstm' else ('state',)
        return [f'{s}{k}' for k in range(self.layers) for s in each]

    @property
    def trace_numbers(self) -> int:
        """Numbers in the D-RTRL trace of all layers of a cell of one state."""
        sizes = [self.inputs] + [self.units] * (self.layers - 1)
        weights = sum((i + self.units) * self.units for i in sizes)
        return self.batch * weights * (3 if self.kind == 'gru' else 1)

    @property
    def operations(self) -> int:
        """The operations of the forward products and of the weight gradient, which every method
        needs.
        """
        return 4 * self.trace_numbers * self.steps


def initial(spec: Spec, seed: int = 0):
    """Parameters and hidden states, each by name."""
    rng = np.random.default_rng(seed)

    def weights(rows, columns):
        return jnp.asarray(rng.normal(size=(rows, columns)) / np.sqrt(rows), jnp.float32)

    params = {}
    for k in range(spec.layers):
        (gates, width), inputs = GATES[spec.kind], spec.units if k else spec.inputs
        for gate in gates:
            params[f'{gate}{k}'] = weights(inputs + spec.units, width * spec.units)
    params['out'] = weights(spec.units, OUTPUTS)
    return params, {name: jnp.zeros((spec.batch, spec.units), jnp.float32) for name in spec.states}


def cell(spec: Spec, params: dict, hidden: dict, x):
    """One step as a pure function: ``(y, hidden)``."""
    traced[0] += 1
    new = {}
    for k in range(spec.layers):
        h = hidden[f'state{k}']
        if spec.kind == 'gru':
            xh = jnp.concatenate([x, h], -1)
            z = jax.nn.sigmoid(braintrace.matmul(xh, params[f'z{k}']))
            r = jax.nn.sigmoid(braintrace.matmul(xh, params[f'r{k}']))
            xrh = jnp.concatenate([x, r * h], -1)
            x = (1 - z) * h + z * jnp.tanh(braintrace.matmul(xrh, params[f'h{k}']))
        elif spec.kind == 'lstm':
            products = braintrace.matmul(jnp.concatenate([x, h], -1), params[f'w{k}'])
            i, f, g, o = jnp.split(products, 4, -1)
            c = jax.nn.sigmoid(f) * hidden[f'memory{k}'] + jax.nn.sigmoid(i) * jnp.tanh(g)
            x, new[f'memory{k}'] = jax.nn.sigmoid(o) * jnp.tanh(c), c
        else:
            x = 0.8 * h + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params[f'w{k}']))
        new[f'state{k}'] = x
    return x @ params['out'], new


class Network(brainstate.nn.Module):
    """The same network as a module."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.spec = spec
        params, hidden = initial(spec)
        self.names = list(params), list(hidden)
        for values, kind in ((params, brainstate.ParamState), (hidden, brainstate.HiddenState)):
            for name, value in values.items():
                setattr(self, name, kind(value))

    def update(self, x):
        params, hidden = (
            {name: getattr(self, name).value for name in names} for names in self.names
        )
        y, new = cell(self.spec, params, hidden, x)
        for name, value in new.items():
            getattr(self, name).value = value
        return y


def data(spec: Spec, seed: int = 1):
    """Inputs and targets, time in front."""
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.normal(size=(spec.steps, spec.batch, spec.inputs)), jnp.float32),
        jnp.asarray(rng.normal(size=(spec.steps, spec.batch, OUTPUTS)), jnp.float32),
    )


def loss_of(y, target):
    """Mean squared error of one step."""
    return jnp.mean((y - target) ** 2)
