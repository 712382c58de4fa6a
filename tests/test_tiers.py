"""What runs when: the choices of ``tests.tiers``, the marks and the summary of ``tests.costs``; and
what it holds, by ``tests.memory``.
"""

import functools
import itertools
import re
import types

import numpy as np
import pytest

from tests import costs, memory, mutants, tiers

SIZES = [(5, 2, 2), (3, 4, 3), (2, 2), (1, 6), (2, 2, 2, 2)]


def marks(decorator):
    """Row -> the names of its marks."""
    return {row.values: {mark.name for mark in row.marks} for row in decorator.mark.args[1]}


@pytest.mark.parametrize('sizes', SIZES, ids=str)
def test_each_pair_of_values_is_in_the_gate_and_the_whole_product_at_night(sizes):
    tables = {f'axis{k}': list(range(size)) for k, size in enumerate(sizes)}
    found = marks(tiers.pairwise(tiers.first(0), **tables))
    assert set(found) == set(itertools.product(*tables.values()))
    gate = [row for row, names in found.items() if 'nightly' not in names]
    for i, j in itertools.combinations(range(len(sizes)), 2):
        pairs = {(row[i], row[j]) for row in gate}
        assert pairs == set(itertools.product(range(sizes[i]), range(sizes[j])))
    assert all(('slow' in found[row]) == (row[0] != 0) for row in gate)


@pytest.mark.parametrize('sizes', SIZES, ids=str)
def test_by_turns_each_value_is_in_the_gate(sizes):
    tables = {f'axis{k}': list(range(size)) for k, size in enumerate(sizes)}
    found = marks(tiers.in_turn(tiers.none, **tables))
    gate = [row for row, names in found.items() if names == {'slow'}]
    assert len(gate) == max(sizes) and len(found) == len(set(itertools.product(*tables.values())))
    assert all({row[k] for row in gate} == set(range(size)) for k, size in enumerate(sizes))


class Item:
    """As much of a test as marking reads."""

    def __init__(self, nodeid, *names, tier=None, **params):
        self.nodeid, self.names = nodeid, list(names)
        self.callspec = types.SimpleNamespace(params=params)
        self.tier = tier and pytest.mark.tier(**tier).mark
        self.add_marker = self.names.append

    def get_closest_marker(self, name):
        return self.tier if name == 'tier' else name if name in self.names else None


def marked(args, *items):
    tiers.assign(types.SimpleNamespace(args=args, getini=lambda name: ['tests']), items)
    return [item.names for item in items]


def test_of_the_rows_behind_them_some_stay_in_the_gate_and_the_others_run_at_night():
    tier = {'quick': 2, 'one_in': 2}
    items = [Item(f'a.py::f[{k}]', *['slow'] * (k % 2), tier=tier) for k in range(7)]
    found = marked(['tests'], *items)
    assert found[0] == found[2] == [] and all('slow' in names for k, names in enumerate(found[3:]))
    assert sum('nightly' in names for names in found) == 2


def rows(tier, *tables):
    """A test of the product of these tables."""
    product = list(itertools.product(*tables))
    return [
        Item(f'a.py::f[{at}]', tier=tier, **dict(zip('xyz', at, strict=False))) for at in product
    ]


def gate_of(found):
    return [item for item in found if 'nightly' not in item.names]


