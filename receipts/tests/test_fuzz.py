"""Whatever comes in, a result comes out, and rule 0 names the place instead of an exception."""

from __future__ import annotations

import copy
import functools
import json
import math
import random

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import making
from braintrace_receipts import (
    RULES,
    ReceiptError,
    Result,
    derive,
    emit,
    parse,
    reconcile,
    reconcile_run,
)
from braintrace_receipts.arrays import INLINE, node
from braintrace_receipts.canonical import spec_digest
from braintrace_receipts.schema import with_arrays
from making import deep, get, places, put

VERDICTS = {'rederived', 'consistent', 'skipped', 'failed', 'malformed'}
BLOCK, GATE, NIGHT = 250, 1, 20  # changes of a block; blocks of the gate; of the night
ALL_RUNS = (
    dict(cell='rnn', optimizer='adam-decay', sealed=True),
    dict(cell='lif', readout='linear', loss='softmax_ce', optimizer='momentum'),
    dict(cell='alif', algorithm='ES_D_RTRL', optimizer='adamw', feedback='fixed'),
    dict(cell='rnn', window=3, steps=3, frozen=('b',)),
    dict(cell='alif', kappa=0.5, credit='whole', reset=(1,), dtype='float32'),
    dict(cell='lif', optimizer='none', feedback='modulator'),
)
WORDS = ('', '\ud800', *'''
    x W inputs carry/h new/z carry/ new/o (filter) rnn lif alif opaque linear leaky D_RTRL
    ES_D_RTRL cut whole frozen trace same-step sgd momentum adam adamw softmax_ce half_mse mean
    sum float32 float64 int64 bool bfloat16 tf32 hidden output recurrent readout etp_mm etp_conv
    fixed modulator a/b / .. third_party opaque_cell weight bias mu h z V o a triangle
    sampled_arrays
'''.split())  # fmt: skip
NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 10**6, 2**31, 2**63, 10**400, -(10**30), True, False, None, 0.0, -0.0),
    *(0.5, 1.0, -1.0, 1e-320, 1e308, -1e308, 1e-9, float('nan'), float('inf'), -float('inf')),
)


THINGS = (
    *([], {}, [[]], [None], {'a': 1}, deep(40), deep(300), [0.0] * 5, 'x' * 1000),
    {'shape': [1], 'dtype': 'float64', 'data': [1.0]},
    {'shape': [2, 2], 'dtype': 'float64', 'data': [1.0, 2.0, 3.0, 4.0]},
    {'shape': [0], 'dtype': 'float32', 'data': []},
    {'shape': [], 'dtype': 'float64', 'data': [2.0]},
    {'shape': [0, 3], 'dtype': 'bool', 'data': []},
    {'shape': [10**9, 10**9], 'dtype': 'float64', 'data': []},
    {'shape': [2], 'dtype': 'float64', 'sha256': 'a' * 64, 'file': 'x.npz', 'key': 'x'},
)


@functools.cache
def bases():
    runs = [making.run(**how) for how in ALL_RUNS]
    return runs + [making.opaque(run) for run in runs[:5]]


