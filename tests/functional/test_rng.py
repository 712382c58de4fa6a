"""Randomness is part of the carry: threaded, never learned, folded by the caller."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional
from tests.compare import assert_close
from tests.gradients.harness import quick
from tests.models.ops import _spike_vjp as spike
from tests.precision import float64 as float64

from .plain import D_RTRL, I, N, T, both_rules, drawn, loss

LANES = 3


def noisy_lif(p, c, x):
    """A leaky neuron with noise in its membrane; it spikes and is reset."""
    key, own = jax.random.split(c['key'])
    noise = 0.3 * jax.random.normal(own, c['v'].shape)
    v = 0.8 * c['v'] + braintrace.matmul(x, p['w']) + noise
    z = spike(v - 0.5)
    return z @ p['out'] + noise.sum(), {'v': v - z, 'key': key}


def params():
    return {'w': drawn(I, N), 'out': drawn(N, 2)}


def carry(key=None):
    return {'v': jnp.zeros(N), 'key': jax.random.key(5) if key is None else key}


XS = np.random.default_rng(0).normal(size=(T, I))
YS = np.random.default_rng(1).normal(size=(T, 2))


def step_of_a_lane(learner):
    """A step on lanes that share one key: folded before it, put back as it was after it."""

    def step(state, x):
        folded = functional.fold_lane(state, 'lane')
        out, new = learner.step(params(), folded, x)
        key = jax.random.split(state.carry['key'])[0]  # without the lane's index
        return out, new.replace(carry={**new.carry, 'key': key})

    return step


@pytest.mark.slow
def test_lanes_draw_their_own_numbers_and_the_shared_key_comes_back_shared():
    learner = functional.online(noisy_lif, D_RTRL)
    state = learner.init(params(), carry(), XS[0])
    axes = jax.tree.map(lambda a: None if a is state.carry['key'] else 0, state)
    lanes = jax.tree.map(
        lambda a, axis: a if axis is None else jnp.stack([a] * LANES),
        state,
        axes,
        is_leaf=lambda a: a is None,
    )
    step = jax.vmap(
        step_of_a_lane(learner), in_axes=(axes, None), out_axes=(0, axes), axis_name='lane'
    )
    out, new = jax.jit(step)(lanes, XS[0])
    assert new.carry['key'].shape == ()
    assert len({float(v) for v in new.carry['v'][:, 0]}) == LANES
    for k in range(LANES):
        own = carry(jax.random.fold_in(jax.random.key(5), k))
        want, c = noisy_lif(params(), own, XS[0])
        assert_close((out[k], new.carry['v'][k]), (want, c['v']))


@pytest.mark.slow
@both_rules
def test_keys_are_threaded_and_have_no_trace_and_no_gradient(rule):
    learner = functional.online(noisy_lif, rule)
    state = learner.init(params(), carry(), XS[0])
    assert state.carry['key'] == jax.random.key(5)  # nothing is folded or drawn at init
    assert not any('key' in row[0] for row in learner.memory().rows if row[0].startswith('trace'))
    _, losses, _, end = jax.jit(learner.sequence_grad(loss, window=2))(params(), state, XS, YS)
    c, want = carry(), []
    for x, y in zip(XS, YS, strict=True):
        out, c = noisy_lif(params(), c, x)
        want.append(loss(out, y))
    assert_close(losses, jnp.stack(want))
    assert end.carry['key'] == c['key']


def begun(cell=noisy_lif, first=None, x=XS[0]):
    """A learner, its first state, and the one behind a step."""
    learner, first = functional.online(cell, D_RTRL), carry() if first is None else first
    state = learner.init(params(), first, x)
    return learner, state, learner.step(params(), state, x)[1]


def test_a_reset_leaves_the_keys():
    _, state, moved = begun()
    again = functional.reset(moved, True, carry())
    assert again.carry['key'] == moved.carry['key'] != state.carry['key']
    assert (again.carry['v'] == 0).all() and int(again.t) == 0


def test_a_raw_key_goes_on_through_every_reset():
    first, key = carry(jax.random.PRNGKey(5)), jax.random.PRNGKey(5)
    learner, start, _ = begun(first=first)
    step, state = jax.jit(lambda state: learner.step(params(), state, XS[0])[1]), start
    for _ in range(3):
        key, state = jax.random.split(key)[0], functional.reset(step(state), True, first)
    assert state.carry['key'].tolist() == key.tolist() and not state.carry['v'].any()
    run, resets = quick(learner.sequence_grad(loss)), (np.arange(3) == 1, first)
    _, _, _, state = run(params(), start, XS[:3], YS[:3], reset=resets)
    assert state.carry['key'].tolist() == key.tolist()


def test_a_raw_key_is_folded_like_a_typed_one():
    def outputs(kind):
        learner = functional.online(noisy_lif, D_RTRL)
        state = learner.init(params(), carry(kind(5)), XS[0])
        return jax.vmap(
            lambda _: learner.step(params(), functional.fold_lane(state, 'lane'), XS[0])[0],
            axis_name='lane',
        )(jnp.arange(LANES))

    typed, raw = outputs(jax.random.key), outputs(jax.random.PRNGKey)
    assert len(set(raw[:, 0].tolist())) == LANES
    assert_close(raw, typed)


def counted(clock=False):
    """Dropout whose keys are counted; with ``clock`` the count is an output too."""

    def cell(p, c, x):
        key, n = jax.random.fold_in(jax.random.key(0), c['n']), c['n'] + 1
        v = 0.8 * c['v'] + braintrace.matmul(x, p['w'])
        kept = jnp.where(jax.random.bernoulli(key, 0.5, v.shape), v, 0)
        return (kept @ p['out'], n if clock else 0), {'v': v, 'n': n}

    return cell


COUNT = {'v': np.zeros((2, N)), 'n': np.array(0)}
TWO = np.stack([XS[0]] * 2)


@pytest.mark.parametrize('flags', [True, np.array([True, False])])
def test_a_count_of_keys_goes_on_through_resets(flags):
    *_, state = begun(counted(), COUNT, TWO)
    again = functional.reset(state, flags, COUNT)
    assert int(again.carry['n']) == 1
    assert_close(again.carry['v'], jnp.where(jnp.reshape(flags, (-1, 1)), 0, state.carry['v']))


def test_a_count_that_is_read_otherwise_is_no_count_of_keys():
    *_, state = begun(counted(clock=True), COUNT, TWO)
    assert int(functional.reset(state, True, COUNT).carry['n']) == 0
    with pytest.raises(
        braintrace.errors.StructureError, match='n .* can not start again in single'
    ):
        functional.reset(state, np.array([True, False]), COUNT)


def test_integers_that_no_draw_takes_for_a_key_start_anew():
    def counting(p, c, x):
        return c['n'], {'v': 0.8 * c['v'] + braintrace.matmul(x, p['w']), 'n': c['n'] + 1}

    first = {'v': jnp.zeros(N), 'n': jnp.zeros(2, jnp.uint32)}
    *_, state = begun(counting, first)
    assert functional.reset(state, jnp.array(True), first).carry['n'].tolist() == [0, 0]
