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


# one array is another one -------------------------------------------------------------------------

HIDDEN, UPDATE, AFTER = 'factors/recurrent/hidden', 'optimizer/updates/W', 'optimizer/state_after/W'
BEFORE, GRADIENT, TRACE = 'optimizer/state_before/W', 'gradients/W', 'traces_after/recurrent/hidden'
DH, ERR, OLD = 'signals/dh/hidden/0', 'signals/err', 'traces_before/recurrent/hidden'
ES = {'algorithm': 'ES_D_RTRL'}


def outer(x, d):
    return x[:, :, None] * d[:, None, :]


# The rule, what is wrong, in which run and record of it, and what is in which fields: a
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
     {f'{HIDDEN}/D_f/0': lambda r: 1 - r['carry_before/h'] ** 2,
      'signals/dy/recurrent': lambda r: r[DH] * (1 - r['carry_before/h'] ** 2)}),
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
    (24, 'epsilon is inside the root', {'optimizer': 'adam-decay'}, 1,
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


# one number is another one, or one claim ----------------------------------------------------------

# The rule, what is wrong, in which run, at which place, and what is there: a function of what
# should.
LIF, ADAM = {'cell': 'lif'}, {'optimizer': 'adam'}
STATE = (1, 'optimizer', 'state_after')
PLACES = [
    (0, 'a gradient is not finite', {}, (1, 'gradients', 'W', 'data', 2), lambda _: float('nan')),
    (0, 'a spike is a half', LIF, (1, 'carry_after', 'z', 'data', 0), lambda _: 0.5),
    (10, 'a record is of another run', {}, (1, 'run_id'), lambda _: 'another'),
    (12, 'the loss is divided twice', {}, (1, 'loss'),
     lambda loss: {**loss, 'value': loss['value'] / loss['divisor']}),
    (15, 'a known cell is called opaque', {}, (1, 'skip'), lambda _: {'basis': 'opaque_cell'}),
    (16, 'a label is written behind the digest', {'sealed': True}, (1, 'labels'),
     lambda _: {'title': 'another'}),
    (19, 'lanes are permuted', {}, (1, 'lanes'), lambda lanes: lanes[::-1]),
    (20, 'the optimiser s count stands still', ADAM, (*STATE, 'count'), lambda count: count - 1),
    (20, 'the count of an optimiser that does not use it stands still', {}, (*STATE, 'count'),
     lambda count: count - 1),
    (20, 'a parameter has no slot', {'optimizer': 'momentum'}, (*STATE, 'slots'),
     lambda slots: {path: slots[path] for path in slots if path != 'b'}),
    (31, 'a lane s clock starts again', {}, (1, 't', 0), lambda _: 5),
    (34, 'a slow decay is three roundings off', {'cell': 'alif', 'dtype': 'float32'},
     (1, 'topology', 'constants', 'rho'), lambda rho: rho + 3 * 2.0**-24),
    (34, 'the decay is of another time constant', LIF, (1, 'topology', 'constants', 'alpha'),
     lambda _: making.decay(1.0, 9.0)),
    (36, 'a trainable parameter has no gradient', {}, (1, 'gradients'),
     lambda grads: {path: grads[path] for path in grads if path != 'W_out'}),
]  # fmt: skip


def replaced(place: tuple, value: Callable) -> Callable[[Run], None]:
    """Puts something else at a place of a run."""

    def put(run: Run) -> None:
        *inside, key = place
        part = making.get(run, inside)
        part[key] = value(part[key] if isinstance(part, list) else part.get(key))

    return put


# a step starts elsewhere, and what follows is consistent ------------------------------------------


def moved(nodes: dict, *place, by: Callable = np.zeros_like) -> dict:
    """Nodes of which one has other numbers."""
    old = making.get(nodes, place)
    return making.put(nodes, place, array(by(numbers(old)), old))


RESET, WEIGHT = {'steps': 3, 'reset': (1,)}, (0, 'entries', 'weight', 0)
# The rule, what is wrong, in which run, and what the configuration of its second record is.
STARTS = [
    (9, 'parameters come from elsewhere', {}, lambda old, new:
     {'params_before': moved(new['params_before'], 'W', by=lambda w: w * (1 + 1e-12))}),
    (10, 'a step is left out', {}, lambda old, new: {'step': 2}),
    (25, 'the optimiser starts again', {'optimizer': 'momentum'}, lambda old, new:
     {'optimizer': {**new['optimizer'], 'state_before': old['optimizer']['state_before']
      | {'count': new['optimizer']['state_before']['count']}}}),
    (26, 'the momentum changes on the way', {'optimizer': 'momentum'}, lambda old, new:
     {'optimizer': {**new['optimizer'], 'config': {'lr': 0.1, 'momentum': 0.9}}}),
    (26, 'the trace s decay changes on the way', ES, lambda old, new:
     {'algorithm': {**new['algorithm'], 'decay_f': 0.5}}),
    (26, 'the loss changes on the way', {}, lambda old, new:
     {'loss': {**new['loss'], 'name': 'softmax_ce'}}),
    (26, 'the reduction changes on the way', {}, lambda old, new:
     {'loss': {**new['loss'], 'reduction': 'sum'}}),
    (31, 'the trace is lost between two steps', {}, lambda old, new: {'traces_before': []}),
    (31, 'a part of the trace becomes a zero by structure', {'cell': 'alif'}, lambda old, new:
     {'traces_before': making.put(new['traces_before'], WEIGHT, None)}),
    (31, 'the lanes swap their traces', {}, lambda old, new:
     {'traces_before': moved(new['traces_before'], *WEIGHT, by=lambda e: e[::-1])}),
    (31, 'the carry starts again without a reset', {}, lambda old, new:
     {'carry_before': moved(new['carry_before'], 'h')}),
    (32, 'the trace is carried over a boundary', RESET, lambda old, new:
     {'traces_before': old['traces_after']}),
    (32, 'a lane that was reset does not start at the initial carry', RESET, lambda old, new:
     {'carry_before': old['carry_after']}),
]  # fmt: skip
PUTS = [(*row[:3], replaced(*row[3:])) for row in PLACES]
PUTS += [
    (*row, lambda run, changes=changes: making.onward(run, 1, **changes(*run[:2])))
    for *row, changes in STARTS
]
PUTS += [(number, said, how, written(i, made)) for number, said, how, i, made in ARRAYS]
for number, said, how, function in PUTS:
    name = f'{number}-{said.replace(" ", "_")}'
    FAULTS.append(pytest.param(number, how, function, id=name))

# and all others -----------------------------------------------------------------------------------


@fault(0)
@fault(0, algorithm='ES_D_RTRL')
def a_trace_has_no_entries(run):
    for when in ('before', 'after'):
        run[1][f'traces_{when}'][0]['entries'] = {}


@fault(2, cell='lif', feedback='modulator')
def the_modulator_is_that_of_the_step_before(run):
    before = run[0]['algorithm']['feedback']['array']
    run[1]['algorithm']['feedback']['array'] = before


@fault(13, window=3, steps=3)
def a_trace_is_dropped_inside_a_window(run):
    record = making.remade(run[1], traces_before=[], optimizer=None)  # they are zero then
    run[1] = {**record, 'window': run[1]['window']}
    making.window_sum(run)


@fault(14)
@fault(14, cell='lif')
@fault(14, cell='alif', readout='linear', algorithm='ES_D_RTRL')
def the_forward_pass_of_the_last_step_drops_a_bias(run):
    """All that follows is consistent."""
    b = run[-1]['params_before']['b']
    making.onward(run, len(run) - 1, params_before=moved(run[-1]['params_before'], 'b'))
    update = run[-1]['optimizer']['updates']['b']
    run[-1]['params_before']['b'] = b
    run[-1]['params_after']['b'] = array(numbers(b) + numbers(update), b)


@fault(17, sealed=True, steps=3)
def records_are_sealed_in_another_order(run):
    run[2]['digests']['root'] = making.seal(run[:2][::-1] + run[2:])[2]['digests']['root']


@fault(18)
def the_batch_is_summed_where_a_mean_is_declared(run):
    making.onward(run, 1, loss={**run[1]['loss'], 'reduction': 'sum'})
    run[1]['loss']['reduction'] = 'mean'


@fault(18, window=3, steps=3)
def a_window_s_sum_is_not_divided(run):
    window = run[2]['window']
    for path, node in window['gradients'].items():
        window['gradients'][path] = array(numbers(node) * window['divisor'], node)
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


@fault(26, window=2, steps=4)
def the_reduction_of_a_window_changes_on_the_way(run):
    for one in run[2:]:
        one['window'] |= {'reduction': 'sum', 'divisor': 1.0}
    making.window_sum(run[2:])


@fault(24, optimizer='adam')
def the_bias_correction_counts_one_step_too_few(run):
    optimizer = run[1]['optimizer']
    count = optimizer['state_before']['count']
    off = (1 - 0.8 ** (count + 1)) / (1 - 0.8**count)
    optimizer['updates'] = moved(optimizer['updates'], 'W', by=lambda u: u * off)


@fault(20)
def the_update_of_a_parameter_is_left_out(run):
    """It stays as it was."""
    del run[-1]['optimizer']['updates']['b']
    run[-1]['params_after']['b'] = run[-1]['params_before']['b']


@fault(34, cell='lif')
def the_readout_s_trace_decays_as_the_membrane(run):
    alpha, at = run[1]['topology']['constants']['alpha'], 'readout/output'
    making.onward(run, 1)
    formulas = {
        f'factors/{at}/D/0/0': lambda r: 0 * r['outputs'] + alpha,
        f'traces_after/{at}/weight/0': lambda r: (
            alpha * r[f'traces_before/{at}/weight/0'] + outer(r[f'factors/{at}/x'], np.ones((2, 2)))
        ),
    }
    written(1, formulas)(run)


@fault(36)
def a_parameter_has_no_route(run):
    for record in run:
        del record['topology']['routes']['b']
        record['spec_digest'] = spec_digest(record)


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
