"""Silent faults A to K of the public package, each as behaviour that must not come back."""

import functools

import jax
import numpy as np
import pytest

from braintrace import functional, rules
from tests import models, oracles
from tests.compare import added, assert_close, assert_moves, at
from tests.gradients.harness import learner_of, over_sequence, quick, start
from tests.models.library import LibraryOps

D_RTRL = rules.d_rtrl()
ES_D_RTRL = rules.es_d_rtrl(0.9)
WANT = {D_RTRL: oracles.dense_recursion, ES_D_RTRL: lambda case: oracles.es_recursion(case, 0.9)}
both_rules = pytest.mark.parametrize('rule', [D_RTRL, ES_D_RTRL], ids=['d_rtrl', 'es_d_rtrl'])


def gradient(case, rule=D_RTRL, window=2):
    """The library's gradient, which equals the oracle's and leaves no parameter without one."""
    grads, *_ = over_sequence(case, rule, window)
    assert_close(grads, oracles.total(WANT[rule](case)))
    assert_moves(grads)
    return grads


OF_BOTH_RULES = {
    'a: readouts, plain weights and reset gates': 'plain_input gru lru op_readout encoder',
    'c: a state that reads another new state counts once': (
        'lstm lstm_fused lstm_reading_cell synapse'
    ),
    'g: two hidden states may be added directly': 'state_sum',
    'j: a weight reaches h directly and through an op': 'mgu minimal_rnn op_between_states',
}
OF_D_RTRL = {
    'a: an output that does not read the new state': 'old_output bypass',
    'b: the function between a parameter and its op': (
        'masked transposed absolute doubled reshaped normalised'
    ),
    'd: a tail that moves positions': 'tail_flip tail_swap tail_cumsum tail_norm',
    'e: recurrence by data movement is cut and not summed into the diagonal': 'roll mean',
}
ROWS = [
    pytest.param(name, rule, id=f'{fault[0]}-{name}-{rule.name}')
    for table, rules_ in ((OF_BOTH_RULES, WANT), (OF_D_RTRL, [D_RTRL]))
    for fault, names in table.items()
    for name in names.split()
    for rule in rules_
]


@pytest.mark.tier(quick=6, one_in=3)
@pytest.mark.parametrize('name, rule', ROWS)
def test_a_fault_does_not_come_back(name, rule):
    gradient(models.case(name, models.cubic), rule)


def test_fault_b_the_gradient_of_a_doubled_weight_is_twice_that_of_the_weight():
    case = models.case('masked')
    plain, doubled = (functools.partial(drive, factor=factor) for factor in (1.0, 2.0))
    make = functools.partial(models.make_case, steps=3)
    whole = make(models.Model('scaled', doubled, case.model.params))
    inner = make(models.Model('scaled', plain, case.model.params))
    inner.params['w'] *= 2.0
    assert_close(gradient(whole), {'w': 2.0 * gradient(inner)['w']})


def drive(ops, p, c, x, factor):
    y = ops.matmul(
        ops.concatenate([x, ops.cut(c['h'])]), p['w'] if factor == 1.0 else factor * p['w']
    )
    h = ops.new('h', 0.8 * c['h'] + ops.tanh(y))
    return h, {'h': h}


def test_fault_b_a_masked_entry_gets_exactly_nothing():
    grads = gradient(models.case('masked'))
    np.testing.assert_array_equal(grads['w'] != 0.0, models.weights.MASK)


def test_fault_f_two_parameters_added_before_one_op_both_learn():
    grads = gradient(models.case('added', models.cubic))
    np.testing.assert_array_equal(grads['w1'], grads['w2'])


@pytest.mark.tier(quick=1, one_in=4)
@both_rules
@pytest.mark.parametrize('name', ['leaky', 'lstm', 'adaptive_lif'])
def test_fault_h_a_loop_inside_one_grad_gives_the_sum_of_the_online_gradients(name, rule):
    case = models.case(name)
    learner, state = start(case, rule)

    def loop(params):
        now, loss = state, 0.0
        for x, y in zip(case.xs, case.ys):
            output, now = learner.step(params, now, x)
            loss = loss + case.loss(output, y)
        return loss

    def scan(params):
        def step(now, xy):
            output, now = learner.step(params, now, xy[0])
            return now, case.loss(output, xy[1])

        return jax.lax.scan(step, state, (case.xs, case.ys))[1].sum()

    for total in (loop, scan):
        assert_close(quick(jax.grad(total))(case.params), oracles.total(WANT[rule](case)))


@pytest.mark.slow
def test_fault_i_an_exception_while_tracing_leaves_the_learner_usable():
    case, fail = models.case('lstm'), [True]

    def cell(params, carry, x):
        output, new = case.run(LibraryOps(), params, carry, x)
        if fail.pop() if fail else False:
            raise RuntimeError('inside the model')
        return output, new

    learner = functional.online(cell, D_RTRL)
    with jax.checking_leaks():
        with pytest.raises(RuntimeError, match='inside the model'):
            learner.init(case.params, case.carry, case.xs[0])
    state = learner.init(case.params, case.carry, case.xs[0])

    def failing(output, target):
        raise RuntimeError('inside the loss')

    with pytest.raises(RuntimeError, match='inside the loss'):
        jax.jit(learner.grad(failing))(case.params, state, case.xs[0], case.ys[0])
    with pytest.raises(RuntimeError, match='inside the loss'):
        learner.sequence_grad(failing, window=2)(case.params, state, case.xs, case.ys)
    grads, *_ = quick(learner.sequence_grad(case.loss, window=2, reduction='sum'))(
        case.params, state, case.xs, case.ys
    )
    assert_close(grads, oracles.total(oracles.dense_recursion(case)))


@pytest.mark.tier(quick=0, one_in=4)
@both_rules
@pytest.mark.parametrize('name', ['mgu', 'minimal_rnn', 'op_between_states'])
def test_fault_j_both_same_step_parts_of_a_weight_are_kept(name, rule):
    case = models.case(name, models.cubic)
    first, *_ = over_sequence(case, rule, None, slice(0, 1))
    assert_close(first, oracles.bptt(case.steps(0, 1, case.carry)))


def test_fault_k_the_bias_correction_counts_trace_steps_and_not_calls():
    """Six steps in one call: the correction of the last is ``1 - 0.9^6`` = 0.469, not 0.1."""
    case = models.case('leaky')
    learner, state = start(case, ES_D_RTRL)
    grads, _, _, whole = over_sequence(case, ES_D_RTRL, None)
    assert_close(grads, oracles.total(oracles.es_recursion(case, 0.9)))
    assert np.all(whole.t == 6)
    parts = []
    for steps in (slice(0, 2), slice(2, 6)):
        part, _, _, state = over_sequence(case, ES_D_RTRL, 2, steps, state)
        parts.append(part)
    assert_close(added(parts), grads)
    assert learner is learner_of(case, ES_D_RTRL) and np.all(state.t == 6)


def test_fault_k_a_reset_starts_the_count_again():
    case = models.case('leaky')
    learner, first = start(case, ES_D_RTRL)
    _, _, _, state = over_sequence(case, ES_D_RTRL, None)
    state = functional.reset(state, True, case.carry)
    assert not np.any(state.t)
    grads, *_ = learner.grad(case.loss)(case.params, state, case.xs[0], case.ys[0])
    assert_close(grads, at(oracles.es_recursion(case, 0.9), 0))
    assert_close(state.trace, first.trace)
