"""ES_D_RTRL of the library against its formula in NumPy, for every row of the table."""

import numpy as np
import pytest

from braintrace import rules
from tests import models, oracles
from tests.compare import added, assert_drawn_close, at, errors
from tests.gradients.harness import by_steps, other_carry, over_sequence, quick, ragged, start
from tests.gradients.rows import WIDE, every_window, row, wide_first
from tests.oracles import es_recursion as es

pytestmark = pytest.mark.drawn
DECAY = 0.8
RULE = rules.es_d_rtrl(DECAY)
MASK = np.array([1.0, 0.0, 0.5, 1.0, 2.0, 1.5])
FEW = [
    'lstm_fused',
    'synapse',
    'learned_decay',
    'conv1d',
    'spiking_two',
    'stored_spike',
    'mamba',
    'two_rows',
]


# Of the rows outside of `WIDE` one half is asked for windows, the other one for single steps.
@pytest.mark.tier(quick=2, one_in=8)
@every_window(None, 1, late=lambda i: i % 2 == 0)
def test_windows_give_the_gradient_of_the_formula(name, window):
    case = models.case(name)
    assert_drawn_close(over_sequence(case, RULE, window)[0], oracles.total(es(case, DECAY)))


@pytest.mark.tier(quick=2, one_in=8)
@pytest.mark.parametrize(
    'name', [row(n, late=n not in WIDE and i % 2 == 1) for i, n in enumerate(models.MODELS)]
)
def test_each_step_gives_the_gradient_of_the_formula_and_the_first_is_exact(name):
    case = models.case(name)
    for t, (_, _, grads) in enumerate(by_steps(case, RULE)):
        assert_drawn_close(grads, at(es(case, DECAY), t))
        if t == 0:
            assert_drawn_close(grads, at(es(case, 0.0), 0))


@pytest.mark.tier(quick=3, one_in=2)
@pytest.mark.parametrize('name', wide_first([name for name in models.MODELS if name in WIDE]))
def test_without_decay_every_step_is_the_exact_same_step_gradient(name):
    case = models.case(name)
    for t, (_, _, grads) in enumerate(by_steps(case, rules.es_d_rtrl(0.0))):
        assert_drawn_close(grads, at(es(case, 0.0), t))


@pytest.mark.tier(quick=1, one_in=2)
@pytest.mark.parametrize('name', ['leaky', 'lstm', 'sparse', 'lora'])
def test_the_first_step_is_plain_bptt(name):
    case = models.case(name, models.cubic, steps=1)
    assert_drawn_close(over_sequence(case, RULE, None)[0], oracles.bptt(case))


@pytest.mark.tier(quick=1, one_in=2)
@pytest.mark.parametrize('rank', [1, 2, 9])
def test_a_rank_is_a_decay(rank):
    case = models.case('lstm')
    grads, *_ = over_sequence(case, rules.es_d_rtrl(rank), 3)
    assert_drawn_close(grads, oracles.total(es(case, (rank - 1) / (rank + 1))))


def test_the_decay_matters():
    case = models.case('leaky')
    assert errors(oracles.total(es(case, 0.5)), oracles.total(es(case, DECAY)))["['w']"] > 1e-2


@pytest.mark.tier(quick=2, one_in=2)
@ragged(FEW, 1, None)
def test_a_mask_weighs_the_losses_and_nothing_else(name, window):
    case = models.case(name)
    assert_drawn_close(
        over_sequence(case, RULE, window, mask=MASK)[0], oracles.total(es(case, DECAY), MASK)
    )


@pytest.mark.tier(quick=1, one_in=4)
@ragged(FEW, None, 1)
def test_a_reset_of_some_lanes_restarts_their_traces_and_their_correction(name, window):
    case = models.case(name)
    carry0, flags = other_carry(case), np.zeros((6, 2), bool)
    flags[[2, 4], 0] = flags[[1, 2], 1] = True
    want = oracles.restarted(lambda part: es(part, DECAY), case, flags, carry0)
    assert_drawn_close(
        over_sequence(case, RULE, window, reset=(flags, carry0))[0], oracles.total(want)
    )


def test_a_reset_of_an_unbatched_model_restarts_it():
    case = models.case('vector')
    carry0, flags = other_carry(case), np.array([False, False, False, True, False, False])
    parts = [case.steps(0, 3, case.carry), case.steps(3, 6, carry0)]
    want = added([oracles.total(es(part, DECAY)) for part in parts])
    assert_drawn_close(over_sequence(case, RULE, 3, reset=(flags, carry0))[0], want)


@pytest.mark.tier(quick=1, one_in=2)
@pytest.mark.parametrize('name', FEW)
def test_a_later_call_continues_the_stream(name):
    case = models.case(name)
    first, _, _, state = over_sequence(case, RULE, 1, slice(0, 3))
    second, _, _, state = over_sequence(case, RULE, None, slice(3, 6), state)
    assert_drawn_close(added([first, second]), oracles.total(es(case, DECAY)))
    assert np.all(state.t == 6)


def test_steps_without_a_gradient_count_in_the_trace_and_in_the_correction():
    """Three steps run by ``step`` alone, then three gradients: as if all six had given one."""
    case = models.case('lstm')
    learner, state = start(case, RULE)
    step, grad = quick(learner.step), quick(learner.grad(case.loss))
    for x in case.xs[:3]:
        _, state = step(case.params, state, x)
    for t in (3, 4, 5):
        grads, _, _, state = grad(case.params, state, case.xs[t], case.ys[t])
        assert_drawn_close(grads, at(es(case, DECAY), t))
