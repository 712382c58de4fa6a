"""Delay lines: what they give back, and what a compiler makes of them."""

import brainstate
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u

import braintrace
from braintrace import nn
from tests.compare import assert_close
from tests.precision import float64_models as float64_models

N = 3


def outputs(line, xs, batch_size=None):
    line.init_state(batch_size)
    return u.math.stack([line(x) for x in xs])


@pytest.mark.parametrize('batch_size', [None, 1])
def test_each_unit_comes_back_after_its_own_delay(batch_size):
    lead = () if batch_size is None else (batch_size,)
    xs = np.random.default_rng(0).normal(size=(9, *lead, N))
    delays = np.array([[0, 1, 4], [3, 0, 2]])
    found = outputs(nn.Delay(N, delays, 6, classes=2), xs, batch_size)
    assert found.shape == (9, *lead, 2, N)
    for (c, n), d in np.ndenumerate(delays):
        want = np.concatenate([np.zeros((d, *lead)), xs[: 9 - d, ..., n]])
        assert_close(found[..., c, n], want)


def test_no_delay_is_no_line_and_a_time_is_measured_by_the_step():
    xs, line = jnp.arange(12.0).reshape(6, 2), nn.Delay(2, 0)
    assert_close(outputs(line, xs), xs)
    assert not line.states(brainstate.HiddenState)
    for dt, steps in ((1.0, 4), (2.0, 2)):
        with brainstate.environ.context(dt=dt * u.ms):
            line = nn.Delay(2, 0.004 * u.second, line_init=0 * u.mV)
            found = outputs(line, xs * u.mV)
        assert line.line.value.shape == (steps + 1, 2) and u.get_unit(found) == u.mV
        assert_close(found[steps:].to_decimal(u.mV), xs[: 6 - steps])


def test_a_narrow_width_reads_the_nearest_step_without_a_new_program():
    line, traced = nn.Delay(2, np.array([1.4, 2.6]), 4, width=2.0, learn=True), []
    line.init_state()

    @brainstate.transform.jit
    def step(x):
        traced.append(x)
        return line(x)

    wide = [step(x) for x in jnp.eye(5, 1) * jnp.ones(2)]
    assert all(float(y.min()) > 0 for y in wide)
    line.width.value = jnp.asarray(0.01)
    line.reset_state()
    narrow = jnp.stack([step(x) for x in jnp.eye(5, 1) * jnp.ones(2)])
    assert_close(narrow, jnp.zeros((5, 2)).at[(1, 3), (0, 1)].set(1.0), 1e-12)
    assert len(traced) <= 2


def test_a_line_of_more_than_64_steps_is_traced():
    """The loss reads what came 70 steps before: without the line the gradient is 0."""
    late, xs = 70, np.random.default_rng(1).normal(size=(75, 1, 2))
    model = brainstate.nn.Sequential(nn.Linear(2, 1, b_init=None), nn.Delay(1, late))
    learner = braintrace.compile(model, 'd_rtrl', jnp.asarray(xs[0]), batch_size=1)
    W = np.asarray(model.layers[0].weight.value['weight'])
    square = lambda x: jnp.sum(learner(x) ** 2)
    options = {'reduction': 'sum', 'keep_trace': False}
    got = learner.etrace_grad(jnp.asarray(xs), step_fn=square, **options).grads
    read = xs[: len(xs) - late, 0]
    assert learner.report.exact and learner.report.memory == late * 2 * xs.itemsize
    assert_close(got['layers', 0, 'weight']['weight'], 2 * read.T @ (read @ W), 1e-12)


def test_a_line_alone_trains_although_no_op_has_a_trace():
    """What a loss reads of the line at once needs none."""
    xs = jnp.asarray(np.random.default_rng(2).normal(size=(9, 2, N)))
    line = nn.Delay(N, np.full(N, 1.5), 4, learn=True)
    with pytest.warns(braintrace.errors.BraintraceWarning, match='no weight'):
        learner = braintrace.compile(line, 'd_rtrl', xs[0], batch_size=2)
    before = line.delay
    learner.etrace_train(
        xs, step_fn=lambda x: jnp.sum((learner(x) - x) ** 2), optimizer=optax.sgd(0.01)
    )
    assert (line.delay < before).all()


def test_what_leaves_a_line_has_credit_by_es_d_rtrl_too():
    """Its signal is that of new states; a line that is longer than its delays changes nothing."""
    xs = jnp.asarray(np.random.default_rng(3).normal(size=(12, 2, 3)))

    def gradient(longest):
        with brainstate.random.seed_context(0):
            layers = nn.Linear(3, N), nn.Expon(N, tau=2.0), nn.Delay(N, 3, longest)
            model = brainstate.nn.Sequential(*layers)
            learner = braintrace.compile(
                model, braintrace.rules.es_d_rtrl(0.9), xs[0], batch_size=2
            )
        found = learner.etrace_grad(xs, step_fn=lambda x: jnp.sum(learner(x) ** 2))
        return found.grads['layers', 0, 'weight']['weight']

    short, longer = map(gradient, (None, 5))
    assert abs(short).min() > 0
    assert_close(short, longer, 1e-12)
