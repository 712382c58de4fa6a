"""Pure functions: no arrays in a learner, no side effects, randomness from keys in the carry."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import functional
from braintrace.errors import EtpShapeError
from tests.compare import assert_close
from tests.precision import float64 as float64

from .plain import D_RTRL, ES, both_rules, cell, data, drawn, loss, params, started


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


@pytest.mark.tier(quick=0, one_in=2)
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
    assert_close(calls(*started(rule=rule)), first, 0)
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
    learner = functional.online(noisy, D_RTRL)
    state = learner.init(p, {'h': jnp.zeros((2, 4)), 'count': jnp.array(0)}, xs[0])
    _, losses, _, end = jax.jit(learner.sequence_grad(loss))(p, state, xs, ys)
    h, wanted = jnp.zeros((2, 4)), []
    for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(7), k), (2, 4))
        out, h = cell(p, h, x + noise[:, :3])
        wanted.append(loss(out, y))
    assert_close((losses, end.carry['h']), (jnp.stack(wanted), h))
    assert int(end.carry['count']) == len(xs)
