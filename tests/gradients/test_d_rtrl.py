"""D_RTRL of the library against the oracles, for every row of the table."""

import jax
import numpy as np
import pytest

from braintrace import functional, rules
from braintrace.errors import OptionError
from tests import models, oracles
from tests.compare import added, assert_drawn_close, assert_moves, at
from tests.gradients.harness import (
    by_steps,
    other_carry,
    over_sequence,
    quick,
    ragged,
    start,
    step_program,
)
from tests.gradients.rows import every_wide_first, every_window
from tests.oracles import dense_recursion as dense

pytestmark = pytest.mark.drawn
RULE = rules.d_rtrl()
MASK = np.array([1.0, 0.0, 0.5, 1.0, 2.0, 1.5])
FEW = [
    'gru',
    'lstm_fused',
    'adaptive_lif',
    'learned_decay',
    'conv1d',
    'spiking_two',
    'stored_spike',
    'fused_attention',
    'two_rows',
]


@pytest.mark.tier(quick=1, one_in=8)
@every_window(1, None)
def test_windows_give_the_gradient_of_the_dense_recursion(name, window):
    case = models.case(name)
    grads, losses, *_ = over_sequence(case, RULE, window)
    assert losses.shape == (len(case.xs),)
    assert_drawn_close(grads, oracles.total(dense(case)))


