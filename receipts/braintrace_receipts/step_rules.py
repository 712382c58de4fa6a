"""The rules of one step: what the receipt stores is compared with what the equations make of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from .bounds import Num, asked, exact, total
from .cells import Entries
from .checks import Check, Gated, Idle
from .equations import Equations, Made, listed, stored
from .losses import LOSSES, divisor_of, softmax
from .primitives import told
from .record import FILTER, Record


def _of_cell(r: Record) -> Equations:
    """The equations of a known cell."""
    if not r.known:
        raise Gated('the engine does not know this cell')
    return stored(r)


def _of_loss(r: Record) -> Equations:
    """The equations of a known loss."""
    name = r.raw['loss']['name']
    if name not in LOSSES:
        raise Gated(f'no formula for the loss {name}')
    return stored(r)


def _at(relation: str, group: str) -> str:
    return f'factors/{relation}/{group}'


def gate(reasons: set[str]) -> None:
    """Gates a rule off if there is any reason."""
    if reasons:
        raise Gated('; '.join(sorted(reasons)))


def hold(r: Record, c: Check, made: Made) -> None:
    """Whether fields are what equations make of others."""
    for path, num, made_of in made:
        c.close(path, None if r.fields.get(path) is None else r[path], num, made_of)


def known_entries(r: Record, prefix: str) -> Entries:
    """A list of fields, with NaN where a sample does not tell."""
    found: Entries = []
    for i in range(len(r.keys(prefix))):
        path = f'{prefix}/{i}'
        sample = r.sample(path)
        if sample is None:
            found.append(None if r.fields[path] is None else r.num(path))
            continue
        asked(*r.shape(path))
        whole = np.full(r.shape(path), np.nan)
        whole.reshape(-1)[sample[0]] = sample[1]
        found.append(exact(whole, r.floor))
    return found


# 1, 11, 12, 18: the loss --------------------------------------------------------------------------


def reduction(r: Record, c: Check) -> None:
    """The divisor is the sum of the mask, or 1."""
    _of_loss(r)
    mask, loss = r.num('loss/mask'), r.raw['loss']
    c.true('loss/mask', bool(np.all(mask.value >= 0)), 'a negative weight', 'weights >= 0')
    want = divisor_of(mask, loss['reduction'])
    c.close('loss/divisor', r['loss/divisor'], want, ('loss/mask', 'loss/reduction'))


def probabilities(r: Record, c: Check) -> None:
    """The probabilities are the softmax of the outputs."""
    if r.raw['loss']['name'] != 'softmax_ce':
        raise Gated('the loss uses no probabilities')
    found = r.num('loss/probabilities')
    c.close('loss/probabilities', np.ones(found.shape[:-1]), found.sum(-1))
    c.close('loss/probabilities', found.value, softmax(r.num('outputs')), ('outputs',))


def loss_value(r: Record, c: Check) -> None:
    """The loss of each lane and in total."""
    hold(r, c, _of_loss(r).losses())


def error(r: Record, c: Check) -> None:
    """The derivative of the loss by the outputs."""
    want = _of_loss(r).loss_slope()
    c.close('signals/err', r['signals/err'], want, ('outputs', 'targets', 'loss'))


# 8, 34: where factors come from -------------------------------------------------------------------


def provenance(r: Record, c: Check) -> None:
    """What ops read is their declared source; groups have one ``D``."""
    sources = {name: relation['source'] for name, relation in r.relations.items()}
    if r.known:
        roles, sent = r.topology['roles'], r.topology['roles'][stored(r).cell.output]
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
                path, other = f'{_at(name, group)}/D/{key}', f'{_at(own, group)}/D/{key}'
                shared = exact(r[other]) if r.fields.get(other) is not None else None
                hold(r, c, [(path, shared, (own,))])


def _source_path(part: str) -> str:
    kind, _, name = part.partition('/')
    return {'inputs': 'inputs', 'carry': f'carry_before/{name}', 'new': f'carry_after/{name}'}[kind]


DECAY = 2.0  # roundings of a decay


def constants(r: Record, c: Check) -> None:
    """Decays are those of their times; ``D`` is made of the constants."""
    declared, s = r.constants, _of_cell(r)
    for number, time in (('alpha', 'tau'), ('rho', 'tau_a'), ('kappa_out', 'tau_out')):
        if number in declared:
            x = declared['dt'] / declared[time]
            # no step makes it: it is rounded itself, and dt/tau before it
            terms = min(DECAY, c.limits.k) / c.limits.k * (1 + x) * math.exp(-x)
            want = Num(np.asarray(math.exp(-x)), np.asarray(terms), r.floor)
            path = f'topology/constants/{number}'
            c.close(path, np.asarray(float(declared[number])), want, ('dt', time))
    for name, group in r.pairs:
        for i, row in enumerate(s.formulas(name)[0]):
            if r.groups[group]['states'][i] != FILTER:
                made_of = ('topology/constants', 'carry_before')
                hold(r, c, listed(f'{_at(name, group)}/D/{i}', row, made_of))


# 2, 3, 33: signals --------------------------------------------------------------------------------


def learning_signal(r: Record, c: Check) -> None:
    """``dh``: the readout's pullback, fixed feedback, or the modulator."""
    s, feedback = _of_cell(r), r.algorithm['feedback']
    if feedback is not None:
        what = {'modulator': 'signal', 'fixed': 'feedback'}[feedback['kind']]
        c.tell('algorithm/feedback', f'the {what} comes from outside: it is taken as given')
    hold(r, c, s.learning_signals())


