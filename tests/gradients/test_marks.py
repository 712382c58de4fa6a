"""Cells without any braintrace op, marked automatically: their gradients and traces are those of
the cell in which the same ops stand by hand, of the cut recursion, and of plain reverse mode where
online learning is exact.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import braintrace
from braintrace import functional, rules, verify
from tests import oracles
from tests.compare import assert_close, assert_moves
from tests.gradients.harness import assert_exact, learn, learn_by_steps
from tests.models import squared

T, B, I, N = 4, 2, 3, 4
RULES = [rules.d_rtrl(), rules.es_d_rtrl(0.8), None]
mm, ew = braintrace.matmul, braintrace.element_wise
sigmoid, tanh = jax.nn.sigmoid, jnp.tanh


def drawn(*shape, seed=0):
    return 0.5 * np.random.default_rng([seed, *shape]).normal(size=shape)


# cells as frameworks write them, each with its twin ----------------------------------------------


def equinox_gru(p, h, x):
    """Single, and mapped over the batch: the weight is on the left, a transpose follows."""

    def one(h, x):
        i, g = p['wi'] @ x + p['b'], p['wh'] @ h
        (ir, iz, i), (gr, gz, g) = jnp.split(i, 3), jnp.split(g, 3)
        z = sigmoid(iz + gz)
        new = tanh(i + sigmoid(ir + gr) * (g + p['bn']))
        return new + z * (h - new)

    h = jax.vmap(one)(h, x)
    return h, h


def equinox_gru_by_hand(p, h, x):
    i, g = mm(x, p['wi'].T, p['b']), mm(h, p['wh'].T)
    (ir, iz, i), (gr, gz, g) = jnp.split(i, 3, -1), jnp.split(g, 3, -1)
    z = sigmoid(iz + gz)
    new = tanh(i + sigmoid(ir + gr) * (g + ew(jnp.broadcast_to(p['bn'], g.shape))))
    h = new + z * (h - new)
    return h, h


def lstm_gates(y, c):
    i, f, g, o = jnp.split(y, 4, -1)
    c = sigmoid(f) * c + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(c), c


def optimized_lstm(p, carry, x):
    """Kernels glued together, a bias by reshape, all of it in `jit` and `checkpoint`."""
    h, c = carry

    @jax.checkpoint
    def dense(p, h, x):
        kernel = jnp.concatenate([p['i'], p['f'], p['g'], p['o']], -1)
        return x @ p['w'] + lax.dot_general(h, kernel, (((1,), (0,)), ((), ()))) + p['b'][None, :]

    h, c = lstm_gates(jax.jit(dense)(p, h, x), c)
    return h, (h, c)


def optimized_lstm_by_hand(p, carry, x):
    kernel = jnp.concatenate([p['i'], p['f'], p['g'], p['o']], -1)
    h, c = lstm_gates(mm(carry[0], kernel) + mm(x, p['w'], p['b']), carry[1])
    return h, (h, c)


def branches(p, h, x):
    """Weights in the branches of a `cond`, a bias that leaves one, and a loop."""
    y = lax.cond(x.sum() > 0, lambda: x @ p['w'] + p['b'], lambda: sigmoid(p['a']) * (x @ p['w']))
    h = 0.5 * h + y + lax.cond(x.max() > 0.6, lambda: p['a'], lambda: p['b'])
    h = lax.fori_loop(0, 2, lambda _, h: tanh(p['a'] * h + x @ p['v']), h)
    return h, h


def branches_by_hand(p, h, x):
    a, b = (ew(jnp.broadcast_to(p[name], h.shape)) for name in 'ab')
    y = lax.cond(x.sum() > 0, lambda: mm(x, p['w'], p['b']), lambda: sigmoid(a) * mm(x, p['w']))
    h = 0.5 * h + y + lax.cond(x.max() > 0.6, lambda: a, lambda: b)
    for _ in range(2):
        h = tanh(a * h + mm(x, p['v']))
    return h, h


H = drawn(B, N)
GRU = {'wi': drawn(3 * N, I), 'wh': drawn(3 * N, N), 'b': drawn(3 * N), 'bn': drawn(N)}
LSTM = {name: drawn(N, N, seed=k) for k, name in enumerate('ifgo')}
LSTM |= {'w': drawn(I, 4 * N), 'b': drawn(4 * N)}
OTHER = {'w': drawn(I, N), 'v': drawn(I, N, seed=1), 'a': drawn(N), 'b': drawn(N, seed=1)}
TWINS = {
    'equinox_gru': (equinox_gru, equinox_gru_by_hand, GRU, H),
    'optimized_lstm': (optimized_lstm, optimized_lstm_by_hand, LSTM, (H, 2 * H)),
    'branches': (branches, branches_by_hand, OTHER, H),
}
XS, YS = drawn(T, B, I, seed=5), drawn(T, B, N, seed=6)


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('rule', RULES, ids=['d_rtrl', 'es_d_rtrl', 'no_rule'])
@pytest.mark.parametrize('name', TWINS)
def test_a_marked_cell_learns_as_its_twin_by_hand(name, rule):
    cell, by_hand, *start = TWINS[name]
    want, twin = learn(by_hand, rule, *start, XS, YS)
    assert_moves(want)
    got, marked = learn(
        cell, rule, *start, XS, YS, mark='auto', policy=braintrace.Policy(strict=True)
    )
    assert_close(got, want)
    assert_close(learn_by_steps(marked, *start, XS, YS), want)
    if rule is RULES[0]:
        cut = verify.cut_bptt_gradients(cell, *start, XS, YS, squared, graph=twin.graph)
        assert_close(want, cut)
        assert all(route.kind == 'trace' for route in marked.routes.values())


def test_the_trace_has_the_bytes_of_the_one_by_hand():
    def size(cell, params, carry, **options):
        learner = functional.online(cell, RULES[0], **options)
        jax.eval_shape(learner.init, params, carry, XS[0])
        return learner.report.memory

    for name in ('equinox_gru', 'optimized_lstm'):
        cell, by_hand, *data = TWINS[name]
        assert size(cell, *data, mark='auto') == size(by_hand, *data)


# cells for which online learning is exact --------------------------------------------------------


def diagonal(p, h, x):
    h = sigmoid(p['a']) * h + jnp.maximum(x @ p['w'], p['b']) / (1.5 + p['v'].sum(0) ** 2)
    return h * p['a'], h


def lookup(p, h, x):
    """Rows by `take`, by an index and by a mapped index; a row of vectors."""
    at = jnp.abs(x[:, 0] * 5).astype(int) % 3
    rows = jnp.take(p['w'], at, axis=0) + jax.vmap(lambda k: p['v'][k])(at)
    h = p['a'] * h + rows * p['w'][at[0]] + p['b'] + jnp.stack([p['w'], p['v']], 1)[at].sum(1)
    return h, h


def convolution(p, h, x):
    y = lax.conv_general_dilated(
        x[..., None], p['a'][:3].reshape(3, 1, 1), (1,), 'SAME', dimension_numbers=LAYOUT
    )
    h = (
        0.8 * h
        + jnp.pad(tanh(y[..., 0]), ((0, 0), (0, 1)))
        + x @ p['w']
        + jnp.sort(p['b'] + p['v'])[0]
    )
    return h, h


LAYOUT = ('NWC', 'WIO', 'NWC')


def products_that_sum_nothing(p, h, x):
    h = jnp.einsum('bn,n->bn', h, sigmoid(p['a'])) + jnp.einsum('n,b->bn', p['b'], x[:, 0])
    return h, h + jnp.einsum('n,bn->bn', p['v'][0], tanh(x @ p['w']))


def between_parameters(p, h, x):
    """What happens between parameters alone stays: a weight norm, a mask, a cast, a product."""
    w = p['w'] / jnp.linalg.norm(p['w'], axis=0) * p['a']
    h = 0.8 * h + x @ (w * (jnp.arange(N) > 0) + p['v'] @ jnp.diag(p['b']))
    return h, h.at[:, 1].add(p['b'][0])


def by_hand_in_a_marked_cell(p, h, x):
    """Ops of the user's own stay as they are."""
    h = ew(p['a'], sigmoid) * h + mm(x, p['w'], p['b']) + x @ p['v']
    return h, h


