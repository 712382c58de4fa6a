"""The reconciler: applies every rule, compares, decides. It reads no label and no file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .bounds import TooLarge, room_for
from .checks import CEILINGS, MOST, Check, Failure, Gated, Idle, Limits
from .engine import derive_parts
from .equations import stored
from .looseness import LOOSE
from .optimizers import OPTIMIZERS
from .record import Record, Unavailable
from .rederivation import obstacle
from .rules import RULES, RUN_RULES, STEP_RULES
from .run_rules import ALONE, Run
from .structure import read

VERDICTS = ('rederived', 'consistent', 'skipped', 'failed', 'malformed')  # from best to worst
PARTIAL = ('opaque_cell', 'unsupported_operation', 'sampled_arrays')  # a basis that is no skip


@dataclass(frozen=True)
class Result:
    """What the verifier found. ``rules_evaluated`` (rule -> number of comparisons) and
    ``gated_off`` (rule -> reason) together are all rules.

    ``verdict``: ``'rederived'``, rule 14 ran and all holds; ``'consistent'``, all algebra holds,
    and the engine cannot derive the step; ``'skipped'``, another basis was claimed; ``'failed'``;
    ``'malformed'``. ``ties`` counts spikes whose potential is too near to its threshold to tell.
    ``failures`` are the first 50, ``failed`` (rule -> places) counts all. ``loose``: fields that
    may be off by more than 1 % of their size, and gradients by which a row, column or number of a
    parameter may be (path -> share). ``doubts``: what is not shown though all holds, or odd: ties,
    samples, loose fields, gaps, a cut run, a start at t > 0, steps without an update or a weight,
    rates below zero, parameters that never move.

    >>> result = reconcile_run([{}])
    >>> result.verdict, result.gated_off[16]
    ('malformed', 'the structure is not right')
    """

    ok: bool
    verdict: str
    failures: tuple[Failure, ...] = ()
    rules_evaluated: Mapping[int, int] = field(default_factory=dict)
    gated_off: Mapping[int, str] = field(default_factory=dict)
    ties: int = 0
    disclosures: Mapping[str, Any] = field(default_factory=dict)
    loose: Mapping[str, float] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    failed: Mapping[int, int] = field(default_factory=dict)


def reconcile(
    obj: Any, *, level: str = 'observer', allow: Iterable[str] = (), key: bytes | None = None
) -> Result:
    """Verify one receipt, any value whatever; nothing is raised.

    ``level``: the ceiling of k, ``'observer'`` 64 or ``'engine'`` 8. ``allow``: ``'tf32'`` and
    ``'bf16'`` admit products, and traces, of that precision. ``key``: of the signatures.

    >>> reconcile(None).verdict
    'malformed'
    """
    return _guarded(lambda: _judged([obj], level, allow, key, whole=False))


def reconcile_run(
    objs: Any, *, level: str = 'observer', allow: Iterable[str] = (), key: bytes | None = None
) -> Result:
    """Verify the receipts of a run in order, and what lies between them; as :func:`reconcile`.

    An iterator is read record by record, and what was judged is let go.

    >>> reconcile_run([]).verdict
    'malformed'
    """
    return _guarded(lambda: _judged(objs, level, allow, key, whole=True))


def _guarded(judge: Callable[[], Result]) -> Result:
    """The result, also where something was not foreseen."""
    try:
        with np.errstate(all='ignore'):
            return judge()
    except (TooLarge, MemoryError) as error:
        said = f'{error}' or 'its formulas ask for more memory than there is'
        return _malformed([Failure(0, '', 'too large', None, hint=said)])
    except (Exception, RecursionError) as error:  # the promise is to return, whatever came in
        said = f'{type(error).__name__}: {error}'[:300]
        return _malformed([Failure(0, 'internal', None, None, hint=said)])


def _malformed(failures: Sequence[Failure]) -> Result:
    gated = {number: 'the structure is not right' for number in RULES if number}
    count = max(1, len(failures))
    return Result(False, 'malformed', tuple(failures), {0: count}, gated, failed={0: count})


def _judged(objs: Any, level: str, allow: Iterable[str], key: bytes | None, whole: bool) -> Result:
    """Records are judged as they come; of those that were no more is kept than rules look at."""
    refused = _options(level, allow, key)
    if refused:
        return _malformed([Failure(0, 'options', None, None, hint=refused)])
    if not isinstance(objs, list | tuple | Iterator):
        return _malformed([Failure(0, '', type(objs).__name__, RECORDS)])
    check, run = Check(partial(Limits.of, level=level, allow=tuple(allow)), key=key), Run()
    seen = Seen(check)
    for i, obj in enumerate(objs):
        at = f'[{i}].' if whole else ''
        problems, record = read(obj)
        if record is None:
            found = [Failure(0, at + p.path, None, None, hint=p.message) for p in problems]
            return _malformed(found)
        check.begin(record, at)
        run.take(record)
        with room_for(sum(one.size for one in {*run.window, record})):
            _rules_of(check, run, whole)
            _weigh(check, run)
        asked = record.raw['numeric']['k']
        if asked is not None and asked > CEILINGS[level]:
            check.tell('k', f'{asked:g} was asked for; the ceiling is {CEILINGS[level]:g}')
        seen.take(run)
    if run.place < 0:
        return _malformed([Failure(0, '', type(objs).__name__, RECORDS)])
    if whole:
        seen.end(run)
    return seen.result()


RECORDS = 'a list of receipts, at least one'


def _rules_of(check: Check, run: Run, whole: bool) -> None:
    """Every rule, on a record and on what lies between it and those before."""
    check.counts[0] += 1
    if check.limits.trace > check.limits.unit:
        check.tell('traces', f'compared as {run.now.raw["numeric"]["trace_dtype"]}')
    for number, rule in STEP_RULES:
        _apply(check, number, partial(rule, run.now))
    check.of_run = True
    for number, rule in RUN_RULES:
        if whole or number == 18:
            _apply(check, number, partial(rule, run))
        else:
            check.gated[number] = 'it needs the records of a run'
    check.of_run = False
    if 'gradients' in (run.now.raw.get('window') or {}) and not run.whole_window:
        check.gated.setdefault(14, 'gradients of a window whose other steps are not here')


def _weigh(check: Check, run: Run) -> None:
    """How wide the bounds of a record are, and what its optimiser makes of that."""
    r, limits = run.now, check.limits
    name = (r.raw['optimizer'] or {'name': ''})['name']

    def updated(path: str, terms: np.ndarray) -> np.ndarray | float | None:
        if name not in OPTIMIZERS or not isinstance(
            r.fields.get(f'params_after/{path}'), np.ndarray
        ):
            return None
        with suppress(Unavailable):
            exact, wide = (stored(r).updated(path, more)[1] for more in (0.0, terms))
            return wide.terms - exact.terms
        return None

    def derived(off: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        if not run.adjacent or obstacle(r):
            return {}
        made = derive_parts(r, off).fields
        ku = {path: limits.of_path(path, 14) for path in made}
        return {p: (num.value, ku[p] * num.terms) for p, num in made.items() if num is not None}

    check.loose.end(r, limits.k * limits.unit, limits.tiny, updated, derived)


class Seen:
    """What a reader should know of a run that no rule refuses; ``doubts`` are what is not shown."""

    def __init__(self, check: Check):
        self.check = check
        self.gaps = self.resets = self.sampled = self.updates = self.left_out = self.idle = 0
        self.bases: set[str] = set()
        self.doubts: list[str] = []
        self.ranges: dict[str, tuple[float, float]] = {}
        self.still: set[str] = set()

    def take(self, run: Run) -> None:
        """What a record adds."""
        r = run.now
        self.gaps += run.before is not None and not run.adjacent
        self.resets += int(r.reset.sum())
        self.sampled += len(r.sampled)
        self.bases |= {r.raw['skip']['basis']} if 'skip' in r.raw else set()
        if run.place == 0:
            self._start(r)
        window = r.raw.get('window') or {**ALONE, 'weight': 1.0}
        weight = window['weight'] * float(_size(r, 'loss/mask', np.sum))
        self._range('step_weight', weight / (r.raw['loss']['divisor'] or 1.0))
        for of in (np.min, np.max):
            self._range('lane_weight', float(_size(r, 'loss/mask', of)))
        if r.raw['optimizer'] is not None:
            self._update(r)
        elif window['index'] + 1 == window['length']:
            self.left_out += 1

    def _range(self, name: str, value: float) -> None:
        low, high = self.ranges.get(name, (value, value))
        self.ranges[name] = min(low, value), max(high, value)

    def _update(self, r: Record) -> None:
        """An update, which may move less than it seems."""
        for name in ('lr', 'weight_decay'):
            if name in r.raw['optimizer']['config']:
                self._range(name, r.raw['optimizer']['config'][name])
        still = {path for path in r.keys('params_before') if _same(r, path)}
        learns = any(_size(r, f'gradients/{path}', np.any) for path in r.keys('gradients'))
        if not self.updates:
            self._optimizer(r)
            self.still = still
        self.idle += learns and len(still) == len(r.keys('params_before'))
        self.still &= still
        self.updates += 1

    def _start(self, r: Record) -> None:
        """Where the first record starts, which no record before it shows."""
        step, t = r.raw['step'], int(r.t.max())
        given = 'parameters, carry and traces' if t else 'parameters and carry'
        self.check.disclosures['start'] = f'step {step}, t = {t}: {given} are taken as given'
        if step or t:
            self.doubts.append(f'a start at step {step}, t = {t}')

    def _optimizer(self, r: Record) -> None:
        """The state of the first update."""
        at, count = 'optimizer/state_before', r.raw['optimizer']['state_before']['count']
        moved = any(r.sample(f'{at}/{k}') or np.any(r[f'{at}/{k}']) for k in r.keys(at))
        if count or moved:
            said = f'a state of the optimiser (count {count}) from before the run'
            self.check.disclosures['optimiser'] = f'{said} is taken as given'
            self.doubts.append(said)

    def end(self, run: Run) -> None:
        """What the last record leaves open, and what all of them were."""
        window, told = run.now.raw.get('window') or ALONE, self.check.disclosures
        if window['index'] + 1 < window['length']:
            told['window'] = f'the last one ends after {window["index"] + 1} of {window["length"]}'
            self.doubts.append('an end in the middle of a window')
        if self.check.key is not None and not run.ended:
            told['signature'] = (
                'the last record is not signed as the end: later ones may be missing'
            )
            self.doubts.append('an end that is not signed')
        if self.gaps:
            told['steps between records'] = f'{self.gaps} gaps: what happened there is not checked'
            self.doubts.append(f'gaps between records: {self.gaps}')

    def _odd(self) -> None:
        """What is right in its arithmetic, and not what a reader expects."""
        told = self.check.disclosures
        for name, (low, high) in self.ranges.items():
            if low != high:
                told[name] = f'{low:.4g} to {high:.4g}'
            if low < 0 or (name == 'step_weight' and low <= LOOSE * high):
                self.doubts.append(f'{name}: {low:.4g} to {high:.4g}')
        if not self.updates:
            return
        numbers = {'steps without an update': self.left_out, 'updates that move nothing': self.idle}
        self.doubts += [f'{name}: {n}' for name, n in numbers.items() if n]
        if self.still:
            few = ', '.join(sorted(self.still)[:5])
            self.doubts.append(f'parameters that never move: {len(self.still)} ({few:.100})')

    def result(self) -> Result:
        """All that was found."""
        self._odd()
        check = self.check
        if self.resets:
            check.disclosures['resets'] = f'{self.resets} lanes start again, as the receipts say'
        loose = check.loose.over_the_run()
        numbers = {'ties': check.ties, 'sampled arrays': self.sampled, 'loose fields': len(loose)}
        doubts = [*self.doubts, *(f'{name}: {n}' for name, n in numbers.items() if n)]
        counts = {number: check.counts[number] for number in RULES if check.counts[number]}
        reasons = check.idle | check.gated
        gated = {n: reasons.get(n, 'nothing to compare') for n in RULES if n not in counts}
        for number, reason in check.gated.items():
            if number in counts:
                check.disclosures[f'rule {number} in part'] = reason
        verdict = 'failed' if check.failed else self._verdict()
        order = [number for number, _ in RUN_RULES]
        between = sorted(check.between, key=lambda one: order.index(one.rule))
        return Result(
            ok=verdict in VERDICTS[:2],
            verdict=verdict,
            failures=(*check.failures, *between)[:MOST],
            rules_evaluated=counts,
            gated_off=gated,
            ties=check.ties,
            disclosures=dict(check.disclosures),
            loose=loose,
            doubts=tuple(doubts),
            failed=dict(check.failed),
        )

    def _verdict(self) -> str:
        if 14 not in self.check.gated:
            return 'rederived'
        return 'skipped' if self.bases - set(PARTIAL) else 'consistent'


def _size(r: Record, path: str, of: Callable) -> Any:
    """A number that a field makes; of one that is not whole 1."""
    found = r.fields.get(path)
    return of(found) if isinstance(found, np.ndarray) and found.size else 1


def _same(r: Record, path: str) -> bool:
    """Whether a parameter is what it was."""
    a, b = (r.fields.get(f'params_{when}/{path}') for when in ('before', 'after'))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    return isinstance(a, dict) and isinstance(b, dict) and a['sha256'] == b['sha256']


def _options(level: str, allow: Iterable[str], key: bytes | None) -> str:
    if key is not None and not isinstance(key, bytes):
        return f'key is {type(key).__name__}; give bytes'
    if level not in CEILINGS:
        return f'level is {level!r}; choose one of {", ".join(CEILINGS)}'
    unknown = sorted(set(allow) - {'tf32', 'bf16'})
    return f'allow has {unknown}; choose of tf32, bf16' if unknown else ''


def _apply(check: Check, number: int, rule: Callable) -> None:
    check.rule = number
    try:
        rule(check)
    except Idle as reason:
        check.idle.setdefault(number, str(reason))
    except (Gated, Unavailable) as reason:
        check.gated.setdefault(number, str(reason))
