"""The rules of one step that read what the receipt stores and compare it with closed forms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from .bounds import Num, constant, exact, total
from .cells import CELLS, chained, ones
from .checks import Check, Gated
from .engine import (
    correction,
    d_rtrl_gradient,
    es_gradient,
    factored_after,
    instant_of,
    recurrent_of,
)
from .losses import LOSSES, softmax
from .primitives import FORMULAS
from .record import FILTER, Record

Entries = list[Num | None]


def _cell_of(r: Record):
    if not r.known:
        raise Gated('the engine does not know this cell')
    return CELLS[r.topology['cell']]


def _states(r: Record, when: str) -> dict[str, Num]:
    """The states of a known cell as stored, by role."""
    roles = r.topology['roles']
    return {role: r.num(f'{when}/{roles[role]}') for role in _cell_of(r).roles}


def _readout(r: Record) -> Mapping:
    return r.relations[r.topology['roles']['readout']]


def _recurrent(r: Record) -> Mapping:
    return r.relations[r.topology['roles']['recurrent']]


def _columns(rows: list[Entries]) -> list[Entries]:
    return [list(column) for column in zip(*rows, strict=True)]


def _at(relation: str, group: str) -> str:
    return f'factors/{relation}/{group}'


def _list_close(c: Check, r: Record, path: str, want: Entries, factors=()) -> None:
    """A stored list, one entry for each state, against another."""
    for i, num in enumerate(want):
        stored = r.fields.get(f'{path}/{i}')
        c.close(f'{path}/{i}', None if stored is None else r[f'{path}/{i}'], num, factors)


# 8, 34: where factors come from -------------------------------------------------------------------


def provenance(r: Record, c: Check) -> None:
    sources = {name: relation['source'] for name, relation in r.relations.items()}
    if r.known:
        roles, sent = r.topology['roles'], r.topology['roles'][_cell_of(r).output]
        sources[roles['recurrent']] = ['inputs', f'carry/{sent}']
        sources[roles['readout']] = [f'new/{sent}']
    for name, source in sources.items():
        if source is not None:
            parts = [r[_source_path(part)] for part in source]
            joins = len({part.shape[:-1] for part in parts}) == 1 and all(p.ndim for p in parts)
            said = [list(part.shape) for part in parts]
            if not c.true(f'{name}/source', joins, said, 'arrays that differ in their last axis'):
                continue
            want = np.concatenate(parts, -1) if len(parts) > 1 else parts[0]
            for group in r.relations[name]['groups'] or ['']:
                c.same(f'{_at(name, group)}/x', r[f'{_at(name, group)}/x'], want, source)
    if not c.counts[8]:
        raise Gated('no x has a declared source')
    first: dict[str, str] = {}
    for name, group in r.pairs:
        own = first.setdefault(group, name)
        if own != name:
            for key in r.keys(f'{_at(name, group)}/D'):
                path, first_path = f'{_at(name, group)}/D/{key}', f'{_at(own, group)}/D/{key}'
                want = exact(r[first_path]) if r.fields.get(first_path) is not None else None
                stored = r[path] if r.fields[path] is not None else None
                c.close(path, stored, want, (own,))


def _source_path(part: str) -> str:
    kind, _, name = part.partition('/')
    return {'inputs': 'inputs', 'carry': f'carry_before/{name}', 'new': f'carry_after/{name}'}[kind]


def constants(r: Record, c: Check) -> None:
    cell, declared = _cell_of(r), r.constants
    for number, time in (('alpha', 'tau'), ('rho', 'tau_a'), ('kappa_out', 'tau_out')):
        if number in declared:
            dt, tau = (constant(declared[name], r.floor) for name in ('dt', time))
            want = (-(dt / tau)).map(np.exp, np.exp)
            path = f'topology/constants/{number}'
            c.close(path, np.asarray(float(declared[number])), want, ('dt', time))
    relation = _recurrent(r)
    at = f'{_at(relation["name"], relation["groups"][0])}/D'
    for s, row in enumerate(cell.D(declared, _states(r, 'carry_before'))):
        _list_close(c, r, f'{at}/{s}', row, ('topology/constants', 'carry_before'))
    if r.topology['readout'] == 'leaky':
        relation = _readout(r)
        path = f'{_at(relation["name"], relation["groups"][0])}/D/0/0'
        kappa = constant(declared['kappa_out'], r.floor).to(r['outputs'].shape)
        c.close(path, r[path], kappa, ('topology/constants/kappa_out',))


# 11, 12, 1, 18: the loss --------------------------------------------------------------------------


def _loss(r: Record):
    name = r.raw['loss']['name']
    if name not in LOSSES:
        raise Gated(f'no formula for the loss {name}')
    return LOSSES[name]


def reduction(r: Record, c: Check) -> None:
    _loss(r)
    mask, loss = r.num('loss/mask'), r.raw['loss']
    c.true('loss/mask', bool(np.all(mask.value >= 0)), 'a negative weight', 'weights >= 0')
    want = mask.sum() if loss['reduction'] == 'mean' else exact(1.0)
    c.close('loss/divisor', r['loss/divisor'], want, ('loss/mask', 'loss/reduction'))


def probabilities(r: Record, c: Check) -> None:
    if r.raw['loss']['name'] != 'softmax_ce':
        raise Gated('the loss uses no probabilities')
    stored = r.num('loss/probabilities')
    c.close('loss/probabilities', np.ones(stored.shape[:-1]), stored.sum(-1))
    c.close('loss/probabilities', stored.value, softmax(r.num('outputs')), ('outputs',))


def loss_value(r: Record, c: Check) -> None:
    per_lane = _loss(r).per_lane(r.num('outputs'), r.num('targets'))
    c.close('loss/per_lane', r['loss/per_lane'], per_lane, ('outputs', 'targets'))
    stored = r.num('loss/per_lane')
    value = (r.num('loss/mask') * stored).sum() / constant(r['loss/divisor'], r.floor)
    c.close('loss/value', r['loss/value'], value, ('loss/per_lane', 'loss/mask', 'loss/divisor'))


def error(r: Record, c: Check) -> None:
    slope = _loss(r).slope(r.num('outputs'), r.num('targets'))
    weight = r.num('loss/mask') / constant(r['loss/divisor'], r.floor)
    err = slope * weight.reshape((-1, 1))
    c.close('signals/err', r['signals/err'], err, ('outputs', 'targets', 'loss'))


# 2, 3, 33: signals --------------------------------------------------------------------------------


def _slopes(r: Record, when: str) -> Entries:
    """The derivative of the stored output by each stored state; a filter stands for the others."""
    slopes = _cell_of(r).slopes(r.constants, _states(r, when))
    if FILTER not in r.groups[_recurrent(r)['groups'][0]]['states']:
        return slopes
    like = next(s for s in slopes if s is not None)
    return [*([None] * len(slopes)), ones(like)] if when == 'carry_after' else [*slopes, None]


def learning_signal(r: Record, c: Check) -> None:
    slopes, feedback = _slopes(r, 'carry_after'), r.algorithm['feedback']
    readout, group = _readout(r), _recurrent(r)['groups'][0]
    weight = f'params_before/{readout["params"]["weight"]}'
    if feedback is None:
        sent, made_of = r.num('signals/err') @ r.num(weight).T, ('signals/err', weight)
    else:
        array = r.num('algorithm/feedback')
        modulates = feedback['kind'] == 'modulator'
        sent = array if modulates else r.num('signals/err') @ array.T
        made_of = ('signals/err', 'algorithm/feedback')
    want = [None if e is None else sent * e for e in slopes]
    _list_close(c, r, f'signals/dh/{group}', want, (*made_of, 'carry_after'))
    for own in readout['groups']:
        _list_close(c, r, f'signals/dh/{own}', [r.num('signals/err')], ('signals/err',))


def step_signals(r: Record, c: Check) -> None:
    if r.known:
        _membrane(r, c)
    for name, relation in r.relations.items():
        if r.known and not relation['groups']:
            c.close(f'signals/dy/{name}', r[f'signals/dy/{name}'], r.num('signals/err'), ('err',))
            continue
        parts: Entries = [_direct(r, f'dy/{name}')]
        for group in relation['groups']:
            D_f = r.entries(f'{_at(name, group)}/D_f')
            parts += chained(r.entries(f'signals/dh/{group}'), [D_f])
        if relation['groups']:
            path = f'signals/dy/{name}'
            c.close(path, r[path], total(parts), ('signals/dh', _at(name, relation['groups'][0])))
    first = {group: name for name, group in reversed(r.pairs)}
    for group, name in first.items():
        _old_signal(r, c, group, r.matrix(f'{_at(name, group)}/D'))


def _membrane(r: Record, c: Check) -> None:
    """D_f, and the row of a filter, by the slope at the stored membrane."""
    cell, relation = _cell_of(r), _recurrent(r)
    at = _at(relation['name'], relation['groups'][0])
    old, new = _states(r, 'carry_before'), _states(r, 'carry_after')
    D_f = cell.D_f(r.constants, old, new)
    slopes, size = cell.slopes(r.constants, new), len(cell.states)
    if FILTER in r.groups[relation['groups'][0]]['states']:
        rows = [row[:size] for row in r.matrix(f'{at}/D')[:size]]
        kappa = constant(r.algorithm['kappa'], r.floor).to(new[cell.output].shape)
        want = [*chained(slopes, _columns(rows)), kappa]
        _list_close(c, r, f'{at}/D/{size}', want, ('carry_after', 'algorithm/kappa'))
        for s in range(size):
            path = f'{at}/D/{s}/{size}'
            c.close(path, None if r.fields.get(path) is None else r[path], None)
        D_f = [*D_f, *chained(slopes, [D_f])]
    _list_close(c, r, f'{at}/D_f', D_f, ('carry_after',))
    for group in _readout(r)['groups']:
        path = f'{_at(_readout(r)["name"], group)}/D_f'
        _list_close(c, r, path, [ones(r.num('outputs'))])


def _old_signal(r: Record, c: Check, group: str, D: list[Entries]) -> None:
    want = chained(r.entries(f'signals/dh/{group}'), _columns(D))
    if r.known and r.algorithm['credit'] == 'whole' and group == _recurrent(r)['groups'][0]:
        weight = r.num(f'params_before/{_recurrent(r)["params"]["weight"]}')
        dy = r.num(f'signals/dy/{_recurrent(r)["name"]}')
        back = (dy @ weight.T)[:, r['inputs'].shape[-1] :]
        slopes = _slopes(r, 'carry_before')
        want = [
            total((one, None if slope is None else back * slope))
            for one, slope in zip(want, slopes, strict=True)
        ]
    want = [total((one, _direct(r, f'c/{group}/{i}'))) for i, one in enumerate(want)]
    _list_close(c, r, f'signals/c/{group}', want, ('signals/dh', 'D'))


def _direct(r: Record, name: str) -> Num | None:
    """A part of a signal that reaches the loss without passing a new state."""
    path = f'signals/direct/{name}'
    return r.num(path) if r.fields.get(path) is not None else None


def trace_correction(r: Record, c: Check) -> None:
    if not r.factored:
        raise Gated('the algorithm has no correction')
    want = correction(r.algorithm['decay_f'], r.t, r.floor)
    c.close('signals/correction', r['signals/correction'], want, ('t', 'algorithm/decay_f'))


# 27 to 30, 32: traces -----------------------------------------------------------------------------


def _parts(r: Record) -> Iterator[tuple[str, Entries, Entries]]:
    """Of each trace that is kept by entries: its path, and what of it comes from the trace before
    and from this step.
    """
    if r.factored:
        raise Gated('the trace is factored: rule 28')
    missing = {one['primitive'] for one in r.relations.values() if one['groups']} - {*FORMULAS}
    for name, group in r.pairs:
        relation, at = r.relations[name], _at(name, group)
        if relation['primitive'] not in FORMULAS:
            continue
        fresh = instant_of(relation['primitive'], r.x(name), r.entries(f'{at}/D_f'))
        for slot in relation['params']:
            before = r.entries(f'traces_before/{name}/{group}/{slot}')
            kept = recurrent_of(r.matrix(f'{at}/D'), before)
            yield f'traces_after/{name}/{group}/{slot}', kept, fresh.get(slot, [None] * len(kept))
    if missing:
        raise Gated(f'no formula: {", ".join(sorted(missing))}')


def instantaneous(r: Record, c: Check) -> None:
    for path, kept, fresh in _parts(r):
        _where_other_is_zero(r, c, path, fresh, kept)


def recurrent(r: Record, c: Check) -> None:
    for path, kept, fresh in _parts(r):
        _where_other_is_zero(r, c, path, kept, fresh)


def _where_other_is_zero(r: Record, c: Check, path: str, want: Entries, other: Entries) -> None:
    """Entries to which one term alone contributes."""
    for i, (num, rest) in enumerate(zip(want, other, strict=True)):
        at = f'{path}/{i}'
        if r.fields.get(at) is None or num is None:
            continue
        alone = np.ones(num.shape, bool) if rest is None else rest.value == 0
        if alone.any():
            stored = np.where(alone, r[at], num.value)
            c.close(at, stored, num, (at.replace('after', 'before'), 'x', 'D', 'D_f'))


def trace_after(r: Record, c: Check) -> None:
    for path, kept, fresh in _parts(r):
        want = [total(pair) for pair in zip(kept, fresh, strict=True)]
        _list_close(c, r, path, want, (path.replace('after', 'before'), 'x', 'D', 'D_f'))


def factored_trace(r: Record, c: Check) -> None:
    if not r.factored:
        raise Gated('the trace is kept by entries: rules 27, 29 and 30')
    a_x, a_f = (constant(r.algorithm[name], r.floor) for name in ('decay_x', 'decay_f'))
    for name, group in r.pairs:
        at, before = _at(name, group), f'traces_before/{name}/{group}'
        old = {'x': [r.num(f'{before}/x')], 'f': r.entries(f'{before}/f')}
        D, D_f = r.matrix(f'{at}/D'), r.entries(f'{at}/D_f')
        new = factored_after(a_x, a_f, r.x(name), D, D_f, old)
        path = f'traces_after/{name}/{group}'
        c.close(f'{path}/x', r[f'{path}/x'], new['x'][0], (f'{before}/x', f'{at}/x'))
        _list_close(c, r, f'{path}/f', new['f'], (f'{before}/f', f'{at}/D', f'{at}/D_f'))


def fresh_start(r: Record, c: Check) -> None:
    new = r.t == 0
    c.true('t', bool(np.all(new[r.reset])), 'a lane that was reset has t > 0', 't = 0')
    for path, value in r.fields.items():
        if path.startswith('traces_before/') and value is not None and new.any():
            stored = r[path][new]
            c.same(path, np.abs(stored), np.zeros(stored.shape), ('t',))
    if r.reset.any():
        for name in r.keys('carry_before'):
            at = f'carry_before/{name}'
            stored, start = (r.of_lanes(path, r.reset) for path in (at, f'initial/{name}'))
            c.same(at, stored, start, (f'initial/{name}', 'reset'))
    if not new.any():
        raise Gated('no lane stands at its start')


# 4: gradients -------------------------------------------------------------------------------------


def gradient(r: Record, c: Check) -> None:
    sums: dict[str, Num | None] = {}
    missing = set()
    for name, relation in r.relations.items():
        if relation['primitive'] not in FORMULAS:
            missing.add(relation['primitive'])
            continue
        for slot, one in _gradient_of(r, name, relation).items():
            path = relation['params'].get(slot)
            if path is not None:
                sums[path] = total((sums.get(path), one))
    incomplete = {
        path
        for one in r.relations.values()
        if one['primitive'] in missing
        for path in one['params'].values()
    }
    for path, num in sums.items():
        if path not in incomplete and not r.frozen(path):
            made_of = ('factors', 'signals/dy', 'signals/c', 'traces_before')
            c.close(f'gradients/{path}', r[f'gradients/{path}'], num, made_of)
    if missing:
        raise Gated(f'no formula: {", ".join(sorted(missing))}')
    if not sums:
        raise Gated('no parameter has a factor')


def _gradient_of(r: Record, name: str, relation: Mapping) -> dict[str, Num]:
    x, dy, primitive = r.x(name), r.num(f'signals/dy/{name}'), relation['primitive']
    groups = relation['groups']
    if not r.factored:
        history = []
        for g in groups:
            at = f'traces_before/{name}/{g}'
            slots = {slot: r.entries(f'{at}/{slot}') for slot in relation['params']}
            history.append((r.entries(f'signals/c/{g}'), slots))
        return d_rtrl_gradient(primitive, x, dy, history)
    parts = []
    for g in groups:
        at, D_f = f'traces_after/{name}/{g}', r.entries(f'{_at(name, g)}/D_f')
        dh, corrected = r.entries(f'signals/dh/{g}'), r.num('signals/correction')
        parts.append((dh, D_f, r.num(f'{at}/x'), r.entries(f'{at}/f'), corrected))
    return es_gradient(primitive, x, dy, parts)


# 35, 36: what parameters there are ----------------------------------------------------------------


def dropped_mass(r: Record, c: Check) -> None:
    """The share of the absolute hidden Jacobian that the position-wise trace does not keep."""
    _cell_of(r)
    relation = _recurrent(r)
    group, width = relation['groups'][0], r['inputs'].shape[-1]
    weight = r[f'params_before/{relation["params"]["weight"]}'][width:]
    at = _at(relation['name'], group)
    size = sum(s != FILTER for s in r.groups[group]['states'])
    old = [np.zeros(1) if e is None else np.abs(e.value) for e in _slopes(r, 'carry_before')[:size]]
    new = [np.zeros(1) if e is None else np.abs(e.value) for e in r.entries(f'{at}/D_f')[:size]]
    lost = sum(
        np.einsum('bi,io,bo->', s, np.abs(weight), d) for s in old for d in new if d.ndim > 1
    )
    rows = [row[:size] for row in r.matrix(f'{at}/D')[:size]]
    kept = sum(np.abs(d.value).sum() for row in rows for d in row if d is not None)
    c.counts[c.rule] += 1
    c.tell(f'dropped_mass/{group}', float(lost / (lost + kept)) if lost + kept else 0.0)


def routes(r: Record, c: Check) -> None:
    declared, gradients = r.topology['routes'], r.keys('gradients')
    related = {path for one in r.relations.values() for path in one['params'].values()}
    for path in sorted(r.keys('params_before') | set(declared)):
        route = declared.get(path)
        at = f'topology/routes/{path}'
        if not c.true(at, route is not None, 'no route', 'trace, same-step or frozen'):
            continue
        frozen, has = route['kind'] == 'frozen', path in gradients
        want = 'no gradient, or none declared' if frozen else 'a gradient'
        c.true(f'gradients/{path}', has != frozen, 'a gradient' if has else 'no gradient', want)
        if route['kind'] == 'trace':
            c.true(at, path in related, 'trace, and no relation', 'a relation that has it')
        whole = has and r.sample(f'gradients/{path}') is None
        if whole and not np.any(r[f'gradients/{path}']) and 'reason' not in route:
            c.tell(f'zero_gradient/{path}', 'all of its gradient is zero')
