"""What runs when: the choices of ``tests.tiers`` and ``tests.cover``, the marks and the summary of
``tests.costs``; and what it holds, by ``tests.memory``.
"""

import ast
import functools
import itertools
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from tests import costs, cover, faults, memory, mutants, tiers

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

    def __init__(self, nodeid, *names, quick=None):
        self.nodeid, self.names = nodeid, list(names)
        self.tier = quick if quick is None else pytest.mark.tier(quick=quick).mark
        self.add_marker = self.names.append

    def get_closest_marker(self, name):
        return self.tier if name == 'tier' else name if name in self.names else None


def test_the_first_rows_are_quick_and_a_table_says_which_others_left_the_gate():
    known = [Item(f'a.py::f[{k}]', *['slow'] * (k == 1), quick=2) for k in range(5)]
    new, late = Item('a.py::new', 'slow'), Item('a.py::late', 'nightly')
    tiers.assign([*known, new, late], {'a.py::f': ['0', '1', '4'], 'a.py::gone': ['']})
    found = [item.names for item in known]
    assert found == [[], ['slow', 'nightly'], [], ['slow'], ['slow', 'nightly']]
    assert new.names == ['slow'] and late.names == ['nightly', 'slow']


CODE = """
def f(a: int = 1, *, b: str = 'b') -> int:
    if a < 2 and not b:
        raise ValueError(f'{a + 1}')
    g(a)
    return [x * 2 for x in a if x] or (a if b else -a)
"""


def test_a_fault_changes_what_runs_and_no_message():
    found = []
    for old, new, where, at in faults.changes(ast.parse(CODE)):
        found.append((ast.unparse(old), ast.unparse(new)))
        assert where[at] is old if at >= 0 else getattr(where[0], where[1]) is old
    shown = {f'{old} -> {new}'.replace('\n', ' ') for old, new in found}
    either = '[x * 2 for x in a if x] {} (a if b else -a)'
    assert {one for one in shown if not one.startswith('if ')} == {
        *('1 -> 2', 'a < 2 and (not b) -> a < 2 or not b', 'a < 2 -> a <= 2', '2 -> 3'),
        *('not b -> b', 'g(a) -> pass', f'{either.format("or")} -> {either.format("and")}'),
        *('x * 2 -> x / 2', ' for x in a if x ->  for x in a if not x', '-a -> a'),
        'a if b else -a -> -a if b else a',
    }
    (condition,) = (one for one in shown if one.startswith('if '))
    assert '-> if not (a < 2 and (not b)):' in condition


def test_a_fault_is_in_the_package_that_is_imported():
    names = {fault.name: fault for fault in faults.faults_of('braintrace/_tables.py')}
    fault = names['braintrace/_tables.py: module: 32 -> 33']
    put_in = f'from tests import faults; faults.put_in(faults.Fault(*{tuple(fault)}))'
    code = f'{put_in}; import braintrace._tables; print(braintrace._tables.SHORT)'
    run = [sys.executable, '-c', code]
    told = subprocess.run(run, cwd=faults.ROOT, capture_output=True, text=True, check=True)
    assert told.stdout == '33\n'


def test_faults_are_drawn_one_a_line_of_those_that_run():
    lines = {'braintrace/_tables.py': {line for line in range(1, 60)}}
    found = faults.drawn(3, 5, lines)
    assert found == faults.drawn(3, 5, lines) != faults.drawn(4, 5, lines)
    assert len({fault.line for fault in found}) == 5 and all(f.line < 60 for f in found)


def test_the_gate_has_the_cheapest_tests_that_see_what_quick_ones_do_not(tmp_path, monkeypatch):
    tests = ['a.py::q', 'a.py::dear', 'a.py::f[1]', 'a.py::f[2]', 'b.py::g', 'b.py::law']
    lines, law = {'m.py': {'1': [0, 1], '2': [1, 2]}}, {'op': 'o', 'rule': None, 'law': 'L1'}
    known = {'seen': ['a.py::f[2]', 'b.py::g']}, {'seen': [], 'equal': 'why'}
    data = {
        'LINES': {'tests': tests, 'quick': ['a.py::q'], 'lines': lines},
        'COSTS': dict(zip(tests, (1.0, 9.0, 1.0, 1.0, 1.0, 1.0))),
        'SHOWN': {'tests': [law | {'test': 'b.py::law', 'status': 'pass'}]},
        'TABLE': dict(zip(('seen', 'equal'), known)),
    }
    for constant, value in data.items():
        monkeypatch.setattr(cover, constant, tmp_path / f'{constant}.json')
        cover.write(tmp_path / f'{constant}.json', value)
    monkeypatch.setattr(cover, 'NIGHT', tmp_path / 'night.json')
    monkeypatch.setattr(cover, 'EACH_LINE', 1)
    cover.choose()
    night = json.loads((tmp_path / 'night.json').read_text())
    assert night == {'a.py::dear': [''], 'b.py::g': ['']}


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
