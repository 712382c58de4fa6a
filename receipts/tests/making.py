"""Runs of receipts that the engine makes, as plain JSON values, and ways to change them."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np

from braintrace_receipts.arrays import array_of, decimals, node
from braintrace_receipts.canonical import digest, emit, spec_digest
from braintrace_receipts.claims import signed
from braintrace_receipts.derivation import derive
from braintrace_receipts.equations import stored
from braintrace_receipts.optimizers import OPTIMIZERS as KNOWN
from braintrace_receipts.record import FILTER, Record
from braintrace_receipts.run_rules import chained_root
from braintrace_receipts.schema import SCHEMAS

ADAM = {'lr': 0.1, 'b1': 0.8, 'b2': 0.9, 'eps': 0.01}
MOMENTUM, DECAY = {'lr': 0.1, 'momentum': 0.8}, {'weight_decay': 0.1}
OPTIMIZERS: dict[str, tuple[str, dict]] = {
    'none': ('', {}),
    'sgd': ('sgd', {'lr': 0.1}),
    'sgd-decay': ('sgd', {'lr': 0.1, **DECAY}),
    'momentum': ('momentum', MOMENTUM),
    'nesterov': ('momentum', {**MOMENTUM, 'nesterov': True}),
    'momentum-decay': ('momentum', {**MOMENTUM, **DECAY}),
    'adam': ('adam', ADAM),
    'adam-decay': ('adam', {**ADAM, 'eps_root': 0.01, **DECAY}),
    'adamw-plain': ('adamw', {**ADAM, 'weight_decay': 0.0}),
    'adamw': ('adamw', {**ADAM, **DECAY}),
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
    topology = topology_of(cell, readout, kappa, frozen, sizes)
    constants = topology['constants']
    if cell != 'rnn':
        constants['reset_gradient'] = reset_gradient
        constants['surrogate'] = {'name': surrogate, 'parameters': SURROGATES[surrogate]}
    inputs, hidden, outputs, lanes = sizes
    shapes = {'W': (inputs + hidden, hidden), 'b': (hidden,)}
    shapes |= {'W_out': (hidden, outputs), 'b_out': (outputs,)}
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
        'numeric': dict.fromkeys(('dtype', 'trace_dtype'), dtype)
        | {'matmul_precision': 'highest', 'device': 'cpu', 'k': None},
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


def topology_of(cell, readout, kappa, frozen, sizes) -> dict[str, Any]:
    """A cell in front of a readout; with a filter, or parameters that are frozen."""
    states = {'rnn': ['h'], 'lif': ['V'], 'alif': ['V', 'a']}[cell]
    output, leaky = 'h' if cell == 'rnn' else 'z', readout == 'leaky'
    carried = dict.fromkeys([*states, output, *(['o'] if leaky else [])])
    groups = [
        {'name': 'hidden', 'shape': [sizes[1]], 'states': states + [FILTER] * bool(kappa)},
        {'name': 'output', 'shape': [sizes[2]], 'states': ['o']},
    ]
    relations = [
        {
            'name': name,
            'primitive': 'etp_mm',
            'params': {'weight': weight, 'bias': bias},
            'groups': own,
            'source': source,
        }
        for name, weight, bias, own, source in (
            ('recurrent', 'W', 'b', ['hidden'], ['inputs', f'carry/{output}']),
            ('readout', 'W_out', 'b_out', ['output'] if leaky else [], [f'new/{output}']),
        )
    ]
    routes = {path: {'kind': 'trace'} for path in ('W', 'b')}
    routes |= {path: {'kind': 'trace' if leaky else 'same-step'} for path in ('W_out', 'b_out')}
    frozen = {path: {'kind': 'frozen', 'reason': 'fixed'} for path in frozen}
    return {
        'cell': cell,
        'readout': readout,
        'groups': groups if leaky else groups[:1],
        'relations': relations,
        'routes': routes | frozen,
        'roles': {name: name for name in ('recurrent', 'readout', *carried)},
        'constants': _constants(cell, leaky),
    }


def _constants(cell: str, leaky: bool) -> dict[str, Any]:
    spiking = {'dt': 1.0, 'tau': 10.0, 'alpha': decay(1.0, 10.0), 'theta': 0.5}
    spiking |= {'reset_gradient': True}
    spiking |= {'surrogate': {'name': 'sigmoid', 'parameters': SURROGATES['sigmoid']}}
    own = {
        'rnn': {'leak': 0.7},
        'lif': spiking,
        'alif': {**spiking, 'tau_a': 50.0, 'rho': decay(1.0, 50.0), 'beta': 0.2},
    }[cell]
    leak = {'dt': 1.0, 'tau_out': 8.0, 'kappa_out': decay(1.0, 8.0)}
    return {**own, **(leak if leaky else {})}


def _started(optimizer: str, shapes, frozen, dtype) -> dict | None:
    name, config = OPTIMIZERS[optimizer]
    if not name:
        return None
    slots = {
        path: {slot: node(np.zeros(shape, dtype)) for slot in KNOWN[name].slots}
        for path, shape in shapes.items()
        if KNOWN[name].slots and path not in frozen
    }
    return {'name': name, 'config': config, 'state_before': {'count': 0, 'slots': slots}}


def as_it_is(value: Any) -> Any:
    return value


def steps(
    config: dict, count: int, reset=(), window: int = 0, data=as_it_is, then=as_it_is
) -> list[dict]:
    """Steps from a configuration: all lanes start again before the steps of ``reset``, and the
    optimiser acts at the end of each ``window`` steps. ``data`` changes what is drawn for a step,
    ``then`` its record, from which the next step starts.
    """
    rng, records = np.random.default_rng(len(config['lanes']) + count), []
    for i in range(count):
        config = {**config, **data(drawn(config, rng)), 'step': i}
        config = again(config) if i in reset else config
        acts = not window or i % window == window - 1
        record = derive(config if acts else {**config, 'optimizer': None})
        if window:
            _in_window(record, records, window)
        records.append(then(plain(record)))
        config = following(config, records[-1])
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
    """All lanes start again, at an initial carry that is not zero."""
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
    optimizer = config['optimizer']
    if record['optimizer'] is not None:
        optimizer = {**optimizer, 'state_before': record['optimizer']['state_after']}
    return {
        **{key: value for key, value in config.items() if key != 'initial'},
        'reset': [False] * len(config['lanes']),
        't': [t + 1 for t in record['t']],
        'params_before': record['params_after'],
        'carry_before': record['carry_after'],
        'traces_before': record['traces_after'],
        'optimizer': optimizer,
    }


def _in_window(record: dict, records: list[dict], length: int) -> None:
    index, weights = len(records) % length, [1.0 + 0.5 * (i % 2) for i in range(length)]
    record['window'] = {'index': index, 'length': length, 'reduction': 'mean'}
    record['window'] |= {'weight': weights[index], 'divisor': sum(weights)}
    if index == length - 1:
        window_sum([*records[len(records) - index :], record])


def plain(record: dict) -> dict:
    """As it comes out of a file."""
    return json.loads(emit(record))


def seal(records: list[dict], key: bytes | None = None) -> list[dict]:
    """With digests, and with signatures where there is a key."""
    root, found = '', []
    for i, record in enumerate(records, 1):
        record = {key: value for key, value in record.items() if key != 'digests'}
        own = digest(record)
        root = chained_root(root, own)
        digests: dict[str, Any] = {'receipt': own, 'root': root}
        if key is not None:
            value = signed(digests, key, i == len(records))
            digests['signature'] = {'algorithm': 'hmac-sha256', 'key_id': 'k', 'value': value}
        found.append({**record, 'digests': digests})
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
    """What is at a place."""
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


def deep(n: int) -> list:
    """A list in a list, and so on."""
    value: list = []
    for _ in range(n):
        value = [value]
    return value


def numbers(at) -> np.ndarray:
    """The numbers of an array node."""
    return array_of(at)


def array(value: Any, like: dict) -> dict:
    """A plain node with other numbers."""
    dtype = like['dtype']
    return {'shape': list(np.shape(value)), 'dtype': dtype, 'data': decimals(value, dtype)}


def decay(dt: float, tau: float) -> float:
    """``exp(-dt/tau)``."""
    return math.exp(-dt / tau)


# other runs ---------------------------------------------------------------------------------------

CONFIG_KEYS = tuple(SCHEMAS['braintrace.config/1']['properties'])


def config_of(record: dict, **changes) -> dict:
    """What a record, or a configuration that has results of another step, says before its step."""
    config = {key: record[key] for key in CONFIG_KEYS if key in record} | changes
    loss, optimizer = config['loss'], config['optimizer']
    if optimizer is not None:
        optimizer = {key: optimizer[key] for key in ('name', 'config', 'state_before')}
    loss = {key: loss[key] for key in ('name', 'reduction', 'mask')}
    return {**config, 'schema': 'braintrace.config/1', 'loss': loss, 'optimizer': optimizer}


def remade(record: dict, **changes) -> dict:
    """The step once more by the engine, out of another configuration."""
    return plain(derive(config_of(record, **changes)))


def onward(records: list[dict], i: int, **changes) -> None:
    """Record ``i`` and those behind it as the engine makes them after a change."""
    rng = np.random.default_rng(5)
    config = config_of(records[i], **changes)
    for at in range(i, len(records)):
        records[at] = remade(config)
        config = following(config, records[at]) | {'step': records[at]['step'] + 1}
        config |= drawn(config, rng)


def window_sum(records: list[dict]) -> None:
    """The sum over a window, and its update."""
    windows, last = [r['window'] for r in records], records[-1]
    sums = last['window']['gradients'] = {}
    for path, like in last['gradients'].items():
        parts = [w['weight'] * array_of(r['gradients'][path]) for w, r in zip(windows, records)]
        sums[path] = array(sum(parts) / windows[0]['divisor'], like)
    updated(last)


def updated(record: dict) -> None:
    """The update by the gradients that are stored, once more."""
    r, optimizer = Record(record), record['optimizer']
    for path, like in (optimizer or {'updates': {}})['updates'].items():
        slots, update = stored(r).updated(path)
        optimizer['updates'][path] = array(update.value, like)
        moved = numbers(record['params_before'][path]) + update.value
        record['params_after'][path] = array(moved, like)
        for slot, one in slots.items():
            optimizer['state_after']['slots'][path][slot] = array(one.value, like)
