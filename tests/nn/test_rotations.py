"""What cells of rotating pairs have beyond the others: first values in a ring or of HiPPO."""

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import nn
from braintrace.errors import OptionError, StructureError


@pytest.mark.parametrize('make', [nn.LRUCell, lambda *a: nn.RTUCell(a[0], a[1], 'relu', *a[2:])])
def test_first_values_lie_in_the_ring(make):
    brainstate.random.seed(3)
    cell = make(3, 2000, 0.6, 0.9, 0.5)
    radius = np.exp(-np.exp(np.asarray(cell.nu_log.value, float)))
    angle = np.exp(np.asarray(cell.theta_log.value, float))
    assert 0.6 <= radius.min() < 0.61 and 0.89 < radius.max() <= 0.9
    assert 0 < angle.min() < 0.01 and 0.49 < angle.max() <= 0.5
    np.testing.assert_allclose((radius**2).mean(), (0.36 + 0.81) / 2, atol=0.01)  # by its area


def test_the_whole_disc_is_finite():
    brainstate.random.seed(3)
    cell = nn.LRUCell(2, 3000)
    assert all(np.isfinite(getattr(cell, n).value).all() for n in ('nu_log', 'gamma_log'))
    radius = np.exp(-np.exp(np.asarray(cell.nu_log.value, float)))
    np.testing.assert_allclose(
        np.exp(2 * np.asarray(cell.gamma_log.value, float)), 1 - radius**2, rtol=1e-3
    )


def test_frequencies_are_those_of_hippo():
    root = np.sqrt(np.arange(12) + 0.5)
    legs = -np.tril(np.outer(2 * root, root), -1) - np.diag(np.arange(12) + 1.0)
    values = np.linalg.eigvals(legs + np.outer(root, root))
    cell = nn.S5Cell(2, 6)
    expected = np.sort(values.imag[values.imag > 0])
    np.testing.assert_allclose(np.sort(cell.A_im.value), expected, rtol=1e-5)
    np.testing.assert_allclose(values.real, -np.exp(np.asarray(cell.A_log.value))[0], rtol=1e-5)


def test_small_steps_of_a_held_input_are_one_large_step():
    """Zero-order hold is exact in time for every step size."""
    brainstate.random.seed(3)
    ends = []
    cell = nn.S5Cell(2, 4, 0.1, 0.2)
    for parts in (1, 8):
        cell.init_state()
        cell.step_log.value = jnp.full(4, np.log(0.4 / parts))
        for _ in range(parts):
            out = cell(jnp.array([1.0, -2.0]))
        ends.append(np.asarray(out))
    np.testing.assert_allclose(*ends, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(
    'make, message',
    [
        (lambda: nn.LRUCell(2, 3, r_min=0.9, r_max=0.5), 'LRUCell: r_min is 0.9 and r_max 0.5'),
        (lambda: nn.LRUCell(2, 3, r_max=1.5), 'r_max 1.5; give radii'),
        (lambda: nn.RTUCell(2, 3, r_min=-0.1), 'RTUCell: r_min is -0.1'),
        (lambda: nn.LRUCell(2, 3, max_phase=0), 'max_phase is 0'),
        (lambda: nn.S5Cell(2, 3, dt_min=0.1, dt_max=0.01), 'dt_min is 0.1 and dt_max 0.01'),
        (lambda: nn.S5Cell(2, 0), 'S5Cell: d_hidden is 0'),
        (lambda: nn.LRUCell(2.5, 3), 'LRUCell: d_model is 2.5'),
        (lambda: nn.RTUCell(2, 3, activation='no_such_function'), 'RTUCell: activation is'),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_states_have_the_hidden_size_and_are_set_back():
    cell = nn.LRUCell(2, 3)
    cell.init_state(batch_size=4)
    assert cell(jnp.ones((4, 2))).shape == (4, 2) and cell.h_re.value.shape == (4, 3)
    cell.reset_state()
    assert cell.h_im.value.shape == (3,) and not cell.h_re.value.any()
    with pytest.raises(StructureError, match=r'state h_re of shape \(3,\)'):
        cell(jnp.ones((4, 2)))