def long_loop(p, h, x):
    """Weights stacked along the axis that a loop runs over, in a branch; one starts its carry."""

    def layer(y, w):
        return lax.cond(
            x.sum() > 0, lambda y: tanh(y * w[0] + x @ w), lambda y: y * p['a'], y
        ), None

    y, _ = lax.scan(layer, jnp.broadcast_to(p['b'], h.shape), jnp.stack([p['w'], p['v']] * 5))
    h = 0.8 * h + y
    return h, h


EXACT = [diagonal, lookup, convolution, products_that_sum_nothing, between_parameters]
EXACT += [by_hand_in_a_marked_cell, long_loop]


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('cell', EXACT, ids=lambda cell: cell.__name__)
def test_a_marked_cell_without_mixing_has_the_gradient_of_reverse_mode(cell):
    data = OTHER, H, XS, YS
    want = oracles.by_time(cell, *data, squared)
    assert_moves(want)
    got, learner = learn(cell, RULES[0], *data, mark='auto')
    assert_close([got, learn_by_steps(learner, *data)], [want, want])


def test_ops_by_hand_stay():
    learner = functional.online(by_hand_in_a_marked_cell, RULES[0], mark='auto')
    jax.eval_shape(learner.init, OTHER, H, XS[0])
    reasons = {path: route.reason for path, route in learner.routes.items()}
    assert reasons == {'a': 'etp_elemwise', 'b': 'etp_mm', 'v': 'etp_einsum_mm', 'w': 'etp_mm'}
    marked = [d.path for d in learner.graph.diagnostics if d.kind == 'marked']
    assert marked == ['v']


