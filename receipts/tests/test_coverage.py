"""What ran and what did not: together all rules, in every verdict, and the counts are true."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from braintrace_receipts import checks
from braintrace_receipts.canonical import parse, parse_run
from braintrace_receipts.checks import Check
from braintrace_receipts.reconciler import VERDICTS, reconcile, reconcile_run
from braintrace_receipts.rules import RULES, RUN_RULES, STEP_RULES
from golden import GOLDEN_CELLS, generate


def receipt(cell='alif'):
    return parse(generate(cell, 1))


def off():
    value = receipt()
    value['carry_after']['V']['data'][0] += 1.0
    return value


def of_unknown_loss(**more):
    value = receipt()
    return {**value, 'loss': {**value['loss'], 'name': 'mine'}, **more}


def cases():
    return {
        'rederived': receipt(),
        'consistent': of_unknown_loss(),
        'skipped': of_unknown_loss(skip={'basis': 'third_party'}),
        'failed': off(),
        'malformed': {**receipt(), 'more': 1},
    }


@pytest.mark.parametrize('whole', [False, True])
@pytest.mark.parametrize('verdict', VERDICTS)
def test_each_rule_ran_or_says_why_not(verdict, whole):
    value = cases()[verdict]
    result = reconcile_run([value]) if whole else reconcile(value)
    assert result.verdict == verdict
    assert set(result.rules_evaluated).isdisjoint(result.gated_off)
    assert {*result.rules_evaluated, *result.gated_off} == set(RULES) == set(range(37))
    assert all(count > 0 for count in result.rules_evaluated.values())
    assert all(result.gated_off.values())
    assert {one.rule for one in result.failures} <= set(result.rules_evaluated)


def test_each_rule_has_a_function():
    assert {number for number, _ in (*STEP_RULES, *RUN_RULES)} == set(RULES) - {0}


class Counted(Check):
    """Counts the elements that are compared, beside what the rules say of themselves."""

    seen: Counter = Counter()

    def close(self, path, stored, num, factors=()):
        self.seen[self.rule] += 1 if num is None and stored is None else len(stored.reshape(-1))
        return super().close(path, stored, num, factors)

    def same(self, path, stored, want, factors=()):
        self.seen[self.rule] += max(1, want.size)
        return super().same(path, stored, want, factors)

    def true(self, path, holds, *more):
        self.seen[self.rule] += 1
        return super().true(path, holds, *more)


@pytest.mark.parametrize('cell', GOLDEN_CELLS)
def test_a_count_is_the_number_of_elements_compared(cell, monkeypatch):
    monkeypatch.setattr(sys.modules[reconcile.__module__], 'Check', Counted)
    monkeypatch.setattr(Counted, 'seen', Counter())
    values = parse_run(generate(cell, 2))
    result = reconcile_run(values)
    assert result.verdict == 'rederived'
    told = {0: len(values), 35: len(values)}  # no comparison of elements
    assert dict(result.rules_evaluated) == {**Counted.seen, **told}


def test_a_disclosure_never_fails():
    assert all(one.rule != 35 for one in reconcile(off()).failures)
    assert checks.CEILINGS == {'engine': 8.0, 'observer': 64.0}
