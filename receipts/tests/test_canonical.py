"""Canonical bytes: what goes in comes out, and what is no canonical JSON is named."""

from __future__ import annotations

import json
import os
import zipfile

import numpy as np
import pytest

from braintrace_receipts import (
    ReceiptError,
    arrays,
    canonical,
    emit,
    errors,
    files,
    node,
    parse,
    parse_run,
    schema,
)
from samples import full

NAMES = list(schema.SCHEMAS)


def head(**values):
    return {'schema': 'braintrace.receipt/1', **values}


@pytest.mark.parametrize('name', NAMES)
def test_canonical_bytes_survive_parsing_and_any_order_of_keys(name):
    value = full(name)
    line = emit(value)
    assert line.endswith(b'}\n') and b', ' not in line and b'": ' not in line
    assert parse(line) == value and emit(parse(line)) == line
    assert emit(json.loads(line, object_pairs_hook=lambda pairs: dict(pairs[::-1]))) == line
    assert list(parse(line)) == list(schema.SCHEMAS[name]['properties'])


def test_floats_are_the_shortest_decimals_of_their_dtype():
    array = np.array([0.1, -0.0, 1 / 3, 1e-45, 3.4028235e38, 16777216], np.float32)
    wide = {'a': node(array), 'b': node(array.astype(np.float64)[:3])}
    value = head(inputs={}, carry_before=wide)
    line = emit(value)
    assert b'[0.1,-0.0,0.33333334,1e-45,3.4028235e+38,16777216.0]' in line
    assert b'[0.10000000149011612,-0.0,0.3333333432674408]' in line
    back = parse(line)['carry_before']['a']
    np.testing.assert_array_equal(arrays.array_of(back), array.astype(np.float64))
    assert np.signbit(arrays.array_of(back)[1])


def test_each_float32_comes_back():
    drawn = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint32).view(np.float32)
    drawn = drawn[np.isfinite(drawn)]
    back = np.array(json.loads(json.dumps(arrays.decimals(drawn, 'float32'))))
    np.testing.assert_array_equal(back.astype(np.float32).view(np.uint32), drawn.view(np.uint32))


def test_a_digest_leaves_the_digests_out():
    value = full(NAMES[0])
    bare = {key: part for key, part in value.items() if key != 'digests'}
    assert canonical.digest(value) == canonical.digest(bare)
    assert canonical.digest({**bare, 'step': 4}) != canonical.digest(bare)


LONG = '9' * 5000
REFUSED = {
    'not-json': ['{', '{"a":1}x', '{"a":01}'],
    'duplicate-key': ['{"a":{"b":1,"b":1}}'],
    'not-finite': ['{"a":NaN}', '[-Infinity]', '{"a":1e999}'],
    'integer': [f'[{LONG}]', '[9223372036854775808]'],
    'depth': ['[' * 40 + ']' * 40, '[' * 100_000, '{"a":' * 50 + '1' + '}' * 50],
    'lines': ['{}\n{}\n', '\n{}'],
    'not-utf8': [b'{"a":"\xff"}', '["\\ud800"]', '{"\\uDfff":1}'],
    'empty': ['', '\n', b' '],
}


@pytest.mark.parametrize('code', REFUSED)
def test_what_is_no_canonical_json_is_named(code):
    for raw in REFUSED[code]:
        with pytest.raises(ReceiptError) as found:
            parse(raw)
        assert found.value.code == code, raw[:50]


def test_caps_are_in_code(monkeypatch):
    monkeypatch.setattr(canonical, 'MAX_LINE', 20)
    with pytest.raises(ReceiptError, match='a line of 25 bytes, more than 20'):
        parse('[' + ' ' * 23 + ']')
    monkeypatch.setattr(canonical, 'MAX_ELEMENTS', 3)
    with pytest.raises(ReceiptError, match='a list of 4'):
        parse('{"a":[1,2,3,4]}')
    monkeypatch.setattr(canonical, 'MAX_RECORDS', 1)
    with pytest.raises(ReceiptError, match='more than 1 lines'):
        parse_run(b'{}\n{}\n')
    assert errors.MAX_LANES == 10_000


def test_a_run_names_its_line():
    assert parse_run('{}\n[1]\n') == [{}, [1]]
    with pytest.raises(ReceiptError, match='line 2: NaN is no JSON') as found:
        parse_run(b'{}\n[NaN]\n')
    assert found.value.code == 'not-finite'
    with pytest.raises(ReceiptError, match='line 2'):
        parse_run('{}\n\n{}\n')


def test_what_json_cannot_say_is_named_by_its_path():
    value = full(NAMES[0])
    value['gradients']['a'] = node(np.array([0.0, np.nan], np.float32))
    with pytest.raises(ReceiptError, match=r'gradients\.a\.data\[1\]: is not finite'):
        emit(value)
    with pytest.raises(ReceiptError, match='step'):
        emit({**full(NAMES[0]), 'step': np.int64(3)})
    with pytest.raises(ReceiptError, match='is due'):
        emit({})
    with pytest.raises(ReceiptError, match='an array of float16'):
        node(np.float16(1))


