"""What the tests of a run have shown: the pytest plugin, its record, and the report that joins it
with the registry.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from braintrace import _etrace_op as ops
from braintrace import kit
from braintrace.errors import OptionError
from braintrace.kit.__main__ import main

from . import bad

pytestmark = pytest.mark.usefixtures('registries_are_restored')
SUITE = """
import pytest
from braintrace import kit

@pytest.mark.etp('etp_mv', rule='yw_to_w')
def test_shows_a_rule(): pass

@pytest.mark.etp('etp_mv', rule='xy_to_dw')
def test_breaks_a_rule(): assert False

@pytest.mark.etp('etp_mv', rule='init_pp')
@pytest.mark.skip
def test_is_skipped(): pass

@pytest.mark.etp('etp_mv', rule='init_drtrl', law='L5')
@pytest.mark.xfail
def test_is_expected_to_fail(): assert False

def test_every_law(etp_conformance): etp_conformance('etp_elemwise')

def test_a_broken_law(etp_conformance):
    from tests.kit import bad
    etp_conformance(bad.quadratic())
"""


def run(folder, source, *options):
    (folder / 'test_ops.py').write_text(source)
    command = f'{sys.executable} -m pytest -q -c /dev/null --rootdir {folder} -p no:cacheprovider'
    command += ' -p braintrace.kit.pytest_plugin --strict-markers test_ops.py'
    return subprocess.run([*command.split(), *options], capture_output=True, text=True, cwd=folder)


def results_of(folder, source, outcome, *options):
    source = f'import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n{source}'
    done = run(folder, source, '--etp-results', 'results.json', *options)
    assert outcome in done.stdout, done.stdout + done.stderr
    return folder / 'results.json'


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    outcome = '2 failed, 2 passed, 1 skipped, 1 xfailed'
    return results_of(tmp_path_factory.mktemp('suite'), SUITE, outcome)


@pytest.mark.nightly  # `make test` itself runs in several processes
def test_what_several_processes_show_is_one_record(tmp_path):
    marks = SUITE.split('def test_every_law')[0]
    outcome = '1 failed, 1 passed, 1 skipped, 1 xfailed'
    found = []
    for options in ([], ['-n', '2']):
        entries = json.loads(results_of(tmp_path, marks, outcome, *options).read_text())['tests']
        found.append(sorted(map(repr, entries)))
    assert found[0] == found[1] and len(found[0]) == 4


@pytest.mark.slow
def test_a_rule_is_shown_by_a_marked_test_that_passed_and_no_other(results):
    report = kit.registry_report(results)
    rows = {row.law: row for row in report.rows if row.op == 'etp_mv'}
    assert {slot: rows[slot].status for slot in ops.REQUIRED_SLOTS} == {
        'yw_to_w': 'pass',
        'xy_to_dw': 'fail',
        'init_drtrl': 'not_tested',
        'init_pp': 'not_tested',
    }
    assert rows['xy_to_dw'].case == 'test_ops.py::test_breaks_a_rule'
    assert rows['L5'].status == 'not_tested' and rows['L2'].status == 'missing'
    assert {row.law for row in rows.values()} == {*ops.REQUIRED_SLOTS, *kit.LAWS}


@pytest.mark.slow
def test_laws_are_recorded_one_by_one_also_where_another_fails(results):
    rows = {row.law: row.status for row in kit.registry_report(results, 'etp_elemwise').rows}
    assert {rows[law] for law in ('L3', 'yw_to_w', 'xy_to_dw', 'init_drtrl')} == {'pass'}
    assert rows['L8'] == 'not_applicable'
    bad.quadratic()
    rows = {row.law: row.status for row in kit.registry_report(results, 'etp_bad').rows}
    assert rows['L8'] == 'fail' and rows['L3'] == rows['yw_to_w'] == 'pass'


def passed(op, rule=None, law=None):
    return {'test': 'test_it', 'op': op, 'rule': rule, 'law': law, 'status': 'pass'}


def test_the_forms_of_an_op_are_shown_by_its_name(tmp_path):
    op = kit.make_elementwise_op('t_gain', lambda x, w: x * w)
    entries = [passed('t_gain_sample', rule='xy_to_dw'), passed('t_gain', law='L5')]
    (tmp_path / 'r.json').write_text(json.dumps({'tests': entries}))
    report = kit.registry_report(tmp_path / 'r.json', op)
    assert {row.law for row in report.of('pass')} == {'xy_to_dw', 'init_drtrl', 'init_pp', 'L5'}
    assert {row.op for row in report.rows} == {'t_gain'}


def everything_passed(path, but=(), more=()):
    shown = [*((slot, None) for slot in ops.RULE_SLOTS), *((None, law) for law in kit.LAWS)]
    entries = [passed(p.name, *each) for p in ops.ETP_PRIMITIVES for each in shown]
    kept = [e for e in entries if (e['op'], e['rule'] or e['law']) not in but]
    path.write_text(json.dumps({'tests': [*kept, *more]}))
    return str(path)


def test_what_is_not_shown_is_named_with_its_op(tmp_path, monkeypatch, capsys):
    """A rule that is deleted, a test that is, and a mark for what is not registered."""
    path = tmp_path / 'r.json'

    def missing(but=(), more=()):
        code = main(['check', '--all', '--json', '--results', everything_passed(path, but, more)])
        assert code == (2 if (found := json.loads(capsys.readouterr().out)['missing']) else 0)
        return set(found)

    assert not missing()
    without = {('etp_conv', what) for what in ('solve_drtrl', 'L6', 'xy_to_dw', 'L2', 'L9')}
    assert missing(but=without) == {
        f'{op} {what} missing: no test of it in the results' for op, what in without
    }
    assert missing(more=[passed('etp_nm', rule='yw_to_w')]) == {
        'etp_nm yw_to_w missing: test_it is marked for it, and it is not registered'
    }
    for slot in ops.REQUIRED_SLOTS:
        monkeypatch.delitem(ops.etp_mm_p.own_rules, slot)
        assert f'etp_mm {slot} missing: no such rule is registered' in missing()


@pytest.mark.parametrize(
    'content', [None, '', '[]', '{"tests": [{"op": "etp_mm"}]}', '{"tests": 3}']
)
def test_a_file_that_is_no_record_is_refused(content, tmp_path, capsys):
    path = tmp_path / 'r.json'
    if content is not None:
        path.write_text(content)
    with pytest.raises(OptionError, match='registry_report: .*r.json'):
        kit.registry_report(path)
    assert main(['check', 'etp_mm', '--results', str(path)]) == 3
    assert 'r.json' in capsys.readouterr().err


def refused(folder, source, *options):
    """By a pytest in this process, which runs no test."""
    (folder / 'test_ops.py').write_text(source)
    own = f'-q -c /dev/null --rootdir {folder} --import-mode=importlib -p no:faulthandler'
    plugin = '-p no:cacheprovider -p braintrace.kit.pytest_plugin --strict-markers'
    code = pytest.main([*own.split(), *plugin.split(), *options, f'{folder}/test_ops.py'])
    sys.modules.pop('test_ops', None)
    return code


@pytest.mark.parametrize(
    ('mark', 'found'),
    {
        "'etp_mm', rule='yw'": "rule='yw'",
        '': 'etp(None',
        "'etp_mm', law='L16'": "law='L16'",
    }.items(),
)
def test_a_wrong_mark_is_named_with_its_test(mark, found, tmp_path, capsys):
    code = refused(tmp_path, f'import pytest\n@pytest.mark.etp({mark})\ndef test_it(): pass')
    said = capsys.readouterr().err
    assert code == pytest.ExitCode.USAGE_ERROR
    assert 'test_ops.py::test_it' in said and found in said


def test_a_record_without_a_folder_is_wrong_usage(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = refused(tmp_path, 'def test_it(): pass', '--etp-results', 'none/r.json')
    said = capsys.readouterr().err
    assert code == pytest.ExitCode.USAGE_ERROR and 'Traceback' not in said
    assert '--etp-results none/r.json: there is no folder none' in said
