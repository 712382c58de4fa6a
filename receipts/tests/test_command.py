"""The command line: what it prints, and each of its exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import golden
from braintrace_receipts import __version__, arrays, command, printing, structure
from braintrace_receipts.arrays import array_of, node
from braintrace_receipts.canonical import digest, emit, parse, parse_run
from braintrace_receipts.checks import Failure
from braintrace_receipts.claims import signed
from braintrace_receipts.files import write_files
from braintrace_receipts.reconciler import Result, reconcile
from braintrace_receipts.rules import RULES
from golden import generate


@cache
def made(cell='lif', steps=3):
    return generate(cell, steps)


def receipt(cell='lif'):
    return parse(made(cell).splitlines()[0])


def wrong(value):
    """A receipt with one entry of its trace off by 5 %."""
    value['traces_after'][0]['entries']['weight'][0]['data'][5] *= 1.05
    return value


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Runs a command on a value, bytes or nothing at stdin: exit code, stdout, stderr."""

    def called(*argv, stdin=None):
        if stdin is not None:
            raw = emit(stdin) if isinstance(stdin, dict) else stdin
            monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(raw)))
        code = command.main(argv)
        return code, *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('COLUMNS', '80')
    return called


# verify -------------------------------------------------------------------------------------------


def test_what_holds_passes(call, tmp_path):
    Path('run.jsonl').write_bytes(made())
    code, out, err = call('verify', 'run.jsonl')
    assert (code, err) == (0, '')
    assert out.splitlines()[0].split() == ['R', 'rule', 'finding']
    assert 'PASS rederived: ' in out and '31  states chain' in out
    rows = [line for line in out.splitlines() if line[:2].strip().isdigit()]
    assert [int(line[:2]) for line in rows] == list(RULES)
    assert all(len(line) <= 80 for line in out.splitlines())


def test_one_line_is_a_run_where_it_is_asked_for(call):
    alone, run = (
        json.loads(call('verify', '-', '--json', *more, stdin=receipt())[1])
        for more in ((), ('--run',))
    )
    assert '10' in alone['gated_off'] and '10' in run['rules_evaluated']


def test_json_has_the_whole_result(call):
    code, out, _ = call('verify', '-', '--json', stdin=wrong(receipt()))
    found, want = json.loads(out), reconcile(wrong(receipt()))
    assert (code, found['ok'], found['verdict']) == (1, False, 'failed')
    assert [one['rule'] for one in found['failures']] == [one.rule for one in want.failures]
    assert set(found['failures'][0]) == set(Failure.__dataclass_fields__)
    assert set(found) == {*Result.__dataclass_fields__, 'refused'}
    assert {*found['rules_evaluated'], *found['gated_off']} == {str(number) for number in RULES}


def lines(values):
    return b''.join(map(emit, values))


def off():
    values = parse_run(made())
    return lines([values[0], wrong(values[1]), values[2]])


def cut():
    return lines(parse_run(made())[1:])


def unknown_loss():
    return {**(value := receipt()), 'loss': {**value['loss'], 'name': 'mine'}}


# A command, what is at stdin, the exit code, and what is said.
ASKED = [
    ('verify -', made, 0, ['PASS rederived: ']),
    ('verify - --level engine', receipt, 0, []),
    ('verify -', off, 1, ['30 trace after FAILED', 'FAIL failed: ', 'times its bound of',
     'R30 trace after: record [1], traces_after/recurrent/hidden/weight/0[0, 1, 1]',
     'it is 1.05 times what it should be']),
    ('verify -', unknown_loss, 1, ['FAIL consistent', '--accept consistent']),
    ('verify - --accept consistent', unknown_loss, 0, []),
    ('verify - --json', unknown_loss, 1, ['"ok": false']),
    ('verify - --strict', made, 0, []),
    ('verify -', cut, 0, []),
    ('verify - --strict', cut, 1, ['a start at step 1, t = 1']),
    ('verify -', lambda: golden.first_config('lif'), 2, ['this is a configuration']),
    ('--version', None, 0, [f'braintrace-receipts {__version__}']),
    ('--help', None, 0, ['3 wrong usage']),
    ('verify --help', None, 0, ['3 wrong usage']),
]  # fmt: skip


