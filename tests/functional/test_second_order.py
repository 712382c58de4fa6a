"""The derivative of an online gradient is refused: the trace does not hold all of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, rules
from braintrace.errors import NotSupportedError

W, H, XS = {'w': np.ones((2, 3)) / 3}, np.zeros((1, 3)), np.linspace(-1.0, 1.0, 8).reshape(4, 1, 2)


def cell(p, h, x):
    h = 0.8 * h + jnp.tanh(braintrace.matmul(x, p['w']))
    return h, h


LEARNER = functional.online(cell, rules.d_rtrl())


def square(out, _):
    return jnp.sum(out**2)


def by_steps(p):
    state, total = LEARNER.init(p, H, XS[0]), 0.0
    for x in XS[:2]:
        out, state = LEARNER.step(p, state, x)
        total += square(out, None)
    return total


def by_sequence(p):
    return LEARNER.sequence_grad(square)(p, LEARNER.init(p, H, XS[0]), XS, XS)[0]['w'].sum()


def by_update(p):
    optimizer = optax.sgd(0.1)
    run = LEARNER.sequence_update(square, optimizer)
    return run(p, optimizer.init(p), LEARNER.init(p, H, XS[0]), XS, XS)[0]['w'].sum()


@pytest.mark.parametrize(
    'second',
    [
        lambda: jax.grad(lambda p: jax.grad(by_steps)(p)['w'].sum())(W),
        lambda: jax.jacrev(jax.grad(by_steps))(W),
        lambda: jax.jit(jax.grad(by_sequence))(W),
        lambda: jax.grad(by_update)(W),
    ],
)
def test_a_derivative_of_an_online_gradient_is_refused(second):
    with pytest.raises(
        NotSupportedError, match='derivative of an online gradient .* first derivatives only'
    ):
        second()


def test_forward_mode_over_an_online_gradient_is_refused_too():
    with pytest.raises(NotSupportedError, match='first derivatives only'):
        jax.hessian(by_steps)(W)


@pytest.mark.slow
def test_what_does_not_depend_on_the_gradient_has_its_derivative():
    """A scale of the loss outside of the learner, and first gradients under transformations."""

    def scaled(a):
        return a * jax.lax.stop_gradient(by_sequence(W))

    assert jax.grad(scaled)(2.0) == by_sequence(W)
    first = jax.grad(by_steps)(W)['w']
    for other in (
        jax.jit(jax.grad(by_steps)),
        jax.grad(jax.checkpoint(by_steps)),
        lambda p: jax.vmap(jax.grad(by_steps), axis_size=2, in_axes=None)(p),
    ):
        np.testing.assert_allclose(jnp.reshape(other(W)['w'], (-1, 2, 3))[0], first, rtol=1e-5)
