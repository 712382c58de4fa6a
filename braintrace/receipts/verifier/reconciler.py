"""The reconciler: applies every rule, compares, decides. It reads no label and no file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from .checks import CEILINGS, Check, Failure, Gated, Idle, Limits
from .record import Record, Unavailable
from .rules import RULES, RUN_RULES, STEP_RULES
from .run_rules import Run
from .structure import problems_of

__all__ = ['Result', 'reconcile', 'reconcile_run']

VERDICTS = ('rederived', 'consistent', 'skipped', 'failed', 'malformed')  # from best to worst
PARTIAL = ('opaque_cell', 'unsupported_operation', 'sampled_arrays')  # a basis that is no skip


@dataclass(frozen=True)
class Result:
    """What the verifier found. ``rules_evaluated`` (rule -> number of comparisons) and
    ``gated_off`` (rule -> reason) together are all rules.

    ``verdict``: ``'rederived'``, rule 14 ran and all holds; ``'consistent'``, all algebra holds,
    and the engine cannot derive the step; ``'skipped'``, another basis was claimed; ``'failed'``;
    ``'malformed'``. ``ties`` counts spikes whose potential is too near to its threshold to tell.

    >>> from braintrace.receipts.verifier import generate, parse_run
    >>> result = reconcile_run(parse_run(generate('lif', 2)))
    >>> result.verdict, result.gated_off[16]
    ('rederived', 'the receipt has no digest')
    """

    ok: bool
    verdict: str
    failures: tuple[Failure, ...] = ()
    rules_evaluated: Mapping[int, int] = field(default_factory=dict)
    gated_off: Mapping[int, str] = field(default_factory=dict)
    ties: int = 0
    disclosures: Mapping[str, Any] = field(default_factory=dict)


def reconcile(
    obj: Any, *, level: str = 'observer', allow: Iterable[str] = (), key: bytes | None = None
) -> Result:
    """Verify one receipt, any value whatever; nothing is raised.

    ``level``: the ceiling of k, ``'observer'`` 64 or ``'engine'`` 8. ``allow``: ``'tf32'`` and
    ``'bf16'`` admit products, and traces, of that precision. ``key``: of a signature.

    >>> reconcile(None).verdict
    'malformed'
    """
    return _guarded(lambda: _judged([obj], level, allow, key, whole=False))


def reconcile_run(
    objs: Any, *, level: str = 'observer', allow: Iterable[str] = (), key: bytes | None = None
) -> Result:
    """Verify the receipts of a run in order, and what lies between them; as :func:`reconcile`.

    >>> reconcile_run([]).verdict
    'malformed'
    """
    return _guarded(lambda: _judged(objs, level, allow, key, whole=True))


def _guarded(judge: Callable[[], Result]) -> Result:
    """The result, also where something was not foreseen."""
    try:
        with np.errstate(all='ignore'):
            return judge()
    except (Exception, RecursionError) as error:  # the promise is to return, whatever came in
        said = f'{type(error).__name__}: {error}'[:300]
        return _malformed([Failure(0, 'internal', None, None, hint=said)])


def _malformed(failures: Sequence[Failure]) -> Result:
    gated = {number: 'the structure is not right' for number in RULES if number}
    return Result(False, 'malformed', tuple(failures), {0: max(1, len(failures))}, gated)


def _judged(objs: Any, level: str, allow: Iterable[str], key: bytes | None, whole: bool) -> Result:
    refused = _options(level, allow, key)
    if refused:
        return _malformed([Failure(0, 'options', None, None, hint=refused)])
    if not isinstance(objs, list | tuple) or not objs:
        want = 'a list of receipts, at least one'
        return _malformed([Failure(0, '', type(objs).__name__, want)])
    failures = []
    for i, obj in enumerate(objs):
        at = f'[{i}].' if whole else ''
        failures += [Failure(0, at + p.path, None, None, hint=p.message) for p in problems_of(obj)]
    if failures:
        return _malformed(failures)
    records = [Record(obj) for obj in objs]
    check = Check(partial(Limits.of, level=level, allow=tuple(allow)), key=key)
    check.counts[0] += len(records)
    for i, record in enumerate(records):
        check.at, check.limits = f'[{i}].' if whole else '', check.limits_of(record)
        asked = record.raw['numeric']['k']
        if asked is not None and asked > CEILINGS[level]:
            check.tell('k', f'{asked:g} was asked for; the ceiling is {CEILINGS[level]:g}')
        if check.limits.trace > check.limits.unit:
            check.tell('traces', f'compared as {record.raw["numeric"]["trace_dtype"]}')
        for number, rule in STEP_RULES:
            _apply(check, number, partial(rule, record))
    check.at = ''
    for number, rule in RUN_RULES:
        if whole or number == 18:
            check.limits = check.limits_of(records[0])
            _apply(check, number, partial(rule, Run(records)))
        else:
            check.gated[number] = 'it needs the records of a run'
    first = records[0]
    for name, value in _unseen(records, whole).items():
        check.tell(name, value)
    if first.t.any():
        check.tell('start', f'traces and carry of step {first.raw["step"]} are taken as given')
    if Run(records).unsummed():
        check.gated.setdefault(14, 'gradients of a window whose other steps are not here')
    return _result(check, records)


def _unseen(records: list[Record], whole: bool) -> dict[str, Any]:
    """What a reader should know of a run that no rule refuses."""
    steps = [r.raw['step'] for r in records]
    apart = sum(b != a + 1 for a, b in pairwise(steps))
    found = {'steps between records': f'{apart} gaps: what happened there is not checked'}
    found = found if apart else {}
    resets = sum(int(r.reset.sum()) for r in records)
    if resets:
        found['resets'] = f'{resets} lanes start anew, as the receipts say'
    window = records[-1].raw.get('window') or {'index': 0, 'length': 1}
    if whole and window['index'] + 1 < window['length']:
        found['window'] = f'the last one ends after {window["index"] + 1} of {window["length"]}'
    return found


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


def _result(check: Check, records: list[Record]) -> Result:
    counts = {number: check.counts[number] for number in RULES if check.counts[number]}
    gated = {
        number: (check.idle | check.gated).get(number, 'nothing to compare')
        for number in RULES
        if number not in counts
    }
    partly = {n: reason for n, reason in check.gated.items() if n in counts}
    for number, reason in partly.items():
        check.tell(f'rule {number} in part', reason)
    verdict = 'failed' if check.failures else _verdict(check, records)
    return Result(
        ok=verdict in VERDICTS[:2],
        verdict=verdict,
        failures=tuple(check.failures),
        rules_evaluated=counts,
        gated_off=gated,
        ties=check.ties,
        disclosures=dict(check.disclosures),
    )


def _verdict(check: Check, records: list[Record]) -> str:
    if 14 not in check.gated:
        return 'rederived'
    bases = {record.raw['skip']['basis'] for record in records if 'skip' in record.raw}
    return 'skipped' if bases - set(PARTIAL) else 'consistent'
