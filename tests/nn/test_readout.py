"""What readouts have beyond the other cells: a time constant, and what a filter keeps."""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace.errors import EtpUnitError
from braintrace.nn import LIF, FilteredReadout, LeakyRateReadout, Linear


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


class Net(brainstate.nn.Module):
    def __init__(self, readout):
        super().__init__()
        self.layer, self.neurons = Linear(2, 3), LIF(3, tau=5.0, R=5.0)
        self.readout = readout

    def update(self, x):
        return self.readout(self.neurons(self.layer(x)))


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


def test_a_filter_behind_the_weights_cuts_that_history_and_the_report_says_so():
    net = Net(LeakyRateReadout(3, 2, tau=5.0))
    learner = braintrace.compile(net, 'D_RTRL', jnp.zeros((2, 2)), batch_size=2)
    assert not learner.report.exact
    assert 'readout/r' in str(learner.report)


PUBLIC = [
    [0.6593654155731201, -0.25623077154159546],
    [0.7898427844047546, 0.35271596908569336],
    [0.8966686129570007, 0.8512793779373169],
]


def test_the_leaky_readout_is_that_of_the_public_package():
    """Its parameter, its state, and numbers that braintrace 0.2.8 of PyPI printed."""
    weight, first = jnp.arange(6.0).reshape(3, 2) / 8 - 0.25, jnp.array([0.5, -1.0])
    readout = LeakyRateReadout(3, 2, w_init=weight, r_init=first)
    readout.init_state()
    assert [(*path, value.value.shape) for path, value in readout.states().items()] == [
        ('W', (3, 2)),
        ('r', (2,)),
    ]
    with brainstate.environ.context(dt=1 * u.ms):
        got = [readout(jnp.array([1.0, -0.5, 2.0])) for _ in range(3)]
    np.testing.assert_allclose(got, PUBLIC, rtol=1e-6)


@pytest.mark.parametrize('cls', [FilteredReadout, LeakyRateReadout])
def test_a_state_of_another_unit_than_its_input_is_refused(cls):
    readout = cls(3, 2, tau=5.0)
    readout.init_state()
    with pytest.raises(EtpUnitError, match=r'has the unit 1.*adds to it has mA.*_init'):
        readout(jnp.ones(3) * u.mA)
