"""The rules of one step that read what the receipt stores and compare it with closed forms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from .applied import Entries, application, gate, known_entries, placed, told
from .bounds import Num, constant, exact, total, warm_up
from .cells import CELLS, chained, columns, ones
from .checks import Check, Gated, Idle
from .engine import (
    d_rtrl_gradient,
    es_gradient,
    factored_after,
    instant_of,
    recurrent_of,
)
from .loss_rules import stored_error
from .record import FILTER, Record, once


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


def _at(relation: str, group: str) -> str:
    return f'factors/{relation}/{group}'


def _list_close(c: Check, r: Record, path: str, want: Entries, factors=()) -> None:
    """A stored list, one entry for each state, against another."""
    for i, num in enumerate(want):
        stored = r.fields.get(f'{path}/{i}')
        c.close(f'{path}/{i}', None if stored is None else r[f'{path}/{i}'], num, factors)


# 8, 34: where factors come from -------------------------------------------------------------------


def provenance(r: Record, c: Check) -> None:
    """What ops read is their declared source; groups have one ``D``."""
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
                shared = exact(r[first_path]) if r.fields.get(first_path) is not None else None
                stored = r[path] if r.fields[path] is not None else None
                c.close(path, stored, shared, (own,))


def _source_path(part: str) -> str:
    kind, _, name = part.partition('/')
    return {'inputs': 'inputs', 'carry': f'carry_before/{name}', 'new': f'carry_after/{name}'}[kind]


def constants(r: Record, c: Check) -> None:
    """Decays are those of their times; ``D`` is made of the constants."""
    _cell_of(r)
    declared = r.constants
    for number, time in (('alpha', 'tau'), ('rho', 'tau_a'), ('kappa_out', 'tau_out')):
        if number in declared:
            dt, tau = (constant(declared[name], r.floor) for name in ('dt', time))
            want = (-(dt / tau)).map(np.exp, np.exp)
            path = f'topology/constants/{number}'
            c.close(path, np.asarray(float(declared[number])), want, ('dt', time))
    for relation in (_recurrent(r), _readout(r)):
        for group in relation['groups']:
            D, _ = _formulas(r, relation['name'])
            for s, row in enumerate(D):
                if r.groups[group]['states'][s] != FILTER:
                    made_of = ('topology/constants', 'carry_before')
                    _list_close(c, r, f'{_at(relation["name"], group)}/D/{s}', row, made_of)


# 2, 3, 33: signals --------------------------------------------------------------------------------


@once
def _slopes(r: Record, when: str) -> Entries:
    """The derivative of the stored output by each stored state; a filter stands for the others."""
    slopes = _cell_of(r).slopes(r.constants, _states(r, when))
    if FILTER not in r.groups[_recurrent(r)['groups'][0]]['states']:
        return slopes
    like = next(s for s in slopes if s is not None)
    return [*([None] * len(slopes)), ones(like)] if when == 'carry_after' else [*slopes, None]


def learning_signal(r: Record, c: Check) -> None:
    """``dh``: the readout's pullback, fixed feedback, or the modulator."""
    want, readout, feedback = _sent_back(r), _readout(r), r.algorithm['feedback']
    weight = f'params_before/{readout["params"]["weight"]}'
    if feedback is not None and feedback['kind'] == 'modulator':
        c.tell('algorithm/feedback', 'the signal comes from outside: it is taken as given')
    made_of = 'signals/err', weight if feedback is None else 'algorithm/feedback', 'carry_after'
    _list_close(c, r, f'signals/dh/{_recurrent(r)["groups"][0]}', want, made_of)
    for own in readout['groups']:
        _list_close(c, r, f'signals/dh/{own}', [stored_error(r)], ('signals/err',))


@once
def _sent_back(r: Record) -> Entries:
    """``dh`` of a known cell, out of the stored error."""
    slopes, feedback = _slopes(r, 'carry_after'), r.algorithm['feedback']
    if feedback is not None and feedback['kind'] == 'modulator':
        sent = r.num('algorithm/feedback')
    else:
        own = f'params_before/{_readout(r)["params"]["weight"]}'
        back = own if feedback is None else 'algorithm/feedback'
        sent = r.num('signals/err') @ r.num(back).T
    return [None if e is None else sent * e for e in slopes]


