"""ES_D_RTRL: its decays, one for both factors or one for each, and where it is exact; OTTT, which
has one of them. ``test_rules.py`` compares it with its formula.
"""

import pytest

from braintrace.rules import es_d_rtrl, ottt
from tests import models, oracles
from tests.compare import assert_drawn_close, at, errors
from tests.gradients.harness import over_sequence, quick, start
from tests.models.model import B, I, Model, N
from tests.oracles import es_recursion as es

pytestmark = pytest.mark.drawn
RULE = es_d_rtrl(0.8)
FIRST = 'leaky lstm sparse lora mgu minimal_rnn op_between_states'.split()


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', FIRST)
def test_the_first_step_is_plain_bptt(name):
    case = models.case(name, models.cubic, steps=1)
    assert_drawn_close(over_sequence(case, RULE, None)[0], oracles.bptt(case))


def seen_beside_the_state(ops, p, c, x):
    """The loss reads the result of the op in the state, and once more by itself."""
    y = ops.matmul(x, p['w'])
    v = ops.new('v', 0.8 * c['v'] + y)
    return v + 3.0 * y, {'v': v}


BESIDE = Model('seen_beside_the_state', seen_beside_the_state, {'w': (I, N)}, {'v': (B, N)})


def test_what_the_loss_reads_beside_the_state_is_in_the_first_step():
    case = models.make_case(BESIDE, steps=1)
    assert_drawn_close(over_sequence(case, RULE, None)[0], oracles.bptt(case))


def a_state_moves_on(ops, p, c, x):
    """The loss reads a state at the step at which another one takes its value over."""
    first, second = ops.new('a', ops.matmul(x, p['w'])), ops.new('b', c['a'])
    third = ops.new('c', c['b'])
    return first + 2.0 * second + ops.tanh(third), {'a': first, 'b': second, 'c': third}


MOVES = Model('a_state_moves_on', a_state_moves_on, {'w': (I, N)}, dict.fromkeys('abc', (B, N)))


@pytest.mark.parametrize('window', [1, 4])
def test_a_state_that_takes_over_an_old_one_s_value_is_a_new_state(window):
    case = models.make_case(MOVES)
    assert_drawn_close(over_sequence(case, RULE, window)[0], oracles.total(es(case, 0.8)))


@pytest.mark.parametrize('rank', [1, 2, 9])
def test_a_rank_is_a_decay(rank):
    assert es_d_rtrl(rank) == es_d_rtrl((rank - 1) / (rank + 1))


def test_equal_decays_are_one():
    assert es_d_rtrl((0.8, 0.8)) == RULE and es_d_rtrl((0.8, 0.8)).decay == 0.8
    assert es_d_rtrl((0, 0)) == es_d_rtrl(0.0)
    assert repr(es_d_rtrl((0.9, 0.4))) == 'es_d_rtrl((0.9, 0.4))'


def test_without_decays_it_is_the_same_step():
    case = models.case('leaky')
    assert_drawn_close(over_sequence(case, es_d_rtrl((0, 0)), 4)[0], oracles.same_step(case))
    assert not es_d_rtrl((0, 0)).remembers and es_d_rtrl((0, 0.5)).remembers


def test_steps_without_a_gradient_count_in_the_trace_and_in_the_correction():
    """Three steps run by ``step`` alone, then three gradients: as if all six had given one."""
    case = models.case('lstm')
    learner, state = start(case, RULE)
    step, grad = quick(learner.step), quick(learner.grad(case.loss))
    for x in case.xs[:3]:
        _, state = step(case.params, state, x)
    for t in (3, 4, 5):
        grads, _, _, state = grad(case.params, state, case.xs[t], case.ys[t])
        assert_drawn_close(grads, at(es(case, 0.8), t))


def feed_forward(ops, p, c, x):
    """Leaky neurons without recurrence: the loss reads the spike of the new potential, and the
    reset, by the spike before, is detached.
    """
    past = ops.constant(ops.spike(c['v'] - 0.5))
    v = ops.new('v', 0.8 * c['v'] - past + ops.matmul(x, p['w']))
    return ops.spike(v - 0.5), {'v': v}


LAYER = Model('feed_forward', feed_forward, {'w': (I, N)}, {'v': (B, N)}, smooth=False)


def test_ottt_is_exact_for_a_feed_forward_layer_whose_reset_is_detached():
    case = models.make_case(LAYER)
    got = over_sequence(case, ottt(0.8), 3)[0]
    assert_drawn_close(got, oracles.bptt(case))
    assert errors(over_sequence(case, ottt(0.5), 3)[0], oracles.bptt(case))["['w']"] > 1e-2
    assert ottt(0.8) == es_d_rtrl((0.8, 0.0))
