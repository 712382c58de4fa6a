"""Products in a recurrent step whose operands are of unusual kinds: right gradients, or refused."""

import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from tests.compare import assert_close
from tests.tiers import slow

from .learning import online, squared, through_time

STEPS, BATCH, UNITS = 6, 3, 4


def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def complex_cell(product):
    def step(params, h, x):
        h = (0.8 + 0.1j) * h + product(x + 1j * x**2, params['w'])
        return h.real + h.imag, h

    return step


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize(
    'conjugated, imaginary',
    [(False, 1j), pytest.param(False, 0, marks=slow), pytest.param(True, 1j, marks=slow)],
)
def test_a_complex_result(registries_are_restored, conjugated, imaginary):
    """Of real and of complex weights, also by an op that has no complex derivative."""

    def product(x, w):
        return x @ jnp.conj(w) if conjugated else x @ w

    h, xs, w = jnp.zeros((BATCH, UNITS), complex), draw(STEPS, BATCH, 2), draw(2, UNITS)
    op = braintrace.kit.make_linear_op('conjugated', product) if conjugated else braintrace.matmul
    data = {'w': w + imaginary * w**2 if imaginary else w}, h, xs
    want = through_time(complex_cell(product), *data, squared)
    for window in (2, 'steps'):
        got = online(complex_cell(op), *data, window=window, loss=squared)
        assert_close(got, want, 1e-5)
