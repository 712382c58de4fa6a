"""What a learner compiled ends with it, and with it the arrays of its model."""

import brainstate
import jax.numpy as jnp
import optax
import pytest

import braintrace
from tests.functional.test_lifetimes import left_of

from .networks import Net, compiled, data, squared


class Holding(Net):
    """Holds an array beside its states."""

    def __init__(self):
        super().__init__()
        self.array = jnp.ones((50, 2)) * 2

    def update(self, x):
        return super().update(x) + self.array[0]


CALLS = {
    'call': lambda learner, fn, xs, ys: learner(xs[0]),
    'grad': lambda learner, fn, xs, ys: brainstate.transform.grad(
        lambda: fn(xs[0], ys[0]), learner.param_states
    )(),
    'evolve': lambda learner, fn, xs, ys: learner.etrace_evolve(xs),
    'etrace_grad': lambda learner, fn, xs, ys: learner.etrace_grad(xs, ys, step_fn=fn).grads,
    'etrace_train': lambda learner, fn, xs, ys: learner.etrace_train(
        xs, ys, step_fn=fn, optimizer=optax.sgd(0.1)
    ),
    'evaluate': lambda learner, fn, xs, ys: braintrace.evaluate(learner, xs, ys, squared),
}


QUICK = 'call', 'evolve'
ROWS = [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CALLS]


@pytest.mark.parametrize('call', ROWS)
def test_nothing_of_a_learner_outlives_it(call):
    def used():
        learner, (xs, ys) = compiled(model=Holding), data()
        CALLS[call](learner, lambda x, y: squared(learner(x), y), xs, ys)
        return learner, learner.graph, learner.model, learner.model.array

    left_of(used, 1)  # what is made once for the process
    assert left_of(used, 1) == (0, 0)
