"""ES_D_RTRL with a decay for each of its factors, and OTTT, which has one of them."""

import numpy as np
import pytest

from braintrace.errors import OptionError
from braintrace.rules import es_d_rtrl, ottt
from tests import models, oracles
from tests.compare import assert_drawn_close, at, errors
from tests.gradients.harness import by_steps, other_carry, over_sequence
from tests.models.model import B, I, Model, N
from tests.oracles import es_recursion as es
from tests.tiers import slow

pytestmark = pytest.mark.drawn
PAIR = 0.9, 0.4
ROWS = ['leaky', pytest.param('spiking_two', marks=slow), pytest.param('conv1d', marks=slow)]


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize('name', ROWS)
@pytest.mark.parametrize('pair', [PAIR, (0.8, 0.0)], ids=['both', 'input'])
def test_a_window_gives_the_gradient_of_the_formula(name, pair):
    case = models.case(name)
    assert_drawn_close(over_sequence(case, es_d_rtrl(pair), 4)[0], oracles.total(es(case, pair)))


@pytest.mark.tier(quick=1)
@pytest.mark.slow
@pytest.mark.parametrize('name', ['leaky', 'lstm_fused'])
def test_each_step_and_a_reset_give_the_gradient_of_the_formula(name):
    case = models.case(name)
    for t, (_, _, grads) in enumerate(by_steps(case, es_d_rtrl(PAIR))):
        assert_drawn_close(grads, at(es(case, PAIR), t))
    carry0, flags = other_carry(case), np.zeros((6, 2), bool)
    flags[[2, 4], 0] = flags[[1, 2], 1] = True
    want = oracles.restarted(lambda part: es(part, PAIR), case, flags, carry0)
    got = over_sequence(case, es_d_rtrl(PAIR), 4, reset=(flags, carry0))[0]
    assert_drawn_close(got, oracles.total(want))


def test_equal_decays_are_one_and_each_of_two_matters():
    assert es_d_rtrl((0.8, 0.8)) == es_d_rtrl(0.8)
    assert es_d_rtrl((0.8, 0.8)).decay == 0.8
    assert es_d_rtrl((0, 0)) == es_d_rtrl(0.0)
    assert repr(es_d_rtrl(PAIR)) == 'es_d_rtrl((0.9, 0.4))'
    case = models.case('leaky')
    numbers = [oracles.total(es(case, pair)) for pair in (PAIR, PAIR[::-1], 0.9, 0.4)]
    for i, one in enumerate(numbers):
        assert all(errors(one, other)["['w']"] > 1e-3 for other in numbers[:i])


def test_without_decays_it_is_the_same_step():
    case = models.case('leaky')
    assert_drawn_close(over_sequence(case, es_d_rtrl((0, 0)), 4)[0], oracles.same_step(case))
    assert not es_d_rtrl((0, 0)).remembers and es_d_rtrl((0, 0.5)).remembers


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
    got = over_sequence(case, ottt(0.8), 4)[0]
    assert_drawn_close(got, oracles.bptt(case))
    assert errors(over_sequence(case, ottt(0.5), 4)[0], oracles.bptt(case))["['w']"] > 1e-2
    assert ottt(0.8) == es_d_rtrl((0.8, 0.0))


@pytest.mark.parametrize(
    'make, found',
    [
        (lambda: es_d_rtrl((0.9, 1.0)), r'the decays are \(0.9, 1.0\)'),
        (lambda: es_d_rtrl((0.9,)), r'the decays are \(0.9,\)'),
        (lambda: es_d_rtrl((True, 0.5)), r'the decays are \(True, 0.5\)'),
        (lambda: es_d_rtrl((-0.1, 0.5)), r'give a pair \(a_x, a_f\)'),
        (lambda: es_d_rtrl(True), 'decay_or_rank is True'),
        (lambda: ottt(1.0), 'leak is 1.0'),
        (lambda: ottt(True), 'leak is True'),
        (lambda: ottt(-0.5), 'leak is -0.5'),
    ],
)
def test_other_decays_are_refused(make, found):
    with pytest.raises(OptionError, match=found):
        make()
