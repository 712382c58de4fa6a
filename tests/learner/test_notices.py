"""A gradient around single calls tells what it leaves out, and tells nothing else."""

import warnings

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace.errors import BraintraceWarning

from .networks import Layer

XS = np.linspace(-1.0, 1.0, 4 * 3 * 2).reshape(4, 3, 2)
grad, for_loop = brainstate.transform.grad, brainstate.transform.for_loop


class Leaky(Layer):
    """A diagonal recurrence with a spike flag, for which D-RTRL is exact."""

    def init_state(self, *args, **kwargs):
        super().init_state()
        self.spike = brainstate.HiddenState(jnp.zeros((3, 4), bool))

    def update(self, x):
        out = super().update(x)
        self.spike.value = out > 0.5
        return out


@pytest.fixture
def learner():
    return braintrace.compile(Leaky(), 'D_RTRL', XS[0])


def change(learner):
    """A loss that reads the old state itself: how much the activity changes."""

    def loss(x):
        old = learner.model.h.value
        return jnp.sum((learner(x) - old) ** 2)

    return loss


def size(learner):
    return lambda x: jnp.sum(learner(x) ** 2)


def of_new_state(learner):
    def loss(x):
        old = learner.model.h.value
        learner(x)
        return jnp.sum((learner.model.h.value - old) ** 2)

    return loss


def single(loss, learner):
    return lambda x: grad(loss(learner), learner.param_states)(x)


def in_a_loop(loss, learner):
    return lambda x: grad(lambda: for_loop(loss(learner), XS).sum(), learner.param_states)()


def twice(learner):
    return lambda x: size(learner)(x) + size(learner)(x)


def logged(learner):
    """A read outside of the gradient, inside of the compiled function."""

    @brainstate.transform.jit
    def run(x):
        return learner.model.h.value.sum(), single(size, learner)(x)

    return run


def restarted(learner):
    def loss(x):
        learner.reset_state()
        return size(learner)(x)

    return loss


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize(
    'use, words',
    [
        (lambda l: single(change, l), 'hidden state h before.*etrace_grad'),
        (lambda l: brainstate.transform.jit(single(change, l)), 'hidden state h before'),
        (lambda l: in_a_loop(change, l), 'hidden state h before'),
        (lambda l: single(of_new_state, l), 'hidden state h before'),
        (lambda l: single(twice, l), 'more than once.*a step of time.*etrace_grad'),
    ],
)
def test_what_is_left_out_is_told_once_at_the_users_line(learner, use, words):
    with pytest.warns(BraintraceWarning, match=words) as told:
        use(learner)(XS[0])
        use(learner)(XS[0])
    assert [w.category for w in told] == [BraintraceWarning]
    assert told[0].filename == __file__


@pytest.mark.tier(quick=5)
@pytest.mark.parametrize(
    'use',
    [
        lambda l: change(l),
        lambda l: brainstate.transform.jit(change(l)),
        lambda l: single(size, l),
        lambda l: in_a_loop(size, l),
        logged,
        lambda l: single(restarted, l),
        lambda l: lambda x: l.etrace_grad(XS, step_fn=change(l)).grads,
        lambda l: lambda x: for_loop(single(size, l), XS),
    ],
)
def test_nothing_is_told_where_nothing_is_left_out(learner, use):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        use(learner)(XS[0])