# a bias by hand that is broadcast before the state reads it ---------------------------------------


# products of any layout --------------------------------------------------------------------------


@st.composite
def products(draw):
    """Axes of x, of the weight and their kinds: `b`atch, `c`ontracting, and free ones."""
    kinds = {kind: draw(st.integers(0, most)) for kind, most in dict(b=1, c=2, x=2, w=2).items()}
    kinds['c'] = kinds['c'] if kinds['b'] + kinds['c'] else 1
    names = {kind: [f'{kind}{k}' for k in range(n)] for kind, n in kinds.items()}
    x = draw(st.permutations(names['b'] + names['c'] + names['x']))
    w = draw(st.permutations(names['b'] + names['c'] + names['w']))
    return x, w, names, draw(st.booleans())


SIZES = {'b0': 2, 'c0': 3, 'c1': 2, 'x0': 2, 'x1': 3, 'w0': 3, 'w1': 2}


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(products())
def test_a_product_of_any_layout_has_the_gradient_of_reverse_mode(drawn_product):
    x_axes, w_axes, names, weight_left = drawn_product
    sides = [w_axes, x_axes] if weight_left else [x_axes, w_axes]
    numbers = tuple(
        tuple(tuple(side.index(a) for a in names[kind]) for side in sides) for kind in 'cb'
    )

    def cell(p, h, x):
        operands = (p['w'], x) if weight_left else (x, p['w'])
        h = 0.8 * h + tanh(lax.dot_general(*operands, numbers, precision='highest'))
        return h, h

    params = {'w': drawn(*(SIZES[a] for a in w_axes))}
    xs = drawn(2, *(SIZES[a] for a in x_axes), seed=1)
    operands = (params['w'], xs[0]) if weight_left else (xs[0], params['w'])
    h = jnp.zeros(lax.dot_general(*operands, numbers).shape)
    ys = drawn(2, *h.shape, seed=2)
    learner = assert_exact(cell, RULES[0], params, h, xs, ys, mark='auto')
    assert learner.routes['w'].kind == 'trace'


@pytest.mark.slow
def test_uoro_keeps_of_a_bias_of_the_batch_what_it_keeps_of_one_of_the_op():
    def bias(p, h, x):
        h = 0.8 * h + tanh(x @ p['w'] + p['b'])
        return h, h

    def bias_by_hand(p, h, x):
        h = 0.8 * h + tanh(mm(x, p['w'], p['b']))
        return h, h

    params, xs, ys = {'w': drawn(I, N), 'b': drawn(N)}, drawn(T, B, I), drawn(T, B, N)
    reset = np.array([[False] * B, [True, False], [False] * B, [False, True]]), drawn(B, N)
    found, sizes = [], []
    for cell, mark in (bias, 'auto'), (bias_by_hand, None):
        data, given = (params, drawn(B, N), xs, ys), {'reset': reset}
        grads, learner = learn(cell, rules.uoro(), *data, window=3, given=given, mark=mark)
        found.append(grads)
        sizes.append([learner.report(batch).memory for batch in (B, 5 * B)])
    assert_close(*found)
    assert sizes[0] == sizes[1]
