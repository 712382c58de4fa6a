"""Every primitive of the library keeps every law, and every rule is exercised by the laws about it,
as recorded while they are traced.
"""

from __future__ import annotations

import contextlib
import functools

import jax
import pytest

from braintrace import MissingRuleError
from braintrace import _etrace_op as ops
from braintrace.kit import LAWS, _contract, _laws, check
from braintrace.kit.__main__ import main
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
PRIMITIVES = sorted(
    {
        p.name: p
        for p in (
            *ops.EINSUM_FORMS.values(),
            *(getattr(ops, n) for n in ops.__all__ if n.endswith('_p')),
        )
    }.items()
)
QUICK = {'etp_elemwise'}
every_primitive = pytest.mark.parametrize(
    'primitive',
    [
        pytest.param(
            p,
            id=name,
            marks=[
                *([] if name in QUICK else [pytest.mark.slow]),
                *(
                    pytest.mark.etp(name, rule=slot)
                    for slot, table in ops.RULE_SLOTS.items()
                    if p in table
                ),
            ],
        )
        for name, p in PRIMITIVES
    ],
)


def called_by_laws(primitive, monkeypatch) -> dict[str, set[str]]:
    """Law -> the rules of the primitive that its parts called."""
    called: set[str] = set()

    def recorder(slot, rule):
        @functools.wraps(rule)
        def record(*args, **params):
            called.add(slot)
            return rule(*args, **params)

        return record

    for slot, table in ops.RULE_SLOTS.items():
        if primitive in table:
            monkeypatch.setitem(table, primitive, recorder(slot, table[primitive]))
    found: dict[str, set[str]] = {}

    def note(law, trace):
        called.clear()
        with contextlib.suppress(MissingRuleError):
            trace()
        found.setdefault(law, set()).update(called)

    with jax.enable_x64(True):
        for case in cases_of(primitive, None):
            for app in (
                app for app in case.wide(True).applications() if app.primitive is primitive
            ):
                draw = app.draw(0)
                for part in _laws.NUMERICAL:
                    if part.skip(app) is None:
                        note(
                            part.law,
                            lambda part=part: jax.eval_shape(lambda d: part.sides(app, d), draw),
                        )
                for law, faults in _contract.CONTRACT:
                    note(
                        law,
                        lambda faults=faults: _contract._finding(
                            '', lambda: faults(app, draw, case, True)
                        ),
                    )
    return found


def uncovered(primitive, report, monkeypatch) -> list[str]:
    """What is missing: a required rule, a law that did not call a rule that it is about, or did not
    pass.
    """
    found = called_by_laws(primitive, monkeypatch)
    slots = {
        *ops.REQUIRED_SLOTS,
        *(slot for slot, table in ops.RULE_SLOTS.items() if primitive in table),
    }
    wrong = [
        f'{primitive.name}: no rule {slot}'
        for slot in sorted(slots)
        if primitive.optional_rule(slot) is None
    ]
    return wrong + [
        f'{primitive.name}: {slot} by {law}: called {slot in found.get(law, ())}, '
        f'{report.status(law)}'
        for slot in sorted(slots)
        for law in sorted(ABOUT[slot])
        if slot not in found.get(law, ()) or report.status(law) != 'pass'
    ]


@every_primitive
def test_every_law_holds_and_exercises_the_rules_it_is_about(
    primitive, etp_conformance, monkeypatch
):
    report = etp_conformance(primitive.name)
    passed = ALWAYS | ({'L10'} if primitive is ops.etp_elemwise_p else {'L7', 'L8'})
    passed |= {'L13'} if primitive.lowering else set()
    assert {law: report.status(law) for law in LAWS} == {
        law: 'pass' if law in passed else 'not_applicable' for law in LAWS
    }
    assert {row.law for row in report.rows} == set(LAWS)
    assert uncovered(primitive, report, monkeypatch) == []


@pytest.mark.parametrize('slot', ops.REQUIRED_SLOTS)
def test_a_deleted_rule_is_named_with_its_op(slot, monkeypatch, capsys):
    monkeypatch.delitem(ops.RULE_SLOTS[slot], ops.etp_mv_p)
    assert f'etp_mv: no rule {slot}' in uncovered(ops.etp_mv_p, check('etp_mv'), monkeypatch)
    assert main(['check', 'etp_mv']) in (1, 2)
    printed = capsys.readouterr().out
    assert 'etp_mv' in printed and slot in printed


@pytest.mark.parametrize(
    ('law', 'slot', 'primitive'),
    [
        ('L6', 'solve_drtrl', ops.etp_lora_mv_p),
        ('L2', 'xy_to_dw', ops.etp_mv_p),
        ('L9', 'init_drtrl', ops.etp_mv_p),
        ('L3', 'yw_to_w', ops.etp_mv_p),
    ],
)
def test_a_deleted_test_is_named_with_its_rule(law, slot, primitive, monkeypatch):
    monkeypatch.setattr(_laws, 'NUMERICAL', [part for part in _laws.NUMERICAL if part.law != law])
    found = uncovered(primitive, check(primitive.name), monkeypatch)
    assert [
        line
        for line in found
        if line.startswith(f'{primitive.name}: {slot} by {law}: called False')
    ]
