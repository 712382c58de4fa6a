"""What the leaky readout has beyond the other cells: a time constant."""

from __future__ import annotations

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace.nn import LeakyRateReadout


def decay_of(readout):
    readout.init_state()
    readout.f.value = jnp.ones(3)
    readout(jnp.zeros(3))
    return np.asarray(readout.f.value)


@pytest.mark.parametrize('tau', [0.5, 5.0, 40])
def test_a_number_counts_steps(tau):
    np.testing.assert_allclose(
        decay_of(LeakyRateReadout(3, 2, tau=tau)), np.exp(-1 / tau), rtol=1e-6
    )


def test_a_time_is_measured_against_dt():
    readout = LeakyRateReadout(3, 2, tau=0.01 * u.second)
    with brainstate.environ.context(dt=2 * u.ms):
        np.testing.assert_allclose(decay_of(readout), np.exp(-0.2), rtol=1e-6)


def test_filtering_before_the_weights_is_filtering_behind_them():
    brainstate.random.seed(1)
    readout = LeakyRateReadout(3, 2, tau=4 * u.ms, b_init=brainstate.nn.init.Normal(0.3))
    readout.init_state(batch_size=2)
    weight, bias = (np.asarray(readout.W.weight.value[n], float) for n in ('weight', 'bias'))
    r = np.zeros((2, 2))
    for step, x in enumerate(np.random.default_rng(0).normal(size=(5, 2, 3))):
        with brainstate.environ.context(dt=(1 + step) * u.ms):
            got = readout(jnp.asarray(x, 'float32'))
        r = np.exp(-(1 + step) / 4) * r + x @ weight + bias
        np.testing.assert_allclose(got, r, rtol=0, atol=2e-6)


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = braintrace.nn.MinGRUCell(2, 3)
        self.readout = LeakyRateReadout(3, 2, tau=5.0, b_init=brainstate.nn.init.Normal(0.3))

    def update(self, x):
        return self.readout(self.cell(x))


def test_what_the_loss_reads_through_the_filter_keeps_the_history_of_the_layer_in_front():
    """The loss is that of the last step alone, which reads the past through the filter."""
    learner = braintrace.compile(Net(), 'D_RTRL', jnp.zeros((2, 2)), batch_size=2, seed=0)
    online, params, carry = learner.pure()
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(12, 2, 2)), 'float32')
    last = jnp.arange(12) == 11

    def loss(output, weight):
        return weight * jnp.sum((output - 1) ** 2)

    state = online.init(params, carry, xs[0])
    got = online.sequence_grad(loss, reduction='sum')(params, state, xs, last)[0]
    wanted = braintrace.verify.bptt_gradients(online.cell, params, carry, xs, last, loss)
    for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
        assert np.abs(leaf).max() > 0.1, path
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(np.abs(b).max()))
    assert learner.report.exact


@pytest.mark.parametrize('context', [{}, {'dt': 0.1}, {'dt': 1 * u.mV}])
def test_a_time_without_a_dt_in_time_is_refused(context):
    with (
        brainstate.environ.context(**context),
        pytest.raises(braintrace.EtpUnitError, match='brainstate.environ.set'),
    ):
        decay_of(LeakyRateReadout(3, 2, tau=5 * u.ms))


def test_a_tau_of_another_dimension_is_refused():
    with pytest.raises(braintrace.EtpUnitError, match='give a time'):
        LeakyRateReadout(3, 2, tau=5 * u.mV)


@pytest.mark.parametrize('tau', [0.0, -1.0, 0 * u.ms])
def test_a_tau_that_is_not_positive_is_refused(tau):
    with pytest.raises(braintrace.OptionError, match='larger than 0'):
        LeakyRateReadout(3, 2, tau=tau)
