"""Layers and cells of the public package and of this one, with the same parameters.

    python benchmarks/public_layers.py save FILE      # where the public package is installed
    python benchmarks/public_layers.py compare FILE   # here: the largest difference of each class

Both run in float64. ``compare`` loads the parameters by `braintrace.compat.load_public`, runs the
same five steps and prints how far the outputs are apart.
"""

from __future__ import annotations

import contextlib
import pickle
import sys

import brainstate
import jax
import numpy as np
import saiunit as u

import braintrace

with contextlib.suppress(ImportError):  # the public package has no such module
    import braintrace.compat

I, O, STEPS = 3, 4, 5
MODULES = {
    name: (name, (I, O))
    for name in (
        'Linear ScaledWSLinear SignedWLinear ValinaRNNCell GRUCell MGUCell CFNCell MinimalRNNCell '
        'LSTMCell URLSTMCell MiniGRU MiniLSTM LRUCell LeakyRateReadout'
    ).split()
}
MODULES['LoRA'] = ('LoRA', (I, 2, O))
MODULES['GroupedLinear'] = ('GroupedLinear', (2, I, O))
MODULES['Conv1d'] = ('Conv1d', ((6, I), O, 3))
MODULES['Conv2d'] = ('Conv2d', ((6, 5, I), O, 3))
SHAPES = {'GroupedLinear': (2, I), 'Conv1d': (6, I), 'Conv2d': (6, 5, I)}


def build(name: str):
    kind, sizes = MODULES[name]
    brainstate.random.seed(0)
    module = getattr(braintrace.nn, kind)(*sizes)
    brainstate.nn.init_all_states(module)
    return module


def drawn(name: str, module) -> dict:
    """Numbers of every parameter, by path."""
    rng = np.random.default_rng(len(name))
    return {
        path: jax.tree.map(lambda a: np.abs(rng.normal(size=a.shape)) / 2, state.value)
        for path, state in module.states(brainstate.ParamState).items()
    }


def outputs(name: str, module) -> np.ndarray:
    rng = np.random.default_rng(1)
    xs = rng.normal(size=(STEPS, *SHAPES.get(name, (I,))))
    return np.stack([np.ravel(module(x)) for x in xs])


def save(path: str) -> None:
    found = {}
    for name in MODULES:
        module = build(name)
        values = drawn(name, module)
        for at, state in module.states(brainstate.ParamState).items():
            state.value = jax.tree.map(lambda a, like: like * 0 + a, values[at], state.value)
        found[name] = values, outputs(name, module)
    with open(path, 'wb') as file:
        pickle.dump(found, file)


def compare(path: str) -> None:
    with open(path, 'rb') as file:
        found = pickle.load(file)
    for name, (values, want) in found.items():
        module = build(name)
        braintrace.compat.load_public(module, values)
        print(f'{name:17} {np.abs(outputs(name, module) - want).max():.1e}')


if __name__ == '__main__':
    jax.config.update('jax_enable_x64', True)
    with brainstate.environ.context(precision=64, dt=1 * u.ms):
        {'save': save, 'compare': compare}[sys.argv[1]](sys.argv[2])
