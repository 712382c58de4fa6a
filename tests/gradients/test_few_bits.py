"""Weights that are rounded in the forward pass keep the exact gradient of the rounded network."""

import jax
import jax.numpy as jnp
import pytest

import braintrace
from braintrace import functional, nn, rules
from tests.compare import assert_close, assert_moves
from tests.tiers import slow

KEYS = jax.random.split(jax.random.key(0), 4)


def rounded(w, step):
    return w + jax.lax.stop_gradient(jnp.round(w / step) * step - w)


def plain(params, carry, x, product=jnp.matmul):
    """Two states behind the weights: a synapse, and a membrane that fires."""
    current, potential = carry
    current = 0.8 * current + product(x, params['w'])
    fired = nn.surrogate.triangle()(potential - 1.0)
    potential = 0.9 * potential * (1 - fired) + current
    return jnp.tanh(potential) @ params['out'], (current, potential)


def loss(output, target):
    return jnp.sum((output - target) ** 2)


@pytest.mark.parametrize('bits', [4, pytest.param(8, marks=slow)])
def test_the_trace_of_a_rounded_weight_is_that_of_the_network_with_that_weight(bits):
    """Straight through: backpropagation at the rounded weights, without any rounding."""
    step = 2.0 ** (1 - bits)
    params = {'w': jax.random.normal(KEYS[0], (5, 3)), 'out': jax.random.normal(KEYS[1], (3, 2))}
    xs = jax.random.bernoulli(KEYS[2], 0.5, (12, 2, 5)).astype(float)
    ys = jax.random.normal(KEYS[3], (12, 2, 2))
    start = (jnp.zeros((2, 3)), jnp.zeros((2, 3)))

    def cell(params, carry, x):
        of_few_bits = params | {'w': rounded(params['w'], step)}
        return plain(of_few_bits, carry, x, braintrace.matmul)

    def through(params):
        outputs = jax.lax.scan(lambda c, x: plain(params, c, x)[::-1], start, xs)[1]
        return loss(outputs, ys)

    online = functional.online(cell, rules.d_rtrl())
    gradient = online.sequence_grad(loss, window=4, reduction='sum')
    got = jax.jit(lambda p: gradient(p, online.init(p, start, xs[0]), xs, ys)[0])(params)
    there = params | {'w': jnp.round(params['w'] / step) * step}
    assert jnp.abs(there['w'] - params['w']).max() > step / 4
    want = jax.jit(jax.grad(through))(there)
    assert_moves(want)
    assert_close(got, want)
