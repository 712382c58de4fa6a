"""What neurons have beyond other layers: spikes made of their state, units, a refractory time."""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import nn
from braintrace.errors import EtpUnitError, OptionError

NEURONS = {'IF': nn.IF, 'LIF': nn.LIF, 'ALIF': nn.ALIF, 'AdLIF': nn.AdLIF, 'GIF': nn.GIF}
neurons = pytest.mark.parametrize('name', NEURONS)
POTENTIALS = {'V_th_inf': 1.0, 'V_th_reset': 0.5, 'V_rest': 0.0, 'V_reset': 0.0}
MV = {'V_th': 20 * u.mV, 'V_reset': -5 * u.mV}


def run(units, current, steps, batch_size=None):
    units.init_state(batch_size)
    step = brainstate.transform.jit(units)
    return np.stack([np.asarray(step(current)) for _ in range(steps)])


def test_after_a_spike_the_potential_is_held_for_the_refractory_time():
    units = nn.LIF(1, tau=1.0, tau_ref=3, spk_reset='hard')
    units.init_state()
    got = [(float(units(jnp.full(1, 9.0))[0]), float(units.V.value[0])) for _ in range(9)]
    fired = (1.0, 9 * (1 - np.exp(-1)))
    want = [fired, *3 * [(0.0, 0.0)], fired, *3 * [(0.0, 0.0)], fired]
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    'tau_ref, steps', [(2 * u.ms, 4), (1.9 * u.ms, 4), (0.1 * u.ms, 1), (3, 3)]
)
def test_the_refractory_time_is_a_whole_number_of_steps(tau_ref, steps):
    tau = 1.0 if isinstance(tau_ref, int) else 0.5 * u.ms
    units = nn.IF(1, tau, tau_ref=tau_ref, spk_reset='hard')
    with brainstate.environ.context(dt=0.5 * u.ms):
        spikes = run(units, jnp.full(1, 2.0), 2 * steps + 3)[:, 0]
    np.testing.assert_array_equal(np.flatnonzero(spikes), [0, steps + 1, 2 * steps + 2])


def test_jumps_of_zero_have_the_unit_of_the_current():
    volts = {name: value * u.mV for name, value in POTENTIALS.items()}
    units, plain = nn.GIF(2, R=1 * u.ohm, **volts, A2=-1 * u.uA), nn.GIF(2, **POTENTIALS, A2=-1e-3)
    run(units, jnp.ones(2) * u.mA, 1)
    run(plain, jnp.ones(2), 1)
    assert [u.get_unit(I.value) for I in (units.I1, units.I2)] == [u.mA, u.mA]
    np.testing.assert_allclose(units.V.value.to_decimal(u.mV), plain.V.value, rtol=1e-6)


def test_the_adaptation_current_divides_what_a_constant_input_does():
    units = nn.AdLIF(1, tau=3.0, tau_w=5.0, a=2.0, R=6.0, V_rest=-0.5, V_reset=-1.0, V_th=2.0)
    spikes = run(units, jnp.full(1, 0.5), 200)
    np.testing.assert_allclose(units.V.value, -0.5 + 6 * 0.5 / (1 + 2), rtol=1e-5)
    np.testing.assert_allclose(units.w.value, 2.0, rtol=1e-5)
    assert not spikes.any()


def test_at_its_boundary_a_resonator_turns_and_keeps_its_size():
    """An Euler step of angle sin(a) turns by a where the damping is that of the boundary."""
    units = nn.BRF(2, omega=jnp.array([0.6, 0.8]), b=0.0, tau=1.0, V_init=0.9)
    run(units, jnp.zeros(2), 7)
    z = np.asarray(units.V.value) + 1j * np.asarray(units.V_im.value)
    np.testing.assert_allclose(z, 0.9 * np.exp(7j * np.arcsin([0.6, 0.8])), rtol=1e-5)


def test_a_spike_of_a_resonator_resets_nothing_and_raises_threshold_and_damping():
    """By hand: z is 2, the step turns by 0 and takes b + q = 0.5 + 1, so 2 becomes 2 - 3 / 2."""
    units = nn.BRF(1, omega=0.0, b=0.5, tau=2.0, tau_q=1e9, V_init=2.0)
    assert run(units, jnp.zeros(1), 2).sum() == 0
    np.testing.assert_allclose(units.V.value, 2 * (1 - 0.75) ** 2, rtol=1e-6)
    np.testing.assert_allclose(units.q.value, 1.0)


@pytest.mark.parametrize('V_init', [brainstate.nn.init.Normal(scale=0.1, unit=u.mV), 3 * u.mV])
def test_first_values_may_have_units(V_init):
    units = nn.IF(2, **MV, R=1 * u.ohm, V_init=V_init)
    units.init_state(2)
    assert units.V.value.unit == u.mV and units.V.value.shape == (2, 2)


# -- bad input -------------------------------------------------------------------------------------


@neurons
def test_a_state_in_the_place_of_a_number_is_refused_where_it_is_set(name):
    units, state = NEURONS[name](in_size=2), brainstate.ParamState(jnp.ones(2))
    numbers = [key for key, value in vars(units).items() if isinstance(value, float)]
    assert {'R', 'tau', 'V_reset'} <= {*numbers}
    for key in numbers:
        with pytest.raises(OptionError, match=f'{name}: {key} is a ParamState; give numbers'):
            setattr(units, key, state)
    units.more = state


@pytest.mark.parametrize('dt', [-1 * u.ms, 0 * u.ms])
def test_a_step_is_larger_than_zero(dt):
    with brainstate.environ.context(dt=dt), pytest.raises(OptionError, match='dt is .*than 0'):
        run(nn.LIF(2, 5 * u.ms), jnp.ones(2), 1)


@pytest.mark.parametrize(
    'options, current, words',
    [
        ({'R': 2 * u.ohm, **MV, 'V_rest': 0 * u.mV}, 1.0, 'unit 1 and R ohm.*V has mV'),
        ({}, 1.0 * u.mA, 'current has the unit mA and R 1'),
        ({'tau': 5 * u.ms}, 1.0, r'LIF: .* is .* ms.*dt=1 \* saiunit.ms'),
    ],
    ids=['current', 'plain', 'time without a dt'],
)
def test_units_that_do_not_fit_are_refused_when_it_runs(options, current, words):
    with pytest.raises(EtpUnitError, match=words):
        run(nn.LIF(2, **options), jnp.ones(2) * current, 1)


@pytest.mark.slow
def test_a_learner_resets_the_countdown_too():
    """All lanes, or some; the countdown has no trace."""
    layers = nn.Linear(2, 3, w_init=1.0, b_init=0.0), nn.LIF(3, 2.0, R=9.0, tau_ref=5)
    learner = braintrace.compile(
        brainstate.nn.Sequential(*layers), 'D_RTRL', jnp.ones((2, 2)), batch_size=2
    )
    assert [group.num_state for group in learner.graph.hidden_groups] == [1]

    def run():
        learner(jnp.ones((2, 2)))
        return np.asarray(layers[1].refractory.value)

    assert [run().max() for _ in range(3)] == [0, 5, 4]
    learner.reset_state(lanes=jnp.array([True, False]))
    np.testing.assert_array_equal(run(), [[0, 0, 0], [3, 3, 3]])
    assert (run() > 0).all()
    learner.reset_state()
    assert not run().any() and learner.report.exact