def test_a_sample_stands_where_the_digest_puts_it():
    array = np.arange(5000, dtype=np.float64) / 7
    value = node(array, 'x', arrays='sample')
    indices, values = arrays.samples_of(value)
    assert len(set(indices.tolist())) == 256 and list(indices) == sorted(indices)
    np.testing.assert_array_equal(values, array[indices])
    assert value['sha256'] == arrays.array_digest(array)
    assert arrays.sample_indices('00' * 32, 300)[:3] == [1, 2, 3]
    with pytest.raises(ReceiptError, match='sampled'):
        arrays.array_of(value)


def test_large_arrays_go_to_a_file_and_come_back(tmp_path):
    array = np.arange(5000, dtype=np.float32).reshape(50, 100)
    filed = node(array, 'inputs', arrays='npz', file='step0.npz')
    value = {**full('braintrace.receipt/1'), 'inputs': filed}
    assert files.write_files(value, tmp_path) == ['step0.npz']
    read = parse(emit(value))
    assert 'data' not in read['inputs']
    whole = files.resolve_files(read, tmp_path)
    np.testing.assert_array_equal(arrays.array_of(whole['inputs']), array)
    assert emit(whole) == emit(read)
    with np.load(tmp_path / 'step0.npz', allow_pickle=False) as loaded:
        np.testing.assert_array_equal(loaded['inputs'], array)
    with pytest.raises(ReceiptError, match='unresolved'):
        arrays.array_of(parse(emit(value))['inputs'])


def test_a_file_that_is_not_the_named_one_is_refused(tmp_path):
    array = np.arange(5000, dtype=np.float32)
    value = node(array, 'x', arrays='npz', file='a.npz')
    files.write_files({'inputs': value}, tmp_path)
    value.pop('data')
    (tmp_path / 'text.npz').write_text('no zip')
    np.savez(tmp_path / 'pickled.npz', x=np.array([None] * 5000))
    with zipfile.ZipFile(tmp_path / 'short.npz', 'w') as archive:
        archive.writestr('x.npy', b'\x93NUMPY')
    os.symlink(tmp_path / 'a.npz', tmp_path / 'link.npz')
    os.mkfifo(tmp_path / 'pipe.npz')
    np.savez_compressed(tmp_path / 'bomb.npz', x=array)
    with zipfile.ZipFile(tmp_path / 'head.npz', 'w') as archive:
        archive.writestr('x.npy', b'\x93NUMPY\x02\x00' + b'\xff' * 4 + b' ' * 99)
    np.savez(tmp_path / 'many.npz', **{f'{"x" * 200}{i}': 0 for i in range(4000)})
    receipt = full('braintrace.receipt/1')
    names = ('none', 'link', 'pipe', 'bomb', 'head', 'many', 'text', 'pickled', 'short')
    for change, code in [
        ({'file': '../a.npz'}, None),
        ({'file': str(tmp_path / 'a.npz')}, None),
        *(({'file': f'{name}.npz'}, 'file') for name in names),
        ({'key': 'y'}, 'file'),
        ({'shape': [10**12]}, None),
        ({'shape': [50, 100]}, 'file'),
        ({'dtype': 'float64'}, 'file'),
        ({'sha256': 'a' * 64}, 'digest'),
    ]:
        changed = {**receipt, 'inputs': {**value, **change}}
        if code is None:  # its schema refuses it, and no file is opened
            assert 'data' not in files.resolve_files(changed, tmp_path)['inputs']
            continue
        with pytest.raises(ReceiptError) as found:
            files.resolve_files(changed, tmp_path)
        assert found.value.code == code and found.value.path == 'inputs', change


def test_an_array_of_a_file_stands_in_one_place_of_a_run(tmp_path):
    value = node(np.arange(5000, dtype=np.float32), 'x', arrays='npz', file='a.npz')
    receipt, seen = {**full('braintrace.receipt/1'), 'inputs': value}, set()
    files.write_files(receipt, tmp_path)
    line = emit(receipt)
    files.resolve_files(parse(line), tmp_path, seen)
    with pytest.raises(ReceiptError, match='is in two places of the run'):
        files.resolve_files(parse(line), tmp_path, seen)


@pytest.mark.parametrize(
    'start, kind',
    [
        (b'\x93NUMPY\x01', 'NumPy'),
        (b'PK\x03\x04', 'npz'),
        (b'\x1f\x8b\x08', 'gzip'),
        (b'\xff\xfe{', '16'),
    ],
)
def test_a_file_of_another_kind_is_named(start, kind):
    with pytest.raises(ReceiptError, match=kind):
        parse_run(start)
