"""Synapses, projections and readouts: numbers, units, and the laws of their sources."""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace import nn
from braintrace.errors import EtpShapeError, EtpUnitError


def started(module):
    return brainstate.nn.init_all_states(module)


def test_conductances_and_currents_are_not_added():
    synapses = started(nn.Expon(3, g_init=0 * u.mS))
    with pytest.raises(EtpUnitError, match='the input has the unit mA and the synapse mS'):
        synapses(jnp.ones(3) * u.mA)
    neurons = started(nn.LIF(3, R=1 * u.ohm, V_th=1 * u.mV, V_rest=0 * u.mV, V_reset=0 * u.mV))
    with pytest.raises(EtpUnitError, match='the current has the unit mS and R ohm'):
        neurons(nn.CUBA()(synapses(jnp.ones(3) * u.mS)))


@pytest.mark.parametrize('decay, rise', [(100.0, 20.0), (90.0, 60.0)])
def test_the_highest_conductance_after_one_spike_is_one(decay, rise):
    synapses, spikes = started(nn.DualExpon(1, decay, rise)), jnp.eye(400, 1)
    found = np.asarray(brainstate.transform.for_loop(synapses, spikes))[:, 0]
    assert found[0] == 0 and found.max() == pytest.approx(1, abs=1e-3)
    assert found.argmax() == pytest.approx(np.log(decay / rise) / (1 / rise - 1 / decay), abs=1)


@pytest.mark.parametrize('shape', [(2, 1), (1,), (3,), (2, 2, 2)])
def test_a_number_of_a_current_is_one_for_each_target(shape):
    g = V = jnp.ones((2, 2))
    for out in (nn.COBA(np.ones(shape)), nn.CUBA(np.ones(shape))):
        with pytest.raises(EtpShapeError, match='or an array of one for each target'):
            out(g, V)
    np.testing.assert_array_equal(nn.COBA(np.array([1.0, 3.0]))(g, V), [[0, 2], [0, 2]])
    np.testing.assert_array_equal(nn.CUBA(np.array([1.0, 3.0]))(g), [[1, 3], [1, 3]])


FIVE = np.array([5.0, 8.0, 3.0])
NARROW = {
    'Expon': lambda: nn.Expon(3, FIVE),
    'Expon one': lambda: nn.Expon(3, np.float64(5.0)),
    'Expon time': lambda: nn.Expon(3, np.float64(5.0) * u.ms),
    'DualExpon': lambda: nn.DualExpon(3, FIVE, FIVE / 2),
    'STP': lambda: nn.STP(3, np.float64(0.2), FIVE, FIVE),
    'Filtered': lambda: nn.FilteredReadout(3, 2, np.float64(5.0)),
    'Rate': lambda: nn.LeakyRateReadout(3, 3, FIVE * u.ms),
    'LIF': lambda: nn.LIF(3, FIVE * u.ms, R=np.float64(2.0)),
}


@pytest.mark.parametrize('name', NARROW)
def test_numbers_have_the_float_type_of_the_states(name):
    with brainstate.environ.context(precision='bf16', dt=np.float64(1.0) * u.ms):
        module = started(NARROW[name]())
        states = module.states(brainstate.HiddenState).values()
        before = {s.value.dtype for s in states}
        y = module(jnp.ones(3, 'bfloat16'))
    assert before == {s.value.dtype for s in states} == {y.dtype} == {jnp.dtype('bfloat16')}


class Doubled(brainstate.nn.Module):
    def update(self, x):
        return 2 * x


@pytest.mark.parametrize('comm', [lambda x: 2 * x, Doubled()])
def test_a_function_or_a_module_without_sizes_may_be_its_weights(comm):
    np.testing.assert_allclose(started(nn.Projection(comm, nn.Expon(3)))(jnp.ones(3)), 2)


@pytest.mark.parametrize('first', [0, 0 * u.mS, np.zeros(3, int), 0.5, np.float64(0.5)])
def test_a_first_value_of_any_kind_of_number_is_a_float(first):
    synapses = nn.Expon(3, g_init=first)
    for precision in (32, 'bf16'):
        with brainstate.environ.context(precision=precision):
            synapses.init_state()
            assert u.get_magnitude(synapses.g.value).dtype == brainstate.environ.dftype()


def test_regular_spikes_use_the_resources_of_the_source():
    """The stationary response R u of the paper's recursion, spikes every n steps."""
    n, U, tau_f, tau_d = 4, 0.3, 20.0, 40.0
    plastic = started(nn.STP(1, U=U, tau_f=tau_f, tau_d=tau_d))
    spikes = jnp.arange(400.0)[:, None] % n == 0
    weighted = brainstate.transform.for_loop(plastic, spikes.astype(float))[:, 0]
    used = U / (1 - (1 - U) * np.exp(-n / tau_f))
    left = np.exp(-n / tau_d)
    resources = (1 - left) / (1 - (1 - used) * left)
    assert weighted[396] == pytest.approx(used * resources, rel=1e-5) and weighted[397] == 0


# -- readouts -------------------------------------------------------------------------------------


def decay_of(readout):
    started(readout).f.value = jnp.ones(3)
    readout(jnp.zeros(3))
    return np.asarray(readout.f.value)


@pytest.mark.parametrize('tau, left', [(0.5, -2), (40, -0.025), (0.01 * u.second, -0.2)])
def test_a_number_counts_steps_and_a_time_is_measured_against_dt(tau, left):
    with brainstate.environ.context(dt=2 * u.ms):
        found = decay_of(nn.FilteredReadout(3, 2, tau=tau))
    np.testing.assert_allclose(found, np.exp(left), rtol=1e-6)


@pytest.mark.parametrize('context', [{}, {'dt': 0.1}, {'dt': 1 * u.mV}])
def test_a_time_without_a_dt_in_time_is_refused(context):
    with (
        brainstate.environ.context(**context),
        pytest.raises(EtpUnitError, match='brainstate.environ.set'),
    ):
        decay_of(nn.FilteredReadout(3, 2, tau=5 * u.ms))


def test_each_output_may_leak_by_itself():
    readout = nn.LeakyRateReadout(3, 2, tau=np.array([1.0, 4.0]), w_init=0.0, r_init=1.0)
    np.testing.assert_allclose(started(readout)(jnp.ones(3)), np.exp([-1.0, -0.25]), rtol=1e-6)


@pytest.mark.parametrize('cls', [nn.FilteredReadout, nn.LeakyRateReadout])
def test_a_state_of_another_unit_than_its_input_is_refused(cls):
    with pytest.raises(EtpUnitError, match=r'has the unit 1.*adds to it has mA.*_init'):
        started(cls(3, 2, tau=5.0))(jnp.ones(3) * u.mA)
