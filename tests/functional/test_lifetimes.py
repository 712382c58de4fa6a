"""What was compiled ends with its learner: nothing outside keeps a graph or an array of a cell."""

import gc
import weakref

import jax
import optax
import pytest

from braintrace import functional, rules
from tests.tiers import slow

from .plain import D_RTRL, carry, cell, data, drawn, loss, params

SGD = optax.sgd(0.1)


def closed(array):
    """A cell that holds an array."""
    return lambda p, h, x: (cell(p, h, x)[0], cell(p, h, x)[1] + array[0])


def step(learner, p, state, xs, ys):
    return learner.step(p, state, xs[0])


def grad(learner, p, state, xs, ys):
    return jax.jit(learner.grad(loss))(p, state, xs[0], ys[0])


def sequence_grad(learner, p, state, xs, ys):
    return jax.jit(learner.sequence_grad(loss))(p, state, xs, ys)


def sequence_update(learner, p, state, xs, ys, optimizer=SGD):
    return learner.sequence_update(loss, optimizer)(p, SGD.init(p), state, xs, ys)


SLOW = [pytest.param(call, marks=slow) for call in (step, sequence_grad, sequence_update)]


def left_of(make, number):
    """How many of the things that ``make()`` tells of live on, and how many arrays more."""
    references, arrays = [], len(jax.live_arrays())
    for _ in range(number):
        references += map(weakref.ref, make())
    gc.collect()
    return sum(ref() is not None for ref in references), len(jax.live_arrays()) - arrays


def used(call, rule=D_RTRL):
    """A learner made, called and left alone; its graph and the array that its cell holds."""
    array = drawn(50, 4)
    learner = functional.online(closed(array), rule)
    p, (xs, ys) = params(), data()
    call(learner, p, learner.init(p, carry(), xs[0]), xs, ys)
    return array, learner.graph


@pytest.mark.parametrize('call', [grad, *SLOW])
def test_nothing_of_a_learner_outlives_it(call):
    left_of(lambda: used(call), 1)  # what is made once for the process
    assert left_of(lambda: used(call), 1) == (0, 0)


@pytest.mark.nightly
def test_a_search_over_rates_and_models_stays_flat():
    def searched():
        def call(learner, p, state, xs, ys):
            for rate in (0.1, 0.01):
                sequence_update(learner, p, state, xs, ys, optax.sgd(rate))
            grad(learner, p, state, xs, ys)

        return used(call, rules.es_d_rtrl(0.9))

    left_of(searched, 5)
    before = resident()
    assert left_of(searched, 50) == (0, 0)
    assert resident() - before < 60  # MiB: at 2 arrays and a program for each it is above 100


def resident() -> float:
    """Mebibytes of this process."""
    with open('/proc/self/status') as status:
        return next(float(line.split()[1]) / 1024 for line in status if line.startswith('VmRSS'))
