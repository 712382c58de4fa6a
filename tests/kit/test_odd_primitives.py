"""Products in a recurrent step whose operands are of unusual kinds: right gradients, or refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import verify
from tests.compare import assert_close

slow = pytest.mark.slow
STEPS, BATCH, UNITS = 6, 3, 4


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def loss(out, _):
    return jnp.sum(out**2)


def check_against_bptt(cell, plain, params, h, xs, relative=1e-5):
    """D_RTRL by windows and by steps has the gradient of backpropagation through ``plain``."""
    online = braintrace.functional.online(cell, braintrace.rules.d_rtrl())
    state = online.init(params, h, xs[0])
    wanted = verify.bptt_gradients(plain, params, h, xs, xs, loss)
    by_window = online.sequence_grad(loss, window=2, reduction='sum')(params, state, xs, xs)[0]
    total, step = jax.tree.map(jnp.zeros_like, params), jax.jit(online.grad(loss))
    for x in xs:
        grads, _, _, state = step(params, state, x, x)
        total = jax.tree.map(jnp.add, total, grads)
    for got in (by_window, total):
        assert_close(got, wanted, relative)


def complex_cell(product):
    def step(params, h, x):
        h = (0.8 + 0.1j) * h + product(x + 1j * x**2, params['w'])
        return h.real + h.imag, h

    return step


@pytest.mark.tier(quick=0, one_in=2)
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
    weight = {'w': w + imaginary * w**2 if imaginary else w}
    check_against_bptt(complex_cell(op), complex_cell(product), weight, h, xs)
