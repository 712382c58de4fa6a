"""Every primitive of the library keeps every law."""

from __future__ import annotations

import pytest

from braintrace import _etrace_op as ops
from braintrace.kit import LAWS

ALWAYS = {'L0', 'L1', 'L2', 'L3', 'L4', 'L5', 'L6', 'L9', 'L11', 'L12', 'L15'}
PRIMITIVES = sorted(
    {
        p.name: p
        for p in (
            *ops.EINSUM_FORMS.values(),
            *(getattr(ops, n) for n in dir(ops) if n.endswith('_p')),
        )
    }.items()
)
MARKED = [
    pytest.param(p, id=name, marks=[pytest.mark.etp(name, rule=slot) for slot in p.own_rules])
    for name, p in PRIMITIVES
]


@pytest.mark.slow
@pytest.mark.parametrize('primitive', MARKED)
def test_every_law_holds(primitive, etp_conformance):
    report = etp_conformance(primitive.name)
    passed = ALWAYS | ({'L10'} if primitive is ops.etp_elemwise_p else {'L7', 'L8'})
    passed |= {'L13'} if primitive.lowering else set()
    assert {law: report.status(law) for law in LAWS} == {
        law: 'pass' if law in passed else 'not_applicable' for law in LAWS
    }
    assert {row.law for row in report.rows} == set(LAWS)
