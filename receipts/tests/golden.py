"""Runs that the engine makes: a small net of each known cell learns by Adam on drawn data.

The arrays are float32, which the engine rounds its float64 to: the bytes are those of every machine
whose functions of float64 are right to some units of their last place.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from braintrace_receipts.arrays import node
from braintrace_receipts.canonical import emit
from braintrace_receipts.derivation import derive
from making import first, following

INPUTS, HIDDEN, OUTPUTS, LANES = SIZES = (3, 4, 2, 2)
GOLDEN_CELLS = ('rnn', 'lif', 'alif')
# Where these differ, other bytes come from another library of functions, and not from a fault.
CANARIES = {
    'exp(-0.5)': (np.exp, -0.5, '0x1.368b2fc6f960ap-1'),
    'tanh(0.5)': (np.tanh, 0.5, '0x1.d9353d7568af3p-2'),
}


def foreign_functions() -> list[str]:
    """What this machine computes otherwise than the one that made the shipped runs."""
    made = {name: float(f(np.full(8, x))[0]).hex() for name, (f, x, _) in CANARIES.items()}
    return [
        f'{name} is {made[name]} here and {want} there'
        for name, (_, _, want) in CANARIES.items()
        if made[name] != want
    ]


def generate(cell: str, steps: int = 20, seed: int = 0) -> bytes:
    """The receipts of a run of ``'rnn'``, ``'lif'`` or ``'alif'``, one on each line."""
    rng, lines = np.random.default_rng([seed, len(cell)]), []
    config = _start(cell, rng)
    for step in range(steps):
        config |= {'step': step, **_data(rng)}
        receipt = derive(config)
        lines.append(emit(receipt))
        config = following(config, receipt)
    return b''.join(lines)


def first_config(cell: str, seed: int = 0) -> dict[str, Any]:
    """The configuration of the first step of a golden run."""
    rng = np.random.default_rng([seed, len(cell)])
    return _start(cell, rng) | _data(rng)


def _data(rng: np.random.Generator) -> dict[str, Any]:
    """The inputs and targets of a step."""
    inputs = rng.standard_normal((LANES, INPUTS)) + 0.5
    return {'inputs': _stored(inputs), 'targets': _stored(rng.standard_normal((LANES, OUTPUTS)))}


def _stored(value: np.ndarray) -> dict:
    return node(value.astype(np.float32))


def _start(cell: str, rng: np.random.Generator) -> dict[str, Any]:
    config, width = first(cell, dtype='float32', optimizer='adam', sizes=SIZES), INPUTS + HIDDEN
    params = {
        'W': rng.standard_normal((width, HIDDEN)) / math.sqrt(width),
        'b': np.full(HIDDEN, 0.1),
        'W_out': rng.standard_normal((HIDDEN, OUTPUTS)) / math.sqrt(HIDDEN),
        'b_out': np.zeros(OUTPUTS),
    }
    if cell != 'rnn':
        surrogate = {'name': 'sigmoid', 'parameters': {'slope': 4.0}}
        config['topology']['constants']['surrogate'] = surrogate
    adam = {'lr': 0.05, 'b1': 0.9, 'b2': 0.999, 'eps': 1e-8}
    return {
        **config,
        'run_id': f'golden-{cell}',
        'lanes': list(range(LANES)),
        'params_before': {path: _stored(value) for path, value in params.items()},
        'loss': {**config['loss'], 'mask': _stored(np.ones(LANES))},
        'optimizer': {**config['optimizer'], 'config': adam},
    }
