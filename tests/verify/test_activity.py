"""Silent and saturated shares against neurons that are run in NumPy: every way to keep a spike and
to reset.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import nn, verify
from tests.models.model import squared
from tests.models.ops import _spike_jvp as by_jvp
from tests.models.ops import _spike_vjp as by_vjp
from tests.tiers import first, in_turn
from tests.verify.asked import diagnosed, shown

STEPS, LANES = 12, 2
DRIVES = {'dead': np.zeros(3), 'saturated': np.full(3, 9.0), 'mixed': np.array([0.0, 0.2, 9.0])}


def by_comparison(v):
    return (v > 0).astype(v.dtype)


def by_where(v):
    return jnp.where(v > 0, 1.0, 0.0)


def by_estimator(v):
    """The step function with the gradient of a sigmoid."""
    soft = jax.nn.sigmoid(v)
    return soft + jax.lax.stop_gradient((v > 0) - soft)


SPIKES = {'jvp': by_jvp, 'vjp': by_vjp, 'comparison': by_comparison, 'where': by_where}
SPIKES |= {'estimator': by_estimator}


def hard_state(p, c, i, spike):
    v = 0.9 * c['v'] * (1 - c['z']) + i
    z = spike(v - 1)
    return z, {'v': v, 'z': z}


def soft_state(p, c, i, spike):
    v = 0.9 * c['v'] - c['z'] + i
    z = spike(v - 1)
    return z, {'v': v, 'z': z}


def hard_local(p, c, i, spike):
    v = 0.9 * c['v'] + i
    z = spike(v - 1)
    return z, {'v': v * (1 - z)}


def soft_local(p, c, i, spike):
    """The reset reads the spike of the old potential."""
    v = 0.9 * c['v'] - spike(c['v'] - 1) + i
    return spike(v - 1), {'v': v}


def refractory(p, c, i, spike):
    """The potential stays high while the neuron can not spike."""
    v = 0.9 * c['v'] + i
    z = spike(v - 1) * (c['rest'] <= 0)
    return z, {'v': v, 'rest': jnp.where(z > 0, 3.0, c['rest'] - 1)}


def refractory_by_spike(p, c, i, spike):
    v = 0.9 * c['v'] + i
    z = spike(v - 1) * (1 - c['z'])
    return z, {'v': v, 'z': z}


def adaptive(p, c, i, spike):
    v = 0.9 * c['v'] + i
    z = spike(v - 1 - 0.1 * c['a'])
    return z, {'v': v - z, 'a': 0.9 * c['a'] + z}


CELLS = {
    **dict.fromkeys((hard_state, soft_state, refractory_by_spike), {'v': 0.0, 'z': 0.0}),
    **dict.fromkeys((hard_local, soft_local), {'v': 0.0}),
    refractory: {'v': 0.0, 'rest': 0.0},
    adaptive: {'v': 0.0, 'a': 0.0},
}


def by_hand(cell, drive):
    """The rate of each unit, by a run of the cell in NumPy."""
    c, spikes = {k: np.full(drive.shape, v) for k, v in CELLS[cell].items()}, []
    for _ in range(STEPS):
        fired = []
        z, c = cell(None, c, drive, lambda v: fired.append(v > 0) or (v > 0) * 1.0)
        spikes.append(fired[0] if cell is soft_local else z > 0)  # there the reset's spike counts
    return np.mean(spikes, 0)


XS = np.ones((STEPS, LANES, 1))


def layer(cell, spike):
    return lambda p, c, x: cell(p, c, braintrace.matmul(x, p['W']), spike)


def states(first, units=3):
    return {k: jnp.full((LANES, units), v) for k, v in first.items()}


def of_rates(rates):
    return 'spikes', np.mean(rates == 0), np.mean(rates > 0.5)


@pytest.mark.tier(quick=0)
@in_turn(first(hard_state), cell=CELLS, drive=DRIVES)
def test_a_neuron_is_judged_by_its_spikes(cell, drive):
    got = shown(layer(cell, by_jvp), XS, {'W': DRIVES[drive][None]}, states(CELLS[cell]))
    assert all(found == of_rates(by_hand(cell, DRIVES[drive])) for found in got.values())


@pytest.mark.tier(quick=0)
@in_turn(first('vjp'), spike=SPIKES, cell=[hard_state, soft_local, refractory])
def test_a_spike_is_found_however_it_is_made(spike, cell):
    drive = np.concatenate([*DRIVES.values()])
    first = states(CELLS[cell], len(drive))
    got = shown(layer(cell, SPIKES[spike]), XS, {'W': drive[None]}, first)
    assert all(found == of_rates(by_hand(cell, drive)) for found in got.values())


@pytest.mark.slow
def test_a_dead_layer_is_told_to_get_more_input():
    data = XS, np.zeros((STEPS, LANES, 3)), {'W': np.zeros((1, 3))}, states(CELLS[adaptive])
    found = diagnosed(layer(adaptive, by_jvp), *data).findings
    assert any('100 % of the units' in text and 'a lower threshold' in text for text in found)
    assert not any('saturated' in text for text in found)


@pytest.mark.slow
def test_two_layers_are_judged_each_by_itself():
    """A layer of leaky units below, a dead one of spiking units, and a live one on a plain path."""

    def cell(p, c, x):
        low = 0.9 * c['low'] + braintrace.matmul(x, p['low'])
        dead = 0.9 * c['dead'] + 0.0 * (low @ p['plain'])
        z = by_jvp(dead - 1)
        spikes, live = hard_state(p, c['live'], braintrace.matmul(z + x, p['live']), by_jvp)
        return spikes, {'low': low, 'dead': dead - z, 'live': live}

    params = {'low': np.ones((1, 3)), 'plain': np.eye(3), 'live': np.full((3, 3), 3.0)}
    carry = states({'low': 0.0, 'dead': 0.0}) | {'live': states({'v': 0.0, 'z': 0.0})}
    got = shown(cell, XS, params, carry)
    assert got['low'] == ('states', 0, 0) and got['dead'] == ('spikes', 1, 0)
    assert got['live/v'] == of_rates(by_hand(hard_state, np.full(3, 9.0)))


def test_a_spike_may_be_the_only_state():
    def cell(p, z, x):
        z = by_jvp(braintrace.matmul(jnp.concatenate([x, z], -1), p['W']) - 1)
        return z, z

    W = np.concatenate([np.array([[0.0, 2.0, 2.0]]), np.zeros((3, 3))])
    W[3, 2] = -9.0  # unit 2 spikes at every other step
    (got,) = shown(cell, XS, {'W': W}, states({'z': 0.0})['z']).values()
    assert got == ('spikes', 1 / 3, 1 / 3)


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('cell', [nn.VanillaRNNCell, nn.GRUCell, nn.LSTMCell, nn.MinGRUCell])
def test_a_cell_without_spikes_is_judged_by_its_states(cell):
    learner = braintrace.compile(cell(1, 3), 'D_RTRL', XS[0], batch_size=LANES)
    online, params, carry = learner.pure()
    found = shown(online.cell, XS, params, carry)
    assert {by for by, *_ in found.values()} == {'states'}


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(
    'relu',
    [jax.nn.relu, jax.nn.leaky_relu, lambda a: jnp.where(a > 0, a, 0.0), jax.nn.hard_sigmoid],
)
def test_a_nonlinearity_of_pieces_is_no_spike(relu):
    def cell(p, h, x):
        h = relu(0.5 * h + braintrace.matmul(x, p['W']))
        return h, h

    (got,) = shown(cell, XS, {'W': np.ones((1, 3))}, jnp.zeros((LANES, 3))).values()
    assert got[:2] == ('states', 0)


class Spiking(brainstate.nn.Module):
    """A layer of potentials in mV that keeps its spikes, and outputs that leak."""

    def __init__(self, gain):
        super().__init__()
        self.W = nn.Linear(1, 3, w_init=lambda shape: gain * jnp.ones(shape), b_init=None)
        self.out = nn.Linear(3, 3, b_init=None)

    def init_state(self, batch_size=None, **kwargs):
        self.V = brainstate.HiddenState(jnp.zeros((batch_size, 3)) * u.mV)
        self.z = brainstate.HiddenState(jnp.zeros((batch_size, 3)))
        self.r = brainstate.HiddenState(jnp.zeros((batch_size, 3)))

    def update(self, x):
        self.V.value = 0.9 * self.V.value - self.z.value * u.mV + self.W(x) * u.mV
        self.z.value = by_jvp((self.V.value - 1.0 * u.mV) / u.mV)
        self.r.value = 0.8 * self.r.value + self.out(self.z.value)
        return self.r.value


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('gain', [0.0, 9.0])
def test_potentials_with_units_are_judged_by_their_spikes(gain):
    learner = braintrace.compile(Spiking(gain), 'D_RTRL', jnp.zeros((LANES, 1)), batch_size=LANES)
    got = verify.diagnose(learner, XS, np.zeros((STEPS, LANES, 3)), squared)
    active = {a.group: (a.shown_by, a.silent, a.saturated) for a in got.activity}
    assert active['V/0'] == of_rates(by_hand(soft_state, np.full(3, gain)))
    assert active['r'] == ('states', gain == 0, 0)
    said = [text for text in got.findings if 'units of r are' in text and 'stay at zero' in text]
    assert len(said) == (gain == 0) and not any('threshold' in text for text in said)
