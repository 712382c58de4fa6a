"""Surrogate derivatives against the papers' formulas in NumPy, and spike functions of users."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.errors import EtpDtypeError, OptionError
from braintrace.nn import LIF, surrogate
from tests.models.ops import _spike_jvp, _spike_vjp

X = np.concatenate([np.linspace(-3, 3, 61), [0.0, 1e-6, -1e-6]])


def normal(x, center, deviation):
    return np.exp(-((x - center) ** 2) / (2 * deviation**2)) / np.sqrt(2 * np.pi * deviation**2)


def logistic(x):
    return 1 / (1 + np.exp(-x))


PAPERS = {
    'triangle(width=1.0, height=0.3)': 0.3 * np.maximum(0, 1 - np.abs(X)),
    'triangle(width=0.5, height=1.0)': np.maximum(0, 1 - np.abs(X / 0.5)),
    'sigmoid(slope=4.0)': 4 * logistic(4 * X) * (1 - logistic(4 * X)),
    'sigmoid(slope=10.0)': 10 * logistic(10 * X) * (1 - logistic(10 * X)),
    'multi_gaussian(width=0.5, scale=6.0, height=0.15)': 1.15 * normal(X, 0, 0.5)
    - 0.15 * (normal(X, 0.5, 3.0) + normal(X, -0.5, 3.0)),
    'multi_gaussian(width=0.4, scale=2.0, height=0.5)': 1.5 * normal(X, 0, 0.4)
    - 0.5 * (normal(X, 0.4, 0.8) + normal(X, -0.4, 0.8)),
    'arctan(slope=2.0)': 1 / (1 + (np.pi * X) ** 2),
    'arctan(slope=1.0)': 0.5 / (1 + (np.pi * X / 2) ** 2),
}
# the first call of each is that of the defaults
DEFAULTS = {call.partition('(')[0]: call for call in reversed(PAPERS)}
NAMES = ['triangle', 'sigmoid', 'multi_gaussian', 'arctan']


@pytest.mark.parametrize('call', PAPERS)
def test_the_derivative_is_that_of_the_paper(call):
    spike = eval(f'surrogate.{call}')
    x = jnp.asarray(X, jnp.float32)
    y, pull = jax.vjp(spike, x)
    np.testing.assert_array_equal(y, X > 0)
    np.testing.assert_allclose(pull(jnp.ones_like(x))[0], PAPERS[call], rtol=0, atol=3e-6)
    np.testing.assert_allclose(jax.jvp(spike, (x,), (2 * x,))[1], 2 * X * PAPERS[call], atol=1e-5)
    assert repr(spike) == call


@pytest.mark.parametrize('name', NAMES)
def test_a_name_is_the_function_with_its_defaults(name):
    spike = LIF(2, spk_fun=name).spk_fun
    assert spike == getattr(surrogate, name)() and repr(spike) == DEFAULTS[name]


def test_spike_functions_compare_and_hash_by_their_parameters():
    one, same, other = surrogate.triangle(), surrogate.triangle(1, 0.3), surrogate.triangle(0.5)
    assert one == same and hash(one) == hash(same) and one != other
    assert surrogate.sigmoid(2.0) != surrogate.arctan(2.0)


def test_a_spike_keeps_the_dtype():
    assert surrogate.triangle()(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    with pytest.raises(EtpDtypeError, match='real floating'):
        surrogate.triangle()(jnp.ones(2, int))


def test_a_parameter_that_is_no_number_above_zero_is_refused():
    for name in NAMES:
        for value in (0, -1.0, float('nan'), True, '1', None):
            with pytest.raises(OptionError, match='give a number above 0'):
                getattr(surrogate, name)(value)


@pytest.mark.parametrize('spike', [_spike_jvp, _spike_vjp, surrogate.arctan(slope=5.0)])
def test_any_spike_function_with_a_derivative_is_taken(spike):
    assert LIF(2, spk_fun=spike).spk_fun is spike


def straight_through(v):
    soft = 0.3 * v
    return soft + jax.lax.stop_gradient((v > 0) - soft)


def test_a_step_with_the_slope_of_a_sum_is_a_spike():
    kinds = straight_through, 'arctan'
    rounded, clean = (LIF(5, 3.0, R=4.0, tau_ref=2, spk_fun=f) for f in kinds)
    for units in (rounded, clean):
        units.init_state()
    for x in np.random.default_rng(0).normal(size=(20, 5)).astype('float32'):
        np.testing.assert_allclose(rounded(x), clean(x), atol=1e-6)
        np.testing.assert_array_equal(rounded.refractory.value, clean.refractory.value)


def test_a_slope_that_is_narrow_counts_also_inside_jit():
    narrow = lambda v: surrogate.triangle(width=1e-4)(v)
    assert float(jax.jit(lambda v: LIF(2, spk_fun=narrow).spk_fun(v))(0.5)) == 1.0


@pytest.mark.parametrize(
    'spike, fault',
    [
        (None, 'spk_fun is None, which is no spike function'),
        ('relu', "spk_fun is 'relu', which is no spike function"),
        (lambda v: (v > 0).astype(v.dtype), 'zero everywhere, so nothing would learn'),
        (jax.lax.stop_gradient, 'not 1 where x > 0'),
        (jax.nn.sigmoid, 'not 1 where x > 0'),
        (lambda v: v > 0, r'makes bool\[314\] of float32\[314\]'),
        (lambda v: _spike_jvp(v).sum(), r'makes float32\[\] of'),
        (lambda v: _spike_jvp(v).astype('float16'), r'makes float16\[314\] of'),
        (lambda v: (_spike_jvp(v), v), 'makes tuple of'),
        (lambda v: 1 / 0, 'fails on an array of floats .ZeroDivisionError'),
        (lambda v: _spike_jvp(v) + jnp.sqrt(v - v), 'derivative is not finite'),
    ],
)
def test_a_neuron_without_a_surrogate_is_refused(spike, fault):
    with pytest.raises(OptionError, match=fault) as caught:
        LIF(2, spk_fun=spike)
    assert "'triangle', 'sigmoid', 'multi_gaussian', 'arctan'" in str(caught.value)
    assert 'braintools' not in str(caught.value)


def test_spike_functions_of_braintools_are_taken():
    spike = pytest.importorskip('braintools.surrogate').ReluGrad(alpha=0.3, width=1.0)
    assert LIF(2, spk_fun=spike).spk_fun is spike


def test_what_makes_spike_functions_is_to_be_called_and_a_slope_is_a_function():
    for maker in (surrogate.triangle, type('triangle', (), {})):
        with pytest.raises(OptionError, match=r'which makes spike functions: triangle\(\)'):
            LIF(2, spk_fun=maker)
    for slope, fault in ((3, 'is 3'), (lambda x: 0 * x, 'zero everywhere')):
        with pytest.raises(OptionError, match=fault):
            surrogate.custom(slope)
