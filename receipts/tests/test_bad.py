"""Each rule catches the fault that it is there for, and is the first to say so."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest

import making
from braintrace_receipts import RULES, reconcile_run
from braintrace_receipts.canonical import spec_digest
from making import array, numbers

Run = list[dict]
FAULTS: list = []


def fault(rule: int, **how):
    """A good run, the fault that a function puts into it, and the rule that names it."""

    def keep(function: Callable[[Run], None]) -> Callable:
        FAULTS.append(pytest.param(rule, how, function, id=f'{rule}-{function.__name__}'))
        return function

    return keep


def change(tree: dict, key, function: Callable) -> None:
    """Other numbers in an array node."""
    tree[key] = array(function(numbers(tree[key])), tree[key])


def trace(record: dict, when: str = 'after', relation: str = 'recurrent') -> dict:
    return next(t for t in record[f'traces_{when}'] if t['relation'] == relation)['entries']


def factor(record: dict, relation: str = 'recurrent') -> dict:
    return next(f for f in record['factors'] if f['relation'] == relation)


def again(records: Run, i: int, **changes) -> None:
    """Record ``i`` and those behind it as the engine makes them after a change."""
    rng = np.random.default_rng(5)
    config = {key: records[i][key] for key in making.CONFIG_KEYS if key in records[i]}
    config |= {'schema': 'braintrace.config/1', **changes}
    for at in range(i, len(records)):
        record = making.remade(config)
        records[at] = record
        config = {**making.following(config, record), 'step': record['step'] + 1}
        optimizer = record['optimizer']
        config['optimizer'] = optimizer and {
            'name': optimizer['name'],
            'config': optimizer['config'],
            'state_before': optimizer['state_after'],
        }
        config |= making.drawn(config, rng)


# one record ---------------------------------------------------------------------------------------


@fault(0)
def a_gradient_is_not_finite(run):
    run[1]['gradients']['W']['data'][2] = float('nan')


@fault(0, cell='lif')
def a_spike_is_a_half(run):
    run[1]['carry_after']['z']['data'][0] = 0.5


@fault(1)
def the_error_counts_each_lane_whole(run):
    change(run[1]['signals'], 'err', lambda err: err * 2)


@fault(1, loss='softmax_ce')
def the_error_is_that_of_another_loss(run):
    outputs, targets = (numbers(run[1][name]) for name in ('outputs', 'targets'))
    change(run[1]['signals'], 'err', lambda err: (outputs - targets) / 2)


@fault(2)
def the_learning_signal_is_zero(run):
    change(run[1]['signals']['dh']['hidden'], 0, np.zeros_like)


@fault(2, cell='lif', feedback='modulator')
def the_modulator_is_that_of_the_step_before(run):
    before = run[0]['algorithm']['feedback']['array']
    run[1]['algorithm']['feedback']['array'] = before


@fault(2, cell='lif', feedback='fixed')
def the_readout_s_weight_stands_for_the_fixed_feedback(run):
    weight = numbers(run[1]['params_before']['W_out'])
    array_ = run[1]['algorithm']['feedback']['array']
    array_['data'] = weight.reshape(-1).tolist()


@fault(3)
def the_slope_is_left_out_of_the_step_s_signal(run):
    dh = run[1]['signals']['dh']['hidden'][0]
    run[1]['signals']['dy']['recurrent'] = dh


@fault(3)
def the_slope_is_taken_before_the_step(run):
    h = numbers(run[1]['carry_before']['h'])
    change(factor(run[1])['D_f'], 0, lambda D_f: 1 - h**2)


@fault(3, credit='whole')
def the_way_through_the_recurrent_weight_is_left_out(run):
    dh, D = run[1]['signals']['dh']['hidden'][0], factor(run[1])['D'][0][0]
    change(run[1]['signals']['c']['hidden'], 0, lambda c: numbers(dh) * numbers(D))


@fault(4)
def the_gradient_is_flipped(run):
    change(run[1]['gradients'], 'W', np.negative)


@fault(4)
def the_gradient_leaves_the_history_out(run):
    x, dy = factor(run[1])['x'], run[1]['signals']['dy']['recurrent']
    change(run[1]['gradients'], 'W', lambda g: numbers(x).T @ numbers(dy))


@fault(4, algorithm='ES_D_RTRL')
def the_gradient_takes_the_input_without_its_filter(run):
    ex, x = numbers(trace(run[1])['x']), numbers(factor(run[1])['x'])
    change(run[1]['gradients'], 'W', lambda g: g * (x.sum(0) / ex.sum(0))[:, None])


@fault(5)
def the_update_goes_up_the_hill(run):
    change(run[1]['optimizer']['updates'], 'W', np.negative)


@fault(6)
def the_update_is_taken_off(run):
    before, update = run[1]['params_before']['W'], run[1]['optimizer']['updates']['W']
    change(run[1]['params_after'], 'W', lambda w: numbers(before) - numbers(update))


@fault(7, optimizer='none')
def a_parameter_moves_without_an_optimiser(run):
    change(run[1]['params_after'], 'b', lambda b: b + 0.01)


@fault(7, frozen=('W',))
def a_frozen_parameter_moves(run):
    change(run[1]['params_after'], 'W', lambda w: w * 1.000001)


@fault(7, optimizer='adamw')
def the_decoupled_decay_is_left_out(run):
    optimizer, params = run[1]['optimizer'], run[1]['params_before']
    lr, decay = optimizer['config']['lr'], optimizer['config']['weight_decay']
    update = optimizer['updates']['W']
    more = lr * decay * numbers(params['W'])
    change(optimizer['updates'], 'W', lambda u: u + more)
    change(run[1]['params_after'], 'W', lambda w: numbers(params['W']) + numbers(update) + more)


@fault(7, optimizer='sgd-decay')
def the_coupled_decay_is_left_out(run):
    optimizer, lr = run[1]['optimizer'], run[1]['optimizer']['config']['lr']
    gradient, before = numbers(run[1]['gradients']['W']), numbers(run[1]['params_before']['W'])
    change(optimizer['updates'], 'W', lambda u: -lr * gradient)
    change(run[1]['params_after'], 'W', lambda w: before - lr * gradient)


@fault(8)
def the_factor_is_of_the_lanes_in_another_order(run):
    change(factor(run[1]), 'x', lambda x: x[::-1])


@fault(8)
def the_readout_s_factor_is_the_output_before(run):
    factor(run[1], 'readout')['x'] = run[1]['carry_before']['h']


@fault(11, loss='softmax_ce')
def probabilities_do_not_sum_to_one(run):
    change(run[1]['loss'], 'probabilities', lambda p: p * 1.01)


@fault(12)
def the_loss_is_divided_twice(run):
    run[1]['loss']['value'] /= run[1]['loss']['divisor']


@fault(12)
def a_lane_s_loss_lacks_its_half(run):
    change(run[1]['loss'], 'per_lane', lambda loss: 2 * loss)


def _without_bias(run):
    """The forward pass of the last step drops the bias; all that follows is consistent."""
    last = run[-1]
    b, update = last['params_before']['b'], last['optimizer']['updates']['b']
    again(run, len(run) - 1, params_before={**last['params_before'], 'b': array([0.0, 0.0], b)})
    update = run[-1]['optimizer']['updates']['b']
    run[-1]['params_before']['b'] = b
    run[-1]['params_after']['b'] = array(numbers(b) + numbers(update), b)


@fault(14)
def the_forward_pass_drops_a_bias(run):
    _without_bias(run)


@fault(14, cell='lif')
def the_forward_pass_of_spikes_drops_a_bias(run):
    _without_bias(run)


@fault(14, cell='alif', readout='linear', algorithm='ES_D_RTRL')
def the_forward_pass_of_adapting_spikes_drops_a_bias(run):
    _without_bias(run)


@fault(15)
def a_known_cell_is_called_opaque(run):
    run[1]['skip'] = {'basis': 'opaque_cell'}


@fault(16, sealed=True)
def a_label_is_written_behind_the_digest(run):
    run[1]['labels'] = {'title': 'another'}


@fault(18)
def the_batch_is_summed_where_a_mean_is_declared(run):
    again(run, 1, loss={**making.loss_input(run[1]), 'reduction': 'sum'})
    run[1]['loss']['reduction'] = 'mean'


@fault(20, optimizer='adam')
def the_optimiser_s_count_stands_still(run):
    run[1]['optimizer']['state_after']['count'] -= 1


@fault(20)
def the_count_of_an_optimiser_that_does_not_use_it_stands_still(run):
    run[1]['optimizer']['state_after']['count'] -= 1


@fault(20, optimizer='momentum')
def a_parameter_has_no_slot(run):
    del run[1]['optimizer']['state_after']['slots']['b']


@fault(21, optimizer='momentum')
def the_momentum_is_flipped(run):
    before = run[1]['optimizer']['state_before']['slots']['W']['trace']
    gradient = run[1]['gradients']['W']
    change(
        run[1]['optimizer']['state_after']['slots']['W'],
        'trace',
        lambda trace: numbers(gradient) - 0.8 * numbers(before),
    )


@fault(21, optimizer='nesterov')
def the_direction_is_not_nesterov_s(run):
    new = run[1]['optimizer']['state_after']['slots']['W']['trace']
    change(run[1]['optimizer']['updates'], 'W', lambda u: -0.1 * numbers(new))


@fault(22, optimizer='adam')
def the_first_moment_takes_the_gradient_whole(run):
    slots = run[1]['optimizer']['state_after']['slots']['W']
    before, gradient = run[1]['optimizer']['state_before']['slots']['W'], run[1]['gradients']['W']
    change(slots, 'mu', lambda mu: 0.8 * numbers(before['mu']) + numbers(gradient))


@fault(23, optimizer='adam')
def the_second_moment_is_not_squared(run):
    slots, gradient = run[1]['optimizer']['state_after']['slots']['W'], run[1]['gradients']['W']
    before = run[1]['optimizer']['state_before']['slots']['W']['nu']
    change(slots, 'nu', lambda nu: 0.9 * numbers(before) + 0.1 * np.abs(numbers(gradient)))


@fault(24, optimizer='adam')
def the_bias_correction_counts_one_step_too_few(run):
    count = run[1]['optimizer']['state_before']['count']
    off = (1 - 0.8 ** (count + 1)) / (1 - 0.8**count)
    change(run[1]['optimizer']['updates'], 'W', lambda u: u * off)


@fault(24, optimizer='adam-decay')
def epsilon_stands_inside_the_root(run):
    slots = run[1]['optimizer']['state_after']['slots']['W']
    mean, square = (numbers(slots[s]) / (1 - b**2) for s, b in (('mu', 0.8), ('nu', 0.9)))
    change(run[1]['optimizer']['updates'], 'W', lambda u: -0.1 * mean / np.sqrt(square + 0.02))


@fault(24, optimizer='adamw-plain')
def the_update_is_too_long_where_no_decay_is(run):
    change(run[1]['optimizer']['updates'], 'W', lambda u: u * 1.01)


@fault(27, cell='alif')
def the_adaptation_s_trace_forgets(run):
    change(trace(run[1])['weight'], 1, np.zeros_like)


@fault(28, algorithm='ES_D_RTRL')
def the_input_s_trace_is_filtered_with_the_other_decay(run):
    before, x = trace(run[1], 'before')['x'], factor(run[1])['x']
    change(trace(run[1]), 'x', lambda ex: 0.7 * numbers(before) + numbers(x))


@fault(28, algorithm='ES_D_RTRL', cell='lif')
def the_output_s_trace_leaves_D_out(run):
    before, D_f = trace(run[1], 'before')['f'][0], factor(run[1])['D_f'][0]
    change(trace(run[1])['f'], 0, lambda ef: 0.7 * numbers(before) + 0.3 * numbers(D_f))


@fault(29)
def the_new_term_lacks_the_slope(run):
    x = numbers(factor(run[0])['x'])
    change(trace(run[0])['weight'], 0, lambda e: np.ones_like(e) * x[:, :, None])


@fault(30)
def the_trace_forgets(run):
    x, D_f = numbers(factor(run[1])['x']), numbers(factor(run[1])['D_f'][0])
    change(trace(run[1])['weight'], 0, lambda e: x[:, :, None] * D_f[:, None, :])


@fault(32, steps=3, reset=(1,))
def the_trace_is_carried_over_a_boundary(run):
    again(run, 1, traces_before=run[0]['traces_after'])


@fault(32, steps=3, reset=(1,))
def a_lane_that_was_reset_does_not_start_at_the_initial_carry(run):
    again(run, 1, carry_before=run[0]['carry_after'])


@fault(33, algorithm='ES_D_RTRL', steps=3, reset=(2,))
def the_correction_counts_calls(run):
    change(run[2]['signals'], 'correction', lambda one: np.full_like(one, 1 - 0.7**3))


@fault(34, cell='lif')
def the_readout_s_trace_decays_as_the_membrane(run):
    alpha = run[1]['topology']['constants']['alpha']
    again(run, 1)
    before = numbers(trace(run[1], 'before', 'readout')['weight'][0])
    x = numbers(factor(run[1], 'readout')['x'])
    change(factor(run[1], 'readout')['D'][0], 0, lambda D: np.full_like(D, alpha))
    change(
        trace(run[1], 'after', 'readout')['weight'],
        0,
        lambda e: alpha * before + x[:, :, None] * np.ones(2),
    )


@fault(34, cell='lif')
def the_decay_is_of_another_time_constant(run):
    run[1]['topology']['constants']['alpha'] = making.decay(1.0, 9.0)


@fault(34, cell='lif')
def the_reset_passes_no_derivative_though_it_is_declared(run):
    alpha = run[1]['topology']['constants']['alpha']
    change(factor(run[1])['D'][0], 0, lambda D: np.full_like(D, alpha))


@fault(36)
def a_trainable_parameter_has_no_gradient(run):
    del run[1]['gradients']['W_out']


@fault(36)
def a_parameter_has_no_route(run):
    for record in run:
        del record['topology']['routes']['b']
        record['spec_digest'] = spec_digest(record)


# between records ----------------------------------------------------------------------------------


@fault(9)
def parameters_come_from_elsewhere(run):
    params = dict(run[1]['params_before'])
    change(params, 'W', lambda w: w * (1 + 1e-12))
    again(run, 1, params_before=params)


@fault(10)
def a_step_is_left_out(run):
    again(run, 1, step=2)


@fault(10)
def a_record_is_of_another_run(run):
    run[1]['run_id'] = 'another'


@fault(13, window=3, steps=3)
def a_trace_is_dropped_inside_a_window(run):
    zero = copy.deepcopy(run[1]['traces_before'])
    for one in zero:
        for entries in one['entries'].values():
            for entry in entries:
                entry['data'] = [0.0] * len(entry['data'])
    config = {key: run[1][key] for key in making.CONFIG_KEYS if key in run[1]}
    record = making.remade(
        {**config, 'schema': 'braintrace.config/1', 'traces_before': zero, 'optimizer': None}
    )
    run[1] = {**record, 'window': run[1]['window']}
    making.window_sum(run)


@fault(17, sealed=True, steps=3)
def records_are_sealed_in_another_order(run):
    run[2]['digests']['root'] = making.seal(run[:2][::-1] + run[2:])[2]['digests']['root']


@fault(18, window=3, steps=3)
def a_window_s_sum_is_not_divided(run):
    for path in run[2]['window']['gradients']:
        change(run[2]['window']['gradients'], path, lambda g: g * run[2]['window']['divisor'])
    making.updated(run[2])


@fault(18, window=3, steps=3)
def a_weight_of_a_window_is_negative(run):
    weights = [one['window']['weight'] for one in run]
    run[0]['window']['weight'] = -0.5 * sum(weights[1:])
    for one in run:
        one['window']['divisor'] = 0.5 * sum(weights[1:])
    making.window_sum(run)


@fault(18, window=3, steps=3)
def a_step_of_a_window_is_left_out(run):
    del run[1]
    run[1]['step'] = 1


@fault(19)
def lanes_are_permuted(run):
    run[1]['lanes'] = run[1]['lanes'][::-1]


@fault(25, optimizer='momentum')
def the_optimiser_starts_anew(run):
    slots = copy.deepcopy(run[1]['optimizer']['state_before'])
    for one in slots['slots'].values():
        change(one, 'trace', np.zeros_like)
    kept = {key: run[1]['optimizer'][key] for key in ('name', 'config')}
    again(run, 1, optimizer={**kept, 'state_before': slots})


@fault(26, optimizer='momentum')
def the_momentum_changes_on_the_way(run):
    state = {'name': 'momentum', 'state_before': run[1]['optimizer']['state_before']}
    again(run, 1, optimizer={**state, 'config': {'lr': 0.1, 'momentum': 0.9}})


@fault(26, algorithm='ES_D_RTRL')
def the_trace_s_decay_changes_on_the_way(run):
    again(run, 1, algorithm={**run[1]['algorithm'], 'decay_f': 0.5})


@fault(31)
def the_trace_is_lost_between_two_steps(run):
    zero = copy.deepcopy(run[1]['traces_before'])
    for entries in (one['entries']['weight'] for one in zero):
        change(entries, 0, np.zeros_like)
    again(run, 1, traces_before=zero)


@fault(31, cell='alif')
def a_part_of_the_trace_becomes_a_zero_by_structure(run):
    traces = copy.deepcopy(run[1]['traces_before'])
    traces[0]['entries']['weight'][0] = None
    again(run, 1, traces_before=traces)


@fault(31)
def the_lanes_swap_their_traces(run):
    traces = copy.deepcopy(run[1]['traces_before'])
    change(traces[0]['entries']['weight'], 0, lambda e: e[::-1])
    again(run, 1, traces_before=traces)


@fault(31)
def the_carry_starts_anew_without_a_reset(run):
    carry = dict(run[1]['carry_before'])
    change(carry, 'h', np.zeros_like)
    again(run, 1, carry_before=carry)


@fault(31)
def a_lane_s_clock_starts_anew(run):
    run[1]['t'][0] = 5


@pytest.mark.tier(quick=20)
@pytest.mark.parametrize('rule,how,function', FAULTS)
def test_the_first_rule_that_fails_names_the_fault(rule, how, function):
    records = making.run(**{'cell': 'rnn', **how})
    good = reconcile_run(records)
    assert good.verdict == 'rederived', good.failures
    bad = copy.deepcopy(records)
    function(bad)
    found = reconcile_run(bad)
    assert not found.ok and found.failures
    assert found.failures[0].rule == rule, found.failures[:4]
    assert found.verdict == ('failed' if rule else 'malformed')
    assert 'internal' not in {failure.path for failure in found.failures}
    if rule == 14:
        assert {failure.rule for failure in found.failures} == {14}


def test_every_rule_but_the_disclosure_has_a_bad_run():
    assert {param.values[0] for param in FAULTS} == set(RULES) - {35}
