"""Products in a recurrent step whose operands are of unusual kinds: right gradients, or refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import braintrace
from braintrace import verify
from tests.compare import assert_close

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
        _, grads, state = step(params, state, x, x)
        total = jax.tree.map(jnp.add, total, grads)
    for got in (by_window, total):
        assert_close(got, wanted, relative)


def test_real_and_complex_weights_of_a_complex_result():
    def cell(product):
        def step(params, h, x):
            h = (0.8 + 0.1j) * h + product(x + 1j * x**2, params['w'])
            return h.real + h.imag, h

        return step

    h, xs, w = jnp.zeros((BATCH, UNITS), complex), draw(STEPS, BATCH, 2), draw(2, UNITS)
    for weight in (w, w + 1j * w**2):
        check_against_bptt(cell(braintrace.matmul), cell(jnp.matmul), {'w': weight}, h, xs)