@pytest.mark.parametrize(('line', 'raw', 'code', 'words'), ASKED)
def test_a_command_ends_with_its_code_and_says_why(call, line, raw, code, words):
    found, *texts = call(*line.split(), stdin=raw and raw())
    text = ' '.join(''.join(texts).split())
    assert found == code and all(word in text for word in words), text


def test_a_receipt_cannot_steer_the_terminal(call):
    values = parse_run(made())
    values[1]['run_id'] = 'x\x1b[2J\u202e'
    code, out, _ = call('verify', '-', stdin=lines(values))
    assert code == 1 and 'x?[2J?' in out and '\x1b' not in out
    code, _, err = call('verify', '-', stdin=emit({**values[0], 'every': '\x1b[2J'}))
    assert code == 2 and '\x1b' not in err


@pytest.fixture
def inputs(monkeypatch):
    """The inputs of the receipt, in a world where these are a large array."""
    for module in (arrays, structure):
        monkeypatch.setattr(module, 'INLINE', 4)
    return np.float32(array_of(receipt()['inputs']))


def test_strict_fails_on_samples_and_ties(call, inputs, monkeypatch):
    sampled = {**receipt(), 'inputs': node(inputs, arrays='sample')}
    options = ('verify', '-', '--accept', 'consistent')
    assert call(*options, stdin=sampled)[0] == 0
    code, out, _ = call(*options, '--strict', stdin=sampled)
    assert code == 1 and 'sampled arrays: 1' in ' '.join(out.split())
    tied = Result(True, 'rederived', (), {0: 1}, {}, ties=2, doubts=('ties: 2',))
    monkeypatch.setattr(command, 'reconcile', lambda *_, **__: tied)
    assert call('verify', '-', stdin=receipt())[0] == 0
    code, out, _ = call('verify', '-', '--strict', stdin=receipt())
    assert code == 1 and 'ties: 2' in ' '.join(out.split())


def test_a_key_asks_for_signatures(call):
    Path('key').write_bytes(b'secret\n')
    value = receipt()
    assert call('verify', '-', '--key', 'key', stdin=value)[0] == 1
    for key, want in ((b'secret\n', 0), (b'other', 1)):
        own = {'receipt': digest(value)}
        sign = {'algorithm': 'hmac-sha256', 'key_id': 'k', 'value': signed(own, key)}
        bound = {**value, 'digests': {**own, 'signature': sign}}
        assert call('verify', '-', '--key', 'key', stdin=bound)[0] == want
    assert call('verify', '-', '--key', 'none', stdin=value)[0] == 2


def test_arrays_stand_in_files_beside_the_receipt(call, inputs, tmp_path):
    filed = node(inputs, 'inputs', arrays='npz', file='a.npz')
    write_files({'inputs': filed}, tmp_path)
    Path('one.jsonl').write_bytes(emit({**receipt(), 'inputs': filed}))
    assert call('verify', str(tmp_path / 'one.jsonl'))[0] == 0
    write_files({'inputs': {**filed, 'data': inputs + 1}}, tmp_path)
    code, _, err = call('verify', 'one.jsonl')
    assert code == 2 and 'another sha256' in err
    Path('a.npz').unlink()
    assert call('verify', 'one.jsonl')[0] == 2


BAD = {
    'not-json': b'{"schema": ',
    'empty': b'',
    'duplicate-key': b'{"a":1,"a":2}\n',
    'not-finite': b'[NaN]\n',
    'malformed': b'null\n',
    'not-utf8': b'"\xff"\n',
}


@pytest.mark.parametrize('code', BAD)
def test_what_cannot_be_read_is_told(call, code):
    exit_code, out, err = call('verify', '-', '--json', stdin=BAD[code])
    error = json.loads(out)
    assert exit_code == 2 and error['ok'] is False
    assert set(error['error']) == {'code', 'message', 'hint', 'retryable'}
    assert error['error']['code'] == code and not error['error']['retryable']
    assert error['error']['message'] in err and 'Traceback' not in err


def test_of_several_problems_the_first_is_told_and_the_others_are_counted(call):
    for gone, hint in ((1, ''), (2, 'and 1 problem more')):
        value = receipt()
        for name in ('run_id', 'step')[:gone]:
            del value[name]
        assert json.loads(call('verify', '-', '--json', stdin=value)[1])['error']['hint'] == hint


