"""The rules of an update: what the optimiser does with a gradient, and where parameters end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from .bounds import Num
from .checks import Check, Gated, Idle
from .equations import stored
from .optimizers import OPTIMIZERS, Optimizer
from .record import Record


def _optimizer(r: Record) -> Mapping:
    if r.raw['optimizer'] is None:
        raise Idle('no optimiser acts on this step')
    return r.raw['optimizer']


def _known(r: Record, *names: str) -> Optimizer:
    name = _optimizer(r)['name']
    if name not in OPTIMIZERS:
        raise Gated(f'no formula for the optimiser {name}')
    if names and name not in names:
        raise Gated(f'the optimiser is {name}')
    return OPTIMIZERS[name]


def moving(r: Record) -> list[str]:
    """The parameters that an optimiser moves."""
    return [path for path in r.keys('params_before') if not r.frozen(path)]


def _decays(r: Record) -> bool:
    return bool(_optimizer(r)['config'].get('weight_decay'))


def _update(r: Record, c: Check) -> None:
    for path in moving(r):
        at, made_of = f'optimizer/updates/{path}', ('optimizer/config', 'optimizer/state_before')
        c.close(at, r[at], stored(r).updated(path)[1], (stored(r).acted_on(path), *made_of))


def slots_of(r: Record, c: Check) -> None:
    """Slots and shapes for each parameter that moves; the count goes on by 1."""
    raw, known = _optimizer(r), _known(r)
    counts = [raw[name]['count'] for name in ('state_before', 'state_after')]
    raw_params = r.raw['params_before']
    for name in ('state_before', 'state_after'):
        found = raw[name]['slots']
        want = set(moving(r)) if known.slots else set(found) & set(moving(r))
        c.true(f'optimizer/{name}/slots', set(found) == want, sorted(found), sorted(want))
        for path, slots in found.items():
            at = f'optimizer/{name}/slots/{path}'
            c.true(at, set(slots) == set(known.slots), sorted(slots), sorted(known.slots))
            for slot in slots:
                c.true(f'{at}/{slot}', path in raw_params, 'a slot', 'of a parameter')
    if counts[0] == 0:
        for key in r.keys('optimizer/state_before'):
            at = f'optimizer/state_before/{key}'
            c.same(at, np.abs(r[at]), np.zeros(r.shape(at)), ('optimizer/state_before/count',))
    updates = r.keys('optimizer/updates')
    c.true('optimizer/updates', updates == set(moving(r)), sorted(updates), sorted(moving(r)))
    if 'mu' in known.slots or counts != [None, None]:
        right = None not in counts and counts[1] == counts[0] + 1
        c.true(
            'optimizer/state_after/count', right, counts[1], f'the count before, {counts[0]}, + 1'
        )


def sgd(r: Record, c: Check) -> None:
    """The update of SGD without decay."""
    _known(r, 'sgd')
    if _decays(r):
        raise Gated('coupled decay: rule 7')
    _update(r, c)


def slot(name: str, *optimizers: str) -> Callable[[Record, Check], None]:
    """The rule of one slot of these optimisers; of the only slot also that of the update."""

    def rule(r: Record, c: Check) -> None:
        known = _known(r, *optimizers)
        for path in moving(r):
            at = f'optimizer/state_after/{path}/{name}'
            made_of = stored(r).acted_on(path), at.replace('after', 'before')
            c.close(at, r[at], stored(r).updated(path)[0][name], made_of)
        if known.slots == (name,):
            _update(r, c)

    return rule


momentum = slot('trace', 'momentum')
first_moment = slot('mu', 'adam', 'adamw')
second_moment = slot('nu', 'adam', 'adamw')


def adam(r: Record, c: Check) -> None:
    """The update of Adam without decoupled decay."""
    if _known(r, 'adam', 'adamw').decoupled and _decays(r):
        raise Gated('decoupled decay: rule 7')
    _update(r, c)


ADDITION = 2.0  # roundings of a parameter: of the sum, and of one that decays before it
STEP = 2.0  # terms of an update: an optimizer that adds it as it is made rounds it on the way


def added(r: Record, c: Check) -> None:
    """Before plus update is after; a walk of the parameter itself has two roundings alone."""
    _optimizer(r)
    share = min(ADDITION, c.limits.k) / c.limits.k
    for path in r.keys('optimizer/updates') & r.keys('params_before'):
        before, update = r.num(f'params_before/{path}'), r.num(f'optimizer/updates/{path}')
        terms = share * np.abs(before.value) + STEP * np.abs(update.value)
        want = Num(before.value + update.value, terms + r.floor, r.floor)
        at = f'params_after/{path}'
        made_of = (f'params_before/{path}', f'optimizer/updates/{path}')
        c.close(at, r[at], want, made_of)


def final_state(r: Record, c: Check) -> None:
    """What a decay makes; parameters that stay are bit-equal."""
    raw = r.raw['optimizer']
    for path in r.keys('params_before'):
        if raw is None or r.frozen(path) or path not in r.keys('optimizer/updates'):
            made_of = (f'params_before/{path}',)
            at = f'params_after/{path}'
            c.same(at, r[at], r[f'params_before/{path}'], made_of)
    if raw is not None and raw['name'] in OPTIMIZERS and _decays(r):
        known = OPTIMIZERS[raw['name']]
        if known.decoupled or raw['name'] == 'sgd':
            _update(r, c)
    if not c.counts[c.rule]:
        raise Idle('no parameter is frozen, and none decays by itself')
