"""Runs that are wrong and whose author knows the verifier: each fails, or leaves a doubt."""

from __future__ import annotations

import copy
import random
import weakref
from pathlib import Path

import numpy as np
import pytest

import making
from braintrace_receipts import looseness, reconcile_run
from braintrace_receipts.canonical import spec_digest
from making import array, numbers

HONEST = ('rnn', 'lif', 'alif')


def rules(result):
    return {one.rule for one in result.failures}


def moved(path, shift):
    """Another gradient of a record, and all that an SGD makes of it."""

    def then(record):
        like, lr = record['gradients'][path], record['optimizer']['config']['lr']
        gradient, before = numbers(like) + shift, numbers(record['params_before'][path])
        update = np.float32(-lr * gradient)
        record['gradients'][path] = array(gradient, like)
        record['optimizer']['updates'][path] = array(update, like)
        record['params_after'][path] = array(before + update, like)
        return record

    return then


def opposite(size, error=None):
    """Two lanes with the same inputs, whose errors cancel but for a remainder: at all outputs, or
    at all but the first one, which has an error of its own.
    """

    def data(drawn):
        x, lane = numbers(drawn['inputs']), [size, size] if error is None else [error, size]
        drawn['inputs'] = array(np.stack([x[0], x[0]]), drawn['inputs'])
        drawn['targets'] = array([lane, [error or -size, -size]], drawn['targets'])
        drawn['loss']['mask'] = array(np.ones(2), drawn['loss']['mask'])
        return drawn

    return data


def test_a_bound_that_the_data_widen_is_told_with_its_size():
    config = making.first('rnn', dtype='float32', reduction='sum')
    wide, narrow = (
        reconcile_run(making.steps(config, 2, data=opposite(size), then=moved('W_out', 0.2)))
        for size in (1e6, 1.0)
    )
    assert wide.verdict == 'rederived', wide.failures[:3]
    assert wide.loose['gradients/W_out'] > 1 and any('loose' in one for one in wide.doubts)
    assert not narrow.ok


# what is large hides nothing ----------------------------------------------------------------------


def flipped(*places):
    """Gradients of which parts have the other sign, and what the optimiser makes of them."""

    def then(record):
        for path, at in places:
            value = numbers(record['gradients'][path])
            value[at] *= -1
            record['gradients'][path] = array(value, record['gradients'][path])
        making.updated(record)
        return record

    return then


def crossed(size):
    """Errors by which a gradient is large on the diagonal and the rest of large terms beside it."""

    def then(record):
        z, outputs = numbers(record['carry_after']['h']), numbers(record['outputs'])
        away = np.float32(size) * np.array([[z[1, 1], z[1, 0]], [-z[0, 1], -z[0, 0]]])
        targets = array(outputs - away, record['targets'])
        record = making.remade(record, targets=targets)
        return flipped(('W_out', np.array([[False, True], [True, False]])))(record)

    return then


def raised(lanes):
    """Potentials of a unit, or of all, in some lanes that a small weight makes, in the record of
    one whose large terms cancel there.
    """

    def then(record):
        W, V = record['params_before']['W'], record['carry_after']['V']
        small, before = numbers(W), numbers(V)
        small[:2, np.abs(small[0]) > 1] = 0.04 / 3
        params = {**record['params_before'], 'W': array(small, W)}
        made = making.remade(record, params_before=params)
        after = numbers(made['carry_after']['V'])
        after[lanes:] = before[lanes:]  # one of them is masked, and large
        made['carry_after']['V'] = array(after, V)
        moved = numbers(W) + numbers(made['optimizer']['updates']['W'])
        made['params_before']['W'], made['params_after']['W'] = W, array(moved, W)
        return made

    return then


def cancelling(size, units=3):
    """A net of LIF neurons, some of which have two weights of opposite signs."""
    config = making.first('lif', dtype='float32', reduction='sum', sizes=(2, 3, 2, 3), **LINEAR)
    W = config['params_before']['W']
    value = 0.1 * numbers(W)
    value[0, :units], value[1, :units] = size - 0.25, -size - 0.25
    config['params_before']['W'] = array(value, W)
    return config


