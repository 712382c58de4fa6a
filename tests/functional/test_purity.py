"""Pure functions: no arrays in a learner, no side effects, randomness from keys in the carry; what
was compiled ends with its learner.
"""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braintrace import functional
from braintrace.errors import EtpShapeError
from tests.compare import assert_close
from tests.precision import float64 as float64

from .plain import D_RTRL, ES, both_rules, carry, cell, data, drawn, loss, params, started


def arrays_within(thing, seen):
    """The arrays that a record, a container or an object of the package leads to."""
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    if isinstance(thing, jax.Array):
        yield thing
    inner = []
    if isinstance(thing, dict):
        inner = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset):
        inner = list(thing)
    elif type(thing).__module__.startswith('braintrace'):
        fields = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
        inner = [getattr(thing, f.name) for f in fields] + list(vars(thing).values())
    for each in inner:
        yield from arrays_within(each, seen)


@pytest.mark.parametrize('rule', [D_RTRL, ES, None], ids=str)
def test_a_learner_that_has_run_holds_no_array(rule):
    learner, state = started(rule=rule)
    jax.jit(learner.sequence_grad(loss))(params(), state, *data())
    assert list(arrays_within((learner, learner.graph), seen := {})) == [] and len(seen) > 100


def test_a_constant_of_the_cell_is_found_in_its_learner():
    constant = drawn(4)
    learner, _ = started(lambda p, h, x: (cell(p, h, x)[0], constant * cell(p, h, x)[1]))
    assert any(a is constant or a.shape == (4,) for a in arrays_within(learner, {}))


@pytest.mark.tier(quick=0)
@both_rules
def test_no_tracer_leaks_and_a_repeated_call_gives_the_same_bits(rule):
    def calls(learner, state):
        (xs, ys), p = data(), params()
        step = jax.jit(learner.step)(p, state, xs[0])
        grad = jax.jit(learner.grad(loss))(p, state, xs[0], ys[0])
        return step, grad, jax.jit(learner.sequence_grad(loss))(p, state, xs, ys)

    learner, state = started(rule=rule)
    before = jax.tree.map(np.array, state)
    with jax.checking_leaks():
        first = calls(learner, state)
    assert_close(calls(learner, state), first, 0)
    assert_close(jax.tree.map(np.array, state), before, 0)


def test_a_call_that_raises_leaves_the_learner_as_it_was():
    learner, state = started()
    (xs, ys), p = data(), params()
    wanted = learner.grad(loss)(p, state, xs[0], ys[0])

    def fails(out, target):
        raise RuntimeError('in the loss')

    with jax.checking_leaks():
        for bad in (
            lambda: jax.jit(learner.grad(fails))(p, state, xs[0], ys[0]),
            lambda: jax.jit(learner.sequence_grad(fails))(p, state, xs, ys),
            lambda: learner.init({**p, 'w': p['w'][1:]}, state.carry, xs[0]),
        ):
            with pytest.raises((RuntimeError, EtpShapeError)):
                bad()
    assert_close(learner.grad(loss)(p, state, xs[0], ys[0]), wanted, 0)


@pytest.mark.slow
def test_keys_made_of_a_seed_and_a_counter_are_those_of_a_plain_loop():
    """The recipe of docs/howto/sharp_bits.md."""

    def noisy(p, c, x):
        noise = jax.random.normal(jax.random.fold_in(p['seed'], c['count']), c['h'].shape)
        out, h = cell(p, c['h'], x + noise[:, :3])
        return out, {'h': h, 'count': c['count'] + 1}

    (xs, ys), p = data(), {**params(), 'seed': jax.random.key(7)}
    learner, h, wanted = functional.online(noisy, D_RTRL), jnp.zeros((2, 4)), []
    state = learner.init(p, {'h': h, 'count': jnp.array(0)}, xs[0])
    _, losses, _, end = jax.jit(learner.sequence_grad(loss))(p, state, xs, ys)
    for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(7), k), (2, 4))
        out, h = cell(p, h, x + noise[:, :3])
        wanted.append(loss(out, y))
    assert_close((losses, end.carry), (jnp.stack(wanted), {'h': h, 'count': np.array(len(xs))}))


# -- nothing outside keeps a graph or an array of a cell -------------------------------------------

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


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('call', [grad, step, sequence_grad, sequence_update])
def test_nothing_of_a_learner_outlives_it(call):
    left_of(lambda: used(call), 1)  # what is made once for the process
    assert left_of(lambda: used(call), 1) == (0, 0)
