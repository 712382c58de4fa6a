"""The schemas: closed, ordered, shipped, and a validator that never raises."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

import braintrace_receipts
from braintrace_receipts import errors
from braintrace_receipts.arrays import array_digest, node
from braintrace_receipts.schema import SCHEMAS, check
from making import deep, places, put
from samples import full

NAMES = list(SCHEMAS)
RECEIPT = NAMES[0]


def text_of(name):
    """The shipped file of a format."""
    stem = name.removeprefix('braintrace.').replace('/', '-')
    folder = Path(braintrace_receipts.__file__).parent / 'schemas'
    return (folder / f'{stem}.json').read_text('utf-8')


JUNK = [
    *(None, True, 0, -1, 10**400, 2.5, float('nan'), float('inf'), '', 'x' * 100, '\ud800', b'x'),
    *([], [None], {}, {'a': 1}, {1: 2, None: 3}, object(), np.float32(1), np.ones(2), set()),
    *(deep(50), deep(5000), {'shape': [-1], 'dtype': 'float32', 'data': []}),
    {'shape': [True], 'dtype': [], 'data': None},
    {'shape': [2], 'dtype': 'float32', 'data': [1.0, 10**400]},
    {'shape': [1], 'dtype': 'float32', 'sha256': 'zz', 'sample': [[0, 1.0]]},
]


@pytest.mark.parametrize('name', NAMES)
def test_a_whole_value_has_no_problem(name):
    assert check(full(name), name) == []


KEYWORDS = set(
    """$schema $id $defs $ref title type const enum pattern maxLength minimum exclusiveMinimum
    exclusiveMaximum items maxItems properties required additionalProperties anyOf""".split()
)


def keywords(part):
    """The keywords of a schema; names of properties and definitions are none."""
    if isinstance(part, dict):
        yield from part
        for key, one in part.items():
            named = key in ('properties', '$defs') and isinstance(one, dict)
            for inner in one.values() if named else [one]:
                yield from keywords(inner)
    elif isinstance(part, list):
        for one in part:
            yield from keywords(one)


@pytest.mark.parametrize('name', NAMES)
def test_a_schema_has_no_keyword_that_is_not_checked(name):
    shipped = json.loads(text_of(name))
    shipped.get('$defs', {}).pop('array', None)  # its numbers have a checker of their own
    assert set(keywords(shipped)) <= KEYWORDS
    assert shipped['additionalProperties'] is False and shipped['title'] == name


def test_an_independent_validator_agrees():
    jsonschema = pytest.importorskip('jsonschema')
    referencing = pytest.importorskip('referencing')
    shipped = {name: json.loads(text_of(name)) for name in NAMES}
    registry = referencing.Registry().with_resources(
        [(one['$id'], referencing.Resource.from_contents(one)) for one in shipped.values()]
    )
    for name, one in shipped.items():
        validator = jsonschema.Draft202012Validator(one, registry=registry)
        assert not list(validator.iter_errors(full(name)))
        assert list(validator.iter_errors({**full(name), 'verdict': 'rederived'}))


@pytest.mark.parametrize('name', NAMES)
def test_every_key_is_due_or_optional_and_no_other_is_taken(name):
    value = full(name)
    optional = set(SCHEMAS[name]['properties']) - set(SCHEMAS[name]['required'])
    for key in value:
        rest = {other: part for other, part in value.items() if other != key}
        found = [problem.path for problem in check(rest, name)]
        assert found == ([] if key in optional else [key])
    (extra,) = check({**value, 'verdict': 'rederived'}, name)
    assert (extra.path, extra.message) == ('verdict', 'is no key of the schema')


def test_a_config_has_no_key_for_a_result():
    results = {'factors', 'traces_after', 'carry_after', 'outputs', 'signals', 'gradients'}
    results |= {'params_after', 'window', 'digests', 'labels'}
    config = SCHEMAS['braintrace.config/1']['properties']
    assert not results & set(config)
    assert set(config['loss']['properties']) == {'name', 'reduction', 'mask'}
    optimizer = config['optimizer']['anyOf'][0]['properties']
    assert set(optimizer) == {'name', 'config', 'state_before'}


def test_no_schema_has_a_word_for_a_verdict():
    for name in NAMES:
        text = text_of(name)
        for word in ('verdict', 'passed', 'verified', 'expected', 'tolerance', '"ok"'):
            assert word not in text


def test_junk_anywhere_is_told_and_raises_nothing():
    value = full(RECEIPT)
    spots = list(places(value))
    draw = random.Random(0)
    for junk in JUNK:
        assert check(junk, RECEIPT)
        for path in draw.sample(spots, 40):
            for problem in check(put(value, path, junk), RECEIPT):
                assert isinstance(problem.path, str) and 0 < len(problem.message) < 300


WRONG = [
    (('step',), True, 'step', 'true where an integer is due'),
    (('step',), -1, 'step', '-1 is out of range'),
    (('run_id',), 'x' * 2000, 'run_id', 'a text of 2000 letters, more than 1000'),
    (('algorithm', 'decay_x'), 1.0, 'algorithm.decay_x', '1.0 where a number below 1 is due'),
    (('numeric', 'k'), 0, 'numeric.k', '0 where a number above 0 is due'),
    (('lanes', 0), 10**30, 'lanes[0]', 'an integer of 100 bits'),
    (('numeric', 'k'), '8', 'numeric.k', "'8' where a number is due"),
    (('loss', 'value'), float('nan'), 'loss.value', 'nan is not finite'),
    (('loss', 'value'), 10**400, 'loss.value', 'is not finite'),
    (('reset', 1), 0, 'reset[1]', '0 where true or false is due'),
    (('algorithm', 'name'), 'BPTT', 'algorithm.name', 'known are D_RTRL, ES_D_RTRL'),
    (('spec_digest',), 'sha256:0', 'spec_digest', 'does not match'),
    (('inputs', 'data'), [0.0] * 3, 'inputs.data', '3 numbers where the shape asks for 4'),
    (('inputs', 'data', 2), True, 'inputs.data[2]', 'true where a number is due'),
    (('inputs', 'data', 2), '1', 'inputs.data[2]', "'1' where a number is due"),
    (('inputs', 'data', 2), float('inf'), 'inputs.data[2]', 'is not finite'),
    (('inputs', 'data', 2), 1e39, 'inputs.data[2]', 'is not finite'),
    (('inputs', 'dtype'), 'float16', 'inputs.dtype', 'known are float32'),
    (('inputs', 'shape'), [2, 3], 'inputs.data', '4 numbers where the shape asks for 6'),
    (('inputs', 'shape'), [2**13, 2**13], 'inputs.shape', 'at most 16777216'),
    (('factors', 0, 'D', 1), None, 'factors[0].D[1]', 'null where a list is due'),
    (('lanes',), [1] * 10_001, 'lanes', 'a list of 10001, more than 10000'),
]


@pytest.mark.parametrize(('path', 'new', 'where', 'message'), WRONG)
def test_a_problem_names_the_place_and_what_is_due(path, new, where, message):
    (found,) = check(put(full(RECEIPT), path, new), RECEIPT)
    assert found.path == where and message in found.message


def test_array_nodes_are_one_of_three_forms():
    digest = array_digest(np.zeros(2))
    head = {'shape': [2], 'dtype': 'float64'}
    sample = [[0, 0.0], [1, 0.0]]
    good = [
        {**head, 'data': np.zeros(2)},
        {**head, 'sha256': digest, 'file': 'a.npz', 'key': 'x'},
        {**head, 'sha256': digest, 'file': 'a.npz', 'key': 'x', 'data': np.zeros(2)},
        {**head, 'sha256': digest, 'sample': sample},
        {'shape': [2], 'dtype': 'bool', 'data': [True, False]},
        {'shape': [], 'dtype': 'int32', 'data': [3]},
        node(np.arange(5000), arrays='sample'),
    ]
    bad = [
        {**head, 'data': np.zeros(2, np.float32)},
        {**head, 'data': np.zeros(3)},
        {**head, 'data': [0.0, 0.0], 'sha256': digest},
        {**head, 'sha256': digest, 'file': '../a.npz', 'key': 'x'},
        {**head, 'sha256': digest, 'file': 'a.npz', 'key': 'x', 'data': [0.0, 0.0]},
        {**head, 'sha256': digest, 'file': 'a.npz', 'key': 'x', 'data': np.ones(2)},
        {**head, 'sha256': digest, 'sample': sample[::-1]},
        {**head, 'sha256': digest, 'sample': sample[:1]},
        {'shape': [2], 'dtype': 'bool', 'data': [0, 1]},
        {'shape': [1], 'dtype': 'int32', 'data': [2**31]},
        {'shape': [1], 'dtype': 'int64', 'data': [1.0]},
        {'shape': [1], 'dtype': 'float32', 'data': [np.float32(1)]},
    ]
    value = full(RECEIPT)
    assert [check({**value, 'inputs': one}, RECEIPT) for one in good] == [[]] * len(good)
    assert [len(check({**value, 'inputs': one}, RECEIPT)) for one in bad] == [1] * len(bad)
    assert errors.MAX_ELEMENTS == 2**24