def changed(records, draw: random.Random):
    """A run with one thing changed, or a few."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        spots = list(places(records))
        records = draw.choice(CHANGES)(records, draw.choice(spots), spots, draw)
    return records


def drop(value, at, spots, draw):
    if not at:
        return None
    rest = copy.copy(get(value, at[:-1]))
    del rest[at[-1]]
    return put(value, at[:-1], rest)


def add(value, at, spots, draw):
    inside = get(value, at)
    new = draw.choice((*THINGS, *NUMBERS, *WORDS))
    if isinstance(inside, dict):
        return put(value, at, {**inside, draw.choice(WORDS): new})
    if isinstance(inside, list):
        twice = draw.choice((new, *inside[:3]))
        return put(value, at, [*inside, twice])
    return put(value, at, new)


def retype(value, at, spots, draw):
    old = get(value, at)
    if isinstance(old, str):
        new = draw.choice(WORDS)
    elif isinstance(old, int | float) or old is None:
        new = draw.choice(NUMBERS)
    else:
        new = draw.choice((*THINGS, *NUMBERS, *WORDS))
    return put(value, at, new)


def swap(value, at, spots, draw):
    """Something that stands elsewhere."""
    return put(value, at, get(value, draw.choice(spots)))


def alike(value, at, spots, draw):
    """Something from elsewhere under the same key: an array for an array, a name for a name."""
    own = [spot for spot in spots if spot and at and spot[-1] == at[-1]]
    return put(value, at, get(value, draw.choice(own or [at])))


def truncate(value, at, spots, draw):
    old = get(value, at)
    return put(value, at, old[: len(old) // 2]) if isinstance(old, list | str) else value


def rename(value, at, spots, draw):
    """Another key, everywhere else it stands as it was."""
    if not at or not isinstance(at[-1], str):
        return retype(value, at, spots, draw)
    inside = dict(get(value, at[:-1]))
    inside[draw.choice(WORDS)] = inside.pop(at[-1])
    return put(value, at[:-1], inside)


def an_array(value, spots, draw):
    """The place of an array that is still whole, or None."""
    ends = [at[:-1] for at in spots if at[-1:] == ('data',) and _whole(get(value, at[:-1]))]
    return draw.choice(ends) if ends else None


def _whole(one):
    fine = isinstance(one, dict) and {'shape', 'dtype'} <= set(one)
    return fine and isinstance(one['shape'], list) and set(map(type, one['shape'])) <= {int}


def reshape(value, at, spots, draw):
    """An array of another shape whose numbers fit it."""
    at = an_array(value, spots, draw)
    if at is None:
        return None
    kind, shape = get(value, at)['dtype'], get(value, at)['shape'] or [0]
    kind = kind if kind in ('float32', 'float64') else 'float64'
    axis = draw.randrange(len(shape))
    head, n, tail = shape[:axis], shape[axis], shape[axis + 1 :]
    others = [*head, n + 1, *tail], [*head, n - 1, *tail], shape[::-1], [math.prod(shape)]
    shape = [min(max(n, 0), 20) for n in draw.choice((*others, [1, *shape], [0]))[:4]]
    data = np.random.default_rng(draw.randrange(100)).standard_normal(shape).astype(kind)
    return put(value, at, making.array(data, {'dtype': kind}))


def sampled(value, at, spots, draw):
    """A sample in place of an array."""
    at = an_array(value, spots, draw)
    if at is None:
        return None
    digest, old = f'{draw.randrange(16):x}' * 64, get(value, at)
    data = old['data'] if isinstance(old['data'], list) else []
    new = {**{k: old[k] for k in ('shape', 'dtype')}, 'sha256': digest}
    return put(value, at, {**new, 'sample': [[i, v] for i, v in enumerate(data)]})


def other_lanes(value, at, spots, draw):
    lanes = draw.choice(([1, 1], [1], [], [1, 2, 3], list(range(20)), [2**70, 1]))
    return put(value, (0, 'lanes'), lanes) if isinstance(value, list) and value else value


def shuffled(value, at, spots, draw):
    """Records or lists in another order, once more, or of another run."""
    inside = get(value, at)
    if not isinstance(inside, list):
        return value
    mixed = list(inside)
    draw.shuffle(mixed)
    return put(value, at, draw.choice((mixed, inside * 2)))


def of_another_run(value, at, spots, draw):
    if not isinstance(value, list) or not value:
        return value
    i = draw.randrange(len(value))
    other = draw.choice(draw.choice(bases()))
    if draw.random() < 0.5 or not isinstance(value[i], dict):
        return put(value, (i,), other)
    key = draw.choice(list(other))
    return put(value, (i, key), other[key])


def positioned(value, at, spots, draw):
    """An op of a primitive that is known or not, whose y feeds some positions of a group."""
    if not isinstance(value, list):
        return value
    named = [spot for spot in spots if spot[-1:] == ('primitive',)]
    if not named:
        return value
    spot = draw.choice(named)
    value = put(value, spot, draw.choice(('mine', 'etp_mm', 'etp_elemwise', 'etp_conv')))
    relation = get(value, spot[:-1])
    where = draw.choice(([0], [0, 1], [1, 0], [7, 0], [0, 1, 1], [2**40, 0], [], None))
    groups = relation.get('groups') if isinstance(relation.get('groups'), list) else []
    named = [group for group in groups if isinstance(group, str)]
    value = put(value, (*spot[:-1], 'options'), {'positions': dict.fromkeys(named, where)})
    record = value[spot[0]]
    try:
        return put(value, (spot[0], 'spec_digest'), spec_digest(record))
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
        return value


def scaled(value, at, spots, draw):
    """A row, a column or a lane of an array that is much larger, smaller or of the other sign."""
    at = an_array(value, spots, draw)
    shape = get(value, at)['shape'] if at is not None else []
    if not shape or get(value, at)['dtype'] not in ('float32', 'float64'):
        return value
    try:
        numbers = making.numbers(get(value, at))
        axis = draw.randrange(numbers.ndim)
        place = [slice(None)] * numbers.ndim
        place[axis] = draw.randrange(max(1, numbers.shape[axis]))
        numbers[tuple(place)] *= draw.choice((-1.0, 0.0, 1e-30, 1e-6, 1e6, 1e30))
    except (ReceiptError, TypeError, ValueError, IndexError, OverflowError):
        return value
    return put(value, at, making.array(numbers, get(value, at)))


CHANGES = (
    *(drop, add, retype, retype, swap, alike, alike, truncate, rename, reshape, reshape, sampled),
    *(other_lanes, shuffled, of_another_run, positioned, scaled, scaled),
)


def judged(value):
    """The results of a value as a run and of its first part as a record."""
    found = [reconcile_run(value), reconcile(value)]
    if isinstance(value, list) and value:
        found.append(reconcile(value[-1]))
    for result in found:
        assert isinstance(result, Result) and result.verdict in VERDICTS
        assert result.ok == (result.verdict in ('rederived', 'consistent'))
        assert result.ok or result.failures or result.verdict == 'skipped'
        assert not set(result.rules_evaluated) & set(result.gated_off)
        assert set(result.rules_evaluated) | set(result.gated_off) == set(RULES)
        internal = [f for f in result.failures if f.path == 'internal']
        assert not internal, internal
    return found


def parsed(raw):
    """A value by way of its bytes, or None for what is refused."""
    try:
        return parse(raw)
    except ReceiptError:
        return None


def a_block(block):
    seen = set()
    for i in range(BLOCK):
        draw = random.Random(BLOCK * block + i)
        records = changed(draw.choice(bases()), draw)
        seen |= {result.verdict for result in judged(records)}
        try:
            raw = json.dumps(records)
        except (RecursionError, ValueError):
            continue
        parsed(raw)
        if isinstance(records, list) and records and isinstance(records[0], dict):
            try:
                emit(records[0])
            except ReceiptError:
                pass
    return seen


BLOCKS = [
    pytest.param(block, marks=pytest.mark.slow if block < GATE else pytest.mark.nightly)
    for block in range(NIGHT)
]


@pytest.mark.parametrize('block', BLOCKS)
def test_structural_changes_give_a_result(block):
    assert {'failed', 'malformed'} <= a_block(block)


@pytest.mark.slow
def test_the_engine_refuses_by_its_own_error_alone():
    refused = 0
    for seed in range(300):
        draw = random.Random(seed)
        record = draw.choice(draw.choice(bases()))
        (config,) = changed([making.config_of(record)], draw) or [None]
        try:
            derive(config)
        except ReceiptError:
            refused += 1
    assert refused > 100


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    LEAVES | st.sampled_from([*NUMBERS, *WORDS]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@hypothesis.given(st.data())
@hypothesis.settings(max_examples=200)
def test_any_json_alone_or_in_a_record_gives_a_result(data):
    judged(data.draw(JSON))
    records = data.draw(st.sampled_from(bases()))
    spots = list(places(records))
    at = spots[data.draw(st.integers(0, len(spots) - 1))]
    judged(put(records, at, data.draw(JSON)))


@pytest.mark.slow
@hypothesis.given(st.binary(max_size=60) | st.text(max_size=60))
@hypothesis.settings(max_examples=300)
def test_parse_refuses_by_its_own_error_alone(raw):
    parsed(raw)


@pytest.mark.slow
@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60)
def test_parse_refuses_what_a_cut_or_patched_line_has_become(data):
    line = emit(bases()[0][0])
    at = data.draw(st.integers(0, len(line)))
    more = data.draw(st.binary(max_size=4))
    skip = data.draw(st.integers(0, 40))
    value = parsed(line[:at] + more + line[at + skip :])
    judged(value)


ODD = (
    *(None, [], {}, '', 'x', 0, 1.5, True, b'{}', object(), {1: 2}, [None], [[]], [{}], deep(5000)),
    *(float('nan'), {'schema': []}, np.ones(3), {None}, range(3), lambda: 0, [object()]),
)


def test_anything_gives_a_result():
    for value in ODD:
        for result in (reconcile(value), reconcile_run(value)):
            assert result.verdict == 'malformed' and result.failures[0].rule == 0
            assert result.failures[0].path != 'internal'
    for level, allow in (('judge', ()), (None, ()), ('observer', ('fp8',))):
        found = reconcile({}, level=level, allow=allow)
        assert found.verdict == 'malformed' and found.failures[0].path == 'options'
    for raw in (None, 3, [], {}, object()):
        with pytest.raises(ReceiptError):
            parse(raw)


def test_arrays_of_numpy_stand_for_lists():
    record = making.run('lif')[0]
    record['inputs'] = node(making.numbers(record['inputs']))
    assert reconcile(record).verdict == 'rederived'


def with_samples(records):
    """Arrays of more than 4096 elements as samples."""

    def sample(path, one):
        large = one is not None and math.prod(one['shape']) > INLINE
        numbers = making.numbers(one).astype(one['dtype']) if large else None
        return node(numbers, arrays='sample') if large else one

    return [with_arrays(record, sample) for record in records]


@pytest.mark.slow
def test_samples_of_large_arrays_are_consistent_at_most():
    run = making.run('rnn', sizes=(8, 64, 2, 1), optimizer='momentum', dtype='float32')
    sampled = with_samples(run)
    found = reconcile_run(sampled)
    assert found.verdict == 'consistent' and 14 in found.gated_off, found.failures
    assert {9, 12, 31} <= set(found.rules_evaluated)
    other = with_samples(making.run('rnn', sizes=(8, 64, 2, 1), optimizer='momentum', seed=1))
    for at, rule in (
        ((1, 'params_before', 'W'), 9),
        ((1, 'traces_before', 0, 'entries', 'weight', 0), 31),
    ):
        (first, *_) = reconcile_run(put(sampled, at, get(with_samples(run[::-1]), at))).failures
        assert first.rule == rule
    for i in range(30):
        draw = random.Random(i)
        judged(changed(draw.choice((sampled, sampled, other)), draw))
