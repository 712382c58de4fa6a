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
from .schema import check
from .structure import problems_of, problems_of_config


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
    _refuse(problems_of(receipt))
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


def _no_traces(config: Mapping) -> list[dict]:
    """Traces of zeros."""
    lanes, dtype, found = len(config['lanes']), config['numeric']['dtype'], []
    groups = {group['name']: group['states'] for group in config['topology']['groups']}

    def zeros(shape):
        return node(np.zeros((lanes, *shape), dtype))

    for relation, group in _pairs(config):
        params, states = relation['params'], groups[group]
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
    dtype = np.dtype(given['numeric']['dtype'])
    relations, pairs = given['topology']['relations'], _pairs(given)
    stored = {
        path: None if num is None else node(np.asarray(num.value, dtype))
        for path, num in made.items()
    }

    def under(head: str) -> dict:
        return {p[len(head) + 1 :]: one for p, one in stored.items() if p.startswith(f'{head}/')}

    def listed(head: str) -> list:
        own = under(head)
        return [own[str(i)] for i in range(len(own))]

    def factor(relation: Mapping, group: str | None) -> dict:
        at = f'factors/{relation["name"]}/{group or ""}'
        D_f = listed(f'{at}/D_f')
        D = [listed(f'{at}/D/{i}') for i in range(len(D_f))]
        head = {'relation': relation['name'], 'group': group}
        return {**head, 'x': stored[f'{at}/x'], 'D_f': D_f, 'D': D}

    def trace_after(trace: Mapping) -> dict:
        at = f'traces_after/{trace["relation"]}/{trace["group"]}'
        entries = {
            slot: listed(f'{at}/{slot}') if isinstance(old, list) else stored[f'{at}/{slot}']
            for slot, old in trace['entries'].items()
        }
        return {**trace, 'entries': entries}

    loss, signals, groups = under('loss'), {'err': stored['signals/err']}, [g for _, g in pairs]
    for key in ('divisor', 'value'):
        if (one := made[f'loss/{key}']) is not None:
            loss[key] = float(np.asarray(one.value, dtype))
    signals['dy'] = under('signals/dy')
    for key in ('dh', 'c'):
        signals[key] = {group: listed(f'signals/{key}/{group}') for group in groups}
    if 'signals/correction' in stored:
        signals['correction'] = stored['signals/correction']
    found = {
        'factors': [
            *(factor(*pair) for pair in pairs),
            *(factor(one, None) for one in relations if not one['groups']),
        ],
        'traces_after': [trace_after(trace) for trace in given['traces_before']],
        'carry_after': under('carry_after'),
        'outputs': stored['outputs'],
        'loss': {**given['loss'], **loss},
        'signals': signals,
        'gradients': under('gradients'),
        'params_after': under('params_after'),
    }
    if given['optimizer'] is not None:
        found['optimizer'] = _moved(given['optimizer'], under)
    return found


def _moved(optimizer: Mapping, under: Any) -> dict:
    """The optimiser with its state after the step."""
    count, slots = optimizer['state_before']['count'], dict[str, dict]()
    for key, value in under('optimizer/state_after').items():
        path, _, slot = key.rpartition('/')
        slots.setdefault(path, {})[slot] = value
    after = {'count': None if count is None else count + 1, 'slots': slots}
    return {**optimizer, 'state_after': after, 'updates': under('optimizer/updates')}
