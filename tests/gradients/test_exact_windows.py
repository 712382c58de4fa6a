"""Exact windows: reverse mode through K steps, the trace at the border, against the oracles."""

import functools

import jax
import numpy as np
import optax
import pytest

from braintrace import rules
from tests import models, oracles
from tests.compare import added, assert_drawn_close, differences
from tests.gradients.harness import MASK, learner_of, other_carry, quick, restarts, start
from tests.gradients.rows import every_core_first, every_wide_first
from tests.late import LATE

pytestmark = pytest.mark.drawn
RULE = rules.d_rtrl()
few = pytest.mark.parametrize('name', ['gru', 'lstm_fused', 'adaptive_lif', 'stored_spike'])


@functools.cache
def program(case, rule, window, keep_trace):
    options = {'reduction': 'sum', 'keep_trace': keep_trace, 'inside': 'exact'}
    return quick(learner_of(case, rule).sequence_grad(case.loss, window=window, **options))


def gradient(case, rule, window, keep_trace=True, state=None, steps=slice(None), **arguments):
    """The gradient of an exact window."""
    state = start(case, rule)[1] if state is None else state
    run = program(case, rule, window, keep_trace)
    return run(case.params, state, case.xs[steps], case.ys[steps], **arguments)


@pytest.mark.tier(quick=3)
@every_core_first()
def test_one_window_is_bptt_for_every_parameter(name):
    case = models.case(name)
    assert_drawn_close(gradient(case, RULE, None)[0], oracles.bptt(case))


@pytest.mark.tier(quick=1)
@every_wide_first()
def test_the_trace_is_read_at_the_border_of_a_window(name):
    case = models.case(name)
    assert_drawn_close(gradient(case, RULE, 4)[0], oracles.exact_windows(case, 4))


@pytest.mark.slow
@pytest.mark.parametrize('rule', [rules.es_d_rtrl(0.9), rules.same_step()])
def test_one_window_of_any_rule_is_bptt(rule):
    case = models.case('lstm')
    assert_drawn_close(gradient(case, rule, None)[0], oracles.bptt(case))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['gru', 'two_layers'])
def test_without_a_trace_it_is_truncated_bptt(name):
    case = models.case(name)
    carry, parts = case.carry, []
    for first in (0, 3):
        part = case.steps(first, first + 3, carry)
        parts.append(oracles.bptt(part))
        for x in part.xs:
            carry = oracles.real(case.run(models.ops.NumpyOps(), case.params, carry, x)[1])
    want = added(parts)
    dropped, _, _, state = gradient(case, RULE, 3, keep_trace=False)
    assert_drawn_close(dropped, want)
    assert not np.any(state.t)
    assert_drawn_close(gradient(case, rules.same_step(), 3)[0], want)
    assert differences(gradient(case, RULE, 3)[0], want)


@pytest.mark.tier(quick=1)
@few
def test_windows_of_one_step_are_those_of_the_whole_credit(name):
    case = models.case(name)
    want = oracles.total(oracles.dense_recursion(case, 'whole'))
    assert_drawn_close(gradient(case, RULE, 1)[0], want)


@pytest.mark.tier(quick=0)
@few
def test_resets_masks_and_a_later_call(name):
    case = models.case(name)
    cell = functools.partial(case.model.cell, models.ops.JaxOps())
    data = case.params, case.carry, case.xs, case.ys, case.loss
    grads, *_ = gradient(case, RULE, None, reset=restarts(case), mask=MASK)
    assert_drawn_close(grads, oracles.by_time(cell, *data, MASK, restarts(case)))
    first, _, _, state = gradient(case, RULE, 3, steps=slice(0, 3))
    second, _, _, state = gradient(case, RULE, 3, state=state, steps=slice(3, 6))
    assert_drawn_close(added([first, second]), oracles.exact_windows(case, 3))


@pytest.mark.slow
def test_resets_inside_windows_with_a_trace():
    """A lane that starts again inside a window sends nothing to the trace behind the border."""
    case = models.case('lstm_fused')
    carry0, flags = other_carry(case), np.zeros((len(case.xs), 2), bool)
    flags[2, 0] = flags[3, 1] = flags[5, 0] = True
    one = gradient(case, RULE, None, reset=(flags, carry0))[0]
    state, total = None, []
    for part in (slice(0, 3), slice(3, 6)):
        options = {'steps': part, 'reset': (flags[part], carry0)}
        grads, _, _, state = gradient(case, RULE, None, state=state, **options)
        total.append(grads)
    both = gradient(case, RULE, 3, reset=(flags, carry0))[0]
    assert_drawn_close(added(total), both)
    assert differences(both, one)


@pytest.mark.slow
@pytest.mark.parametrize('rule', [RULE, LATE])
def test_updates_take_exact_windows_too(rule):
    case, optimizer = models.case('lstm_fused'), optax.sgd(0.05)
    learner, state = start(case, rule)
    update = quick(learner.sequence_update(case.loss, optimizer, update_every=3, inside='exact'))
    params, opt_state = case.params, optimizer.init(case.params)
    new, *_ = update(params, opt_state, state, case.xs, case.ys)
    run = quick(learner.sequence_grad(case.loss, window=None, inside='exact'))
    for k in (0, 3):
        grads, _, _, state = run(params, state, case.xs[k : k + 3], case.ys[k : k + 3])
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
    assert_drawn_close(new, params)


@pytest.mark.slow
def test_at_the_border_a_factored_trace_is_read_as_it_stands():
    """ES_D_RTRL: ``xy_to_dw(ex, lam . ef / (1 - a^t))`` after two steps."""
    case = models.case('leaky')
    decay = 0.8
    rule = rules.es_d_rtrl(decay)
    grads, _, _, state = gradient(case, rule, None, steps=slice(0, 2))
    parts = gradient(case, rule, 2, steps=slice(0, 4))[0]
    later = case.steps(2, 4, jax.tree.map(np.asarray, dict(state.carry)))
    direct, lam = oracles.through(later)
    history = jax.tree.map(lambda a, b, c: a - b - c, parts, grads, direct)
    for key, of_group in state.trace.items():
        (slots,) = of_group.values()
        sent = lam['h'] * slots['f'][..., 0] / (1 - decay**2)
        np.testing.assert_allclose(history[key], slots['x'].T @ sent, rtol=1e-10, atol=1e-13)
