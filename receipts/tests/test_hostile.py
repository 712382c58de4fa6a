"""Files that were made to cost much: they are refused in a time that grows as their size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import braintrace_receipts as verifier
import making
from braintrace_receipts import ReceiptError, emit, parse, reconcile_run
from braintrace_receipts.structure import read
from golden import generate


def seconds(function, *args) -> float:
    """CPU time, the better of two."""
    found = []
    for _ in range(2):
        start = time.process_time()
        function(*args)
        found.append(time.process_time() - start)
    return min(found)


def refused(raw):
    with pytest.raises(ReceiptError) as found:
        parse(raw)
    return str(found.value)


def test_a_key_that_stands_twice_among_many_is_found_at_once():
    raw = b'{' + b','.join(b'"%d":1' % i for i in range(30_000)) + b',"7":1}'
    assert seconds(refused, raw) < 1.0


@pytest.mark.parametrize(
    'raw', [b'[' * 2_000_000, b'[' + b'{},' * 1_200_000, '"",' * 600_000, b'[' + b'0,' * 9_000_000]
)
def test_a_line_of_too_many_parts_is_refused_before_it_is_read(raw):
    assert 'quotes, lists and objects' in refused(raw)
    assert seconds(refused, raw) < 0.5


def many_parameters(n):
    record = parse(generate('rnn', 1))
    for name in ('params_before', 'params_after'):
        node = record[name]['b']
        record[name] |= {f'a/{i}': node for i in range(n)}
    return record


def many_relations(n):
    (record,) = making.opaque(making.run('rnn', optimizer='none', steps=1))
    relation = record['topology']['relations'][0]
    lists = [record['factors'], record['traces_before'], record['traces_after']]
    dy = record['signals']['dy']
    for i in range(n):
        name = f'r{i}'
        record['topology']['relations'].append({**relation, 'name': name})
        dy[name] = dy[relation['name']]
        for one in lists:
            one.append({**one[0], 'relation': name})
    return record


@pytest.mark.slow
@pytest.mark.parametrize('made', [many_parameters, many_relations])
def test_a_larger_receipt_costs_as_much_more(made):
    small, large = made(80), made(500)
    assert not read(large)[0]
    assert seconds(read, large) < 14 * seconds(read, small)  # 39 times if it were quadratic


def test_the_first_record_that_is_none_ends_a_run():
    def records():
        yield {}
        raise AssertionError('nobody reads on')

    found = reconcile_run(records())
    assert found.verdict == 'malformed' and len(found.failures) <= 50


def test_arrays_have_a_largest_sum(monkeypatch):
    record = making.run('rnn', steps=1)[0]
    monkeypatch.setattr(verifier.structure, 'MAX_TOTAL', 100)
    (problem,) = read(record)[0]
    assert 'elements in all, more than 100' in problem.message


@pytest.mark.slow
def test_a_file_is_read_in_little_memory(tmp_path):
    """An honest run, and one line of many megabytes, where no more than 3 GB may be asked for."""
    honest, hostile = tmp_path / 'honest.jsonl', tmp_path / 'hostile.jsonl'
    honest.write_bytes(generate('lif', 2))
    value = parse(generate('rnn', 1))
    value['labels'] = {'note': '@'}
    hostile.write_bytes(emit(value).replace(b'@', b'x' * 20_000_000))
    code = (
        'import json, resource, sys; resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30,) * 2); '
        'from braintrace_receipts.command import main; '
        'print([main(["verify", name]) for name in sys.argv[1:]], file=sys.stderr)'
    )
    folder = str(Path(verifier.__file__).parents[1])
    environment = {**os.environ, 'PYTHONPATH': folder, 'OPENBLAS_NUM_THREADS': '1'}
    done = subprocess.run(
        [sys.executable, '-c', code, honest, hostile],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert json.loads(done.stderr.splitlines()[-1]) == [0, 2], done.stderr