@pytest.mark.parametrize('turn', [2, 4, 8])
@pytest.mark.parametrize('sizes', SIZES, ids=str)
def test_each_value_of_a_short_table_stays_in_the_gate_with_its_test(monkeypatch, sizes, turn):
    found = rows({'quick': 1, 'one_in': turn}, *map(range, sizes))
    monkeypatch.setattr(tiers, 'SHORT', max(sizes))
    marked(['a.py'], *found)
    gate = gate_of(found)
    assert set().union(*map(tiers.values, gate)) == set().union(*map(tiers.values, found))
    assert len(gate) <= max(*sizes, 1 + -(-(len(found) - 1) // turn)) + 1


def test_values_that_cannot_be_hashed_and_equal_ones_of_other_types_are_told_apart():
    given = [1, True, 1.0, [1], {'a': 1}, {'a': 2}, None]
    assert len(set().union(*(tiers.values(Item('a.py::f', x=x)) for x in given))) == len(given)
    assert tiers.values(Item('a.py::f', x=[1])) == tiers.values(Item('a.py::g', x=[1]))


def test_a_long_table_is_in_the_gate_of_a_whole_run_once_by_some_test():
    tier = {'quick': 0, 'one_in': 4}
    both = [
        Item(f'{name}[{k}]', tier=tier, x=k)
        for name in ('a.py::f', 'b.py::g')
        for k in range(tiers.SHORT + 1)
    ]
    marked(['tests'], *both)
    gate = gate_of(both)
    assert {item.callspec.params['x'] for item in gate} == set(range(tiers.SHORT + 1))
    assert len(gate) < len(both)


def test_a_value_that_a_file_leaves_to_the_night_is_refused_in_a_whole_run(monkeypatch):
    day, night = Item('a.py::f[1-u]', x=1, y='u'), Item('a.py::f[2-u]', 'nightly', x=2, y='u')
    with pytest.raises(pytest.UsageError, match=r'night alone; .*tiers.py: a.py::f\[2-u\] \(x\)$'):
        marked(['tests'], day, night)
    with pytest.raises(pytest.UsageError, match='night alone'):  # another test's value is its own
        marked(['tests'], day, night, Item('b.py::g[2]', x=2))
    assert 'nightly' not in marked(['a.py'], day, night)[0]
    monkeypatch.setattr(tiers, 'AT_NIGHT', {'a.py': 'a reason'})
    assert 'nightly' not in marked(['tests'], day, night)[0]


def test_the_summary_names_the_dearest_files():
    tests = {f'{k}.py::f[{row}]': k / 4 for k in range(15) for row in (1, 2)}
    first, *rest = costs.summary(tests, 60.0)
    assert first == 'CPU seconds: 52 in 30 tests, 8 beside them; the dearest files:'
    assert [line.split() for line in rest[:2]] == [
        ['7.0', 's', '2', 'tests', '14.py'],
        ['6.5', 's', '2', 'tests', '13.py'],
    ]
    assert len(rest) == 10 and not costs.summary({}, 1.0)


def test_what_a_run_measured_gives_the_marks():
    tests = {'a.py::f[x]': 0.5, 'a.py::g': 0.1, 'a.py::f[y]': 0.5, 'a.py::h': 2.0}
    assert costs.marks(tests) == [
        'a.py::f: @pytest.mark.tier(quick=1)',
        'a.py::h: @pytest.mark.slow',
    ]


def test_the_cost_of_a_test_is_in_its_report(request):
    clock = request.config.pluginmanager.get_plugin('costs-clock')
    assert clock is not None and costs.cpu_seconds() >= clock.last > 0


@pytest.fixture
def told():
    if not memory.peak_bytes():
        pytest.skip('the system does not tell the memory of a process by a file')


@pytest.mark.usefixtures('told')
def test_memory_that_a_test_held_and_gave_back_counts():
    before = memory.resident_bytes()
    np.ones(2**25)  # 256 MiB
    assert memory.peak_bytes() > before + 2**27 > memory.peak_bytes()


@pytest.mark.usefixtures('told')
def test_a_test_above_the_limit_ends_in_an_error_that_names_it(request, monkeypatch):
    monkeypatch.setattr(memory, 'MOST', 2**20)
    ends = memory.pytest_runtest_teardown(request.node, request.node)
    next(ends)
    with pytest.raises(pytest.fail.Exception, match=re.escape(request.node.nodeid)):
        next(ends)


@functools.cache
def kept(of):
    return [of]


def test_where_much_stays_what_helpers_keep_is_dropped_too(monkeypatch):
    first = kept(1)
    memory.drop()
    assert memory.resident_bytes() > memory.BETWEEN or kept(1) is first
    monkeypatch.setattr(memory, 'BETWEEN', -1)
    memory.drop()
    assert kept(1) is not first


def test_each_mutant_changes_one_place_and_names_tests():
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS)
    for mutant in mutants.MUTANTS:
        text = (mutants.ROOT / 'braintrace' / mutant.file).read_text(encoding='utf-8')
        assert text.count(mutant.old) == 1 and mutant.new not in (mutant.old, ''), mutant.name
        assert (mutants.ROOT / mutant.tests.split()[0]).exists(), mutant.name
