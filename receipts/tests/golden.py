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

INPUTS, HIDDEN, OUTPUTS, LANES = 3, 4, 2, 2
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


def following(config: dict, receipt: dict) -> dict:
    """The configuration of the next step, but for its data."""
    optimizer = receipt['optimizer']
    state = {k: optimizer[k] for k in ('name', 'config')} | {
        'state_before': optimizer['state_after']
    }
    return {
        **config,
        't': [t + 1 for t in receipt['t']],
        'params_before': receipt['params_after'],
        'carry_before': receipt['carry_after'],
        'traces_before': receipt['traces_after'],
        'optimizer': state,
    }


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
    topology, params = topology_of(cell), _params(rng)
    sizes = {role: OUTPUTS if role == 'o' else HIDDEN for role in ('h', 'V', 'a', 'z', 'o')}
    carry = {
        role: _stored(np.zeros((LANES, size)))
        for role, size in sizes.items()
        if role in topology['roles']
    }
    algorithm = {'name': 'D_RTRL', 'credit': 'cut', 'decay_x': None, 'decay_f': None}
    numeric = {'dtype': 'float32', 'trace_dtype': 'float32', 'matmul_precision': 'highest'}
    return {
        'schema': 'braintrace.config/1',
        'run_id': f'golden-{cell}',
        'step': 0,
        'every': 1,
        'algorithm': {**algorithm, 'kappa': 0.0, 'feedback': None},
        'numeric': {**numeric, 'device': 'cpu', 'k': None},
        'topology': topology,
        'lanes': list(range(LANES)),
        'reset': [False] * LANES,
        't': [0] * LANES,
        'inputs': None,
        'targets': None,
        'params_before': {path: _stored(value) for path, value in params.items()},
        'carry_before': carry,
        'loss': {'name': 'half_mse', 'reduction': 'mean', 'mask': _stored(np.ones(LANES))},
        'optimizer': _optimizer(params),
    }


def _params(rng: np.random.Generator) -> dict[str, np.ndarray]:
    width = INPUTS + HIDDEN
    return {
        'W': rng.standard_normal((width, HIDDEN)) / math.sqrt(width),
        'b': np.full(HIDDEN, 0.1),
        'W_out': rng.standard_normal((HIDDEN, OUTPUTS)) / math.sqrt(HIDDEN),
        'b_out': np.zeros(OUTPUTS),
    }


def _optimizer(params: dict[str, np.ndarray]) -> dict[str, Any]:
    zeros = {path: _stored(np.zeros_like(value)) for path, value in params.items()}
    return {
        'name': 'adam',
        'config': {'lr': 0.05, 'b1': 0.9, 'b2': 0.999, 'eps': 1e-8},
        'state_before': {
            'count': 0,
            'slots': {path: {'mu': zero, 'nu': zero} for path, zero in zeros.items()},
        },
    }


def topology_of(cell: str) -> dict[str, Any]:
    """The topology of a golden run: a cell in front of a leaky readout."""
    states = {'rnn': ['h'], 'lif': ['V'], 'alif': ['V', 'a']}[cell]
    output = 'h' if cell == 'rnn' else 'z'
    carried = dict.fromkeys([*states, output, 'o'])
    return {
        'cell': cell,
        'readout': 'leaky',
        'groups': [
            {'name': 'hidden', 'shape': [HIDDEN], 'states': states},
            {'name': 'output', 'shape': [OUTPUTS], 'states': ['o']},
        ],
        'relations': [
            {
                'name': 'recurrent',
                'primitive': 'etp_mm',
                'params': {'weight': 'W', 'bias': 'b'},
                'groups': ['hidden'],
                'source': ['inputs', f'carry/{output}'],
            },
            {
                'name': 'readout',
                'primitive': 'etp_mm',
                'params': {'weight': 'W_out', 'bias': 'b_out'},
                'groups': ['output'],
                'source': [f'new/{output}'],
            },
        ],
        'routes': {path: {'kind': 'trace'} for path in ('W', 'b', 'W_out', 'b_out')},
        'roles': {
            'recurrent': 'recurrent',
            'readout': 'readout',
            **{role: role for role in carried},
        },
        'constants': _constants(cell),
    }


def _constants(cell: str) -> dict[str, Any]:
    leaky = {'dt': 1.0, 'tau_out': 8.0, 'kappa_out': math.exp(-1 / 8)}
    if cell == 'rnn':
        return {'leak': 0.7, **leaky}
    spiking = {
        **leaky,
        'tau': 10.0,
        'alpha': math.exp(-1 / 10),
        'theta': 0.5,
        'reset_gradient': True,
        'surrogate': {'name': 'sigmoid', 'parameters': {'slope': 4.0}},
    }
    if cell == 'lif':
        return spiking
    return {**spiking, 'tau_a': 50.0, 'rho': math.exp(-1 / 50), 'beta': 0.2}
