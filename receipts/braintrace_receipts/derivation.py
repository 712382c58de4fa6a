"""A receipt made by the engine out of a configuration, which has no key for a result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .arrays import node
from .bounds import Num
from .canonical import spec_digest
from .engine import derive_step
from .errors import Problem, ReceiptError
from .losses import LOSSES
from .optimizers import OPTIMIZERS
from .primitives import NoFormula
from .record import Record, Unavailable
from .schema import check, with_arrays
from .structure import problems_of_config, read


def derive(config: Mapping) -> dict:
    """The receipt of one step of a known cell, in the format of the configuration.

    Traces that are not given are zero. Raises ``ReceiptError`` for what is no configuration.

    >>> try:
    ...     derive({'schema': 'braintrace.config/1'})
    ... except ReceiptError as error:
    ...     print(error)
    run_id: is missing
    """
    _refuse(check(config, 'braintrace.config/1'))
    _refuse([*_unknown(config), *problems_of_config(config)])
    try:
        given = {**config, 'schema': 'braintrace.receipt/1', 'spec_digest': spec_digest(config)}
        given['traces_before'] = config.get('traces_before') or _no_traces(config)
        with np.errstate(all='ignore'):
            receipt = given | results(given, derive_step(Record(given)).fields)
    except (ArithmeticError, LookupError, TypeError, ValueError, NoFormula, Unavailable) as error:
        if isinstance(error, ReceiptError):
            raise
        message = f'its parts do not fit each other: {error}'
        raise ReceiptError('config', '', message[:300]) from error
    _refuse(read(receipt)[0])
    return receipt


def _unknown(config: Mapping) -> Iterator[Problem]:
    """Names that the engine has no formula for."""
    if config['topology']['cell'] == 'opaque':
        yield Problem('topology/cell', 'the engine knows rnn, lif and alif')
    for what, known in (('loss', LOSSES), ('optimizer', OPTIMIZERS)):
        name = (config[what] or {}).get('name')
        if name is not None and name not in known:
            yield Problem(f'{what}/name', f'{name}; the engine knows {", ".join(known)}')


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ReceiptError('config', problems[0].path, problems[0].message)


def _pairs(raw: Mapping) -> list[tuple[dict, str]]:
    return [(one, group) for one in raw['topology']['relations'] for group in one['groups']]


def _states(raw: Mapping) -> dict[str, int]:
    return {group['name']: len(group['states']) for group in raw['topology']['groups']}


def _no_traces(config: Mapping) -> list[dict]:
    """Traces of zeros."""
    lanes, dtype, found = len(config['lanes']), config['numeric']['dtype'], []

    def zeros(shape):
        return node(np.zeros((lanes, *shape), dtype))

    for relation, group in _pairs(config):
        params, states = relation['params'], range(_states(config)[group])
        shapes = {slot: config['params_before'][path]['shape'] for slot, path in params.items()}
        if config['algorithm']['name'] == 'ES_D_RTRL':
            n, m = shapes['weight']
            entries: dict[str, Any] = {'x': zeros([n]), 'f': [zeros([m]) for _ in states]}
        else:
            entries = {slot: [zeros(shape) for _ in states] for slot, shape in shapes.items()}
        found.append({'relation': relation['name'], 'group': group, 'entries': entries})
    return found


def results(given: Mapping, made: Mapping[str, Num | None]) -> dict[str, Any]:
    """What a step made, under the keys of a receipt."""
    dtype, pairs = np.dtype(given['numeric']['dtype']), _pairs(given)
    numbers: dict[str, Any] = {
        path: None if num is None else np.asarray(num.value, dtype) for path, num in made.items()
    }
    learned = dict.fromkeys(p for p in given['params_before'] if f'gradients/{p}' in made)
    alone = [(one, None) for one in given['topology']['relations'] if not one['groups']]
    states: dict = {group: [None] * count for group, count in _states(given).items()} | {None: []}
    # the keys first, None where an array is due: the path of each says which one
    found: dict[str, Any] = {
        'factors': [
            {
                'relation': relation['name'],
                'group': group,
                'x': None,
                'D_f': states[group],
                'D': [states[group]] * len(states[group]),
            }
            for relation, group in [*pairs, *alone]
        ],
        'traces_after': given['traces_before'],
        'carry_after': given['carry_before'],
        'outputs': None,
        'loss': {**given['loss'], 'per_lane': None},
        'signals': {
            'err': None,
            'dy': dict.fromkeys(one['name'] for one in given['topology']['relations']),
            'dh': {group: states[group] for _, group in pairs},
            'c': {group: states[group] for _, group in pairs},
        },
        'gradients': learned,
        'params_after': given['params_before'],
    }
    for key in ('divisor', 'value'):
        found['loss'][key] = float(numbers[f'loss/{key}'])
    for part, key in (('loss', 'probabilities'), ('signals', 'correction')):
        found[part] |= {key: None} if f'{part}/{key}' in made else {}
    if given['optimizer'] is not None:
        found['optimizer'] = _moved(given['optimizer'], learned)

    def stored(path: str, value: Any) -> Any:
        if path not in numbers:
            return value
        return None if numbers[path] is None else node(numbers[path])

    return with_arrays(found, stored)


def _moved(optimizer: Mapping, learned: Mapping) -> dict:
    """The keys of the optimiser with its state after the step."""
    count, slots = optimizer['state_before']['count'], OPTIMIZERS[optimizer['name']].slots
    after = {
        'count': None if count is None else count + 1,
        'slots': {path: dict.fromkeys(slots) for path in learned if slots},
    }
    return {**optimizer, 'state_after': after, 'updates': learned}