def step_signals(r: Record, c: Check) -> None:
    """``dy`` and ``c`` are made of ``dh``, ``D_f`` and ``D``."""
    s, missing = stored(r), set[str]()
    if r.known:
        _membrane(r, c)
    for name in r.relations:
        with told(missing):
            hold(r, c, s.signals(name))
    hold(r, c, s.old_signals())
    gate(missing)


def _membrane(r: Record, c: Check) -> None:
    """D_f, and the row of a filter, by the slope at the stored membrane."""
    for name, group in r.pairs:
        D, D_f = stored(r).formulas(name)
        at, states = _at(name, group), r.groups[group]['states']
        if states[-1] == FILTER:
            hold(r, c, listed(f'{at}/D/{len(states) - 1}', D[-1], ('carry_after', 'kappa')))
        hold(r, c, listed(f'{at}/D_f', D_f, ('carry_after',)))


def trace_correction(r: Record, c: Check) -> None:
    """``1 - a^(t+1)`` counts the steps of the trace."""
    if not r.factored:
        raise Gated('the algorithm has no correction')
    want = stored(r).warm_up()
    c.close('signals/correction', r['signals/correction'], want, ('t', 'decay_f'))


# 27 to 30, 32: traces -----------------------------------------------------------------------------


def _parts(r: Record, sampled: bool = False) -> Iterator[tuple[str, Entries, Entries]]:
    """Of each trace that is kept by entries: its path, and what of it comes from the trace before
    and from this step. ``sampled``: entries of which a sample does not tell are NaN.
    """
    if r.factored:
        raise Gated('the trace is factored: rule 28')
    missing = set[str]()
    for name, group in r.pairs:
        key = ('parts', name, group, str(sampled))
        with told(missing):
            if key not in r.kept:
                old = (lambda prefix: known_entries(r, prefix)) if sampled else r.entries
                r.kept[key] = stored(r).trace(name, group, old)
            for slot, kept, fresh in r.kept[key]:
                yield f'traces_after/{name}/{group}/{slot}', kept, fresh
    gate(missing)


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
    missing = set[str]()
    for name, group in r.pairs:
        with told(missing):
            hold(r, c, stored(r).factored(name, group))
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
        raise Idle('no lane is at its start')


# 4: gradients -------------------------------------------------------------------------------------


def gradient(r: Record, c: Check) -> None:
    """The gradient that signals and traces make."""
    sums, missing = stored(r).gradients()
    made_of = ('factors', 'signals/dy', 'signals/c', 'traces_before')
    for path, num in sums.items():
        if not r.frozen(path):
            c.close(f'gradients/{path}', r[f'gradients/{path}'], num, made_of)
    gate(missing)
    if not sums:
        raise Gated('no parameter has a factor')


# 35: what a trace does not keep -------------------------------------------------------------------


def dropped_mass(r: Record, c: Check) -> None:
    """The share of the absolute hidden Jacobian that the position-wise trace does not keep."""
    s = _of_cell(r)
    relation, group, width = s.relation('recurrent'), s.group, r['inputs'].shape[-1]
    weight = r[f'params_before/{relation["params"]["weight"]}'][width:]
    at = _at(relation['name'], group)
    size = sum(one != FILTER for one in r.groups[group]['states'])
    old = [np.zeros(1) if e is None else np.abs(e.value) for e in s.slopes('carry_before')[:size]]
    new = [np.zeros(1) if e is None else np.abs(e.value) for e in r.entries(f'{at}/D_f')[:size]]
    lost = sum(
        np.einsum('bi,io,bo->', e, np.abs(weight), d) for e in old for d in new if d.ndim > 1
    )
    rows = [row[:size] for row in r.matrix(f'{at}/D')[:size]]
    kept = sum(np.abs(d.value).sum() for row in rows for d in row if d is not None)
    c.counts[c.rule] += 1
    c.tell(f'dropped_mass/{group}', float(lost / (lost + kept)) if lost + kept else 0.0)
