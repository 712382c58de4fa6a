"""Models and data of the learner's tests."""

import contextlib
import functools

import brainstate
import jax
import jax.numpy as jnp
import pytest

import braintrace
from tests.compare import added, assert_close

BATCH, INPUTS, UNITS, STEPS = 3, 2, 4, 7


class Net(brainstate.nn.Module):
    """A GRU with a plain readout."""

    def __init__(self):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(INPUTS, UNITS)
        self.readout = brainstate.ParamState(brainstate.random.randn(UNITS, 2))

    def update(self, x):
        return self.cell(x) @ self.readout.value


class Layer(brainstate.nn.Module):
    """A weight ``w`` and one hidden state ``h``, a leaky sum of its products with the input."""

    def __init__(self, w=None, batch=BATCH):
        super().__init__()
        w = jnp.full((INPUTS, UNITS), 0.5) if w is None else w
        self.w, self.batch = brainstate.ParamState(jax.tree.map(jnp.asarray, w)), batch

    def init_state(self, *args, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((self.batch, UNITS)))

    def drive(self, x):
        return braintrace.matmul(x, self.w.value)

    def update(self, x):
        self.h.value = 0.8 * self.h.value + self.drive(x)
        return self.h.value


def data(steps: int = STEPS):
    keys = jax.random.split(jax.random.key(3), 2)
    return jax.random.normal(keys[0], (steps, BATCH, INPUTS)), jax.random.normal(
        keys[1], (steps, BATCH, 2)
    )


def compiled(rule='D_RTRL', model=Net, batch=BATCH, **options):
    x = jnp.zeros((INPUTS,) if batch is None else (batch, INPUTS))
    brainstate.random.seed(0)
    return braintrace.compile(model(), rule, x, batch_size=batch, **options)


@functools.cache
def shared():
    """One learner for calls that are refused, which leave it as it was."""
    return compiled()


def squared(y, target):
    return 0.5 * jnp.sum((y - target) ** 2)


@functools.lru_cache(maxsize=4)
def loss_of(learner):
    """One function for each learner, since a new one compiles again."""
    return lambda x, y: squared(learner(x), y)


def by_steps(learner, xs, ys, weights=None):
    """The sum of the gradients of single calls; ``learner`` may be a function with ``weights``."""
    weights = learner.param_states if weights is None else weights
    of_one = lambda x, y: brainstate.transform.grad(lambda: squared(learner(x), y), weights)()
    grad = brainstate.transform.jit(of_one)
    return added([grad(x, y) for x, y in zip(xs, ys, strict=True)])


@contextlib.contextmanager
def refused(error, words, module):
    """An error that says these words and leaves every state of a module as it was."""
    before = {k: s.value for k, s in module.states().items()}
    with pytest.raises(error) as caught:
        yield
    assert all(word in str(caught.value) for word in words), caught.value
    assert_close({k: s.value for k, s in module.states().items()}, before)


def apart(options, carry):
    """Options of a learner's call for the pure functions: those that make one, and its mask and
    resets.
    """
    given = {'mask': options.get('mask'), 'reset': None}
    if 'reset' in options:
        given['reset'] = jnp.asarray(options['reset']), carry
    return {k: v for k, v in options.items() if k not in given}, given


def same_state(learner, state):
    """Raise unless a learner holds this state of the pure functions."""
    held = learner.pure()[2], learner.etrace.value
    assert_close(held, (state.carry, {'trace': state.trace, 't': state.t}))
