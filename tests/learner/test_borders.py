"""Inputs that are tuples, and cells that read arrays from around them."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, nn, verify
from tests.compare import assert_close

T, B, N = 6, 2, 4
RNG = np.random.default_rng(0)
SEEN = RNG.standard_normal((T, B, 5)), RNG.integers(0, 3, (T, B))
YS = jnp.zeros((T, B, N))
AT = SEEN[0][0], SEEN[1][0]


def loss(y, target):
    return jnp.mean((y - target) ** 2)


class Policy(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        brainstate.random.seed(0)
        self.look, self.did = nn.Linear(5, N), nn.Embedding(3, N)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, N)))

    def update(self, seen):
        picture, action = seen
        self.h.value = 0.5 * self.h.value + jnp.tanh(self.look(picture) + self.did(action))
        return self.h.value


@pytest.mark.slow
def test_a_tuple_that_was_compiled_as_one_input_is_one_in_every_call():
    learner = braintrace.compile(Policy(), 'D_RTRL', AT, batch_size=B)
    online, params, carry = learner.pure()
    state = online.init(params, carry, AT)
    want = verify.bptt_gradients(online.cell, params, carry, SEEN, YS, loss)
    found = online.sequence_grad(loss, reduction='sum')(params, state, SEEN, YS)
    assert_close(found.grads, want, 1e-5)
    one, heads = (f(params, state, AT, YS[0]) for f in (online.grad(loss), online.heads(loss)))
    assert_close(heads.grads[0], one.grads, 1e-6)
    assert np.allclose(online.observed(loss)(params, state, AT, YS[0])[0].loss, one.loss)
    assert np.allclose(
        braintrace.evaluate(learner, SEEN, YS, lambda o, y: loss(o[0], y[0])), one.loss
    )
    assert verify.hidden_jacobians(online, params, carry, AT)
    step = lambda x, y: loss(learner(x), y)
    grads = learner.etrace_grad(SEEN, YS, step_fn=step, reduction='sum').grads
    assert_close(grads, want, 1e-5)


@pytest.mark.parametrize('way', ['jit', 'vmap'])
def test_a_cell_that_closes_over_hidden_arrays_is_right(way):
    def grads(scale):
        def cell(params, h, x):
            h = jnp.tanh(scale * h + braintrace.matmul(x, params))
            return h, h

        learner = functional.online(cell)
        params, x = jnp.full((5, N), 0.1), AT[0]
        _, state = learner.step(params, learner.init(params, jnp.zeros((B, N)), x), x)
        return learner.grad(loss)(params, state, SEEN[0][1], YS[0]).grads

    around = jax.jit if way == 'jit' else lambda f: lambda s: jax.vmap(f)(s[None])[0]
    assert_close(around(grads)(jnp.asarray(0.3)), grads(0.3), 1e-6)
