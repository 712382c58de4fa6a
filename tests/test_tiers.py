"""What runs when: the choices of ``tests.tiers``, the marks and the summary of ``tests.costs``."""

import itertools
import types

import pytest

from tests import costs, mutants, tiers

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

    def __init__(self, nodeid, *names, **params):
        self.nodeid, self.names = nodeid, list(names)
        self.callspec = types.SimpleNamespace(params=params)
        self.get_closest_marker = lambda name: name if name in self.names else None
        self.add_marker = self.names.append


def marked(monkeypatch, tmp_path, text, args, *items):
    (tmp_path / 'slow.txt').write_text(text)
    monkeypatch.setattr(costs, 'SLOW', tmp_path / 'slow.txt')
    config = types.SimpleNamespace(args=args, getini=lambda name: ['tests'], rootpath=tmp_path)
    costs.mark_slow(config, items)
    return [item.names for item in items]


def test_the_first_rows_of_a_listed_test_stay_quick(monkeypatch, tmp_path):
    items = [Item('a.py::f[1]'), Item('a.py::f[2]', 'slow'), Item('a.py::f[3]'), Item('a.py::g')]
    found = marked(monkeypatch, tmp_path, '1 a.py::f\n', ['tests'], *items)
    assert found == [[], ['slow'], ['slow'], []]


def test_of_the_rows_behind_them_some_stay_in_the_gate_and_the_others_run_at_night(
    monkeypatch, tmp_path
):
    items = [Item(f'a.py::f[{k}]', *['slow'] * (k % 2)) for k in range(7)]
    found = marked(monkeypatch, tmp_path, '2/2 a.py::f\n', ['tests'], *items)
    assert found[0] == found[2] == [] and all('slow' in names for k, names in enumerate(found[3:]))
    assert sum('nightly' in names for names in found) == 2


def rows(*tables):
    """A test of the product of these tables."""
    product = list(itertools.product(*tables))
    return [Item(f'a.py::f[{at}]', **dict(zip('xyz', at, strict=False))) for at in product]


def gate_of(found):
    return [item for item in found if 'nightly' not in item.names]


