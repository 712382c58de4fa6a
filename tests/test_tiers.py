"""What runs when: the choices of ``tests.tiers``, the marks and the summary of ``tests.costs``."""

import itertools
import types

import pytest

from tests import costs, tiers

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

    def __init__(self, nodeid, *names):
        self.nodeid, self.names = nodeid, list(names)
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


def test_of_the_rows_behind_them_some_run_in_turn_and_the_others_at_night(monkeypatch, tmp_path):
    items = [Item(f'a.py::f[{k}]', *['slow'] * (k % 2)) for k in range(7)]
    found = marked(monkeypatch, tmp_path, '2/2 a.py::f\n', ['tests'], *items)
    late = ['slow', 'nightly']
    assert found == [[], ['slow'], [], late, ['slow'], late, ['slow']]


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
