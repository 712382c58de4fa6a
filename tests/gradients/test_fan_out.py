"""An element of an op's result that feeds several positions has an entry of the trace for each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, rules
from tests.gradients.harness import assert_exact
from tests.tiers import slow

B, I, K, D = 2, 3, 2, 4
RNG = np.random.default_rng(4)
XS, YS = RNG.normal(size=(4, B, I)), RNG.normal(size=4)


def loss(output, y):
    return (y * jnp.sin(output)).sum()


def check(cell, params, carry):
    """Windows and single steps are exact, and the report says so."""
    for window in (1, 3):
        learner = assert_exact(cell, rules.d_rtrl(), params, carry, XS, YS, loss, window)
    assert braintrace.report(learner.graph).exact


@pytest.mark.slow
@pytest.mark.parametrize(
    'outer',
    [
        lambda k, v: jnp.einsum('bi,bj->bij', k, v),
        lambda k, v: k[:, :, None] @ v[:, None, :],
        lambda k, v: jax.vmap(jnp.outer)(k, v),
        lambda k, v: jnp.einsum('bi,bj->bji', v, k),
    ],
    ids=['einsum', 'matmul', 'vmap of outer', 'einsum turned'],
)
def test_a_product_that_sums_nothing_is_position_by_position(outer):
    def cell(p, s, x):
        s = 0.9 * s + outer(braintrace.matmul(x, p['k']), braintrace.matmul(x, p['v']))
        return s.sum(-1), s

    params = {'k': RNG.normal(size=(I, K)), 'v': RNG.normal(size=(I, D))}
    check(cell, params, np.zeros((B, K, D)))


@pytest.mark.slow
def test_rows_of_a_table_feed_several_positions():
    def cell(p, s, x):
        k = braintrace.embedding((x[:, 0] > 0).astype(int), p['table'])
        s = jax.nn.sigmoid(k)[..., None] * s + x[:, None]
        return s, s

    check(cell, {'table': RNG.normal(size=(2, K))}, np.zeros((B, K, I)))


@pytest.mark.slow
def test_without_a_carry_no_array_has_the_size_of_the_trace():
    def cell(p, s, x):
        s = 0.9 * s + braintrace.matmul(x, p['k'])[:, :, None] * x[:, None, :]
        return s.sum(-1), s

    params, carry = {'k': np.ones((I, 7))}, np.zeros((B, 7, I))
    learner = functional.online(cell, rules.d_rtrl())
    state = learner.init(params, carry, XS[0])
    assert state.trace['k']['carry']['weight'][0].shape == (B, I, I, 7)

    def sizes(keep):
        grad = learner.sequence_grad(loss, window=None, keep_trace=keep)
        text = jax.jit(grad).lower(params, state, XS, YS).compile().as_text()
        return text.count(f'[{B},{I},{I},7]')

    kept, dropped = map(sizes, (True, False))
    assert dropped < kept


# ---- drawn tails ----

MOVES = {
    'rows': lambda y, n: jnp.repeat(y[:, :, None], n, 2),
    'columns': lambda y, n: jnp.broadcast_to(y[:, None, :], (B, n, y.shape[1])),
    'tiled': lambda y, n: jnp.tile(y[:, :, None], (1, 1, n))[:, ::-1],
    'moved': lambda y, n: jnp.stack([jnp.roll(y, k, 1) for k in range(n)], 2),
}


@pytest.mark.parametrize(
    'seed',
    [
        pytest.param(0, marks=slow),
        *(pytest.param(s, marks=pytest.mark.nightly) for s in range(1, 40)),
    ],
)
def test_drawn_tails_are_exact(seed):
    """Products of parts of one result, each repeated along an axis of its own."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(list(MOVES), 3)
    sizes = [D if name == 'columns' else K for name in chosen]
    starts = np.cumsum([0, *sizes])

    def cell(p, s, x):
        y = jnp.tanh(braintrace.matmul(x, p['w']))
        parts = [
            MOVES[name](y[:, start : start + size], K if name == 'columns' else D)
            for name, start, size in zip(chosen, starts, sizes, strict=False)
        ]
        s = jax.nn.sigmoid(parts[0]) * s + parts[1] * parts[2] + parts[0]
        return s.sum(-1), s

    check(cell, {'w': rng.normal(size=(I, int(starts[-1])))}, rng.normal(size=(B, K, D)))