@pytest.mark.parametrize('turn', [2, 4, 8])
@pytest.mark.parametrize('sizes', SIZES, ids=str)
def test_each_value_of_a_short_table_stays_in_the_gate_with_its_test(
    monkeypatch, tmp_path, sizes, turn
):
    found = rows(*map(range, sizes))
    monkeypatch.setattr(tiers, 'SHORT', max(sizes))
    marked(monkeypatch, tmp_path, f'1/{turn} a.py::f\n', ['a.py'], *found)
    gate = gate_of(found)
    assert set().union(*map(tiers.values, gate)) == set().union(*map(tiers.values, found))
    assert len(gate) <= max(*sizes, 1 + -(-(len(found) - 1) // turn)) + 1


def test_no_period_of_a_table_is_that_of_its_choice(monkeypatch, tmp_path):
    """A long table with two and two values behind it, one in four rows of which are in the gate."""
    found = rows(range(tiers.SHORT + 20), 'ab', [1, 7])
    marked(monkeypatch, tmp_path, '0/4 a.py::f\n', ['a.py'], *found)
    gate = gate_of(found)
    assert len(gate) == len(found) // 4
    pairs = {tuple(item.callspec.params[name] for name in 'yz') for item in gate}
    assert pairs == set(itertools.product('ab', [1, 7]))


def test_rows_of_a_long_table_are_chosen_from_all_over_it(monkeypatch, tmp_path):
    found = rows(range(40))
    marked(monkeypatch, tmp_path, '0/4 a.py::f\n', ['a.py'], *found)
    chosen = [item.callspec.params['x'] for item in gate_of(found)]
    assert len(chosen) == 10 and all(any(x // 10 == part for x in chosen) for part in range(4))


def test_values_that_cannot_be_hashed_and_equal_ones_of_other_types_are_told_apart():
    given = [1, True, 1.0, [1], {'a': 1}, {'a': 2}, None]
    assert len(set().union(*(tiers.values(Item('a.py::f', x=x)) for x in given))) == len(given)
    assert tiers.values(Item('a.py::f', x=[1])) == tiers.values(Item('a.py::g', x=[1]))


def test_a_long_table_is_in_the_gate_of_a_whole_run_once_by_some_test(monkeypatch, tmp_path):
    both = [
        Item(f'{name}[{k}]', x=k) for name in ('a.py::f', 'b.py::g') for k in range(tiers.SHORT + 1)
    ]
    text = '0/4 a.py::f\n0/4 b.py::g\n'
    marked(monkeypatch, tmp_path, text, ['tests'], *both)
    gate = gate_of(both)
    assert {item.callspec.params['x'] for item in gate} == set(range(tiers.SHORT + 1))
    assert len(gate) < len(both)


def test_a_value_that_a_file_leaves_to_the_night_is_refused_in_a_whole_run(monkeypatch, tmp_path):
    day, night = Item('a.py::f[1-u]', x=1, y='u'), Item('a.py::f[2-u]', 'nightly', x=2, y='u')
    with pytest.raises(pytest.UsageError, match=r'night alone; .*tiers.py: a.py::f\[2-u\] \(x\)$'):
        marked(monkeypatch, tmp_path, '', ['tests'], day, night)
    with pytest.raises(pytest.UsageError, match='night alone'):  # another test's value is its own
        marked(monkeypatch, tmp_path, '', ['tests'], day, night, Item('b.py::g[2]', x=2))
    assert marked(monkeypatch, tmp_path, '', ['a.py'], day, night) == [[], ['nightly']]
    monkeypatch.setattr(tiers, 'AT_NIGHT', {'a.py': 'a reason'})
    assert marked(monkeypatch, tmp_path, '', ['tests'], day, night) == [[], ['nightly']]


def test_a_listed_name_that_is_no_test_is_refused_in_a_whole_run(monkeypatch, tmp_path):
    (tmp_path / 'b.py').touch()  # left out of this run by --ignore, say
    for name in ('a.py::gone', 'c.py::gone'):
        text = f'0 b.py::f\n0 {name}\n'
        with pytest.raises(pytest.UsageError, match=f'names what is no test; delete: {name}$'):
            marked(monkeypatch, tmp_path, text, ['tests'], Item('a.py::f'))
        assert marked(monkeypatch, tmp_path, text, ['a.py'], Item('a.py::f')) == [[]]


def test_the_summary_names_the_dearest_files():
    tests = {f'{k}.py::f[{row}]': k / 4 for k in range(15) for row in (1, 2)}
    first, *rest = costs.summary(tests, 60.0)
    assert first == 'CPU seconds: 52 in 30 tests, 8 beside them; the dearest files:'
    assert [line.split() for line in rest[:2]] == [
        ['7.0', 's', '2', 'tests', '14.py'],
        ['6.5', 's', '2', 'tests', '13.py'],
    ]
    assert len(rest) == 10 and not costs.summary({}, 1.0)


def test_what_a_run_measured_gives_the_lines_of_the_list():
    tests = {'a.py::f[x]': 0.5, 'a.py::g': 0.1, 'a.py::f[y]': 0.5, 'a.py::h': 2.0}
    assert costs.slow_lines(tests) == ['1 a.py::f', '0 a.py::h']


def test_the_cost_of_a_test_is_in_its_report(request):
    clock = request.config.pluginmanager.get_plugin('costs-clock')
    assert clock is not None and costs.cpu_seconds() >= clock.last > 0


def test_each_mutant_changes_one_place_and_names_tests():
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS)
    for mutant in mutants.MUTANTS:
        text = (mutants.ROOT / 'braintrace' / mutant.file).read_text(encoding='utf-8')
        assert text.count(mutant.old) == 1 and mutant.new not in (mutant.old, ''), mutant.name
        assert (mutants.ROOT / mutant.tests.split()[0]).exists(), mutant.name