def masked(lanes):
    """Inputs by which weights of opposite signs cancel in some lanes, and a lane that is large."""

    def data(drawn):
        x = [[1.5, 1.5]] * lanes + [[0.0, 0.0]] * (2 - lanes) + [[1e4, 0.0]]
        drawn['inputs'] = array(x, drawn['inputs'])
        drawn['loss']['mask'] = array([1.0, 1.0, 0.0], drawn['loss']['mask'])
        return drawn

    return data


def tiny(size, dtype):
    """Losses of a size, and a rate that is as large as they are small."""
    config = making.first('rnn', dtype=dtype, reduction='sum')
    config['optimizer']['config'] = {'lr': 0.01 / size}
    return config


def weighing(size):
    def data(drawn):
        drawn['loss']['mask'] = array(np.full(2, size), drawn['loss']['mask'])
        return drawn

    return data


LINEAR = {'readout': 'linear'}
COLUMN = flipped(('W_out', (slice(None), 1)), ('b_out', 1))
ALL = flipped(*((path, ...) for path in ('W', 'b', 'W_out', 'b_out')))


def plain(optimizer):
    config = making.first('rnn', dtype='float32', reduction='sum', optimizer=optimizer, **LINEAR)
    if optimizer == 'adam':
        config['optimizer']['config'] = {'lr': 1e-3, 'b1': 0.9, 'b2': 0.999, 'eps': 1e-8}
    return config


# The configuration, the data and what is forged, all by a size: a large or tiny one, by which it
# passes, and one by which it is refused. Then what has to be told.
HIDDEN = {
    'a column behind another one': (
        lambda _: plain('adam'), lambda size: opposite(size, 5e3), lambda _: COLUMN,
        (1e6, 1.0), 'gradients/W_out'),
    'a bias behind another one': (
        lambda _: plain('sgd'), lambda size: opposite(size, 5e3), lambda _: flipped(('b_out', 1)),
        (1e6, 1.0), 'gradients/b_out'),
    'numbers beside the diagonal': (
        lambda _: plain('sgd'), lambda _: weighing(1.0), crossed,
        (1e5, 1e-3), 'gradients/W_out'),
    'lanes behind one that is masked': (
        cancelling, lambda _: masked(2), lambda _: raised(2), (2.0**20, 16.0), 'carry_after/V'),
    'one potential in each step': (
        lambda size: cancelling(size, 1), lambda _: masked(1), lambda _: raised(1),
        (2.0**20, 16.0), 'carry_after/V'),
    'tiny numbers': (
        lambda size: tiny(size, 'float32'), weighing, lambda _: ALL, (2e-38, 1e-30),
        'gradients/W_out'),
    'tiny numbers of float64': (
        lambda size: tiny(size, 'float64'), weighing, lambda _: ALL, (5e-308, 1e-300),
        'gradients/W_out'),
}  # fmt: skip


@pytest.mark.parametrize('name', HIDDEN)
def test_what_stands_beside_large_numbers_or_is_tiny_is_told(name):
    config, data, then, sizes, path = HIDDEN[name]
    hidden, control = (
        reconcile_run(making.steps(config(size), 3, data=data(size), then=then(size)))
        for size in sizes
    )
    assert not control.ok, control.doubts
    assert hidden.ok, hidden.failures[:2]
    assert path in hidden.loose and any('loose' in one for one in hidden.doubts), hidden.loose


def test_a_row_a_column_and_a_lane_are_judged_by_themselves():
    shares = np.zeros((40, 40))
    shares[3, 5] = 1.0  # one number is by chance the rest of its terms
    assert looseness.mean_share(shares, shares < 2) == 0.0
    for place in ((slice(None), 5), (3, slice(None))):
        part = shares.copy()
        part[place] = 1.0
        assert looseness.mean_share(part, part < 2) == 1.0
    assert looseness.mean_share(np.eye(40), shares < 2) == 39 / 1599