@pytest.mark.tier(quick=3, one_in=2)
@every_wide_first()
def test_each_step_gives_the_gradient_of_the_dense_recursion(name):
    case = models.case(name)
    ops, carry = models.ops.NumpyOps(), case.carry
    for t, (loss, output, grads) in enumerate(by_steps(case, RULE)):
        assert_drawn_close(grads, at(dense(case), t))
        want, carry = oracles.real(case.run(ops, case.params, carry, case.xs[t]))
        np.testing.assert_allclose(output, want, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(loss, case.loss(want, case.ys[t]), rtol=1e-12)


READS_WEIGHTS = {'lora', 'attention_of_other_ops'}


@pytest.mark.tier(quick=1, one_in=4)
@every_wide_first()
def test_a_trace_that_is_written_once_in_three_steps_gives_the_same_gradients(name):
    case, rule = models.case(name), rules.d_rtrl(write_every=3)
    if name in READS_WEIGHTS:
        with pytest.raises(OptionError, match='depends on the weights'):
            start(case, rule)
        return
    for t, (_, _, grads) in enumerate(by_steps(case, rule)):
        assert_drawn_close(grads, at(dense(case), t))


@pytest.mark.tier(quick=1, one_in=2)
@pytest.mark.parametrize('name', FEW)
def test_single_steps_before_a_sequence_and_after_it(name):
    case = models.case(name)
    rule, got = rules.d_rtrl(write_every=3), []
    (learner, state), step = start(case, rule), step_program(case, rule)
    for t in (0, 1):
        grads, _, _, state = step(case.params, state, case.xs[t], case.ys[t])
        got.append(grads)
    grads, _, _, state = quick(learner.sequence_grad(case.loss, window=None, reduction='sum'))(
        case.params, state, case.xs[2:4], case.ys[2:4]
    )
    assert_drawn_close(added([*got, grads]), added([at(dense(case), t) for t in range(4)]))
    for t in (4, 5):
        grads, _, _, state = step(case.params, state, case.xs[t], case.ys[t])
        assert_drawn_close(grads, at(dense(case), t))


@pytest.mark.tier(quick=2, one_in=2)
@pytest.mark.parametrize('name', [*FEW, 'min_gru', 'three_layers', 'populations'])
def test_a_reset_ends_pending_steps_too(name):
    case = models.case(name)
    carry0, rule = other_carry(case), rules.d_rtrl(write_every=3)
    flags = np.zeros((len(case.xs), 2), bool)
    flags[[2, 4], 0] = flags[[1, 2], 1] = True
    want = oracles.restarted(dense, case, flags, carry0)
    state, step = start(case, rule)[1], step_program(case, rule)
    for t, (x, y, flag) in enumerate(zip(case.xs, case.ys, flags, strict=True)):
        state = functional.reset(state, flag, carry0)
        grads, _, _, state = step(case.params, state, x, y)
        assert_drawn_close(grads, at(want, t))


@pytest.mark.tier(quick=1, one_in=4)
@pytest.mark.parametrize('name', models.names(exact=True))
def test_it_is_bptt_where_nothing_is_cut(name):
    case = models.case(name, models.cubic)
    assert_drawn_close(over_sequence(case, RULE, 3)[0], oracles.bptt(case))


@pytest.mark.tier(quick=0, one_in=4)
@pytest.mark.parametrize('name', ['leaky', 'lstm', 'conv2d', 'spiking_three', 'populations'])
def test_another_loss_gives_the_gradient_of_reverse_mode_with_the_cut(name):
    case = models.case(name, models.cubic)
    assert_drawn_close(over_sequence(case, RULE, 3)[0], oracles.cut_bptt(case))


@pytest.mark.tier(quick=4)
@pytest.mark.parametrize('name', FEW)
def test_grad_through_step_is_the_online_gradient(name):
    case = models.case(name)
    learner, state = start(case, RULE)

    @quick
    def gradient(params, state, x, y):
        def loss(params):
            output, new = learner.step(params, state, x)
            return case.loss(output, y), new

        return jax.grad(loss, has_aux=True)(params)

    for t, (x, y) in enumerate(zip(case.xs, case.ys)):
        grads, state = gradient(case.params, state, x, y)
        assert_drawn_close(grads, at(dense(case), t))


def test_a_loss_may_read_the_new_carry():
    """``vanilla`` and ``bypass`` cells: the output equals, or does not determine, the new state."""
    case = models.case('leaky')

    def cell(ops, params, carry, x):
        new = case.run(ops, params, carry, x)[1]
        return new['h'], new

    reading_h = models.make_case(models.Model('leaky', cell, case.model.params))
    learner, state = start(case, RULE)

    def loss(params, state, t):
        _, new = learner.step(params, state, case.xs[t])
        return reading_h.loss(new.carry['h'], reading_h.ys[t]), new

    for t in range(len(case.xs)):
        grads, state = jax.grad(loss, has_aux=True)(case.params, state, t)
        want = at(dense(reading_h), t)
        assert_drawn_close(grads | {'out': want['out']}, want)
        assert not np.any(grads['out'])


@pytest.mark.slow
def test_gradients_of_inputs_are_those_of_the_same_step():
    """An encoder in front of the cell learns; old states, trace and t get nothing."""
    case = models.case('gru')
    learner, state = start(case, RULE)

    def loss(x, carry, step):
        return case.loss(step(x, carry), case.ys[0])

    def online(x, carry):
        return learner.step(case.params, learner.init(case.params, carry, x), x)[0]

    def plain(x, carry):
        return case.run(models.ops.JaxOps(), case.params, carry, x)[0]

    to_x, to_carry = jax.grad(loss, (0, 1))(case.xs[0], case.carry, online)
    np.testing.assert_allclose(to_x, jax.grad(loss)(case.xs[0], case.carry, plain), rtol=1e-12)
    assert not np.any(to_carry['h'])


@pytest.mark.tier(quick=0, one_in=4)
@ragged(FEW, 1, None)
def test_a_mask_weighs_the_losses_and_nothing_else(name, window):
    case = models.case(name)
    grads, losses, _, state = over_sequence(case, RULE, window, mask=MASK)
    assert_drawn_close(grads, oracles.total(dense(case), MASK))
    _, plain_losses, _, plain_state = over_sequence(case, RULE, window)
    np.testing.assert_array_equal(losses, plain_losses)
    assert_drawn_close(state.carry, plain_state.carry)


@pytest.mark.slow
def test_mean_divides_by_the_sum_of_the_mask():
    case = models.case('lstm')
    grads, *_ = over_sequence(case, RULE, 3, reduction='mean', mask=MASK)
    assert_drawn_close(grads, oracles.total(dense(case), MASK / MASK.sum()))
    grads, *_ = over_sequence(case, RULE, 3, reduction='mean')
    assert_drawn_close(grads, oracles.total(dense(case), np.full(len(MASK), 1 / len(MASK))))
    grads, *_ = over_sequence(case, RULE, 3, reduction='mean', mask=0.0 * MASK)
    assert_drawn_close(grads, oracles.total(dense(case), 0.0 * MASK))


@pytest.mark.tier(quick=0, one_in=4)
@ragged([*FEW, 'min_gru', 'three_layers', 'populations'], None, 1)
def test_a_reset_of_some_lanes_is_a_restart_of_those_lanes(name, window):
    case = models.case(name)
    carry0 = other_carry(case)
    flags = np.zeros((len(case.xs), 2), bool)
    flags[[2, 4], 0] = flags[[1, 2], 1] = True
    want = oracles.restarted(dense, case, flags, carry0)
    assert_moves(oracles.total(want))
    grads, *_ = over_sequence(case, RULE, window, reset=(flags, carry0), mask=MASK)
    assert_drawn_close(grads, oracles.total(want, MASK))


@pytest.mark.tier(quick=0, one_in=2)
@pytest.mark.parametrize('name', ['lstm', 'vector', 'context'])
def test_a_reset_of_all_lanes_is_a_restart(name):
    case = models.case(name)
    carry0, flags = other_carry(case), np.array([True, False, False, True, False, False])
    parts = [case.steps(0, 3, carry0), case.steps(3, 6, carry0)]
    want = added([oracles.total(dense(part)) for part in parts])
    assert_drawn_close(over_sequence(case, RULE, 3, reset=(flags, carry0))[0], want)


@pytest.mark.tier(quick=0, one_in=4)
@pytest.mark.parametrize('name', FEW)
def test_a_later_call_continues_the_stream(name):
    case = models.case(name)
    first, _, _, state = over_sequence(case, RULE, 1, slice(0, 3))
    second, _, _, state = over_sequence(case, RULE, None, slice(3, 6), state)
    assert_drawn_close(added([first, second]), oracles.total(dense(case)))
    _, _, _, whole = over_sequence(case, RULE, 1)
    assert_drawn_close(state.carry, whole.carry)
    assert_drawn_close(state.trace, whole.trace)
    np.testing.assert_array_equal(state.t, whole.t)


@pytest.mark.parametrize('name', ['leaky', 'lstm_fused', 'spiking_two'])
def test_one_compilation_serves_every_step(name):
    case, traced = models.case(name), []
    learner, state = start(case, RULE)

    @jax.jit
    def step(params, state, x, y):
        traced.append(None)
        return learner.grad(case.loss)(params, state, x, y)

    for x, y in zip(case.xs, case.ys):
        _, _, _, state = step(case.params, state, x, y)
    assert len(traced) == 1
