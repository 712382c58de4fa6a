"""Files that were made to cost much: they are refused by work that grows as their size."""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

import braintrace_receipts as verifier
import making
from braintrace_receipts import ReceiptError, bounds, emit, node, parse, reconcile, reconcile_run
from braintrace_receipts.canonical import spec_digest, unique
from braintrace_receipts.files import resolve_files, write_files
from braintrace_receipts.structure import read
from golden import generate


def lines(function, *args) -> int:
    """How many lines of Python a call runs, which no machine changes."""
    found, before = itertools.count(), sys.gettrace()

    def trace(frame, event, arg):
        if event == 'line':
            next(found)
        return trace

    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return next(found)


def refused(raw):
    with pytest.raises(ReceiptError) as found:
        parse(raw)
    return str(found.value)


class Word(str):
    """A text that counts how often one is compared with another."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Word.compared += 1
        return str.__eq__(self, other)


def test_a_key_that_stands_twice_among_many_is_found_by_few_comparisons():
    keys = [Word(k) for k in (*range(3000), 7)]
    with pytest.raises(ReceiptError, match='7: the key appears twice'):
        unique([(key, 1) for key in keys])
    assert Word.compared < 10 * len(keys)
    assert '7: the key appears twice' in refused(b'{"7":1,"8":1,"7":1}')


@pytest.mark.parametrize(
    'raw', [b'[' * 2_000_000, b'[' + b'{},' * 1_200_000, '"",' * 600_000, b'[' + b'0,' * 9_000_000]
)
def test_a_line_of_too_many_parts_is_refused_before_it_is_read(raw, monkeypatch):
    monkeypatch.setattr(json, 'loads', lambda *args, **options: pytest.fail('it is read'))
    assert 'quotes, lists and objects' in refused(raw)


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
    small, large = made(20), made(125)
    assert not read(large)[0]
    assert lines(read, large) < 7 * lines(read, small)  # 39 times if it were quadratic


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


@pytest.mark.parametrize(
    'kind, like',
    [('gradients', 'params_before'), ('params_after', 'params_before')]
    + [('carry_after', 'carry_before')],
)
def test_an_array_has_the_shape_of_the_one_it_belongs_to(kind, like):
    record = making.run('rnn', steps=1)[0]
    name = min(record[kind])
    record[kind][name] = node(np.zeros((1, 1, 1)))
    want = tuple(record[like][name]['shape'])
    problems = [problem.message for problem in read(record)[0]]
    assert problems == [f'(1, 1, 1), and {like}/{name} has {want}']


# what formulas would make of it ------------------------------------------------------------------


def with_op(record, primitive, x, y, weight, options=None, group=None):
    """A record with one op more, whose numbers are all zero."""
    topology, name = record['topology'], f'op{len(record["factors"])}'
    path, zeros, entries = f'{name}/w', node(np.zeros(weight)), {'weight': [None]}
    relation = {'name': name, 'primitive': primitive, 'params': {'weight': path}}
    relation |= {'groups': [group] if group else [], 'source': None}
    topology['relations'].append(relation | ({'options': options} if options else {}))
    topology['routes'][path] = {'kind': 'same-step'}
    factor = {'relation': name, 'group': group, 'x': x, 'D_f': [], 'D': []}
    if group:
        at = record['factors'][0]
        factor |= {'D_f': [node(np.zeros(y))], 'D': [[at['D'][0][0]]]}
        for when in ('before', 'after'):
            trace = {'relation': name, 'group': group, 'entries': entries}
            record[f'traces_{when}'].append(trace)
    record['factors'].append(factor)
    record['signals']['dy'][name] = node(np.zeros(y))
    for kind in ('params_before', 'params_after', 'gradients'):
        record[kind][path] = zeros


def opaque(lanes=2):
    (record,) = making.opaque(
        making.run('rnn', optimizer='none', steps=1, sizes=(2, 2, 2, lanes), readout='linear')
    )
    return record


def convolved(x, y, kernel, padding):
    record, one = opaque(), [1]
    options = dict.fromkeys(('strides', 'lhs_dilation', 'rhs_dilation'), one)
    options |= dict(padding=padding, feature_group_count=1, batch_group_count=1)
    options['dimension_numbers'] = [[0, 1, 2]] * 3
    with_op(record, 'etp_conv', node(np.zeros(x)), y, kernel, options)
    return record


def convolution(n):
    return convolved((2, 1, n), (2, 1, n), (1, 1, n), [[n // 2, n - 1 - n // 2]])


def without_taps(n):
    """A kernel without a number, of which a formula would ask which channels it reads."""
    return convolved((2, n, 0), (2, n, 1), (n, n, 0), [[0, 0]])


def embedding(n):
    record = opaque(n)
    with_op(record, 'etp_embed_mm', node(np.zeros(n, np.int64)), (n, 1), (n, 1))
    return record


def sparse(n):
    record, zeros = opaque(n), [0] * (40 * n)
    options = {'rows': zeros, 'columns': zeros, 'shape': [1, 1]}
    with_op(record, 'etp_sp_mm', node(np.zeros((n, 1))), (n, 1), (40 * n,), options)
    return record


def letters(n):
    record = opaque()
    with_op(record, 'etp_einsum_mm', node(np.zeros((2, n))), (2, n), (1,), {'equation': 'a,b->c'})
    record['topology']['relations'][-1]['options']['equation'] = 'a,ab->b'
    return record


def vector(n):
    record = opaque()
    with_op(record, 'etp_mv', node(np.zeros(n)), (n,), (1, 1))
    return record


COSTLY = dict.fromkeys((convolution, without_taps, embedding), 6_000)
COSTLY |= {sparse: 1_000, letters: 20_000, vector: 20_000}


@pytest.mark.parametrize('made', COSTLY, ids=lambda one: one.__name__)
def test_an_array_is_asked_for_before_a_formula_makes_it(made):
    record = made(COSTLY[made])
    record['spec_digest'] = spec_digest(record)
    small = made(20)
    small['spec_digest'] = spec_digest(small)
    if made not in (letters, vector):  # whose shapes fit no weight
        assert reconcile(small).verdict == 'consistent', reconcile(small).failures
    tracemalloc.start()
    found = reconcile(record)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.verdict == 'malformed' and found.failures[0].path != 'internal'
    assert peak < 8e8, peak


def test_traces_that_are_null_do_not_hide_what_is_made_of_them(monkeypatch):
    record = opaque()
    for _ in range(20):
        with_op(record, 'etp_mm', node(np.zeros((2, 50))), (2, 2), (50, 2), group='hidden')
    record['spec_digest'] = spec_digest(record)
    assert reconcile(record).verdict == 'consistent', reconcile(record).failures
    monkeypatch.setattr(bounds, 'ROOM', 3000)
    monkeypatch.setattr(bounds, 'SHARE', 0)
    (failure,) = reconcile(record).failures
    assert 'numbers at once' in failure.hint


def test_memory_that_ends_is_a_verdict(monkeypatch):
    def ended(*_):
        raise MemoryError

    monkeypatch.setattr(verifier.reconciler, '_rules_of', ended)
    (failure,) = reconcile(opaque()).failures
    assert failure.path != 'internal' and 'memory' in failure.hint


def filed(inputs):
    """A record whose inputs are in a file."""
    own = {key: value for key, value in inputs.items() if key != 'data'}
    return {**making.run('rnn', steps=1)[0], 'inputs': own}


def test_arrays_of_an_npz_that_overlap_are_refused(tmp_path):
    inputs = node(np.arange(5000.0), 'a', arrays='npz', file='a.npz')
    write_files({'inputs': inputs}, tmp_path)
    with zipfile.ZipFile(tmp_path / 'a.npz', 'a') as archive:
        twice = copy.copy(archive.infolist()[0])
        twice.filename = 'b.npy'
        archive.filelist.append(twice)
        archive._didModify = True
    with pytest.raises(ReceiptError, match='overlap'):
        resolve_files(filed(inputs), tmp_path)


@pytest.mark.parametrize('kind', ['link', 'pipe', 'folder'])
def test_what_is_no_regular_file_beside_a_receipt_is_refused(tmp_path, kind):
    inputs = node(np.arange(5000.0), 'a', arrays='npz', file='a.npz')
    write_files({'inputs': {**inputs, 'file': 'b.npz'}}, tmp_path)
    link = lambda path: path.symlink_to(tmp_path / 'b.npz')
    {'link': link, 'pipe': os.mkfifo, 'folder': Path.mkdir}[kind](tmp_path / 'a.npz')
    with pytest.raises(ReceiptError, match='beside the receipt|a.npz'):
        resolve_files(filed(inputs), tmp_path)


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