def test_a_tiny_number_is_wide_by_its_size_and_a_zero_is_not():
    found = looseness.Looseness()
    for path, stored, value in (('a', 0.0, 1e-20), ('b', 0.0, 0.0), ('c', 1e-30, 1e-30)):
        off = np.full(2, 0.5 * value + 1e-38)
        found.weigh(1, path, np.full(2, stored), np.full(2, value), off, 2.0**-126)
    assert [path for path, wide in found.wide.items() if wide is not None] == ['a', 'c']


def test_what_is_free_in_a_step_of_a_window_is_told_where_the_window_acts():
    turns, held = iter([1e6, 1.0] * 2), []

    def then(record):
        if record['window']['index'] == 0:
            value = numbers(record['gradients']['W_out'])
            value[:, 1] *= -1
            record['gradients']['W_out'] = array(value, record['gradients']['W_out'])
        else:
            making.window_sum([held[-1], record])
        held.append(record)
        return record

    data = lambda new: opposite(next(turns), 5e3)(new)
    found = reconcile_run(making.steps(plain('adam'), 4, window=2, data=data, then=then))
    assert found.ok and 'gradients/W_out' in found.loose, (found.failures[:2], found.loose)


def test_a_trace_that_the_data_make_free_is_told_where_it_is_used():
    """An input that is large and of both signs, and of which one unit keeps the rest alone."""
    config = making.first('rnn', dtype='float32', sizes=(1, 2, 1, 1), **LINEAR)
    x, inputs, leak = 2.0**20, [2.0**20, -(2.0**20), 1.0], 0.7
    at = 1.0
    rest = np.tanh(at) ** 2
    before = np.arctanh(np.sqrt(1 - (1 - rest) / leak))  # of which the slope is 1 / leak times
    w, b = (before - at) / 2 / x, (before + at) / 2
    for path, value in (('W', [[0.5 / x, w], [0, 0], [0, 0]]), ('b', [0.0, b])):
        config['params_before'][path] = array(value, config['params_before'][path])
    steps = iter(range(3))

    def data(drawn):
        step = next(steps)
        drawn['inputs'] = array([[inputs[step]]], drawn['inputs'])
        drawn['loss']['mask'] = array([float(step == 2)], drawn['loss']['mask'])
        return drawn

    def forged(shift):
        def then(record):
            if record['step'] == 1:
                trace = record['traces_after'][0]['entries']['weight']
                value = numbers(trace[0])
                value[0, 0, 1] += shift
                trace[0] = array(value, trace[0])
            return record

        return then

    found = reconcile_run(making.steps(config, 3, data=data, then=forged(1.0)))
    assert found.ok and 'gradients/W' in found.loose, (found.failures[:2], found.loose)
    steps = iter(range(3))
    assert not reconcile_run(making.steps(config, 3, data=data, then=forged(100.0))).ok


def drawn_forgery(draw):
    """A random net whose errors cancel at some outputs, and a random part of a gradient flipped."""
    optimizer = draw.choice(['sgd', 'momentum', 'nesterov', 'adam', 'adamw-plain'])
    how = {'readout': draw.choice(['linear', 'leaky']), 'optimizer': optimizer}
    cell, loss = draw.choice(HONEST), {'dtype': 'float32', 'reduction': 'sum'}
    config = making.first(cell, **how, **loss, seed=draw.randrange(1000))
    path = draw.choice(['W', 'b', 'W_out', 'b_out'])
    shape = config['params_before'][path]['shape']
    at = [slice(None)] * len(shape)
    axis = draw.randrange(len(shape))
    at[axis] = draw.randrange(shape[axis])
    size, error = draw.choice([1.0, 1e3, 1e5, 1e6, 1e7]), draw.choice([None, 1.0, 5e3])
    then = flipped((path, tuple(at) if draw.random() < 0.7 else ...))
    return making.steps(config, 4, data=opposite(size, error), then=then), path, at


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(30))
def test_a_part_of_a_gradient_that_is_flipped_is_refused_or_told(seed):
    run, path, at = drawn_forgery(random.Random(seed))
    found = reconcile_run(run)
    parts = [numbers(record['gradients'][path])[tuple(at)] for record in run]
    assert not found.ok or found.doubts or not np.any(parts), (path, at)