@once
def _signals(r: Record, group: str) -> Entries:
    """``dh`` as stored, with the terms of its formula if the cell is known, else its own size."""
    stored = r.entries(f'signals/dh/{group}')
    if not r.known or group != _recurrent(r)['groups'][0]:
        return [one and Num(one.value, abs(one.value), one.floor) for one in stored]
    return [_rounded(*pair) for pair in zip(stored, _sent_back(r), strict=True)]


def step_signals(r: Record, c: Check) -> None:
    """``dy`` and ``c`` are made of ``dh``, ``D_f`` and ``D``."""
    if r.known:
        _membrane(r, c)
    missing: set[str] = set()
    for name, relation in r.relations.items():
        path, groups = f'signals/dy/{name}', relation['groups']
        if r.known and not groups:
            c.close(path, r[path], stored_error(r), ('err',))
        elif groups:
            with told(missing):
                c.close(path, r[path], _sent_to(r, name), ('signals/dh', _at(name, groups[0])))
    first = {group: name for name, group in reversed(r.pairs)}
    for group, name in first.items():
        _old_signal(r, c, group, _factors(r, name, group)[0])
    gate(missing)


def _sent_to(r: Record, name: str) -> Num | None:
    """``sum_s dh_s D_f_s + direct``, summed over the positions that an element of y feeds."""
    shape, parts = r.shape(f'signals/dy/{name}'), [_direct(r, f'dy/{name}')]
    for group in r.relations[name]['groups']:
        dh = placed(r, name, group, _signals(r, group))
        (one,) = chained(dh, [_factors(r, name, group)[1]])
        parts.append(one if one is None or one.shape == shape else application(r, name).to_y(one))
    return total(parts)


def _membrane(r: Record, c: Check) -> None:
    """D_f, and the row of a filter, by the slope at the stored membrane."""
    for relation in (_recurrent(r), _readout(r)):
        for group in relation['groups']:
            D, D_f = _formulas(r, relation['name'])
            at, states = _at(relation['name'], group), r.groups[group]['states']
            if states[-1] == FILTER:
                _list_close(c, r, f'{at}/D/{len(states) - 1}', D[-1], ('carry_after', 'kappa'))
            _list_close(c, r, f'{at}/D_f', D_f, ('carry_after',))


@once
def _formulas(r: Record, name: str) -> tuple[list[Entries], Entries]:
    """D and D_f of a relation of a known cell, out of its stored states."""
    cell, (group,) = _cell_of(r), r.relations[name]['groups']
    if name != _recurrent(r)['name']:
        like = r.num('outputs')
        return [[constant(r.constants['kappa_out'], r.floor).to(like.shape)]], [ones(like)]
    old, new = _states(r, 'carry_before'), _states(r, 'carry_after')
    D, D_f = cell.D(r.constants, old), cell.D_f(r.constants, old, new)
    if r.groups[group]['states'][-1] == FILTER:
        slopes = cell.slopes(r.constants, new)
        kappa = constant(r.algorithm['kappa'], r.floor).to(new[cell.output].shape)
        last = [*chained(slopes, columns(D)), kappa]
        D, D_f = [*([*row, None] for row in D), last], [*D_f, *chained(slopes, [D_f])]
    return D, D_f


@once
def _factors(r: Record, name: str, group: str) -> tuple[list[Entries], Entries]:
    """D and D_f as stored. They were rounded when they were made, and a compiler may make them
    anew where they are used: each counts with the terms of its formula, or, where the engine has
    none, with terms of size one beside its own.
    """
    D, D_f = r.matrix(f'{_at(name, group)}/D'), r.entries(f'{_at(name, group)}/D_f')
    if not r.known:
        return [[_rounded(one) for one in row] for row in D], [_rounded(one) for one in D_f]
    of_D, of_D_f = _formulas(r, name)
    rows = [
        [_rounded(*pair) for pair in zip(*both, strict=True)] for both in zip(D, of_D, strict=True)
    ]
    return rows, [_rounded(*pair) for pair in zip(D_f, of_D_f, strict=True)]


def _rounded(stored: Num | None, made: Num | None = None) -> Num | None:
    if stored is None:
        return None
    terms = 1 + np.abs(stored.value) if made is None else made.terms + np.abs(stored.value)
    return Num(stored.value, terms, stored.floor)


