"""Steps whose loss has weight 0: neither the loss nor its derivative need be numbers there."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, rules
from tests.precision import float64 as float64

B, INPUTS, N, T = 2, 2, 4, 6
RNG = np.random.default_rng(5)
PARAMS = {
    'w': RNG.normal(size=(INPUTS + N, N)),
    'out': RNG.normal(size=(N, 2)),
    'bias': RNG.normal(size=2),
}
XS, YS = RNG.normal(size=(T, B, INPUTS)), RNG.normal(size=(T, B, 2))
MASK = np.array([1.0, 0.0, 2.0, 0.0, 0.0, 0.5])
UNKNOWN = np.where((MASK == 0)[:, None, None], np.nan, YS)


def cell(p, h, x):
    h = 0.8 * h + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), p['w']))
    return h @ p['out'] + p['bias'], h


def squared(out, y):
    return jnp.sum((out - y) ** 2)


def by_gradient(rule, ys, window):
    learner = functional.online(cell, rule)
    state = learner.init(PARAMS, np.zeros((B, N)), XS[0])
    grads, _, _, end = jax.jit(learner.sequence_grad(squared, window=window))(
        PARAMS, state, XS, ys, MASK
    )
    return grads, end.trace


def by_update(rule, ys, window):
    learner, optimizer = functional.online(cell, rule), optax.sgd(0.1)
    state = learner.init(PARAMS, np.zeros((B, N)), XS[0])
    run = jax.jit(learner.sequence_update(squared, optimizer, update_every=window or 3))
    params, *_ = run(PARAMS, optimizer.init(PARAMS), state, XS, ys, MASK)
    return params


def by_learner(rule, ys, window):
    """With a weight outside of the model, which meets the target itself."""

    class Net(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.out = (
                brainstate.ParamState(jnp.asarray(PARAMS['w'])),
                brainstate.ParamState(jnp.asarray(PARAMS['out'])),
            )
            self.h = brainstate.HiddenState(jnp.zeros((B, N)))

        def update(self, x):
            out, self.h.value = cell(
                {'w': self.w.value, 'out': self.out.value, 'bias': 0.0}, self.h.value, x
            )
            return out

    learner, scale = (
        braintrace.ETraceLearner(Net(), rule),
        brainstate.ParamState(jnp.asarray(PARAMS['bias'])),
    )
    learner.compile_graph(XS[0])
    weights = {**learner.param_states, ('scale',): scale}
    return learner.etrace_grad(
        XS,
        ys,
        step_fn=lambda x, y: squared(learner(x), scale.value * y),
        mask=MASK,
        weights=weights,
        window=window,
    ).grads


@pytest.mark.tier(quick=1, one_in=4)
@pytest.mark.parametrize('window', [1, 4])
@pytest.mark.parametrize('way', [by_gradient, by_update, by_learner])
@pytest.mark.parametrize('rule', [rules.d_rtrl(), rules.es_d_rtrl(0.7)], ids=lambda r: r.name)
def test_a_target_that_is_not_a_number_counts_for_nothing_where_the_weight_is_zero(
    rule, way, window
):
    got, want = way(rule, UNKNOWN, window), way(rule, YS, window)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_a_target_that_is_not_a_number_shows_where_it_counts():
    grads, _ = by_gradient(
        rules.d_rtrl(), np.where(np.arange(T)[:, None, None] == 2, np.nan, YS), 4
    )
    assert all(np.isnan(g).any() for g in jax.tree.leaves(grads))
