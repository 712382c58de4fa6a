"""The rules of every registered op, and the laws that the tests of a run have shown for it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from .._etrace_op import ETP_PRIMITIVES, REQUIRED_SLOTS, RULE_SLOTS, ETPPrimitive
from ..errors import OptionError
from ._cases import registered, subject
from ._report import LAWS, STATUSES, ConformanceReport, Row

ABOUT = {
    'yw_to_w': ('L3', 'L4'),
    'xy_to_dw': ('L2',),
    'init_drtrl': ('L5',),
    'init_pp': ('L5',),
    'instant_drtrl': ('L3',),
    'solve_drtrl': ('L6',),
}


def registry_report(results: str | PathLike | None = None, op: Any = None) -> ConformanceReport:
    """Report a row for each rule and law of every registered op (or of one), from a run's tests.

    ``results``: the file of ``pytest -p braintrace.kit.pytest_plugin --etp-results FILE``. Tests
    marked ``@pytest.mark.etp(op, rule=...)`` and the laws about a rule show the rule;
    ``etp_conformance`` and tests marked with ``law=...`` show a law. ``pass``: some test of it
    passed and none failed; ``not_tested``: its tests were skipped; ``missing``: there is no test,
    or no such rule. Without ``results``, registered rules are ``not_tested``, and laws have no
    rows.

    Raises ``OptionError`` for a file of another kind.

    >>> from braintrace import kit
    >>> print(kit.registry_report(op='etp_mv'))
    etp_mv: 4 not_tested
    etp_mv yw_to_w not_tested: no results of a run are given
    etp_mv xy_to_dw not_tested: no results of a run are given
    etp_mv init_drtrl not_tested: no results of a run are given
    etp_mv init_pp not_tested: no results of a run are given
    """
    entries = None if results is None else _read(Path(results))
    ops = registered() if op is None else dict([subject(op)])
    rows = [
        row
        for name, one in ops.items()
        for row in _rows(name, list(getattr(one, 'forms', [one])), entries)
    ]
    return ConformanceReport((*rows, *(_unknown(entries or []) if op is None else [])))


def _unknown(entries: list[dict]) -> Iterable[Row]:
    """A row for each test whose mark names a primitive that is not registered."""
    known = {primitive.name for primitive in ETP_PRIMITIVES} | set(registered())
    for entry in entries:
        if entry['rule'] is not None and entry['op'] not in known:
            said = f'{entry["test"]} is marked for it, and it is not registered'
            yield Row(entry['op'], entry['rule'], 'missing', case=said)


def _rows(name: str, forms: list[ETPPrimitive], entries: list[dict] | None) -> Iterable[Row]:
    names = {name, *(form.name for form in forms)}
    own = None if entries is None else [entry for entry in entries if entry['op'] in names]
    for slot in RULE_SLOTS:
        present = all(form.optional_rule(slot) is not None for form in forms)
        if not present and slot in REQUIRED_SLOTS:
            yield Row(name, slot, 'missing', case='no such rule is registered')
        elif present:
            yield _shown(name, slot, own, {slot, *ABOUT[slot]})
    if own is not None:
        for law in LAWS:
            yield _shown(name, law, own, {law})


def _shown(name: str, what: str, entries: list[dict] | None, by: set[str]) -> Row:
    """What the tests have shown that are marked for one of these rules and laws."""
    if entries is None:
        return Row(name, what, 'not_tested', case='no results of a run are given')
    found = [entry for entry in entries if by & {entry['rule'], entry['law']}]
    for status in ('fail', 'missing', 'pass', 'not_applicable', 'not_tested'):
        tests = dict.fromkeys(entry['test'] for entry in found if entry['status'] == status)
        if tests:
            return Row(name, what, status, case=', '.join(tests))
    return Row(name, what, 'missing', case='no test of it in the results')


def _read(path: Path) -> list[dict]:
    try:
        entries = json.loads(path.read_text())['tests']
        wrong = [
            entry
            for entry in entries
            if not {'test', 'op', 'rule', 'law', 'status'} <= set(entry)
            or entry['status'] not in STATUSES
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OptionError(
            f'registry_report: {path} is no record of a run ({type(error).__name__}: {error}); '
            'write one by `pytest -p braintrace.kit.pytest_plugin --etp-results FILE`.'
        ) from error
    if wrong:
        raise OptionError(
            f'registry_report: {path} has an entry {wrong[0]!r}; expected test, op, rule, law and '
            'a status.'
        )
    return entries
