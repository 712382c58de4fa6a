"""Options of cells and first values of their parameters; formulas and gradients are in
``test_table``.
"""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import compat, nn

NORMAL = brainstate.nn.init.Normal(scale=0.5)
CELLS = [nn.VanillaRNNCell, nn.GRUCell, nn.LSTMCell, nn.MinGRUCell]


def stepped(kind, **options):
    """A cell behind a step from a drawn state, and what it gave."""
    brainstate.random.seed(7)
    cell = kind(3, 5, **{'b_init': NORMAL, 'state_init': NORMAL} | options)
    cell.init_state()
    return cell, brainstate.transform.jit(cell)(jnp.array([0.1, -1.0, 0.6]))


def along(cell, xs):
    """What a cell gives for each of some inputs."""
    cell.init_state()
    return np.asarray(brainstate.transform.for_loop(cell, jnp.asarray(xs, 'float32')))


@pytest.mark.parametrize('kind', [*CELLS, nn.FilteredReadout])
def test_the_bias_may_be_left_out(kind):
    cell, y = stepped(kind, b_init=None)
    assert all(set(s.value) == {'weight'} for s in cell.states(brainstate.ParamState).values())
    assert y.shape == (5,)


@pytest.mark.tier(quick=6)
@pytest.mark.parametrize('activation', ['softplus', jnp.sin])
@pytest.mark.parametrize('kind', CELLS)
def test_the_activation_counts(kind, activation):
    assert not np.allclose(stepped(kind)[1], stepped(kind, activation=activation)[1])


GATED = {  # and the state that remembers
    'gru': (nn.GRUCell, 'h'),
    'mgu': (nn.MGUCell, 'h'),
    'cfn': (nn.CFNCell, 'h'),
    'minimal_rnn': (nn.MinimalRNNCell, 'h'),
    'mini_gru': (compat.MiniGRU, 'h'),
    'mini_lstm': (compat.MiniLSTM, 'h'),
    'lstm': (nn.LSTMCell, 'c'),
    'min_gru': (nn.MinGRUCell, 'h'),
    'min_lstm': (nn.MinLSTMCell, 'h'),
    'elstm': (nn.ELSTMCell, 'c'),
}


@pytest.mark.tier(quick=3)
@pytest.mark.parametrize('name', GATED)
def test_timescale_spreads_what_units_forget(name):
    """At first a unit keeps t / (1 + t) of its state, with t uniform in (low, high - 1)."""
    brainstate.random.seed(5)
    (cls, state), times = GATED[name], (np.int64(3), np.float32(41))
    cell = cls(2, 400, w_init=brainstate.nn.init.ZeroInit(), timescale=times, state_init=1e-3)
    cell.init_state()
    cell(jnp.zeros(2))
    kept = np.asarray(getattr(cell, state).value, float) / 1e-3
    times = kept / (1 - kept)
    assert 2.9 < times.min() < 4 and 39 < times.max() < 40.1
    np.testing.assert_allclose(times.mean(), 21.5, atol=1.5)


def test_what_an_input_gate_lets_in_is_what_the_forget_gate_drops():
    i, g, f, o = np.split(nn.LSTMCell(2, 7, timescale=(1, 50)).W.weight.value['bias'], 4)
    np.testing.assert_allclose(i, -(f + 1), rtol=1e-6)
    assert not g.any() and not o.any() and i.any()


def test_phi_may_be_a_function_or_a_module():
    learned = nn.MinimalRNNCell(3, 5, phi=nn.Linear(3, 5, b_init=None))
    assert ('phi', 'weight') in learned.states(brainstate.ParamState)
    cell = nn.MinimalRNNCell(3, 3, phi=jnp.tanh, w_init=brainstate.nn.init.ZeroInit())
    assert set(cell.states()) == {('W_u', 'weight')}
    cell.init_state()
    np.testing.assert_allclose(cell(jnp.ones(3)), np.tanh(1) / 2, rtol=1e-6)


def test_closed_gates_leave_finite_numbers():
    cell = nn.MinLSTMCell(1, 1, w_init=np.full((1, 3), -1e3), state_init=2.0)
    cell.init_state()
    np.testing.assert_allclose(cell(jnp.ones(1)), (2 - 1e3) / 2)