# what is right in its arithmetic and odd ----------------------------------------------------------


def configured(step=1, **numbers):
    """From a step on the optimiser has other numbers."""

    def change(run):
        own = run[step]['optimizer']
        making.onward(run, step, optimizer={**own, 'config': {**own['config'], **numbers}})

    return change


def weights_left_out(run):
    for i, record in enumerate(run):
        record['window'] |= {'weight': float(i == 2), 'divisor': 1.0}
    making.window_sum(run)


def masks_left_out(run):
    mask = run[1]['loss']['mask']
    making.onward(run, 1, loss={**run[1]['loss'], 'mask': array(np.zeros(2), mask)})


# How a run is made, what is changed in it, and its doubt.
ODD = {
    'a rate below zero': ({}, configured(lr=-0.1), 'lr: -0.1 to 0.1'),
    'a rate of zero': ({}, configured(lr=0.0), 'updates that move nothing: 2'),
    'a decay below zero': (
        {'optimizer': 'sgd-decay'}, configured(0, weight_decay=-0.1),
        'weight_decay: -0.1 to -0.1'),
    'steps without an update': (
        {}, lambda run: making.onward(run, 1, optimizer=None), 'steps without an update: 2'),
    'frozen weights': (
        {'frozen': ('W', 'b')}, lambda run: None, 'parameters that never move: 2 (W, b)'),
    'an epsilon that stops everything': (
        {'optimizer': 'adam'}, configured(0, eps=1e30), 'updates that move nothing: 3'),
    'steps of a window without a weight': (
        {'window': 3}, weights_left_out, 'step_weight: 0 to 1'),
    'steps whose mask is zero': ({}, masks_left_out, 'step_weight: 0 to 1'),
}  # fmt: skip


@pytest.mark.parametrize('name', ODD)
def test_a_run_that_is_right_and_odd_is_a_doubt(name):
    how, change, doubt = ODD[name]
    run = copy.deepcopy(making.run('rnn', steps=3, **how))
    change(run)
    found = reconcile_run(run)
    assert found.ok and doubt in found.doubts, (found.failures[:2], found.doubts)


def test_rates_and_weights_of_lanes_are_told_where_they_vary():
    run = copy.deepcopy(making.run('rnn', steps=2))
    configured(lr=0.01)(run)
    found = reconcile_run(run)
    assert found.disclosures['lr'] == '0.01 to 0.1' and found.doubts == ()
    low, high = map(float, found.disclosures['lane_weight'].split(' to '))
    assert 0.5 < low < high < 1.5


@pytest.mark.parametrize('cell', HONEST)
@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_an_honest_run_leaves_no_doubt(cell, dtype):
    found = reconcile_run(making.run(cell, dtype=dtype, optimizer='adam', steps=3))
    assert found.verdict == 'rederived' and found.doubts == () and found.loose == {}
    assert found.disclosures['start'].startswith('step 0, t = 0')


def with_constants(records, **constants):
    found = copy.deepcopy(records)
    for record in found:
        record['topology']['constants'].update(constants)
    return found


def test_a_narrow_surrogate_that_was_not_used_is_refused():
    run = making.run('lif', dtype='float32', optimizer='none')
    narrow = {'name': 'triangle', 'parameters': {'width': 1e-7, 'height': 1.0}}
    found = reconcile_run(with_constants(run, surrogate=narrow))
    assert {2, 34} & rules(found) and 14 in rules(found)


def test_a_correction_that_is_a_third_is_refused_however_slow_the_decay():
    config = making.first('rnn', dtype='float32', algorithm='ES_D_RTRL', optimizer='none')
    config['algorithm']['decay_f'] = 1 - 1e-7
    run = making.steps(config, 2)
    assert reconcile_run(run).ok
    for record in run:
        node = record['signals']['correction']
        record['signals']['correction'] = array(numbers(node) / 3, node)
    assert 33 in rules(reconcile_run(run))


