"""Runs of receipts that the engine makes, as plain JSON values, and ways to change them."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np

from braintrace_receipts.arrays import array_of, node
from braintrace_receipts.canonical import digest, emit, spec_digest
from braintrace_receipts.derivation import derive, results
from braintrace_receipts.engine import derive_step
from braintrace_receipts.record import FILTER, Record
from braintrace_receipts.run_rules import chained_root
from braintrace_receipts.schema import SCHEMAS
from golden import topology_of

OPTIMIZERS: dict[str, tuple[str, dict]] = {
    'none': ('', {}),
    'sgd': ('sgd', {'lr': 0.1}),
    'sgd-decay': ('sgd', {'lr': 0.1, 'weight_decay': 0.1}),
    'momentum': ('momentum', {'lr': 0.1, 'momentum': 0.8}),
    'nesterov': ('momentum', {'lr': 0.1, 'momentum': 0.8, 'nesterov': True}),
    'momentum-decay': ('momentum', {'lr': 0.1, 'momentum': 0.8, 'weight_decay': 0.1}),
    'adam': ('adam', {'lr': 0.1, 'b1': 0.8, 'b2': 0.9, 'eps': 0.01}),
    'adam-decay': (
        'adam',
        {'lr': 0.1, 'b1': 0.8, 'b2': 0.9, 'eps': 0.01, 'eps_root': 0.01, 'weight_decay': 0.1},
    ),
    'adamw-plain': (
        'adamw',
        {'lr': 0.1, 'b1': 0.8, 'b2': 0.9, 'eps': 0.01, 'weight_decay': 0.0},
    ),
    'adamw': ('adamw', {'lr': 0.1, 'b1': 0.8, 'b2': 0.9, 'eps': 0.01, 'weight_decay': 0.1}),
}
SLOTS: dict[str, tuple[str, ...]] = {
    'momentum': ('trace',),
    'adam': ('mu', 'nu'),
    'adamw': ('mu', 'nu'),
}
SURROGATES = {
    'sigmoid': {'slope': 2.0},
    'arctan': {'slope': 2.0},
    'fast_sigmoid': {'slope': 2.0},
    'triangle': {'width': 5.0, 'height': 0.7},
    'multi_gaussian': {'width': 1.0, 'scale': 3.0, 'height': 0.15},
}
SIZES = (2, 2, 2, 2)  # inputs, hidden, outputs, lanes


def run(cell: str = 'rnn', **how) -> list[dict]:
    """The receipts of a run, as they come out of a file; see :func:`first` and :func:`steps`."""
    reset, window = how.pop('reset', ()), how.pop('window', 0)
    count, sealed = how.pop('steps', 2), how.pop('sealed', False)
    made = steps(first(cell, **how), count, reset, window)
    return seal(made) if sealed else made


def first(
    cell: str,
    *,
    readout: str = 'leaky',
    algorithm: str = 'D_RTRL',
    credit: str = 'cut',
    kappa: float = 0.0,
    feedback: str = '',
    loss: str = 'half_mse',
    reduction: str = 'mean',
    optimizer: str = 'sgd',
    dtype: str = 'float64',
    frozen: tuple[str, ...] = (),
    reset_gradient: bool = True,
    surrogate: str = 'sigmoid',
    sizes: tuple[int, int, int, int] = SIZES,
    seed: int = 0,
) -> dict[str, Any]:
    """The configuration of the first step."""
    rng = np.random.default_rng(seed)
    topology = topology_for(cell, readout, kappa, frozen, sizes)
    constants = topology['constants']
    if cell != 'rnn':
        constants['reset_gradient'] = reset_gradient
        constants['surrogate'] = {'name': surrogate, 'parameters': SURROGATES[surrogate]}
    inputs, hidden, outputs, lanes = sizes
    shapes = {
        'W': (inputs + hidden, hidden),
        'b': (hidden,),
        'W_out': (hidden, outputs),
        'b_out': (outputs,),
    }
    params = {path: rng.normal(0.1, 0.7, shape) for path, shape in shapes.items()}
    factored = algorithm == 'ES_D_RTRL'
    given = None
    if feedback:
        shape = (hidden, outputs) if feedback == 'fixed' else (lanes, hidden)
        given = {'kind': feedback, 'array': node(rng.standard_normal(shape).astype(dtype))}
    roles = topology['roles']
    carry = {
        roles[role]: node(np.zeros((lanes, outputs if role == 'o' else hidden), dtype))
        for role in ('h', 'V', 'a', 'z', 'o')
        if role in roles
    }
    return {
        'schema': 'braintrace.config/1',
        'run_id': 'made',
        'step': 0,
        'every': 1,
        'algorithm': {
            'name': algorithm,
            'credit': credit,
            'decay_x': 0.6 if factored else None,
            'decay_f': 0.7 if factored else None,
            'kappa': kappa,
            'feedback': given,
        },
        'numeric': {
            'dtype': dtype,
            'trace_dtype': dtype,
            'matmul_precision': 'highest',
            'device': 'cpu',
            'k': None,
        },
        'topology': topology,
        'lanes': [3 + i for i in range(lanes)],
        'reset': [False] * lanes,
        't': [0] * lanes,
        'inputs': None,
        'targets': None,
        'params_before': {path: node(value.astype(dtype)) for path, value in params.items()},
        'carry_before': carry,
        'loss': {'name': loss, 'reduction': reduction, 'mask': None},
        'optimizer': _started(optimizer, shapes, frozen, dtype),
    }


def topology_for(cell, readout, kappa, frozen, sizes) -> dict[str, Any]:
    """The golden topology with another readout, a filter, frozen parameters."""
    topology = copy.deepcopy(topology_of(cell))
    hidden, output = topology['groups']
    hidden['shape'], output['shape'] = [sizes[1]], [sizes[2]]
    if kappa:
        hidden['states'].append(FILTER)
    topology['readout'] = readout
    if readout == 'linear':
        topology['groups'].pop()
        topology['relations'][1]['groups'] = []
        del topology['roles']['o'], topology['constants']['tau_out']
        del topology['constants']['kappa_out']
        if cell == 'rnn':
            del topology['constants']['dt']
        for path in ('W_out', 'b_out'):
            topology['routes'][path] = {'kind': 'same-step'}
    for path in frozen:
        topology['routes'][path] = {'kind': 'frozen', 'reason': 'fixed'}
    return topology


def _started(optimizer: str, shapes, frozen, dtype) -> dict | None:
    name, config = OPTIMIZERS[optimizer]
    if not name:
        return None
    slots = {
        path: {slot: node(np.zeros(shape, dtype)) for slot in SLOTS[name]}
        for path, shape in shapes.items()
        if name in SLOTS and path not in frozen
    }
    return {'name': name, 'config': config, 'state_before': {'count': 0, 'slots': slots}}


def steps(config: dict, count: int, reset=(), window: int = 0) -> list[dict]:
    """Steps from a configuration: all lanes start anew before the steps of ``reset``, and the
    optimiser acts at the end of each ``window`` steps.
    """
    rng = np.random.default_rng(len(config['lanes']) + count)
    optimizer, records, weights = config['optimizer'], [], []
    for i in range(count):
        config = {**config, **drawn(config, rng), 'step': i}
        config = again(config) if i in reset else config
        last = not window or i % window == window - 1
        record = derive({**config, 'optimizer': optimizer if last else None})
        if window:
            weights.append(1.0 + 0.5 * (i % 2))
            _in_window(record, records, weights, window)
        records.append(plain(record))
        if last and optimizer is not None:
            optimizer = {k: optimizer[k] for k in ('name', 'config')}
            optimizer['state_before'] = record['optimizer']['state_after']
        config = following(config, record)
    return records


def drawn(config: dict, rng: np.random.Generator) -> dict:
    """Data of one step; no number is zero."""
    lanes, dtype = len(config['lanes']), config['numeric']['dtype']
    weights = [one['params']['weight'] for one in config['topology']['relations']]
    (rows, _), (hidden, width) = (config['params_before'][path]['shape'] for path in weights)
    inputs = rows - hidden
    targets = rng.standard_normal((lanes, width))
    if config['loss']['name'] == 'softmax_ce':
        targets = np.abs(targets) / np.abs(targets).sum(-1, keepdims=True)
    mask = node(rng.uniform(0.5, 1.5, lanes).astype(dtype))
    found = {
        'inputs': node((rng.standard_normal((lanes, inputs)) + 0.5).astype(dtype)),
        'targets': node(targets.astype(dtype)),
        'loss': {**config['loss'], 'mask': mask},
    }
    feedback = config['algorithm']['feedback']
    if feedback is not None and feedback['kind'] == 'modulator':
        array = rng.standard_normal(feedback['array']['shape']).astype(dtype)
        feedback = {**feedback, 'array': node(array)}
        found['algorithm'] = {**config['algorithm'], 'feedback': feedback}
    return found


def again(config: dict) -> dict:
    """All lanes start anew, at an initial carry that is not zero."""
    lanes, dtype = len(config['lanes']), config['numeric']['dtype']
    z = config['topology']['roles'].get('z')
    start = {
        name: node(np.full(one['shape'], 1.0 if name == z else 0.25, dtype))
        for name, one in config['carry_before'].items()
    }
    more = {'reset': [True] * lanes, 't': [0] * lanes, 'initial': start, 'carry_before': start}
    return {**{k: v for k, v in config.items() if k != 'traces_before'}, **more}


def following(config: dict, record: dict) -> dict:
    """The configuration of the next step, but for its data."""
    config = {k: v for k, v in config.items() if k not in ('initial', 'optimizer')}
    return {
        **config,
        'reset': [False] * len(config['lanes']),
        't': [t + 1 for t in record['t']],
        'params_before': record['params_after'],
        'carry_before': record['carry_after'],
        'traces_before': record['traces_after'],
    }


def _in_window(record: dict, records: list[dict], weights: list[float], length: int) -> None:
    index = len(records) % length
    own = weights[-1 - index :] if index else weights[-1:]
    divisor = float(np.sum([1.0 + 0.5 * (i % 2) for i in range(length)]))
    record['window'] = {
        'index': index,
        'length': length,
        'reduction': 'mean',
        'weight': weights[-1],
        'divisor': divisor,
    }
    if index < length - 1:
        return
    past = [*records[len(records) - index :], record]
    record['window']['gradients'] = {
        path: node(
            np.asarray(
                sum(w * array_of(r['gradients'][path]) for w, r in zip(own, past)) / divisor,
                record['numeric']['dtype'],
            )
        )
        for path in record['gradients']
    }
    made = results(record, derive_step(Record(record)).fields)
    record |= {key: made[key] for key in ('optimizer', 'params_after') if key in made}


def plain(record: dict) -> dict:
    """As it comes out of a file."""
    return json.loads(emit(record))


def seal(records: list[dict]) -> list[dict]:
    """With digests."""
    root, found = '', []
    for record in records:
        record = {key: value for key, value in record.items() if key != 'digests'}
        own = digest(record)
        root = chained_root(root, own)
        found.append({**record, 'digests': {'receipt': own, 'root': root}})
    return found


def opaque(records: list[dict]) -> list[dict]:
    """The same run of a cell that the engine does not know."""

    found = copy.deepcopy(records)
    for record in found:
        topology = record['topology']
        topology.update(cell='opaque', readout=None, roles={}, constants={})
        record['spec_digest'] = spec_digest(record)
    return found


# places -------------------------------------------------------------------------------------------

Place = tuple


def places(value: Any, at: Place = ()):
    """Every place of a JSON value, the value itself first."""
    yield at
    items = value.items() if isinstance(value, dict) else ()
    for key, one in enumerate(value) if isinstance(value, list) else items:
        yield from places(one, (*at, key))


def get(value: Any, at: Place) -> Any:
    """What stands at a place."""
    for key in at:
        value = value[key]
    return value


def put(value: Any, at: Place, new: Any) -> Any:
    """The value with something else at a place; nothing is changed in the old one."""
    if not at:
        return new
    value = copy.copy(value)
    value[at[0]] = put(value[at[0]], at[1:], new) if at[1:] else new
    return value


def numbers(at) -> np.ndarray:
    """The numbers of an array node."""
    return array_of(at)


def array(value: Any, like: dict) -> dict:
    """A plain node with other numbers."""
    flat = np.asarray(value, like['dtype'])
    return {'shape': list(flat.shape), 'dtype': like['dtype'], 'data': _flat(flat)}


def _flat(flat: np.ndarray) -> list:
    if flat.dtype == np.float32:
        return [float(str(one)) for one in flat.reshape(-1)]
    return flat.reshape(-1).tolist()


def decay(dt: float, tau: float) -> float:
    """``exp(-dt/tau)``."""
    return math.exp(-dt / tau)


# other runs ---------------------------------------------------------------------------------------

CONFIG_KEYS = tuple(SCHEMAS['braintrace.config/1']['properties'])


def loss_input(record: dict) -> dict:
    """What a configuration says about the loss."""
    return {key: record['loss'][key] for key in ('name', 'reduction', 'mask')}


def remade(config: dict) -> dict:
    """A step by the engine out of a configuration that may have the results of another one."""
    optimizer = config['optimizer']
    if optimizer is not None:
        optimizer = {key: optimizer[key] for key in ('name', 'config', 'state_before')}
    return plain(derive({**config, 'loss': loss_input(config), 'optimizer': optimizer}))


def window_sum(records: list[dict]) -> None:
    """The sum over a window, and its update, once more."""
    windows, last = [r['window'] for r in records], records[-1]
    for path, old in last['window']['gradients'].items():
        parts = [w['weight'] * array_of(r['gradients'][path]) for w, r in zip(windows, records)]
        last['window']['gradients'][path] = array(sum(parts) / windows[0]['divisor'], old)
    updated(last)


def updated(record: dict) -> None:
    """The update by the gradients that are stored, once more."""
    made = results(record, derive_step(Record(record)).fields)
    record |= {key: made[key] for key in ('optimizer', 'params_after') if key in made}
    record.update(plain(record))
