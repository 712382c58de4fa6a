"""Every primitive of ``bad`` is flagged by the law that names its fault, and by no law that has no
reason to.
"""

import pytest

from braintrace import kit

from .bad import BAD

pytestmark = pytest.mark.usefixtures('registries_are_restored')


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('name', BAD)
def test_a_bad_primitive_is_flagged_by_the_law_it_breaks(name):
    bad = BAD[name]
    report = kit.check(bad.make(), bad.cases)
    flagged = {row.law for row in report.rows if row.status in ('fail', 'missing')}
    assert flagged == bad.laws.union(bad.others)
    with pytest.raises(AssertionError, match=rf' {min(bad.laws)} (fail|missing)'):
        report.require(*bad.laws)


def test_every_law_has_a_bad_primitive():
    assert set.union(*(bad.laws for bad in BAD.values())) == set(kit.LAWS)


@pytest.mark.slow
def test_the_factor_that_is_applied_twice_shows_in_the_size_of_the_deviation():
    row = next(row for row in kit.check(BAD['scaled'].make()).of('fail') if row.law == 'L3')
    assert row.worst == pytest.approx(2.0 - 1) and row.tolerance == 1e-12
    assert 'scale=2.0: carrying an entry and making it' in row.case