def _old_signal(r: Record, c: Check, group: str, D: list[Entries]) -> None:
    want = chained(_signals(r, group), columns(D))
    if r.known and r.algorithm['credit'] == 'whole' and group == _recurrent(r)['groups'][0]:
        weight = r.num(f'params_before/{_recurrent(r)["params"]["weight"]}')
        dy = r.num(f'signals/dy/{_recurrent(r)["name"]}')
        back = (dy @ weight.T)[:, r['inputs'].shape[-1] :]
        pairs = zip(want, _slopes(r, 'carry_before'), strict=True)
        want = [total((one, None if e is None else back * e)) for one, e in pairs]
    want = [total((one, _direct(r, f'c/{group}/{i}'))) for i, one in enumerate(want)]
    _list_close(c, r, f'signals/c/{group}', want, ('signals/dh', 'D'))


def _direct(r: Record, name: str) -> Num | None:
    """A part of a signal that reaches the loss without passing a new state."""
    path = f'signals/direct/{name}'
    return r.num(path) if r.fields.get(path) is not None else None


def trace_correction(r: Record, c: Check) -> None:
    """``1 - a^(t+1)`` counts the steps of the trace."""
    if not r.factored:
        raise Gated('the algorithm has no correction')
    want = warm_up(r.algorithm['decay_f'], r.t + 1, r.floor)
    c.close('signals/correction', r['signals/correction'], want, ('t', 'decay_f'))


# 27 to 30, 32: traces -----------------------------------------------------------------------------


def _parts(r: Record, sampled: bool = False) -> Iterator[tuple[str, Entries, Entries]]:
    """Of each trace that is kept by entries: its path, and what of it comes from the trace before
    and from this step. ``sampled``: entries of which a sample does not tell are NaN.
    """
    if r.factored:
        raise Gated('the trace is factored: rule 28')
    missing: set[str] = set()
    for name, group in r.pairs:
        with told(missing):
            yield from _parts_of(r, name, group, *(('sampled',) if sampled else ()))
    gate(missing)


@once
def _parts_of(r: Record, name: str, group: str, sampled: str = '') -> list[tuple]:
    found = []
    op, (D, D_f) = application(r, name), _factors(r, name, group)
    D, fresh = [placed(r, name, group, row) for row in D], instant_of(op, r.x(name), D_f)
    for slot in r.relations[name]['params']:
        path = f'{name}/{group}/{slot}'
        old = (known_entries if sampled else Record.entries)(r, f'traces_before/{path}')
        kept = recurrent_of(D, old, partial(op.carried, slot))
        found.append((f'traces_after/{path}', kept, fresh.get(slot, [None] * len(kept))))
    return found


def instantaneous(r: Record, c: Check) -> None:
    """The trace where ``sum_r D_sr e'_r`` is zero."""
    for path, kept, fresh in _parts(r):
        _where_other_is_zero(r, c, path, fresh, kept)


def recurrent(r: Record, c: Check) -> None:
    """The trace where ``D_f (x) x`` is zero."""
    for path, kept, fresh in _parts(r):
        _where_other_is_zero(r, c, path, kept, fresh)


def _where_other_is_zero(r: Record, c: Check, path: str, want: Entries, other: Entries) -> None:
    """Entries to which one term alone contributes; a zero that was rounded keeps its bound."""
    for i, (num, rest) in enumerate(zip(want, other, strict=True)):
        at = f'{path}/{i}'
        if r.fields.get(at) is None or num is None:
            continue
        alone = np.ones(num.shape, bool) if rest is None else rest.value == 0
        num = num if rest is None else num + rest
        if alone.any():
            stored = np.where(alone, r[at], num.value)
            c.close(at, stored, num, (at.replace('after', 'before'), 'x', 'D', 'D_f'))


