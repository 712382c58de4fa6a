"""Every primitive of the library keeps every law, and every rule is exercised by the laws about it,
as recorded while they are traced.
"""

from __future__ import annotations

import functools

import pytest

from braintrace import _etrace_op as ops
from braintrace.kit import LAWS, _check, _contract, check
from braintrace.kit._cases import cases_of

ALWAYS = {'L0', 'L1', 'L2', 'L3', 'L4', 'L5', 'L6', 'L9', 'L11', 'L12', 'L15'}
# rule -> the laws that must have called it; L9 goes through the learners
ABOUT = {
    'xy_to_dw': {'L0', 'L2', 'L9'},
    'yw_to_w': {'L0', 'L3', 'L4', 'L9'},
    'init_drtrl': {'L0', 'L5', 'L9'},
    'init_pp': {'L0', 'L5', 'L9'},
    'instant_drtrl': {'L0', 'L3', 'L6', 'L9'},
    'solve_drtrl': {'L0', 'L6', 'L9'},
}
OWN = [*ops.EINSUM_FORMS.values(), *(getattr(ops, n) for n in dir(ops) if n.endswith('_p'))]
PRIMITIVES = dict(sorted({p.name: p for p in OWN}.items()))


def shows(name, primitive):
    """A row that counts as a test of each of its rules."""
    marks = [pytest.mark.etp(name, rule=slot) for slot in primitive.own_rules]
    return pytest.param(primitive, id=name, marks=marks)


def record_calls(primitive, monkeypatch) -> dict[str, set[str]]:
    """Law -> the rules of the primitive that its parts call in the checks from now on."""
    called: dict[str, set[str]] = {}
    laws = ['']  # the last one is being traced

    def recorder(slot, rule):
        @functools.wraps(rule)
        def record(*args, **params):
            called.setdefault(laws[-1], set()).add(slot)
            return rule(*args, **params)

        return record

    def told(law, function):
        """The function, which says first whose it is."""

        def tell(*args):
            laws.append(law)
            return function(*args)

        return tell

    for slot, rule in list(primitive.own_rules.items()):
        monkeypatch.setitem(primitive.own_rules, slot, recorder(slot, rule))
    parts = [part._replace(sides=told(part.law, part.sides)) for part in _check.NUMERICAL]
    monkeypatch.setattr(_check, 'NUMERICAL', parts)
    contract = [(law, told(law, faults)) for law, faults in _contract.CONTRACT]
    monkeypatch.setattr(_contract, 'CONTRACT', contract)
    return called


def uncovered(primitive, report, called) -> list[str]:
    """What is missing: a required rule, a law that did not call a rule that it is about, or did not
    pass.
    """
    slots = {*ops.REQUIRED_SLOTS, *primitive.own_rules}
    wrong = [
        f'{primitive.name}: no rule {slot}'
        for slot in sorted(slots)
        if primitive.optional_rule(slot) is None
    ]
    return wrong + [
        f'{primitive.name}: {slot} by {law}: called {slot in called.get(law, ())}, '
        f'{report.status(law)}'
        for slot in sorted(slots)
        for law in sorted(ABOUT[slot])
        if slot not in called.get(law, ()) or report.status(law) != 'pass'
    ]


@pytest.mark.slow
@pytest.mark.parametrize('primitive', [shows(*row) for row in PRIMITIVES.items()])
@pytest.mark.parametrize(
    'number', [1, pytest.param(None, marks=pytest.mark.nightly)], ids=['first case', 'all cases']
)
def test_every_law_holds_and_exercises_the_rules_it_is_about(
    number, primitive, etp_conformance, monkeypatch
):
    """Other shapes are those of `tests/etrace_op/test_laws.py` in the gate."""
    monkeypatch.setattr(_check, 'cases_of', lambda *given: cases_of(*given)[:number])
    called = record_calls(primitive, monkeypatch)
    report = etp_conformance(primitive.name)
    passed = ALWAYS | ({'L10'} if primitive is ops.etp_elemwise_p else {'L7', 'L8'})
    passed |= {'L13'} if primitive.lowering else set()
    assert {law: report.status(law) for law in LAWS} == {
        law: 'pass' if law in passed else 'not_applicable' for law in LAWS
    }
    assert {row.law for row in report.rows} == set(LAWS)
    assert uncovered(primitive, report, called) == []


@pytest.mark.slow
def test_a_test_that_calls_no_rule_is_named_with_it(monkeypatch):
    """It passes: its two sides are one number."""
    primitive = ops.etp_lora_mv_p
    emptied = {'L2': 'xy_to_dw', 'L9': 'init_drtrl', 'L3': 'yw_to_w', 'L6': 'solve_drtrl'}
    same = lambda app, draw: (1.0, 1.0)
    parts = [p._replace(sides=same) if p.law in emptied else p for p in _check.NUMERICAL]
    monkeypatch.setattr(_check, 'NUMERICAL', parts)
    called = record_calls(primitive, monkeypatch)
    found = uncovered(primitive, check(primitive.name), called)
    for law, slot in emptied.items():
        assert f'{primitive.name}: {slot} by {law}: called False, pass' in found
