"""Each rule catches the fault that it is there for, and is the first to say so."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest

import making
from braintrace_receipts import RULES, reconcile_run
from braintrace_receipts.canonical import spec_digest
from braintrace_receipts.record import array_paths
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


# one array is another one -------------------------------------------------------------------------

HIDDEN, UPDATE, AFTER = 'factors/recurrent/hidden', 'optimizer/updates/W', 'optimizer/state_after/W'
BEFORE, GRADIENT, TRACE = 'optimizer/state_before/W', 'gradients/W', 'traces_after/recurrent/hidden'
DH, ERR, OLD = 'signals/dh/hidden/0', 'signals/err', 'traces_before/recurrent/hidden'
ES = {'algorithm': 'ES_D_RTRL'}


def outer(x, d):
    return x[:, :, None] * d[:, None, :]


# The rule, what is wrong, in which run and record of it, and what stands in which fields: a
# function of the fields of the record as they should be.
ARRAYS = [
    (1, 'the error counts each lane whole', {}, 1, {ERR: lambda r: 2 * r[ERR]}),
    (1, 'the error is that of another loss', {'loss': 'softmax_ce'}, 1,
     {ERR: lambda r: (r['outputs'] - r['targets']) / 2}),
    (2, 'the learning signal is zero', {}, 1, {DH: lambda r: 0 * r[DH]}),
    (2, 'the readout s weight stands for the fixed feedback', {'cell': 'lif', 'feedback': 'fixed'},
     1, {'algorithm/feedback': lambda r: r['params_before/W_out']}),
    (3, 'the slope is left out of the signal', {}, 1, {'signals/dy/recurrent': lambda r: r[DH]}),
    (3, 'the slope is taken before the step', {}, 1,
     {f'{HIDDEN}/D_f/0': lambda r: 1 - r['carry_before/h'] ** 2}),
    (3, 'the way through the recurrent weight is left out', {'credit': 'whole'}, 1,
     {'signals/c/hidden/0': lambda r: r[DH] * r[f'{HIDDEN}/D/0/0']}),
    (4, 'the gradient is flipped', {}, 1, {GRADIENT: lambda r: -r[GRADIENT]}),
    (4, 'the gradient leaves the history out', {}, 1,
     {GRADIENT: lambda r: r[f'{HIDDEN}/x'].T @ r['signals/dy/recurrent']}),
    (4, 'the gradient takes the input without its filter', ES, 1, {GRADIENT: lambda r: r[GRADIENT]
     * (r[f'{HIDDEN}/x'].sum(0) / r[f'{TRACE}/x'].sum(0))[:, None]}),
    (5, 'the update goes up the hill', {}, 1, {UPDATE: lambda r: -r[UPDATE]}),
    (6, 'the update is taken off', {}, 1,
     {'params_after/W': lambda r: r['params_before/W'] - r[UPDATE]}),
    (7, 'a parameter moves without an optimiser', {'optimizer': 'none'}, 1,
     {'params_after/b': lambda r: r['params_after/b'] + 0.01}),
    (7, 'a frozen parameter moves', {'frozen': ('W',)}, 1,
     {'params_after/W': lambda r: r['params_after/W'] * 1.000001}),
    (7, 'the decoupled decay is left out', {'optimizer': 'adamw'}, 1,
     {UPDATE: lambda r: r[UPDATE] + 0.01 * r['params_before/W'],
      'params_after/W': lambda r: 1.01 * r['params_before/W'] + r[UPDATE]}),
    (7, 'the coupled decay is left out', {'optimizer': 'sgd-decay'}, 1,
     {UPDATE: lambda r: -0.1 * r[GRADIENT],
      'params_after/W': lambda r: r['params_before/W'] - 0.1 * r[GRADIENT]}),
    (8, 'the factor is of the lanes in another order', {}, 1,
     {f'{HIDDEN}/x': lambda r: r[f'{HIDDEN}/x'][::-1]}),
    (8, 'the readout s factor is the output before', {}, 1,
     {'factors/readout/output/x': lambda r: r['carry_before/h']}),
    (11, 'probabilities do not sum to one', {'loss': 'softmax_ce'}, 1,
     {'loss/probabilities': lambda r: 1.01 * r['loss/probabilities']}),
    (12, 'a lane s loss lacks its half', {}, 1,
     {'loss/per_lane': lambda r: 2 * r['loss/per_lane']}),
    (21, 'the momentum is flipped', {'optimizer': 'momentum'}, 1,
     {f'{AFTER}/trace': lambda r: r[GRADIENT] - 0.8 * r[f'{BEFORE}/trace']}),
    (21, 'the direction is not nesterov s', {'optimizer': 'nesterov'}, 1,
     {UPDATE: lambda r: -0.1 * r[f'{AFTER}/trace']}),
    (22, 'the first moment takes the gradient whole', {'optimizer': 'adam'}, 1,
     {f'{AFTER}/mu': lambda r: 0.8 * r[f'{BEFORE}/mu'] + r[GRADIENT]}),
    (23, 'the second moment is not squared', {'optimizer': 'adam'}, 1,
     {f'{AFTER}/nu': lambda r: 0.9 * r[f'{BEFORE}/nu'] + 0.1 * np.abs(r[GRADIENT])}),
    (24, 'epsilon stands inside the root', {'optimizer': 'adam-decay'}, 1,
     {UPDATE: lambda r: -0.1 * (r[f'{AFTER}/mu'] / 0.36)
      / np.sqrt(r[f'{AFTER}/nu'] / 0.19 + 0.02)}),
    (24, 'the update is too long where no decay is', {'optimizer': 'adamw-plain'}, 1,
     {UPDATE: lambda r: 1.01 * r[UPDATE]}),
    (27, 'the adaptation s trace forgets', {'cell': 'alif'}, 1,
     {f'{TRACE}/weight/1': lambda r: 0 * r[f'{TRACE}/weight/1']}),
    (28, 'the input s trace is filtered with the other decay', ES, 1,
     {f'{TRACE}/x': lambda r: 0.7 * r[f'{OLD}/x'] + r[f'{HIDDEN}/x']}),
    (28, 'the output s trace leaves D out', {**ES, 'cell': 'lif'}, 1,
     {f'{TRACE}/f/0': lambda r: 0.7 * r[f'{OLD}/f/0'] + 0.3 * r[f'{HIDDEN}/D_f/0']}),
    (29, 'the new term lacks the slope', {}, 0, {f'{TRACE}/weight/0':
     lambda r: outer(r[f'{HIDDEN}/x'], np.ones_like(r[f'{HIDDEN}/D_f/0']))}),
    (30, 'the trace forgets', {}, 1,
     {f'{TRACE}/weight/0': lambda r: outer(r[f'{HIDDEN}/x'], r[f'{HIDDEN}/D_f/0'])}),
    (33, 'the correction counts calls', {**ES, 'steps': 3, 'reset': (2,)}, 2,
     {'signals/correction': lambda r: np.full_like(r['signals/correction'], 1 - 0.7**3)}),
    (34, 'the reset passes no derivative though it is declared', {'cell': 'lif'}, 1,
     {f'{HIDDEN}/D/0/0': lambda r: np.full_like(r[f'{HIDDEN}/D/0/0'], making.decay(1.0, 10.0))}),
]  # fmt: skip


def written(place: int, formulas: dict) -> Callable[[Run], None]:
    """Puts other numbers into the arrays of a record."""

    def put(run: Run) -> None:
        nodes = dict(array_paths(run[place]))
        fields = {path: numbers(node) for path, node in nodes.items() if node is not None}
        for path, formula in formulas.items():
            nodes[path].update(array(formula(fields), nodes[path]))

    return put


for number, said, where, place, formulas in ARRAYS:
    name = f'{number}-{said.replace(" ", "_")}'
    FAULTS.append(pytest.param(number, where, written(place, formulas), id=name))

# one record ---------------------------------------------------------------------------------------


@fault(0)
def a_gradient_is_not_finite(run):
    run[1]['gradients']['W']['data'][2] = float('nan')


@fault(0, cell='lif')
def a_spike_is_a_half(run):
    run[1]['carry_after']['z']['data'][0] = 0.5


@fault(2, cell='lif', feedback='modulator')
def the_modulator_is_that_of_the_step_before(run):
    before = run[0]['algorithm']['feedback']['array']
    run[1]['algorithm']['feedback']['array'] = before


@fault(12)
def the_loss_is_divided_twice(run):
    run[1]['loss']['value'] /= run[1]['loss']['divisor']


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


@fault(24, optimizer='adam')
def the_bias_correction_counts_one_step_too_few(run):
    count = run[1]['optimizer']['state_before']['count']
    off = (1 - 0.8 ** (count + 1)) / (1 - 0.8**count)
    change(run[1]['optimizer']['updates'], 'W', lambda u: u * off)


@fault(32, steps=3, reset=(1,))
def the_trace_is_carried_over_a_boundary(run):
    again(run, 1, traces_before=run[0]['traces_after'])


@fault(32, steps=3, reset=(1,))
def a_lane_that_was_reset_does_not_start_at_the_initial_carry(run):
    again(run, 1, carry_before=run[0]['carry_after'])


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
