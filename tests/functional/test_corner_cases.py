"""Cases in which a gradient was once wrong or a path silently lost; each against plain
backpropagation, exact for these models.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, rules
from tests import oracles
from tests.compare import added, assert_close
from tests.functional.plain import B, I, N, T, both_rules, sines
from tests.gradients.harness import assert_exact, learn
from tests.precision import float64 as float64
from tests.tiers import first, in_turn

RNG = np.random.default_rng(1)
X = RNG.normal(size=(T, B, I))
W, W2, A, LANES = (0.5 * RNG.normal(size=s) for s in ((I, N), (I, N), N, (B, N)))
H, G = RNG.normal(size=(B, N)), RNG.normal(size=(B, 2))
mm = braintrace.matmul


def bptt(cell, params, carry, steps=T):
    return oracles.by_time(cell, params, carry, X[:steps], X[:steps], sines)


def online(cell, params, carry, rule, window=None, steps=T, **given):
    """The gradient, and the learner."""
    return learn(cell, rule, params, carry, X[:steps], X[:steps], sines, window, given)


def check(cell, params, carry, window=2):
    return assert_exact(cell, rules.d_rtrl(), params, carry, X, X, sines, window)


def leaky(p, h, x, drive=lambda p, x: jnp.tanh(mm(x, p['w']))):
    h = 0.8 * h + drive(p, x)
    return h, h


def filtered(p, c, x):
    h = jnp.tanh(mm(x, p['w']))
    g = 0.9 * c['g'] + h
    return g, {'h': h, 'g': g}


def filtered_slice(p, c, x):
    h = 0.5 * c['h'] + jnp.tanh(mm(x, p['w']))
    g = 0.7 * c['g'] + h[:, :2]
    return g, {'h': h, 'g': g}


def chain(p, c, x):
    a = jnp.tanh(mm(x, p['w']))
    b = 0.8 * c['b'] + a**2
    d = 0.7 * c['d'] + jnp.sin(b) * a
    return d + a, {'a': a, 'b': b, 'd': d}


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(
    'cell, carry',
    [
        (filtered, {'h': H, 'g': H}),
        (filtered_slice, {'h': H, 'g': G}),
        (chain, {'a': H, 'b': H, 'd': H}),
    ],
)
@pytest.mark.parametrize('decay', [0.0, 0.7])
def test_a_state_made_of_another_groups_new_state_is_counted_once(cell, carry, decay):
    params = {'w': W}
    plain = bptt(cell, params, carry, steps=1)
    for rule in (rules.es_d_rtrl(decay), rules.d_rtrl()):
        assert_close(online(cell, params, carry, rule, steps=1)[0], plain)


def test_separate_groups_and_merged_groups_give_one_es_gradient():
    def coupled(p, c, x):
        h = 1e-13 * c['h'] + jnp.tanh(mm(x, p['w']))
        g = 0.9 * c['g'] + h
        return g, {'h': h, 'g': g}

    carry = {'h': H, 'g': H}
    a, b = (online(cell, {'w': W}, carry, rules.es_d_rtrl(0.5))[0] for cell in (filtered, coupled))
    assert_close(a, b, 1e-10)


def test_names_that_look_like_keys_of_other_relations_do_not_collide():
    def drive(p, x):
        return jnp.tanh(mm(x, p['w'])) + jnp.sin(mm(2 * x, p['w'])) + mm(x, p['w#1'])

    learner = check(partial(leaky, drive=drive), {'w': W, 'w#1': W2}, H)
    assert len({op.key for op in learner.graph.ops}) == 3


def test_group_names_stay_apart_when_paths_hold_commas():
    def cell(p, c, x):
        a = 0.8 * c['a'] + jnp.tanh(mm(x, p['w']))
        b = 0.7 * c['b'] + a
        z = 0.6 * c['a,b'] + mm(x, p['v'])
        return b + z, {'a': a, 'b': b, 'a,b': z}

    check(cell, {'w': W, 'v': W2}, {'a': H, 'b': H, 'a,b': H})


@pytest.mark.tier(quick=0)
@both_rules
def test_a_weight_for_each_lane_is_reset_with_its_lane(rule):
    def cell(p, h, x):
        h = jax.nn.sigmoid(braintrace.element_wise(p['a'])) * h + jnp.tanh(mm(x, p['w']))
        return h, h

    params, flags = {'a': LANES, 'w': W}, jnp.zeros((T, B), bool).at[2, 0].set(True)
    whole, _ = online(cell, params, H, rule, window=3, reset=(flags, H))
    learner = functional.online(cell, rule)
    state, found, grad = learner.init(params, H, X[0]), [], jax.jit(learner.grad(sines))
    for t in range(T):
        # not `functional.reset`, which also clears the array: only t says here that the lane is new
        fresh = functional.reset(state, flags[t], H)
        got, _, _, state = grad(params, fresh.replace(trace=state.trace), X[t], X[t])
        found.append(got)
    assert_close(whole, added(found))


def test_a_constant_random_key_in_the_step_is_no_obstacle():
    def drive(p, x):
        noise = jax.random.normal(jax.random.key(0), (B, N))
        return jnp.tanh(mm(x, p['w'])) + noise + jax.random.permutation(jax.random.PRNGKey(0), N)

    check(partial(leaky, drive=drive), {'w': W}, H)


@pytest.mark.tier(quick=0)
@in_turn(
    first((N,)),
    shape=[(N,), (B, 1), (), (1, N), (1,), (B, N)],
    rule=[rules.d_rtrl(), rules.es_d_rtrl(0.9)],
)
def test_element_wise_weights_of_every_shape_learn(rule, shape):
    def cell(p, h, x):
        h = (
            braintrace.element_wise(p['a'], jax.nn.sigmoid) * h
            + jnp.tanh(mm(x, p['w']))
            + braintrace.element_wise(p['a'])
        )
        return h, h

    params = {'a': RNG.normal(size=shape), 'w': W}
    one, *others = (online(cell, params, H, rule, window=w)[0] for w in (1, 2, None))
    for other in others:
        assert_close(one, other)
    assert_close(online(cell, params, H, rule, steps=1)[0], bptt(cell, params, H, steps=1))
    if rule.name == 'D_RTRL':
        assert_close(one, bptt(cell, params, H))


def test_a_carry_with_typed_keys_is_copied_where_init_is_traced():
    def noisy(p, c, x):
        key, now = jax.random.split(c['key'])
        h = 0.8 * c['h'] + mm(x, p['w']) + jax.random.normal(now, c['h'].shape)
        return h, {'h': h, 'key': key}

    learner, args = functional.online(noisy), ({'w': W}, {'h': H, 'key': jax.random.key(3)}, X[0])
    init = lambda: learner.init(*args)
    states = [init(), jax.jit(init)(), jax.eval_shape(init), jax.eval_shape(learner.init, *args)]
    first, *others = (jax.tree.map(lambda a: (a.shape, a.dtype), s) for s in states)
    assert all(other == first for other in others)
    assert_close(*(jax.random.key_data(s.carry['key']) for s in states[:2]))
    grads = learner.grad(sines)({'w': W}, states[1], X[0], None).grads
    assert_close(grads, bptt(noisy, *args[:2], steps=1))


def phased(p, c, x):
    """A clock that nothing teaches opens each unit, by a period and a shift that are learned."""
    t = c['t'] + 1.0
    gate = jnp.sin((t - ew(p['shift'])) / ew(p['period'])) ** 2
    h = gate * jnp.tanh(mm(x, p['w']) + 0.5 * c['h']) + (1 - gate) * c['h']
    return h, {'h': h, 't': t}


def phased_in_a_loop(p, c, x):
    def turn(c, _):
        return phased(p, c, x)[1], None

    c = jax.lax.scan(turn, c, None, length=10)[0]
    return c['h'], c


def two_clocks(p, c, x):
    """One runs by the input and starts again; the other reads it."""
    t = jnp.where(c['t'] > 2.0, 0.0, c['t'] + 0.1 * x[0, 0] ** 2 + 0.7)
    s = 0.9 * c['s'] + t.sum()
    h = c['h'] * jnp.exp(-(t + s) / (9 + ew(p['period']) ** 2)) + ew(p['shift']) * mm(x, p['w'])
    return h, {'h': h, 't': t, 's': s}


def filtered_input(p, c, x):
    """What no parameter reaches may mix: the mean of a filtered input."""
    f = 0.8 * c['f'] + x
    mean = jnp.cumsum(f, -1).mean(-1, keepdims=True)
    h = (ew(p['period']) - 0.1 * mean) * 0.3 * c['h'] + mm(x, p['w']) + ew(p['shift'])
    return h, {'h': h, 'f': f}


ew = braintrace.element_wise
PHASES = {'w': W, 'period': RNG.uniform(1, 2, N), 'shift': RNG.uniform(0, 1, N)}
CLOCKS = {
    'of no shape': (phased, {'t': np.zeros(())}),
    'one number': (phased, {'t': np.zeros(1)}),
    'of each unit': (phased, {'t': np.zeros(N)}),
    'of each lane': (phased, {'t': np.zeros((B, 1))}),
    'in a loop': (phased_in_a_loop, {'t': np.zeros(())}),
    'two': (two_clocks, {'t': np.zeros(()), 's': np.zeros(N)}),
    'a filter': (filtered_input, {'f': np.zeros((B, I))}),
}


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', CLOCKS)
def test_a_state_that_nothing_teaches_takes_no_trace(name):
    cell, states = CLOCKS[name]
    learner = check(cell, PHASES, {'h': H, **states})
    assert {r.kind for r in learner.routes.values()} == {'trace'} and not learner.graph.diagnostics
    assert learner.report.exact


@pytest.mark.slow
def test_a_learned_clock_of_another_shape_loses_its_own_way_alone():
    def step(p, c, x, t):
        gate = jnp.sin((t - ew(p['shift'])) / ew(p['period'])) ** 2
        return gate * jnp.tanh(mm(x, p['w']) + 0.5 * c['h']) + (1 - gate) * c['h']

    def cell(p, c, x, read=lambda t: t):
        t, h = c['t'] + ew(p['rate']), step(p, c, x, c['t'])
        return t + h, {'h': step(p, c, x, read(c['t'])), 't': t}

    for start in (np.zeros(()), np.zeros(N)):
        params = PHASES | {'rate': np.array(0.7) if not start.ndim else RNG.uniform(0.5, 1, N)}
        carry = {'h': H, 't': start}
        got, learner = online(cell, params, carry, rules.d_rtrl())
        assert {r.kind for r in learner.routes.values()} == {'trace'} and not learner.report.exact
        assert {d.kind for d in learner.graph.diagnostics} <= {'mixing', 'cross-group'}
        assert_close(got, bptt(lambda *args: cell(*args, jax.lax.stop_gradient), params, carry))


def test_a_weight_put_beside_others_that_lacks_an_inner_axis_has_a_trace():
    def cell(p, h, x):
        wide = jnp.broadcast_to(ew(p['gain'])[:, None], (B, I, N - 1))
        h = 0.5 * h + jnp.concatenate([x[..., None], wide], -1)
        return h, h

    assert check(cell, {'gain': RNG.normal(size=I)}, np.zeros((B, I, N)), None).report.exact
