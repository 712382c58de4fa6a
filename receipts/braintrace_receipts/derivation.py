"""A receipt made by the engine out of a configuration, which has no key for a result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .canonical import node, spec_digest
from .engine import derive_step
from .errors import Problem, ReceiptError
from .losses import LOSSES
from .optimizers import OPTIMIZERS
from .primitives import NoFormula
from .record import Record, Unavailable
from .schema import check
from .structure import problems_of, problems_of_config

__all__ = ['derive']


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
        receipt = _skeleton(config)
        with np.errstate(all='ignore'):
            made = derive_step(Record(receipt)).fields
            _fill(receipt, made, np.dtype(config['numeric']['dtype']))
    except (ArithmeticError, LookupError, TypeError, ValueError, NoFormula, Unavailable) as error:
        if isinstance(error, ReceiptError):
            raise
        message = f'its parts do not fit each other: {error}'
        raise ReceiptError('config', '', message[:300]) from error
    optimizer = receipt['optimizer']
    if optimizer is not None:
        count = optimizer['state_before']['count']
        optimizer['state_after']['count'] = None if count is None else count + 1
    _refuse(problems_of(receipt))
    return receipt


def _unknown(config: Mapping) -> Iterator[Problem]:
    """Names that the engine has no formula for."""
    for what, known in (('loss', LOSSES), ('optimizer', OPTIMIZERS)):
        name = (config[what] or {}).get('name')
        if name is not None and name not in known:
            yield Problem(f'{what}/name', f'{name}; the engine knows {", ".join(known)}')


def _refuse(problems: list[Problem]) -> None:
    if problems:
        first = problems[0]
        raise ReceiptError('config', first.path, first.message)


def _refuse_unknown(config: Mapping) -> None:
    """Raises for a cell, a loss or an optimizer that the engine does not know."""
    if config['topology']['cell'] == 'opaque':
        raise ReceiptError('config', 'topology/cell', 'the engine knows rnn, lif and alif')
    for what, known in (('loss', LOSSES), ('optimizer', OPTIMIZERS)):
        name = (config[what] or {}).get('name')
        if name is not None and name not in known:
            message = f'{name}; the engine knows {", ".join(known)}'
            raise ReceiptError('config', f'{what}/name', message)


def _skeleton(config: Mapping) -> dict[str, Any]:
    """The receipt without its results."""
    _refuse_unknown(config)
    relations, lanes = config['topology']['relations'], len(config['lanes'])
    pairs = [(one, group) for one in relations for group in one['groups']]
    traces = config.get('traces_before')
    if traces is None:
        traces = [_zeros(config, one, group, lanes) for one, group in pairs]
    alone = [(one, None) for one in relations if not one['groups']]
    receipt = {key: value for key, value in config.items() if key != 'traces_before'}
    receipt |= {
        'schema': 'braintrace.receipt/1',
        'spec_digest': spec_digest(config),
        'factors': [
            {'relation': one['name'], 'group': group, 'x': None, 'D_f': [], 'D': []}
            for one, group in pairs + alone
        ],
        'traces_before': traces,
        'traces_after': [
            {
                'relation': trace['relation'],
                'group': trace['group'],
                'entries': {slot: _empty(value) for slot, value in trace['entries'].items()},
            }
            for trace in traces
        ],
        'carry_after': {},
        'outputs': None,
        'loss': dict(config['loss']),
        'signals': {'err': None, 'dh': {}, 'dy': {}, 'c': {}},
        'gradients': {},
        'params_after': {},
    }
    if config['optimizer'] is not None:
        after = {'state_after': {'count': None, 'slots': {}}, 'updates': {}}
        receipt['optimizer'] = {**config['optimizer'], **after}
    return receipt


def _empty(value: Any) -> Any:
    return [] if isinstance(value, list) else None


def _zeros(config: Mapping, relation: Mapping, group: str, lanes: int) -> dict:
    """A zero trace of a relation in a group."""
    states = next(g['states'] for g in config['topology']['groups'] if g['name'] == group)
    params = relation['params']
    shapes = {slot: config['params_before'][path]['shape'] for slot, path in params.items()}
    dtype = config['numeric']['dtype']

    def zeros(shape):
        return node(np.zeros((lanes, *shape), dtype))

    if config['algorithm']['name'] == 'ES_D_RTRL':
        n, m = shapes['weight']
        entries: dict[str, Any] = {'x': zeros([n]), 'f': [zeros([m]) for _ in states]}
    else:
        entries = {slot: [zeros(shape) for _ in states] for slot, shape in shapes.items()}
    return {'relation': relation['name'], 'group': group, 'entries': entries}


def _fill(receipt: dict, made: Mapping, dtype: np.dtype) -> None:
    """Puts the fields of the engine to their places."""
    for path, num in made.items():
        value = None if num is None else node(np.asarray(num.value, dtype))
        parts: list = path.split('/')
        head = parts[0]
        if path in ('loss/value', 'loss/divisor'):
            receipt['loss'][parts[1]] = float(np.asarray(num.value, dtype))
        elif head in ('factors', 'traces_after'):
            at = {f'{head}/{one["relation"]}/{one["group"] or ""}/': one for one in receipt[head]}
            prefix = max((one for one in at if path.startswith(one)), key=len)
            own = at[prefix] if head == 'factors' else at[prefix]['entries']
            _put(own, path[len(prefix) :].split('/'), value)
        elif head == 'signals' and parts[1] in ('dh', 'c'):
            _put(receipt['signals'][parts[1]], ['/'.join(parts[2:-1]), parts[-1]], value)
        elif head == 'signals' and parts[1] == 'dy':
            receipt['signals']['dy']['/'.join(parts[2:])] = value
        elif head == 'optimizer' and parts[1] == 'state_after':
            name, slot = '/'.join(parts[2:-1]), parts[-1]
            receipt['optimizer']['state_after']['slots'].setdefault(name, {})[slot] = value
        elif head in ('params_after', 'gradients', 'carry_after'):
            receipt[head]['/'.join(parts[1:])] = value
        elif head == 'optimizer':
            receipt['optimizer']['updates']['/'.join(parts[2:])] = value
        else:
            _put(receipt, parts, value)


def _put(tree: Any, keys: list[str], value: Any) -> None:
    """A value under keys; a key that is a number stands in a list that grows."""
    for key, following in zip(keys, [*keys[1:], ''], strict=True):
        if isinstance(tree, list):
            while len(tree) <= int(key):
                tree.append(None)
            at: Any = int(key)
        else:
            at = key
        if following == '':
            tree[at] = value
            return
        inner = tree[at] if isinstance(tree, list) else tree.get(at)
        if inner is None:
            inner = [] if following.isdigit() else {}
            tree[at] = inner
        tree = inner
