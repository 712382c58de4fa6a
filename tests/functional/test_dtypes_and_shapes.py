"""Carries of every dtype and shape: trees, units, complex, low precision, axes of size 1 and 0.

A cell is written over ``mm`` and ``ew``: braintrace's ops for the library, plain JAX for
backpropagation, which is exact for all of these.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import functional, rules
from tests.compare import RELATIVE, assert_close, assert_same_kinds
from tests.precision import float64 as float64
from tests.tiers import first, in_turn, pairwise

B, I, N, T = 2, 3, 4, 6  # noqa: E741
RNG = np.random.default_rng(3)
D, ES = rules.d_rtrl(), rules.es_d_rtrl(0.8)
slow = pytest.mark.slow
both = pytest.mark.parametrize('rule', [D, pytest.param(ES, marks=slow)], ids=lambda r: r.name)


class Library:
    mm, ew = staticmethod(braintrace.matmul), staticmethod(braintrace.element_wise)


class Plain:
    @staticmethod
    def mm(x, w):
        return x @ w

    @staticmethod
    def ew(w, fn=lambda w: w):
        return fn(w)


def draw(*shape, scale=0.6):
    return scale * RNG.normal(size=shape)


def loss(out, _=None):
    return jnp.sum(jnp.sin(out)).astype(float)


def bptt(cell, params, carry, xs, steps=T):
    def total(params):
        outputs = jax.lax.scan(
            lambda c, x: cell(Plain, params, c, x)[::-1],
            jax.tree.map(jnp.asarray, carry),
            xs[:steps],
        )[1]
        return loss(outputs)

    return jax.grad(total)(params)


def online(cell, params, carry, xs, rule=D, window=3, **options):
    """``(learner, grads, state)`` of a sequence."""
    learner = functional.online(partial(cell, Library), rule)
    run = jax.jit(learner.sequence_grad(loss, window=window, reduction='sum'))
    grads, _, _, state = run(params, learner.init(params, carry, xs[0]), xs, xs, **options)
    return learner, grads, state


def assert_same(got, want, relative=RELATIVE):
    """The same numbers, in the same dtypes."""
    assert_close(got, want, relative)
    assert_same_kinds(got, want)


X = draw(T, B, I, scale=1.5)
W, V = draw(I, N), draw(B, N)


def integrator(ops, p, h, x):
    h = 0.8 * h + jnp.tanh(ops.mm(x, p['w']))
    return h, h


# -- trees and units -------------------------------------------------------------------------------


def tree(ops, p, c, x):
    """Two coupled states in a tuple in a dict, one of another shape with a unit, a step count."""
    (a, b), q = c['pair'], c['charge']
    a = 0.8 * a + jnp.tanh(ops.mm(x, p['w'])) - 0.3 * b
    b = 0.9 * b + 0.2 * jnp.sin(a)
    q = 0.7 * q + ops.mm(x, p['v'])
    out = jnp.concatenate([a * b, q / u.mV], -1)
    return out, {'pair': (a, b), 'charge': q, 'count': c['count'] + 1}


def test_a_carry_may_be_any_tree_with_units():
    params = {'w': W, 'v': draw(I, 2) * u.mV}
    carry = {'pair': (V, draw(B, N)), 'charge': draw(B, 2) * u.mV, 'count': jnp.array(0)}
    learner, grads, state = online(tree, params, carry, X)
    assert_same(grads, bptt(tree, params, carry, X))
    assert [(g.paths, g.shape) for g in learner.graph.hidden_groups] == [
        (('charge/0',), (B, 2)),
        (('pair/0', 'pair/1'), (B, N)),
    ]
    assert int(state.carry['count']) == T and u.get_unit(state.carry['charge']) == u.mV


def selective(ops, p, c, x):
    """Only ``h`` is hidden: ``mean`` is a float, moves on, and is read as a constant."""
    mean = 0.9 * c['mean'] + 0.1 * c['h']
    h = 0.8 * c['h'] + jnp.tanh(ops.mm(x, p['w'])) - 0.5 * jax.lax.stop_gradient(c['mean'])
    return h + jax.lax.stop_gradient(c['mean']) ** 2, {'h': h, 'mean': mean}


@both
def test_a_carry_that_is_not_declared_hidden_moves_on_and_is_a_constant(rule):
    carry = {'h': V, 'mean': draw(B, N)}

    def unmarked(ops, p, c, x):
        mean = 0.9 * c['mean'] + 0.1 * c['h']
        h = 0.8 * c['h'] + jnp.tanh(ops.mm(x, p['w'])) - 0.5 * c['mean']
        return h + c['mean'] ** 2, {'h': h, 'mean': mean}

    learner = functional.online(
        partial(unmarked, Library), rule, hidden=lambda path, leaf: path[0] == 'h'
    )
    state = learner.init({'w': W}, carry, X[0])
    grads, _, _, state = learner.sequence_grad(loss, window=3, reduction='sum')(
        {'w': W}, state, X, X
    )
    if rule is D:
        assert_same(grads, bptt(selective, {'w': W}, carry, X))
    want = carry
    for x in X:
        _, want = selective(Plain, {'w': W}, want, x)
    assert_same(state.carry, want, 1e-12)
    assert len(learner.graph.hidden_groups) == 1


# -- complex states --------------------------------------------------------------------------------


def lru(ops, p, h, x):
    """A linear recurrent unit: complex diagonal of two real parameters, complex input weight."""
    decay = ops.ew(jnp.exp(-jnp.exp(p['nu']) + 1j * p['theta']))
    h = decay * h + ops.mm(x + 0j, p['b_re'] + 1j * p['b_im'])
    return jnp.real(h @ (p['c_re'] + 1j * p['c_im'])) + x @ p['d'], h


LRU = {
    'nu': draw(N),
    'theta': draw(N),
    'b_re': W,
    'b_im': draw(I, N),
    'c_re': draw(N, 2),
    'c_im': draw(N, 2),
    'd': draw(I, 2),
}


@pytest.mark.tier(quick=0, one_in=2)
@pytest.mark.parametrize('window', [3, *(pytest.param(w, marks=slow) for w in (1, 4))])
def test_a_complex_diagonal_recurrence_is_backpropagation(window):
    carry = V + 1j * draw(B, N)
    learner, grads, state = online(lru, LRU, carry, X, window=window)
    assert_same(grads, bptt(lru, LRU, carry, X))
    assert {k for k, r in learner.routes.items() if r.kind == 'trace'} == {
        'nu',
        'theta',
        'b_re',
        'b_im',
    }
    assert all(e.dtype == complex for e in jax.tree.leaves(state.trace))


@slow
def test_a_complex_diagonal_recurrence_equals_two_real_states():
    def real(ops, p, c, x):
        decay = ops.ew(p['nu'], lambda v: jnp.exp(-jnp.exp(v)))
        a, b = decay * ops.ew(p['theta'], jnp.cos), decay * ops.ew(p['theta'], jnp.sin)
        re = a * c['re'] - b * c['im'] + ops.mm(x, p['b_re'])
        im = b * c['re'] + a * c['im'] + ops.mm(x, p['b_im'])
        return re @ p['c_re'] - im @ p['c_im'] + x @ p['d'], {'re': re, 'im': im}

    im = draw(B, N)
    assert_same(online(lru, LRU, V + 1j * im, X)[1], online(real, LRU, {'re': V, 'im': im}, X)[1])


# -- low and mixed precision -----------------------------------------------------------------------


def lstm_like(compute, ops, p, c, x):
    """Two coupled states, computed in ``compute`` whatever the dtype of the parameters."""
    x, w, v = x.astype(compute), p['w'].astype(compute), p['v'].astype(compute)
    a = jax.nn.sigmoid(ops.ew(p['a'].astype(compute))) * c['a'] + jnp.tanh(ops.mm(x, w))
    b = 0.7 * c['b'] + jax.nn.sigmoid(ops.mm(x, v)) * a
    return (b @ p['out'].astype(compute)).astype(jnp.float32), {'a': a, 'b': b}


MIXED = {'w': W, 'v': draw(I, N), 'a': draw(N), 'out': draw(N, 2)}
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


@functools.cache
def exact(rule):
    """The gradient in float32: by backpropagation for D_RTRL."""
    weights, carry = jax.tree.map(lambda a: jnp.asarray(a, F32), (MIXED, {'a': V, 'b': V[::-1]}))
    cell, xs = partial(lstm_like, F32), jnp.asarray(X, F32)
    return (
        bptt(cell, weights, carry, xs) if rule is D else online(cell, weights, carry, xs, rule)[1]
    )


KINDS = {
    'float32 in bfloat16': (F32, BF16),
    'bfloat16': (BF16, BF16),
    'float32 in float16': (F32, F16),
    'bfloat16 in float32': (BF16, F32),
}
WINDOWS = [3, 1, 4]


@pytest.mark.tier(quick=0, one_in=4)
@pairwise(first('float32 in bfloat16'), kind=KINDS, window=WINDOWS, rule=[D, ES])
def test_mixed_precision_stays_within_twenty_roundings_of_float32(kind, window, rule):
    params, compute = KINDS[kind]
    weights = jax.tree.map(lambda a: jnp.asarray(a, params), MIXED)
    carry = jax.tree.map(lambda a: jnp.asarray(a, compute), {'a': V, 'b': V[::-1]})
    _, grads, state = online(
        partial(lstm_like, compute), weights, carry, jnp.asarray(X, F32), rule, window
    )
    rounding = max(float(jnp.finfo(params).eps), float(jnp.finfo(compute).eps))
    for name, want in exact(rule).items():
        g = grads[name]
        assert g.dtype == params and jnp.isfinite(g).all()
        assert jnp.abs(g.astype(F32) - want).max() <= 20 * rounding * jnp.abs(want).max(), name
    assert all(h.dtype == compute for h in jax.tree.leaves(state.carry))


# -- sizes -----------------------------------------------------------------------------------------


def sized(b, i, n):
    """Parameters, carry and inputs for these sizes."""
    lead = () if b is None else (b,)
    return {'w': draw(i, n), 'v': draw(n)}, draw(*lead, n), draw(T, *lead, i)


def leaky(ops, p, h, x):
    h = jax.nn.sigmoid(ops.ew(p['v'])) * h + jnp.tanh(ops.mm(x, p['w']))
    return h, h


SIZES = [
    (0, I, N),
    (1, I, N),
    (2, I, 1),
    (1, 1, 1),
    (2, 0, N),
    (2, I, 0),
    (0, 0, 0),
    (None, I, 1),
    (None, 0, N),
    (None, I, 0),
]


@pytest.mark.tier(one_in=4)
@in_turn(first((0, I, N)), size=SIZES, rule=[D, ES], window=WINDOWS)
def test_axes_of_size_one_and_zero(size, window, rule):
    params, carry, xs = sized(*size)
    _, grads, state = online(leaky, params, carry, xs, rule, window)
    if rule is D or 0 in (size[0], size[2]):
        assert_same(grads, bptt(leaky, params, carry, xs))
    else:
        assert_same(
            online(leaky, params, carry, xs[:1], rule, window)[1], bptt(leaky, params, carry, xs, 1)
        )
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)
    want = carry
    for x in xs:
        _, want = leaky(Plain, params, want, x)
    assert_same(state.carry, want, 1e-12)
    assert state.t.shape == carry.shape[:-1] and (state.t == T).all()


def test_an_empty_batch_has_the_relations_of_any_other():
    found = []
    for b in (0, 2):
        params, carry, xs = sized(b, I, N)
        learner = functional.online(partial(leaky, Library), D)
        learner.init(params, carry, xs[0])
        found.append({k: (r.kind, r.reason) for k, r in learner.routes.items()})
    assert found[0] == found[1]


@both
def test_an_empty_batch_can_be_stepped_and_reset(rule):
    params, carry, xs = sized(0, I, N)
    learner = functional.online(partial(leaky, Library), rule)
    state = learner.init(params, carry, xs[0])
    grads, value, out, state = learner.grad(loss)(params, state, xs[0], xs[0])
    assert value == 0 and out.shape == (0, N)
    assert_same(grads, jax.tree.map(np.zeros_like, params))
    state = functional.reset(state, jnp.zeros(0, bool), carry)
    assert state.t.shape == (0,)
    _, grads, _ = online(leaky, params, carry, xs, rule, reset=(jnp.zeros((T, 0), bool), carry))
    assert_same(grads, jax.tree.map(np.zeros_like, params))


def scalar(ops, p, c, x):
    """Two states of shape (): a scalar weight drives one, the sum of a matrix product the other."""
    v = jnp.tanh(ops.ew(p['a'])) * c['v'] + ops.ew(p['b']) * x.sum() - 0.2 * c['a']
    a = 0.9 * c['a'] + 0.3 * jnp.sin(v)
    return v * a, {'v': v, 'a': a}


@pytest.mark.parametrize('window', [3, *(pytest.param(w, marks=slow) for w in (1, 4))])
def test_scalar_hidden_states(window):
    params, carry, xs = (
        {'a': np.array(0.7), 'b': np.array(-0.4)},
        {'v': np.array(0.3), 'a': np.array(0.2)},
        X[:, 0],
    )
    learner, grads, state = online(scalar, params, carry, xs, window=window)
    assert_same(grads, bptt(scalar, params, carry, xs))
    (group,) = learner.graph.hidden_groups
    assert (group.shape, group.num_state, state.t.shape) == ((), 2, ())


def reduced(ops, p, h, x):
    """A scalar state that reads the single result of a matrix by reshape."""
    h = 0.8 * h + jnp.tanh(ops.mm(x, p['w']).reshape(()))
    return h, h


@both
def test_a_scalar_hidden_state_driven_by_a_matrix(rule):
    params, xs = {'w': draw(I, 1)}, X[:, 0]
    steps = T if rule is D else 1
    assert_same(
        online(reduced, params, np.array(0.3), xs[:steps], rule)[1],
        bptt(reduced, params, np.array(0.3), xs, steps),
    )
