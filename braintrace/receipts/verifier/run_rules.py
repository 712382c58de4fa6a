"""The rules between the records of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from .arrays import is_sampled
from .bounds import Num, constant, exact, total
from .canonical import spec_digest
from .cells import chained
from .checks import Check, Gated, Idle
from .engine import derive_parts
from .record import Record, Unavailable
from .rederivation import obstacle, unknown
from .step_rules import gradients_of


class Run:
    """Records in order; ``adjacent`` are pairs of steps that follow each other."""

    def __init__(self, records: list[Record]):
        self.records = records

    @property
    def pairs(self) -> Iterator[tuple[int, Record, Record]]:
        """Index of the second, and both."""
        for i, (a, b) in enumerate(pairwise(self.records)):
            yield i + 1, a, b

    @property
    def adjacent(self) -> list[tuple[int, Record, Record]]:
        """Pairs of which the second is the next step."""
        found = [pair for pair in self.pairs if pair[2].raw['step'] == pair[1].raw['step'] + 1]
        if not found:
            raise Gated('no two records are of adjacent steps')
        return found

    def windows(self) -> list[tuple[int, list[Record]]]:
        """The index of the first record and the records of each whole window."""
        found: list[tuple[int, list[Record]]] = []
        for i, r in enumerate(self.records):
            window = r.raw.get('window')
            if window is not None and window['index'] == 0:
                records = self.records[i : i + window['length']]
                steps = [one.raw['step'] - k for k, one in enumerate(records)]
                here = len(records) == window['length'] and len(set(steps)) == 1
                if here and all('window' in one.raw for one in records):
                    found.append((i, records))
        return found

    def unsummed(self) -> list[int]:
        """Records with the gradients of a window whose other steps are not all here."""
        whole = {start + len(records) - 1 for start, records in self.windows()}
        ends = [i for i, r in enumerate(self.records) if 'gradients' in (r.raw.get('window') or {})]
        return [i for i in ends if i not in whole]


def _at(i: int, path: str) -> str:
    return f'[{i}].{path}'


def parameters_chain(run: Run, c: Check) -> None:
    """Parameters of adjacent records, bit for bit."""
    for i, a, b in run.adjacent:
        for path in sorted(b.keys('params_before')):
            at = _at(i, f'params_before/{path}')
            fields = b.fields[f'params_before/{path}'], a.fields.get(f'params_after/{path}')
            if all(map(is_sampled, fields)):
                digests = [one['sha256'] for one in fields]
                c.true(at, digests[0] == digests[1], *digests)
                continue
            after, before = a[f'params_after/{path}'], b[f'params_before/{path}']
            c.same(at, before, after, (_at(i - 1, f'params_after/{path}'),))


def one_run(run: Run, c: Check) -> None:
    """One run, its steps in order, and one specification."""
    first = run.records[0].raw
    for i, r in enumerate(run.records):
        for name in ('run_id', 'every', 'spec_digest'):
            c.true(_at(i, name), r.raw[name] == first[name], r.raw[name], first[name])
        want = spec_digest(r.raw)
        c.true(_at(i, 'spec_digest'), r.raw['spec_digest'] == want, r.raw['spec_digest'], want)
        step = first['step'] + i * first['every']
        c.true(_at(i, 'step'), r.raw['step'] == step, r.raw['step'], step)


def root_digest(run: Run, c: Check) -> None:
    """Each root digest is made of the one before and of the record."""
    root = ''
    for i, r in enumerate(run.records):
        digests = r.raw.get('digests', {})
        if 'root' not in digests:
            if root:
                c.true(_at(i, 'digests/root'), False, 'no root digest', 'one as before')
            continue
        want = chained_root(root, digests['receipt'])
        if i == 0 and r.raw['step'] > 0:
            want = digests['root']  # the records before are not here
        else:
            c.true(_at(i, 'digests/root'), digests['root'] == want, digests['root'], want)
        root = want
    if not root:
        raise Gated('the records have no root digest')


def chained_root(root: str, digest: str) -> str:
    """The root digest after one more record."""
    return f'sha256:{hashlib.sha256((root + digest).encode()).hexdigest()}'


def window_sums(run: Run, c: Check) -> None:
    """The gradients of a window are the weighted sum of those of its steps."""
    for i, a, b in run.pairs:
        if b.raw['step'] == a.raw['step'] + 1:
            before, own = (r.raw.get('window') or {'index': 0, 'length': 1} for r in (a, b))
            want = (before['index'] + 1) % before['length']
            c.true(_at(i, 'window/index'), own['index'] == want, own['index'], want)
            if own['index']:
                sizes = [one['length'] for one in (own, before)]
                c.true(_at(i, 'window/length'), sizes[0] == sizes[1], *sizes)
    windows = run.windows()
    if not windows:
        raise Idle('no whole window')
    for start, records in windows:
        first, last = records[0].raw['window'], records[-1]
        for i, r in enumerate(records):
            own = {**r.raw.get('window', {}), 'gradients': None, 'weight': None}
            want = {**first, 'index': i, 'gradients': None, 'weight': None}
            c.true(_at(start + i, 'window'), own == want, own, want, 'one window, in order')
        weights = [r.raw.get('window', first)['weight'] for r in records]
        least = min(weights)
        c.true(_at(start, 'window/weight'), least >= 0, least, 'weights >= 0')
        divisor = total(exact(w, last.floor) for w in weights)
        if first['reduction'] == 'sum' or divisor.value == 0:
            divisor = exact(1.0, last.floor)
        path = _at(start, 'window/divisor')
        c.limits = c.limits_of(last)
        c.close(path, np.asarray(float(first['divisor'])), divisor, ('window/weight',))
        end = _at(start + len(records) - 1, 'window/gradients')
        if not c.true(end, 'gradients' in last.raw['window'], 'none', 'the sum of the window'):
            continue
        for path in sorted(last.keys('window/gradients')):
            parts = [constant(w) * _made(r, path) for w, r in zip(weights, records)]
            at = f'{end}/{path}'
            c.close(at, last[f'window/gradients/{path}'], total(parts) / divisor, ('gradients',))


def _made(r: Record, path: str) -> Num:
    """A stored gradient of a step with the terms that it was made of: a window sums them all."""
    stored, made = r.num(f'gradients/{path}'), gradients_of(r)[0].get(path)
    return stored if made is None else Num(stored.value, made.terms, stored.floor)


def lanes_stay(run: Run, c: Check) -> None:
    """A lane keeps its sample until it is reset."""
    for i, a, b in run.adjacent:
        stay = ~b.reset
        same = len(a.raw['lanes']) == len(b.raw['lanes'])
        if c.true(_at(i, 'lanes'), same, len(b.raw['lanes']), len(a.raw['lanes'])):
            before, after = (np.asarray(r.raw['lanes'])[stay] for r in (a, b))
            c.same(_at(i, 'lanes'), after, before, ('reset',))


def optimizer_chains(run: Run, c: Check) -> None:
    """The optimiser state of adjacent updates, bit for bit."""
    last: dict | None = None
    for i, r in enumerate(run.records):
        optimizer = r.raw['optimizer']
        follows = i and r.raw['step'] == run.records[i - 1].raw['step'] + 1
        last = last if follows else None
        if optimizer is None:
            continue
        if last is not None:
            want, found = last['after'].raw['optimizer']['state_after'], optimizer['state_before']
            at = _at(i, 'optimizer/state_before')
            c.true(f'{at}/count', want['count'] == found['count'], found['count'], want['count'])
            before = last['after']
            keys = r.keys('optimizer/state_before')
            c.true(at, keys == before.keys('optimizer/state_after'), sorted(keys), 'as before')
            for key in sorted(keys & before.keys('optimizer/state_after')):
                after = before[f'optimizer/state_after/{key}']
                c.same(f'{at}/{key}', r[f'optimizer/state_before/{key}'], after)
        last = {'after': r}
    if not c.counts[c.rule]:
        raise Gated('no two adjacent updates')


def configuration_stays(run: Run, c: Check) -> None:
    """Algorithm, numbers, cell, feedback and optimiser, but for its rate."""
    if len(run.records) < 2:
        raise Gated('one record')
    first, updated = run.records[0], None
    for i, r in enumerate(run.records):
        want = _settings(first)
        for name, value in _settings(r).items():
            c.true(_at(i, name), value == want[name], value, want[name])
        feedback = r.algorithm['feedback']
        if feedback is not None and feedback['kind'] == 'fixed':
            at = _at(i, 'algorithm/feedback')
            c.same(at, r['algorithm/feedback'], first['algorithm/feedback'])
        if r.raw['optimizer'] is not None:
            own = _fixed(r)
            updated = own if updated is None else updated
            c.true(_at(i, 'optimizer/config'), own == updated, own, updated)


def _settings(r: Record) -> dict:
    numbers = {f'algorithm/{k}': v for k, v in r.algorithm.items() if k != 'feedback'}
    numeric = {f'numeric/{k}': v for k, v in r.raw['numeric'].items() if k != 'k'}
    kind = (r.algorithm['feedback'] or {}).get('kind')
    names = ('cell', 'readout', 'roles', 'constants')
    topology = {f'topology/{name}': r.topology[name] for name in names}
    return {**numbers, **numeric, **topology, 'algorithm/feedback': kind}


def _fixed(r: Record) -> dict:
    optimizer = r.raw['optimizer']
    config = {name: value for name, value in optimizer['config'].items() if name != 'lr'}
    return {'name': optimizer['name'], **config}


def states_chain(run: Run, c: Check) -> None:
    """Traces, carry and t of adjacent records on lanes that are not reset."""
    missing: list[str] = []
    for i, a, b in run.adjacent:
        if len(a.raw['lanes']) != len(b.raw['lanes']):
            continue
        stay = ~b.reset
        c.same(_at(i, 't'), b.t[stay], a.t[stay] + 1, (_at(i - 1, 't'),))
        for path in sorted(b.fields):
            kind, _, rest = path.partition('/')
            before = f'{kind.replace("before", "after")}/{rest}'
            if kind not in ('carry_before', 'traces_before'):
                continue
            at = _at(i, path)
            if b.sample(path) is not None and a.sample(before) is not None and stay.all():
                digests = [r.fields[p]['sha256'] for r, p in ((b, path), (a, before))]
                c.true(at, digests[0] == digests[1], *digests)
                continue
            try:
                parts = _part(b, path, stay), _part(a, before, stay)
            except Unavailable as reason:
                missing.append(str(reason))
                continue
            _joined(c, at, *parts, _at(i - 1, before))
    if missing:
        raise Gated('; '.join(missing))


def _part(r: Record, path: str, lanes: np.ndarray) -> np.ndarray | None:
    """The lanes of a field; None is a zero by structure."""
    return None if r.fields.get(path) is None else r.of_lanes(path, lanes)


def _joined(c: Check, at: str, found, want, source: str) -> None:
    """A field is that of the step before; where one of them is a zero by structure, both are 0."""
    if found is not None and want is not None:
        c.same(at, found, want, (source,))
    elif found is not None or want is not None:
        zero = np.zeros(np.shape(want if found is None else found))
        left, right = (zero if one is None else np.abs(one) for one in (found, want))
        c.same(at, left, right, (source,))


def forward_is_reverse(run: Run, c: Check) -> None:
    """A window from zero traces: the online sum is the sum of a reverse sweep without traces."""
    found = [pair for pair in run.windows() if _from_zero(pair[1])]
    if not found:
        raise Gated('no whole window of D_RTRL from zero traces, without a reset')
    for start, records in found:
        c.limits = c.limits_of(records[-1])
        weights = [constant(r.raw['window']['weight']) for r in records]
        divisor = constant(records[-1].raw['window']['divisor'])
        for path, num in _reversed(records, weights, divisor).items():
            stored = records[-1][f'window/gradients/{path}']
            c.close(_at(start + len(records) - 1, f'window/gradients/{path}'), stored, num)


def _from_zero(records: list[Record]) -> bool:
    first = records[0]
    plain = first.algorithm['credit'] == 'cut' and not first.factored
    later = any(r.reset.any() for r in records[1:])
    whole = 'gradients' in (records[-1].raw.get('window') or {})
    derived = not any(obstacle(r) or unknown(r) for r in records) and all(
        _alike(r, first) for r in records
    )
    return bool(plain and whole and derived and not later and not first.t.any())


def _alike(r: Record, first: Record) -> bool:
    """Whether two records are of one net."""
    own, other = ({p: np.shape(v) for p, v in one.fields.items()} for one in (r, first))
    shared = own.keys() & other.keys()
    same = spec_digest(r.raw) == spec_digest(first.raw) and _settings(r) == _settings(first)
    return same and all(own[path] == other[path] for path in shared)


def _reversed(records: list[Record], weights: list[Num], divisor: Num) -> dict[str, Num]:
    """``delta_t = dy_t + lam_t . D_f``, ``lam_{t-1} = c_t + lam_t D_t``, from the last step on."""
    sums: dict[str, Num | None] = {}
    lam: dict[str, list[Num | None]] = {}
    for r, weight in zip(reversed(records), reversed(weights), strict=True):
        step = derive_parts(r)
        for relation in (step.recurrent, step.readout):
            name = relation['name']
            delta: Num | None = weight * step.dy[name]
            for group in relation['groups']:
                back = chained(lam.get(group, []), [step.D_f[group]]) if group in lam else []
                delta = total([delta, *back])
            for slot, one in step.same_step(relation, delta).items():
                path = relation['params'].get(slot)
                if path is not None and path in step.gradients:
                    sums[path] = total((sums.get(path), one))
        for group, D in step.D.items():
            columns = [list(column) for column in zip(*D, strict=True)]
            old = chained(lam[group], columns) if group in lam else [None] * len(columns)
            now = [None if one is None else weight * one for one in step.c[group]]
            lam[group] = [total(pair) for pair in zip(now, old, strict=True)]
    return {path: one / divisor for path, one in sums.items() if one is not None}
