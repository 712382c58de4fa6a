"""Carries of every dtype and shape: trees, units, complex, low precision, axes of size 1 and 0.

Backpropagation is exact for all of these cells.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace import functional
from tests import oracles
from tests.compare import RELATIVE, assert_close, assert_same_kinds
from tests.functional.plain import D_RTRL as D
from tests.functional.plain import ES, both_rules
from tests.models.library import LibraryOps
from tests.models.ops import JaxOps
from tests.precision import float64 as float64
from tests.tiers import first, in_turn, pairwise

B, I, N, T = 2, 3, 4, 6  # noqa: E741
RNG = np.random.default_rng(3)
Library, Plain = LibraryOps(), JaxOps()


def draw(*shape, scale=0.6):
    return scale * RNG.normal(size=shape)


def loss(out, _=None):
    return jnp.sum(jnp.sin(out)).astype(float)


def bptt(cell, params, carry, xs, steps=T):
    return oracles.by_time(partial(cell, Plain), params, carry, xs[:steps], xs[:steps], loss)


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


def tree(ops, p, c, x):
    """Two coupled states in a tuple in a dict, one of another shape with a unit, a step count."""
    (a, b), q = c['pair'], c['charge']
    a = 0.8 * a + jnp.tanh(ops.matmul(x, p['w'])) - 0.3 * b
    b = 0.9 * b + 0.2 * jnp.sin(a)
    q = 0.7 * q + ops.matmul(x, p['v'])
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


def beside(constant, ops, p, c, x):
    """``h`` and a mean that moves on, which is read through ``constant``."""
    mean = 0.9 * c['mean'] + 0.1 * c['h']
    h = 0.8 * c['h'] + jnp.tanh(ops.matmul(x, p['w'])) - 0.5 * constant(c['mean'])
    return h + constant(c['mean']) ** 2, {'h': h, 'mean': mean}


@both_rules
def test_a_carry_that_is_not_declared_hidden_moves_on_and_is_a_constant(rule):
    params, want = {'w': W}, {'h': V, 'mean': draw(B, N)}
    cell = partial(beside, lambda h: h, Library)
    learner = functional.online(cell, rule, hidden=lambda path, leaf: path[0] == 'h')
    run = jax.jit(learner.sequence_grad(loss, window=3, reduction='sum'))
    grads, _, _, state = run(params, learner.init(params, want, X[0]), X, X)
    selective = partial(beside, jax.lax.stop_gradient)
    if rule is D:
        assert_same(grads, bptt(selective, params, want, X))
    for x in X:
        _, want = selective(Plain, params, want, x)
    assert_same(state.carry, want, 1e-12)
    assert len(learner.graph.hidden_groups) == 1


def lstm_like(compute, ops, p, c, x):
    """Two coupled states, computed in ``compute`` whatever the dtype of the parameters."""
    x, w, v = x.astype(compute), p['w'].astype(compute), p['v'].astype(compute)
    decay = jax.nn.sigmoid(ops.element_wise(p['a'].astype(compute)))
    a = decay * c['a'] + jnp.tanh(ops.matmul(x, w))
    b = 0.7 * c['b'] + jax.nn.sigmoid(ops.matmul(x, v)) * a
    return (b @ p['out'].astype(compute)).astype(jnp.float32), {'a': a, 'b': b}


MIXED = {'w': W, 'v': draw(I, N), 'a': draw(N), 'out': draw(N, 2)}
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


@functools.cache
def exact(rule):
    """The gradient in float32: by backpropagation for D_RTRL."""
    data = jax.tree.map(lambda a: jnp.asarray(a, F32), (MIXED, {'a': V, 'b': V[::-1]}, X))
    cell = partial(lstm_like, F32)
    return bptt(cell, *data) if rule is D else online(cell, *data, rule)[1]


KINDS = {
    'float32 in bfloat16': (F32, BF16),
    'bfloat16': (BF16, BF16),
    'float32 in float16': (F32, F16),
    'bfloat16 in float32': (BF16, F32),
    'float16': (F16, F16),
}
WINDOWS = [3, 1, 4]


@pytest.mark.tier(quick=0)
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
    wider = jnp.promote_types(params, compute)
    assert all(e.dtype == wider for e in jax.tree.leaves(state.trace))


def sized(b, i, n):
    """Parameters, carry and inputs for these sizes."""
    lead = () if b is None else (b,)
    return {'w': draw(i, n), 'v': draw(n)}, draw(*lead, n), draw(T, *lead, i)


def leaky(ops, p, h, x):
    h = jax.nn.sigmoid(ops.element_wise(p['v'])) * h + jnp.tanh(ops.matmul(x, p['w']))
    return h, h


SIZES = [(0, I, N), (1, I, N), (2, I, 1), (1, 1, 1), (2, 0, N), (2, I, 0), (0, 0, 0)]
SIZES += [(None, I, 1), (None, 0, N), (None, I, 0)]


@in_turn(first((0, I, N)), size=SIZES, rule=[D, ES], window=WINDOWS)
def test_axes_of_size_one_and_zero(size, window, rule):
    params, carry, xs = sized(*size)
    _, grads, state = online(leaky, params, carry, xs, rule, window)
    if rule is D or 0 in (size[0], size[2]):
        assert_same(grads, bptt(leaky, params, carry, xs))
    else:
        first = online(leaky, params, carry, xs[:1], rule, window)[1]
        assert_same(first, bptt(leaky, params, carry, xs, 1))
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)
    want = carry
    for x in xs:
        _, want = leaky(Plain, params, want, x)
    assert_same(state.carry, want, 1e-12)
    assert state.t.shape == carry.shape[:-1] and (state.t == T).all()


@both_rules
def test_an_empty_batch_can_be_stepped_and_reset(rule):
    params, carry, xs = sized(0, I, N)
    learner = functional.online(partial(leaky, Library), rule)
    state = learner.init(params, carry, xs[0])
    assert {route.kind for route in learner.routes.values()} == {'trace'}
    grads, value, out, state = learner.grad(loss)(params, state, xs[0], xs[0])
    assert value == 0 and out.shape == (0, N)
    assert functional.reset(state, jnp.zeros(0, bool), carry).t.shape == (0,)
    reset = jnp.zeros((T, 0), bool), carry
    for got in (grads, online(leaky, params, carry, xs, rule, reset=reset)[1]):
        assert_same(got, jax.tree.map(np.zeros_like, params))


def scalar(ops, p, c, x):
    """Two states of shape (): a scalar weight drives one, the sum of a matrix product the other."""
    v = jnp.tanh(ops.element_wise(p['a'])) * c['v'] - 0.2 * c['a']
    v = v + ops.element_wise(p['b']) * x.sum()
    a = 0.9 * c['a'] + 0.3 * jnp.sin(v)
    return v * a, {'v': v, 'a': a}


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('window', [3, 1, 4])
def test_scalar_hidden_states(window):
    params, xs = {'a': np.array(0.7), 'b': np.array(-0.4)}, X[:, 0]
    carry = {'v': np.array(0.3), 'a': np.array(0.2)}
    learner, grads, state = online(scalar, params, carry, xs, window=window)
    assert_same(grads, bptt(scalar, params, carry, xs))
    (group,) = learner.graph.hidden_groups
    assert (group.shape, group.num_state, state.t.shape) == ((), 2, ())


def reduced(ops, p, h, x):
    """A scalar state that reads the single result of a matrix by reshape."""
    h = 0.8 * h + jnp.tanh(ops.matmul(x, p['w']).reshape(()))
    return h, h


@both_rules
def test_a_scalar_hidden_state_driven_by_a_matrix(rule):
    params, xs = {'w': draw(I, 1)}, X[:, 0]
    data = params, np.array(0.3), xs[: T if rule is D else 1]
    assert_same(online(reduced, *data, rule)[1], bptt(reduced, *data))
