"""Runs that the engine makes: a small net of each known cell learns by Adam on drawn data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from .canonical import array_of, emit, node
from .derive import derive

__all__ = ['generate', 'golden_file']

INPUTS, HIDDEN, OUTPUTS, LANES = 3, 4, 2, 2


def golden_file(cell: str) -> Path:
    """Where the shipped run of a cell is: 20 steps of seed 0."""
    return Path(__file__).with_name('goldens') / f'{cell}.jsonl'


def generate(cell: str, steps: int = 20, seed: int = 0) -> bytes:
    """The receipts of a run of ``'rnn'``, ``'lif'`` or ``'alif'``, one on each line."""
    rng, lines = np.random.default_rng([seed, len(cell)]), []
    config = _start(cell, rng)
    for step in range(steps):
        config |= {
            'step': step,
            'inputs': node(rng.standard_normal((LANES, INPUTS)) + 0.5),
            'targets': node(rng.standard_normal((LANES, OUTPUTS))),
        }
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


def _start(cell: str, rng: np.random.Generator) -> dict[str, Any]:
    width = INPUTS + HIDDEN
    params = {
        'W': rng.standard_normal((width, HIDDEN)) / math.sqrt(width),
        'b': np.full(HIDDEN, 0.1),
        'W_out': rng.standard_normal((HIDDEN, OUTPUTS)) / math.sqrt(HIDDEN),
        'b_out': np.zeros(OUTPUTS),
    }
    zeros = {path: np.zeros_like(value) for path, value in params.items()}
    slots = {path: {'mu': node(z), 'nu': node(z)} for path, z in zeros.items()}
    topology, carry = topology_of(cell), {}
    for role in ('h', 'V', 'a', 'z', 'o'):
        if role in topology['roles']:
            carry[role] = node(np.zeros((LANES, OUTPUTS if role == 'o' else HIDDEN)))
    algorithm = {'name': 'D_RTRL', 'credit': 'cut', 'decay_x': None, 'decay_f': None}
    return {
        'schema': 'braintrace.config/1',
        'run_id': f'golden-{cell}',
        'step': 0,
        'every': 1,
        'algorithm': {**algorithm, 'kappa': 0.0, 'feedback': None},
        'numeric': {
            'dtype': 'float64',
            'trace_dtype': 'float64',
            'matmul_precision': 'highest',
            'device': 'cpu',
            'k': None,
        },
        'topology': topology,
        'lanes': list(range(LANES)),
        'reset': [False] * LANES,
        't': [0] * LANES,
        'inputs': None,
        'targets': None,
        'params_before': {path: node(value) for path, value in params.items()},
        'carry_before': carry,
        'loss': {'name': 'half_mse', 'reduction': 'mean', 'mask': node(np.ones(LANES))},
        'optimizer': {
            'name': 'adam',
            'config': {'lr': 0.05, 'b1': 0.9, 'b2': 0.999, 'eps': 1e-8},
            'state_before': {'count': 0, 'slots': slots},
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


def first_config(cell: str, seed: int = 0) -> dict[str, Any]:
    """The configuration of the first step of a golden run."""
    rng = np.random.default_rng([seed, len(cell)])
    config = _start(cell, rng)
    config['inputs'] = node(rng.standard_normal((LANES, INPUTS)) + 0.5)
    config['targets'] = node(rng.standard_normal((LANES, OUTPUTS)))
    return config


def value_of(field: Any) -> np.ndarray:
    """The numbers of an array node."""
    return array_of(field)