def test_a_liquid_unit_stays_between_zero_and_its_potential():
    cell = nn.LTCCell(1, 4, tau=2.0, a_init=jnp.array([-2.0, -1.0, 1.0, 3.0]), w_init=20.0)
    h = along(cell, [[(-1) ** (t // 9)] for t in range(40)]) / cell.A.value
    assert h.min() >= 0 and h.max() < 1 and h.max() > 0.6


def test_one_unit_of_uniform_gates_is_finite():
    assert np.isfinite(nn.URLSTMCell(2, 1).bias.value).all()


def ring_of(cell):
    """Radii and angles of the complex numbers of a cell."""
    logs = (np.asarray(state.value, float) for state in (cell.nu_log, cell.theta_log))
    nu, theta = map(np.exp, logs)
    return np.exp(-nu), theta


@pytest.mark.parametrize('make', [nn.LRUCell, lambda *a: nn.RTUCell(a[0], a[1], 'relu', *a[2:])])
def test_first_values_lie_in_the_ring(make):
    brainstate.random.seed(3)
    radius, angle = ring_of(make(3, 2000, 0.6, 0.9, 0.5))
    assert 0.6 <= radius.min() < 0.61 and 0.89 < radius.max() <= 0.9
    assert 0 < angle.min() < 0.01 and 0.49 < angle.max() <= 0.5


def test_the_whole_disc_is_finite():
    brainstate.random.seed(3)
    cell = nn.LRUCell(2, 3000)
    radius, _ = ring_of(cell)
    gamma = np.exp(2 * np.asarray(cell.gamma_log.value, float))
    assert np.isfinite(cell.nu_log.value).all()
    np.testing.assert_allclose(gamma, 1 - radius**2, rtol=1e-3)


def test_frequencies_are_those_of_hippo():
    root = np.sqrt(np.arange(12) + 0.5)
    legs = -np.tril(np.outer(2 * root, root), -1) - np.diag(np.arange(12) + 1.0)
    values = np.linalg.eigvals(legs + np.outer(root, root))
    cell = nn.S5Cell(2, 6)
    expected = np.sort(values.imag[values.imag > 0])
    np.testing.assert_allclose(np.sort(cell.A_im.value), expected, rtol=1e-5)
    np.testing.assert_allclose(values.real, -np.exp(np.asarray(cell.A_log.value))[0], rtol=1e-5)


def test_a_legendre_memory_tells_what_was_in_its_window():
    """By the paper's equation 3; the input is held for a step, so it is half a step late."""
    theta, order = 40, 8
    cell = nn.LMUCell(1, 1, order, theta, recurrent=False, e_init=1.0)
    signal = lambda t: np.sin(2 * np.pi * t / 70)
    along(cell, signal(np.arange(200.0))[:, None])
    for delay in (0.25, 0.5, 1.0):
        told = np.polynomial.legendre.legval(2 * delay - 1, np.asarray(cell.m.value[0]))
        np.testing.assert_allclose(told, signal(199.5 - delay * theta), atol=0.02)


def test_a_long_window_of_many_polynomials_is_stable():
    cell = nn.LMUCell(1, 1, 64, 500)
    assert np.abs(np.linalg.eigvals(cell.A)).max() < 1


def test_the_delta_rule_replaces_what_the_memory_had_for_a_key():
    """By hand: keys of length 1, and a gate that is open; the second value takes the first's
    place.
    """
    of_key, of_value = np.eye(4, 2, dtype='float32'), np.eye(4, 2, -2, dtype='float32')
    cell = nn.DeltaNetCell(4, 2, w_init=0.0, b_init=50.0)
    for layer, weight in ((cell.Wq, of_key), (cell.Wk, of_key), (cell.Wv, of_value)):
        layer.weight.value = {'weight': jnp.asarray(weight)}
    told = along(cell, [[3, 0, 1, 2], [0, 5, 3, 4], [2, 0, 7, 8]])
    np.testing.assert_allclose(told, [[1, 2], [3, 4], [7, 8]], rtol=1e-5)
    np.testing.assert_allclose(cell.S.value[0], [[7, 8], [3, 4]], rtol=1e-5)