def trace_after(r: Record, c: Check) -> None:
    """The sum of both terms."""
    unknown: set[str] = set()
    for path, kept, fresh in _parts(r, sampled=bool(r.sampled)):
        made_of = (path.replace('after', 'before'), 'x', 'D', 'D_f')
        for i, pair in enumerate(zip(kept, fresh, strict=True)):
            at, num = f'{path}/{i}', total(pair)
            sample, stored = r.sample(at), r.fields.get(at)
            if sample is not None and num is not None:
                stored, num = sample[1], num.reshape((-1,))[sample[0]]
            if num is not None and np.isnan(num.value).any():
                unknown.add(f'sampled: {at}, and not the same entries before')
            else:
                c.close(at, stored, num, made_of)
    gate(unknown)


def factored_trace(r: Record, c: Check) -> None:
    """Both factors of a trace of ES_D_RTRL."""
    if not r.factored:
        raise Gated('the trace is kept by entries: rules 27, 29 and 30')
    a_x, a_f = (constant(r.algorithm[name], r.floor) for name in ('decay_x', 'decay_f'))
    missing: set[str] = set()
    for name, group in r.pairs:
        at, before = _at(name, group), f'traces_before/{name}/{group}'
        with told(missing):
            x, (D, D_f) = r.x(name), _factors(r, name, group)
            D = [placed(r, name, group, row) for row in D]
            old = {'x': [] if x is None else [r.num(f'{before}/x')], 'f': r.entries(f'{before}/f')}
            x = None if x is None else application(r, name).read(x)
            new = factored_after(a_x, a_f, x, D, D_f, old)
            path = f'traces_after/{name}/{group}'
            if x is not None:
                c.close(f'{path}/x', r[f'{path}/x'], new['x'][0], (f'{before}/x', f'{at}/x'))
            _list_close(c, r, f'{path}/f', new['f'], (f'{before}/f', f'{at}/D', f'{at}/D_f'))
    gate(missing)


def fresh_start(r: Record, c: Check) -> None:
    """A lane at its start has no trace; a reset one has the initial carry."""
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
        raise Idle('no lane stands at its start')


# 4: gradients -------------------------------------------------------------------------------------


def gradient(r: Record, c: Check) -> None:
    """The gradient that signals and traces make."""
    sums, missing = gradients_of(r)
    for path, num in sums.items():
        if not r.frozen(path):
            made_of = ('factors', 'signals/dy', 'signals/c', 'traces_before')
            c.close(f'gradients/{path}', r[f'gradients/{path}'], num, made_of)
    gate(missing)
    if not sums:
        raise Gated('no parameter has a factor')


@once
def gradients_of(r: Record) -> tuple[dict[str, Num], set[str]]:
    """The gradient of each parameter that ops alone use, all of which have a formula; and why
    others have none.
    """
    sums: dict[str, Num | None] = {}
    missing, incomplete = set[str](), set[str]()
    for name, relation in r.relations.items():
        params, found = relation['params'], None
        with told(missing):
            found = _gradient_of(r, name)
        through = relation.get('options', {}).get('through', ())
        missing |= {f'{name}: {slot} is a function of its parameter' for slot in through}
        for slot, path in params.items():
            if found is None or slot in through or slot not in found:
                incomplete.add(path)
            else:
                sums[path] = total((sums.get(path), found[slot]))
    return {path: one for path, one in sums.items() if path not in incomplete}, missing


def _gradient_of(r: Record, name: str) -> dict[str, Num]:
    x, dy, op = r.x(name), r.num(f'signals/dy/{name}'), application(r, name)
    relation = r.relations[name]
    if not r.factored:
        history = []
        for g in relation['groups']:
            at = f'traces_before/{name}/{g}'
            slots = {slot: r.entries(f'{at}/{slot}') for slot in relation['params']}
            history.append((placed(r, name, g, r.entries(f'signals/c/{g}')), slots))
        return d_rtrl_gradient(op, x, dy, history)
    parts = []
    for g in relation['groups']:
        at, (_, D_f) = f'traces_after/{name}/{g}', _factors(r, name, g)
        dh = placed(r, name, g, r.entries(f'signals/dh/{g}'))
        ex = None if x is None else r.num(f'{at}/x')
        made = warm_up(r.algorithm['decay_f'], r.t + 1, r.floor)
        corrected = _rounded(r.num('signals/correction'), made)
        parts.append((dh, D_f, ex, r.entries(f'{at}/f'), corrected))
    return es_gradient(op, x, dy, parts)


# 35: what a trace does not keep -------------------------------------------------------------------


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