def walked(share):
    """A run of rate 0 whose parameters move by a share of themselves at each step."""

    def then(record):
        for path, node in record['params_before'].items():
            record['params_after'][path] = array(numbers(node) * (1 + share), node)
        return record

    config = making.first('rnn', dtype='float32')
    config['optimizer']['config'] = {'lr': 0.0}
    return making.steps(config, 2, then=then)


def test_a_walk_of_parameters_within_many_roundings_is_refused():
    assert 6 in rules(reconcile_run(walked(3e-6)))
    assert reconcile_run(walked(2.0**-24)).ok  # one rounding is that of an honest machine


PAGE = Path(__file__).parents[2] / 'docs' / 'reference' / 'receipts.md'


@pytest.mark.skipif(not PAGE.exists(), reason='the page is in the repository alone')
def test_the_reference_has_each_of_these_runs():
    rows = [(name, f'loose: {row[-1]}') for name, row in HIDDEN.items()]
    rows += [(name, row[-1]) for name, row in ODD.items()]
    lines = PAGE.read_text(encoding='utf-8').splitlines()
    assert [row for row in rows if f'| {row[0]} | `{row[1]}` |' not in lines] == []


def test_one_state_in_two_roles_is_refused():
    run = copy.deepcopy(making.run('lif', optimizer='none'))
    for record in run:
        record['topology']['roles']['z'] = record['topology']['roles']['V']
        for when in ('carry_before', 'carry_after'):
            del record[when]['z']
        record['spec_digest'] = spec_digest(record)
    found = reconcile_run(run)
    assert found.verdict == 'malformed'
    assert 'two roles for one state' in {one.hint for one in found.failures}


@pytest.mark.parametrize('count', [0, 1000])
def test_a_made_up_state_of_the_optimiser_is_refused_or_a_doubt(count):
    config = making.first('rnn', optimizer='adam')
    state = config['optimizer']['state_before']
    state['count'] = count
    for slots in state['slots'].values():
        slots['nu'] = array(numbers(slots['nu']) + 1.0, slots['nu'])
    found = reconcile_run(making.steps(config, 2))
    if count:
        assert found.ok and any('count 1000' in one for one in found.doubts)
        assert 'count 1000' in found.disclosures['optimiser']
    else:
        assert found.failures[0].rule == 20


def test_gaps_a_cut_run_and_a_late_start_are_doubts():
    run = making.run('rnn', steps=6, optimizer='none', reset=(3,))
    sparse = [{**one, 'every': 2} for one in run[::2]]
    assert reconcile_run(sparse).doubts == ('gaps between records: 2',)
    assert any('start' in one for one in reconcile_run(run[1:]).doubts)
    late = reconcile_run(run[3:])  # all lanes start again in its first record
    assert late.ok and late.doubts == ('a start at step 3, t = 0',)
    window = making.run('rnn', steps=4, window=2)
    assert reconcile_run(window).doubts == ()
    assert reconcile_run(window[:3]).doubts == ('an end in the middle of a window',)


def test_a_group_that_a_relation_names_twice_is_refused():
    run = making.opaque(making.run('rnn', optimizer='none', steps=1))
    run[0]['topology']['relations'][0]['groups'] *= 2
    found = reconcile_run(run)
    assert 'a group appears twice' in {one.hint for one in found.failures}


def test_a_run_is_judged_record_by_record_in_the_memory_of_a_few():
    class Watched(dict):
        pass

    alive, counted = [], []

    def records():
        for record in making.run('rnn', steps=6):
            value = Watched(copy.deepcopy(record))
            alive.append(weakref.ref(value))
            counted.append(sum(ref() is not None for ref in alive))
            yield value
            del value

    assert reconcile_run(records()).verdict == 'rederived'
    assert max(counted) <= 5, counted


def test_the_first_failures_are_kept_and_all_are_counted():
    run = copy.deepcopy(making.run('rnn', steps=40, optimizer='none'))
    for record in run:
        record['loss']['value'] += 1.0
    found = reconcile_run(run)
    assert len(found.failures) == 50 and found.failed[12] == found.failed[14] == 40
