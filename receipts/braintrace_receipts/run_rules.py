"""The rules between the records of a run. Each looks at one record and what lies right before it:
the record before, the last update, or the window that ends here.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from .arrays import is_sampled
from .bounds import Num, constant, exact, total
from .cells import chained, columns
from .checks import Check, Gated, Idle
from .engine import derive_parts
from .equations import stored
from .record import Record, Unavailable, below
from .rederivation import obstacle, unknown


class Run:
    """The record at hand, ``now``, and what of the run before it is still looked at: the first
    record, the one before, the last with an update if no step is missing since, what optimiser it
    has, how its windows are reduced, the records of the window at hand from its first one on, the
    root digest so far, and whether a signature says that the run has ended.
    """

    now: Record
    first: Record

    def __init__(self) -> None:
        self.place = -1
        self.before: Record | None = None
        self.updated: Record | None = None
        self.optimizer: dict | None = None
        self.reduction: str | None = None
        self.window: list[Record] = []
        self.root = ''
        self.ended = False

    def take(self, record: Record) -> None:
        """Turns to the next record."""
        if self.place >= 0 and self.now.raw['optimizer'] is not None:
            self.updated = self.now
        self.before = self.now if self.place >= 0 else None
        self.now, self.place = record, self.place + 1
        if self.place == 0:
            self.first = record
        if self.before is not None:
            self.before.kept.clear()
        if not self.adjacent:
            self.updated = None
        window = record.raw.get('window')
        goes_on = window is not None and window['index'] and self.window and self.adjacent
        if not goes_on:
            self.window = []
        if goes_on or (window is not None and window['index'] == 0):
            self.window.append(record)

    @property
    def adjacent(self) -> bool:
        """Whether this is the step behind that of the record before."""
        before = self.before
        return before is not None and self.now.raw['step'] == before.raw['step'] + 1

    def pair(self) -> tuple[Record, Record]:
        """The record before, whose step is the one before, and this one."""
        if self.before is None or not self.adjacent:
            raise Idle('no two records are of adjacent steps')
        return self.before, self.now

    @property
    def whole_window(self) -> bool:
        """Whether a window ends here, all of whose records are here."""
        return bool(self.window) and len(self.window) == self.window[0].raw['window']['length']


def parameters_chain(run: Run, c: Check) -> None:
    """Parameters of adjacent records, bit for bit."""
    _chain(c, *run.pair(), 'params_before', source=f'[{run.place - 1}].')


def one_run(run: Run, c: Check) -> None:
    """One run, its steps in order, and one specification."""
    first, r = run.first.raw, run.now.raw
    for name in ('run_id', 'every', 'spec_digest'):
        c.true(name, r[name] == first[name], r[name], first[name])
    c.true('spec_digest', r['spec_digest'] == run.now.spec, r['spec_digest'], run.now.spec)
    step = first['step'] + run.place * first['every']
    c.true('step', r['step'] == step, r['step'], step)


def root_digest(run: Run, c: Check) -> None:
    """Each root digest is made of the one before and of the record."""
    digests = run.now.raw.get('digests', {})
    if run.ended:
        c.true('digests/signature', False, 'a record', 'none behind the signed end')
    run.ended = c.ended
    if 'root' not in digests:
        if run.root or c.key is not None:
            c.true('digests/root', False, 'no root digest', 'one, as before or for a key')
        raise Idle('the records have no root digest')
    want = chained_root(run.root, digests['receipt'])
    if run.place == 0 and run.now.raw['step'] > 0:
        want = digests['root']  # the records before are not here
    else:
        c.true('digests/root', digests['root'] == want, digests['root'], want)
    run.root = want


def chained_root(root: str, digest: str) -> str:
    """The root digest after one more record."""
    return f'sha256:{hashlib.sha256((root + digest).encode()).hexdigest()}'


def window_sums(run: Run, c: Check) -> None:
    """The gradients of a window are the weighted sum of those of its steps."""
    if run.adjacent:
        before, own = (r.raw.get('window') or ALONE for r in run.pair())
        want = (before['index'] + 1) % before['length']
        c.true('window/index', own['index'] == want, own['index'], want)
        if own['index']:
            sizes: list[Any] = [one['length'] for one in (own, before)]
            c.true('window/length', sizes[0] == sizes[1], *sizes)
    if not run.whole_window:
        raise Idle('no whole window')
    first, last = run.window[0].raw['window'], run.now
    for i, r in enumerate(run.window):
        own = {**r.raw['window'], 'gradients': None, 'weight': None}
        want = {**first, 'index': i, 'gradients': None, 'weight': None}
        c.true('window', own == want, own, want, 'one window, in order')
    weights = [r.raw['window']['weight'] for r in run.window]
    least = min(weights)
    c.true('window/weight', least >= 0, least, 'weights >= 0')
    divisor = total(exact(w, last.floor) for w in weights)
    if divisor is None or first['reduction'] == 'sum' or divisor.value == 0:
        divisor = exact(1.0, last.floor)
    c.close('window/divisor', np.asarray(float(first['divisor'])), divisor, ('window/weight',))
    if not c.true(
        'window/gradients', 'gradients' in last.raw['window'], 'none', 'the sum of the window'
    ):
        return
    for path in sorted(last.keys('window/gradients')):
        parts = [
            constant(w, last.floor) * _made(r, path)
            for w, r in zip(weights, run.window, strict=True)
        ]
        at = f'window/gradients/{path}'
        whole = total(parts)
        c.close(at, last[at], None if whole is None else whole / divisor, ('gradients',))


ALONE = {'index': 0, 'length': 1}  # a step with a window of its own


def _made(r: Record, path: str) -> Num:
    """A stored gradient of a step with the terms that it was made of: a window sums them all."""
    own, made = r.num(f'gradients/{path}'), stored(r).gradients()[0].get(path)
    return own if made is None else Num(own.value, made.terms, own.floor)


def lanes_stay(run: Run, c: Check) -> None:
    """A lane keeps its sample until it is reset."""
    a, b = run.pair()
    same = len(a.raw['lanes']) == len(b.raw['lanes'])
    if c.true('lanes', same, len(b.raw['lanes']), len(a.raw['lanes'])):
        before, after = (np.asarray(r.raw['lanes'])[~b.reset] for r in (a, b))
        c.same('lanes', after, before, ('reset',))


def optimizer_chains(run: Run, c: Check) -> None:
    """The optimiser state of adjacent updates, bit for bit."""
    r, before = run.now, run.updated
    if r.raw['optimizer'] is None or before is None:
        raise Idle('no two adjacent updates')
    want, found = before.raw['optimizer']['state_after'], r.raw['optimizer']['state_before']
    at = 'optimizer/state_before'
    c.true(f'{at}/count', want['count'] == found['count'], found['count'], want['count'])
    keys, others = r.keys(at), before.keys('optimizer/state_after')
    c.true(at, keys == others, sorted(keys), 'as before')
    _chain(c, before, r, at)


def configuration_stays(run: Run, c: Check) -> None:
    """Algorithm, numbers, cell, loss, feedback and optimiser, but for its rate."""
    first, r = run.first, run.now
    own = None if r.raw['optimizer'] is None else _fixed(r)
    run.optimizer = run.optimizer or own
    window = r.raw.get('window') or {'reduction': run.reduction}
    run.reduction = run.reduction or window['reduction']
    if run.before is None:
        raise Idle('one record')
    c.true('window/reduction', window['reduction'] == run.reduction, window, run.reduction)
    want = first.settings
    for name, value in r.settings.items():
        c.true(name, value == want[name], value, want[name])
    feedback = r.algorithm['feedback']
    if feedback is not None and feedback['kind'] == 'fixed':
        at = 'algorithm/feedback'
        c.same(at, r[at], first[at])
    if own is not None:
        c.true('optimizer/config', own == run.optimizer, own, run.optimizer)


def _fixed(r: Record) -> dict:
    optimizer = r.raw['optimizer']
    config = {name: value for name, value in optimizer['config'].items() if name != 'lr'}
    return {'name': optimizer['name'], **config}


def states_chain(run: Run, c: Check) -> None:
    """Traces, carry and t of adjacent records on lanes that are not reset."""
    a, b = run.pair()
    if len(a.raw['lanes']) != len(b.raw['lanes']):
        return
    stay, source = ~b.reset, f'[{run.place - 1}].'
    c.same('t', b.t[stay], a.t[stay] + 1, (f'{source}t',))
    _chain(c, a, b, 'carry_before', 'traces_before', stay=stay, source=source)


def _chain(c: Check, a: Record, b: Record, *kinds: str, stay=None, source: str = '') -> None:
    """Fields of ``b`` from before its step are those of ``a`` after it, bit for bit, on the lanes
    that stay; samples of whole arrays have one digest.
    """
    missing: list[str] = []
    for at in (path for kind in kinds for path in below(b.paths, kind)):
        before = at.replace('before', 'after', 1)
        fields = b.fields[at], a.fields.get(before)
        digests = [one['sha256'] for one in fields if is_sampled(one)]
        if len(digests) == len(fields) and (stay is None or stay.all()):
            c.true(at, digests[0] == digests[1], *digests)
            continue
        try:
            parts = b.of_lanes(at, stay), a.of_lanes(before, stay)
        except Unavailable as reason:
            missing.append(str(reason))
            continue
        _joined(c, at, *parts, f'{source}{before}')
    if missing:
        raise Gated('; '.join(missing))


def _joined(c: Check, at: str, found, want, source: str) -> None:
    """A field is that of the step before; where one of them is a zero by structure, both are 0."""
    if found is None and want is None:
        return
    if found is None or want is None:
        found, want = np.abs(0.0 if found is None else found), np.abs(0.0 if want is None else want)
        found, want = np.broadcast_arrays(found, want)
    c.same(at, found, want, (source,))


def forward_is_reverse(run: Run, c: Check) -> None:
    """A window from zero traces: the online sum is the sum of a reverse sweep without traces."""
    records = run.window
    if not run.whole_window or not _from_zero(records):
        raise Idle('no whole window of D_RTRL from zero traces, without a reset')
    weights = [constant(r.raw['window']['weight']) for r in records]
    divisor = constant(records[-1].raw['window']['divisor'])
    for path, num in _reversed(records, weights, divisor).items():
        c.close(f'window/gradients/{path}', records[-1][f'window/gradients/{path}'], num)


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
    same = r.spec == first.spec and r.settings == first.settings
    return same and all(own[path] == other[path] for path in shared)


def _reversed(records: list[Record], weights: list[Num], divisor: Num) -> dict[str, Num]:
    """``delta_t = dy_t + lam_t . D_f``, ``lam_{t-1} = c_t + lam_t D_t``, from the last step on."""
    sums: dict[str, Num | None] = {}
    lam: dict[str, list[Num | None]] = {}
    for r, weight in zip(reversed(records), reversed(weights), strict=True):
        step = derive_parts(r)
        for name, relation in step.r.relations.items():
            delta = weight * step.r.num(f'signals/dy/{name}')
            for group in relation['groups']:
                back = chained(lam[group], [step.by.formulas(name)[1]]) if group in lam else []
                delta = sum((one for one in back if one is not None), delta)
            for slot, one in step.by.same_step(name, delta).items():
                path = relation['params'].get(slot)
                if f'gradients/{path}' in step.fields:
                    sums[path] = total((sums.get(path), one))
        for name, group in step.r.pairs:
            D = step.by.formulas(name)[0]
            old = chained(lam[group], columns(D)) if group in lam else [None] * len(D)
            now = [
                None if one is None else weight * one
                for one in step.r.entries(f'signals/c/{group}')
            ]
            lam[group] = [total(pair) for pair in zip(now, old, strict=True)]
    return {path: one / divisor for path, one in sums.items() if one is not None}
