"""The networks of all benchmarks, in names that every ``braintrace`` package has.

``traced[0]`` counts the runs of ``cell`` in Python; a compiled call does not raise it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import brainstate
import jax.numpy as jnp
import numpy as np
from cells import CELLS, Cell

OUTPUTS = 10
traced = [0]


class Spec(NamedTuple):
    """A network and its data. ``kind`` is a key of ``cells.CELLS``."""

    kind: str
    units: int
    inputs: int
    steps: int
    batch: int = 16
    layers: int = 1

    @property
    def cell(self) -> Cell:
        return CELLS[self.kind]

    @property
    def states(self) -> list[str]:
        return [f'{s}{k}' for k in range(self.layers) for s in self.cell.states]

    @property
    def weights(self) -> int:
        """Numbers in the parameters of all layers; the readout is none of them."""
        params = initial(self)[0]
        return sum(w.size for name, w in params.items() if name != 'out')

    @property
    def trace_numbers(self) -> int:
        """Numbers in the D-RTRL trace of all layers."""
        return self.batch * self.weights * self.cell.traced

    @property
    def operations(self) -> int:
        """The operations of the forward products and of the weight gradient, which every method
        needs, of a cell of real products.
        """
        return 4 * self.batch * self.weights * self.steps


def initial(spec: Spec, seed: int = 0):
    """Parameters and hidden states, each by name."""
    rng = np.random.default_rng(seed)

    def single(w):
        return jnp.asarray(w, jnp.complex64 if np.iscomplexobj(w) else jnp.float32)

    params, hidden, cell, inputs = {}, {}, spec.cell, spec.inputs
    for k in range(spec.layers):
        for name, w in cell.weights(rng, inputs, spec.units).items():
            params[f'{name}{k}'] = single(w)
        for name, dtype in cell.states.items():
            hidden[f'{name}{k}'] = jnp.zeros((spec.batch, spec.units), dtype)
        inputs = cell.wide * spec.units
    params['out'] = single(rng.normal(size=(inputs, OUTPUTS)) / np.sqrt(inputs))
    return params, hidden


def of_layer(names, values: dict, k: int) -> dict:
    """The values of layer k, without its number in their names."""
    return {name: values[f'{name}{k}'] for name in names}


def cell(spec: Spec, params: dict, hidden: dict, x):
    """One step as a pure function: ``(y, hidden)``."""
    traced[0] += 1
    new = {}
    for k in range(spec.layers):
        number = re.compile(rf'(\D+){k}')
        p = {found[1]: w for name, w in params.items() if (found := number.fullmatch(name))}
        x, at = spec.cell.step(p, of_layer(spec.cell.states, hidden, k), x)
        new |= {f'{name}{k}': h for name, h in at.items()}
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
