"""What a time scale is for: the adding problem over 200 steps."""

import brainstate
import jax
import jax.numpy as jnp
import optax
import pytest

import braintrace
from braintrace import nn

STEPS, LANES, UNITS, UPDATES = 200, 32, 64, 400


class Net(brainstate.nn.Module):
    def __init__(self, timescale):
        super().__init__()
        self.cell = nn.MinGRUCell(2, UNITS, timescale=timescale)
        self.out = nn.Linear(UNITS, 1)

    def update(self, x):
        return self.out(self.cell(x))[:, 0]


def sequences(key):
    """Numbers with two marks, one in each half, and the sum of the two marked numbers."""
    keys, half = jax.random.split(key, 3), STEPS // 2
    numbers = jax.random.uniform(keys[0], (STEPS, LANES))
    places = [jax.random.randint(k, (LANES,), 0, half) + i * half for i, k in enumerate(keys[1:])]
    marks = sum(jax.nn.one_hot(place, STEPS, axis=0) for place in places)
    return jnp.stack([numbers, marks], -1), (numbers * marks).sum(0)


def error_after_learning(timescale):
    """The mean squared error of the last 50 updates; the variance of the sum is 1 / 6."""
    brainstate.random.seed(0)
    none = jnp.zeros((LANES, 2))
    learner = braintrace.compile(Net(timescale), 'D_RTRL', none, batch_size=LANES)
    online, params, carry = learner.pure()
    start, last = online.init(params, carry, none), jnp.arange(STEPS) == STEPS - 1
    gradient = online.sequence_grad(lambda out, y: ((out - y) ** 2).mean(), keep_trace=False)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def update(values, key):
        (params, opt_state), (xs, y) = values, sequences(key)
        grads, losses, *_ = gradient(params, start, xs, jnp.tile(y, (STEPS, 1)), mask=last)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), losses[-1]

    first, keys = (params, optimizer.init(params)), jax.random.split(jax.random.key(0), UPDATES)
    return float(jax.jit(lambda: jax.lax.scan(update, first, keys))()[1][-50:].mean())


@pytest.mark.nightly
def test_a_timescale_learns_what_the_default_does_not():
    assert error_after_learning((1, STEPS)) < 0.03
    assert error_after_learning(None) > 0.12
