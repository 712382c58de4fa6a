"""What the leaky readout has beyond the other cells: a time constant."""
from __future__ import annotations

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace.nn import LeakyRateReadout


def decay_of(readout):
    readout.init_state()
    readout.r.value = jnp.ones(2)
    return np.asarray(readout(jnp.zeros(3)))


@pytest.mark.parametrize('tau', [0.5, 5., 40])
def test_a_number_counts_steps(tau):
    np.testing.assert_allclose(decay_of(LeakyRateReadout(3, 2, tau=tau)), np.exp(-1 / tau), rtol=1e-6)


def test_a_time_is_measured_against_dt():
    readout = LeakyRateReadout(3, 2, tau=0.01 * u.second)
    with brainstate.environ.context(dt=2 * u.ms):
        np.testing.assert_allclose(decay_of(readout), np.exp(-0.2), rtol=1e-6)


@pytest.mark.parametrize('context', [{}, {'dt': 0.1}, {'dt': 1 * u.mV}])
def test_a_time_without_a_dt_in_time_is_refused(context):
    with brainstate.environ.context(**context), pytest.raises(braintrace.EtpUnitError, match='brainstate.environ.set'):
        decay_of(LeakyRateReadout(3, 2, tau=5 * u.ms))


def test_a_tau_of_another_dimension_is_refused():
    with pytest.raises(braintrace.EtpUnitError, match='give a time'):
        LeakyRateReadout(3, 2, tau=5 * u.mV)


@pytest.mark.parametrize('tau', [0., -1., 0 * u.ms])
def test_a_tau_that_is_not_positive_is_refused(tau):
    with pytest.raises(braintrace.OptionError, match='larger than 0'):
        LeakyRateReadout(3, 2, tau=tau)