def test_a_file_that_is_not_there_or_too_large_is_told(call, monkeypatch):
    code, out, err = call('verify', 'nowhere', '--json')
    assert (code, json.loads(out)['error']['retryable']) == (2, True) and 'nowhere' in err
    monkeypatch.setattr(command, 'MAX_RUN', 100)
    code, _, err = call('verify', '-', stdin=made())
    assert code == 2 and 'more than 100 bytes' in err


def test_a_fault_of_our_own_is_a_sentence(call, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError('boom')

    monkeypatch.setattr(command, 'reconcile', broken)
    code, out, err = call('verify', '-', stdin=receipt())
    assert (code, out) == (2, '') and 'RuntimeError: boom' in err and 'Traceback' not in err


# wrong usage --------------------------------------------------------------------------------------

USAGE = [
    ('verify --jsn x', '--json'),
    ('verify --run --stric x', '--strict'),
    ('verfy x', 'verify'),
    ('verify --allow tf23 x', 'tf32'),
    ('verify --level observr x', 'observer'),
    ('verify --accept consistant x', 'consistent'),
    ('rules 37', '0 to 36'),
    ('rules x', 'no rule'),
    ('rules --jso', '--json'),
    ('verify', '--help'),
    ('', '--help'),
]


@pytest.mark.parametrize(('line', 'hint'), USAGE)
def test_wrong_usage_gets_a_suggestion(call, line, hint):
    code, out, err = call(*line.split())
    assert (code, out) == (3, '') and hint in err and 'Traceback' not in err


def test_wrong_usage_is_json_where_that_is_asked_for(call):
    code, out, _ = call('verify', '--json', '--stricct', 'x')
    assert code == 3
    assert json.loads(out)['error']['code'] == 'usage' and '--strict' in out


# the others ---------------------------------------------------------------------------------------


def test_each_rule_is_listed_and_explained(call):
    code, out, _ = call('rules', '--json')
    assert code == 0 and [one['number'] for one in json.loads(out)] == list(RULES)
    code, table, _ = call('rules')
    assert code == 0 and all(len(line) <= 80 for line in table.splitlines())
    for number, rule in RULES.items():
        code, out, _ = call('rules', str(number))
        lines = out.splitlines()
        assert code == 0 and rule.title in table and all(len(line) <= 80 for line in lines)
        assert {line[:12].strip() for line in lines} >= {'means', 'formula', 'if it fails'}
    assert 'tau_mem' in call('rules', 'R34')[1]
    assert [one['number'] for one in json.loads(call('rules', '34', '--json')[1])] == [34]


# how it is printed --------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colours_are_for_terminals_alone(monkeypatch):
    monkeypatch.delenv('NO_COLOR', raising=False)
    result = reconcile(wrong(receipt()))
    assert '\x1b[31m' in printing.Page(Terminal()).verdict(result, False)
    assert '\x1b' not in printing.Page(io.StringIO()).verdict(result, False)
    monkeypatch.setenv('NO_COLOR', '1')
    assert '\x1b' not in printing.Page(Terminal()).verdict(result, False)


@pytest.mark.parametrize('width', [40, 80, 200])
def test_long_lists_are_cut_with_a_count(monkeypatch, width):
    monkeypatch.setenv('COLUMNS', str(width))
    failures = [Failure(4, f'[3].gradients/{"w" * 200}', 1.0, 2.0, 1.0, 1e-9) for _ in range(50)]
    told = {f'note {i}': 'word ' * 60 for i in range(30)}
    gated, failed = {0: 'x' * 300}, {4: 50}
    result = Result(False, 'failed', tuple(failures), failed, gated, 0, told, failed=failed)
    out = printing.Page(io.StringIO()).verdict(result, False)
    assert all(len(line) <= max(80, width) for line in out.splitlines())
    assert '38 more failures' in out and '22 more' in out
    title = next(line for line in out.splitlines() if 'record [3]' in line)
    assert len(title) == max(80, width)  # a line fills the width before it is cut


def test_a_stream_of_text_alone_is_written_to():
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        assert command.main(['rules', '--json']) == 0
    assert json.loads(stream.getvalue())[4]['title'] == 'gradient'


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error():
    process = subprocess.Popen(
        [sys.executable, '-m', 'braintrace_receipts', 'rules', '--json'],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, 'PYTHONPATH': str(Path(command.__file__).parents[1])},
    )
    process.stdout.read(10)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b'', 0)
    process.stderr.close()
