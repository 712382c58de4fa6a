"""The time constants of readouts, and their units."""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace.errors import EtpUnitError
from braintrace.nn import FilteredReadout, LeakyRateReadout


def decay_of(readout):
    readout.init_state()
    readout.f.value = jnp.ones(3)
    readout(jnp.zeros(3))
    return np.asarray(readout.f.value)


@pytest.mark.parametrize('tau, left', [(0.5, -2), (40, -0.025), (0.01 * u.second, -0.2)])
def test_a_number_counts_steps_and_a_time_is_measured_against_dt(tau, left):
    with brainstate.environ.context(dt=2 * u.ms):
        found = decay_of(FilteredReadout(3, 2, tau=tau))
    np.testing.assert_allclose(found, np.exp(left), rtol=1e-6)


@pytest.mark.parametrize('context', [{}, {'dt': 0.1}, {'dt': 1 * u.mV}])
def test_a_time_without_a_dt_in_time_is_refused(context):
    with (
        brainstate.environ.context(**context),
        pytest.raises(EtpUnitError, match='brainstate.environ.set'),
    ):
        decay_of(FilteredReadout(3, 2, tau=5 * u.ms))


def test_each_output_may_leak_by_itself():
    readout = LeakyRateReadout(3, 2, tau=np.array([1.0, 4.0]), w_init=0.0, r_init=1.0)
    readout.init_state()
    np.testing.assert_allclose(readout(jnp.ones(3)), np.exp([-1.0, -0.25]), rtol=1e-6)


@pytest.mark.parametrize('cls', [FilteredReadout, LeakyRateReadout])
def test_a_state_of_another_unit_than_its_input_is_refused(cls):
    readout = cls(3, 2, tau=5.0)
    readout.init_state()
    with pytest.raises(EtpUnitError, match=r'has the unit 1.*adds to it has mA.*_init'):
        readout(jnp.ones(3) * u.mA)
