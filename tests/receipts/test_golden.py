"""The shipped runs: their bytes are made again, and they pass."""

from __future__ import annotations

import json

import numpy as np
import pytest

from braintrace.receipts.verifier import command, golden
from braintrace.receipts.verifier.canonical import emit, parse_run
from braintrace.receipts.verifier.derivation import derive
from braintrace.receipts.verifier.golden import GOLDEN_CELLS, SHIPPED, generate, golden_file
from braintrace.receipts.verifier.reconciler import reconcile_run


@pytest.mark.parametrize('cell', GOLDEN_CELLS)
def test_the_shipped_bytes_are_made_again(cell):
    shipped = golden_file(cell).read_bytes()
    assert generate(cell, SHIPPED) == shipped
    values = parse_run(shipped)
    assert b''.join(map(emit, values)) == shipped
    result = reconcile_run(values, level='engine')
    assert (result.verdict, result.failures, result.ties) == ('rederived', (), 0)


@pytest.mark.parametrize('cell', GOLDEN_CELLS)
def test_the_bytes_depend_on_the_seed_alone(cell):
    assert generate(cell, 2, seed=3) == generate(cell, 2, seed=3) != generate(cell, 2, seed=4)
    run = parse_run(generate(cell, 2, seed=3))
    assert reconcile_run(run).verdict == 'rederived'
    config = golden.first_config(cell, seed=3)
    assert emit(derive(config)) == emit(run[0])


def test_the_shipped_runs_spike_and_learn():
    for cell in GOLDEN_CELLS:
        values = parse_run(golden_file(cell).read_bytes())
        gradients = [value['gradients']['W']['data'] for value in values]
        assert np.all([np.any(gradient) for gradient in gradients[1:]])
        if cell != 'rnn':
            spikes = np.array([value['carry_after']['z']['data'] for value in values])
            assert 0.05 < spikes.mean() < 0.95


def test_they_are_small():
    sizes = [golden_file(cell).stat().st_size for cell in GOLDEN_CELLS]
    assert sum(sizes) < 400_000


def test_the_canaries_are_those_of_this_library():
    assert golden.foreign_functions() == []


@pytest.mark.parametrize('steps', ['3', '20'])
def test_a_check_says_what_it_compared(capsys, steps):
    assert command.main(['generate', 'lif', '--steps', steps, '--check']) == 0
    said = capsys.readouterr().out
    assert f'{min(int(steps), SHIPPED)} steps' in said
    assert ('20 asked for' in said) == (steps == '20')


def test_other_bytes_fail_unless_the_functions_are_others(capsys, monkeypatch, tmp_path):
    other = json.loads(golden_file('rnn').read_bytes().splitlines()[1])
    other['gradients']['b']['data'][0] *= 2
    lines = [golden_file('rnn').read_bytes().splitlines()[0], emit(other).strip()]
    (tmp_path / 'rnn.jsonl').write_bytes(b'\n'.join(lines) + b'\n')
    monkeypatch.setattr(command, 'golden_file', lambda cell: tmp_path / f'{cell}.jsonl')
    asked = ['generate', 'rnn', '--steps', '2', '--check']
    assert command.main(asked) == 1
    assert 'gradients/b' in capsys.readouterr().out
    monkeypatch.setitem(golden.CANARIES, 'exp(-0.5)', (np.exp, -0.5, '0x1.0p-1'))
    assert command.main(asked) == 2
    assert 'exp(-0.5) is 0x1.368b2fc6f960ap-1 here' in capsys.readouterr().err


def test_generated_lines_are_receipts(capsys):
    assert command.main(['generate', 'alif', '--steps', '2', '--seed', '5']) == 0
    assert capsys.readouterr().out.encode() == generate('alif', 2, 5)
