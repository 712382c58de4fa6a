"""Steps whose loss has weight 0: neither the loss nor its derivative need be numbers there.
``Penalised``: a penalty beside a loss that a mask weighs.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import Penalised, functional, rules
from braintrace.errors import StepFunctionError
from tests.compare import assert_close
from tests.precision import float64 as float64

B, I, N, T = 2, 2, 3, 6  # noqa: E741
RNG, D_RTRL = np.random.default_rng(7), rules.d_rtrl()
PARAMS = {'w': RNG.normal(size=(I + N, N)), 'out': RNG.normal(size=(N, 2))}
XS, YS = RNG.normal(size=(T, B, I)), RNG.normal(size=(T, B, 2))
MASK = np.array([0.0, 2.0, 0.0, 0.5, 0.0, 0.0])
UNKNOWN = np.where((MASK == 0)[:, None, None], np.nan, YS)
W, K = MASK / MASK.sum(), np.full(T, 1 / T)
FLAGS = np.array([[False, False], [False, True], *[[False, False]] * 2, [True, False], [True] * 2])


def cell(p, h, x):
    h = 0.8 * h + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), p['w']))
    return (braintrace.matmul(h, p['out']), h), h


def squared(output, y):
    return jnp.sum((output[0] - y) ** 2)


def rate(output):
    return 0.3 * jnp.sum(jnp.cos(output[1])) + jnp.sum(jnp.sin(output[0]))


def penalised(output, y):
    return Penalised(squared(output, y), rate(output))


def by_hand(output, at):
    """One loss, with the weights of both parts as sequences."""
    y, w, k = at
    return w * squared(output, y) + k * rate(output)


def start(rule):
    learner = functional.online(cell, rule)
    return learner, learner.init(PARAMS, np.zeros((B, N)), XS[0])


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.p = {k: brainstate.ParamState(jnp.asarray(v)) for k, v in PARAMS.items()}
        self.h = brainstate.HiddenState(jnp.zeros((B, N)))

    def update(self, x):
        output, self.h.value = cell({k: p.value for k, p in self.p.items()}, self.h.value, x)
        return output


def compiled(rule=D_RTRL):
    learner = braintrace.ETraceLearner(Net(), rule)
    learner.compile_graph(XS[0])
    return learner


def by_gradient(rule, ys, window):
    learner, state = start(rule)
    run = jax.jit(learner.sequence_grad(squared, window=window))
    grads, _, _, end = run(PARAMS, state, XS, ys, MASK)
    return grads, end.trace


def by_update(rule, ys, window):
    (learner, state), optimizer = start(rule), optax.sgd(0.1)
    run = jax.jit(learner.sequence_update(squared, optimizer, update_every=window or 3))
    return run(PARAMS, optimizer.init(PARAMS), state, XS, ys, MASK)[0]


def by_learner(rule, ys, window):
    """With a weight outside of the model, which meets the target itself."""
    learner, scale = compiled(rule), brainstate.ParamState(jnp.array([0.5, 2.0]))
    return learner.etrace_grad(
        XS,
        ys,
        step_fn=lambda x, y: squared(learner(x), scale.value * y),
        mask=MASK,
        weights={**learner.param_states, ('scale',): scale},
        window=window,
    ).grads


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('window', [1, 3])
@pytest.mark.parametrize('way', [by_gradient, by_update, by_learner])
@pytest.mark.parametrize('rule', [D_RTRL, rules.es_d_rtrl(0.7)], ids=lambda r: r.name)
def test_a_target_that_is_not_a_number_counts_for_nothing_where_the_weight_is_zero(
    rule, way, window
):
    assert_close(way(rule, UNKNOWN, window), way(rule, YS, window))


def test_a_target_that_is_not_a_number_shows_where_it_counts():
    unknown = np.where(np.arange(T)[:, None, None] == 3, np.nan, YS)
    grads, _ = by_gradient(D_RTRL, unknown, 3)
    assert all(np.isnan(g).any() for g in jax.tree.leaves(grads))


# -- a penalty beside the loss ---------------------------------------------------------------------


def compared(rule, loss=penalised, reset=None, **options):
    learner, state = start(rule)
    grad = learner.sequence_grad(loss, **options)
    got = jax.jit(grad)(PARAMS, state, XS, UNKNOWN, MASK, reset)
    hand = learner.sequence_grad(by_hand, reduction='sum', **options)
    want = jax.jit(hand)(PARAMS, state, XS, (YS, W, K), None, reset)
    assert_close(got[0], want[0])
    keys = [x for x in jax.tree.leaves(want.state) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    if not keys:
        assert_close(got.state.trace, want.state.trace)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(
    'rule, options',
    [
        (D_RTRL, {'window': 4}),
        (rules.es_d_rtrl(0.7), {'window': 4}),
        (D_RTRL, {'window': 4, 'inside': 'exact'}),
        (rules.signs(), {'window': 4}),
        (D_RTRL.with_feedback(braintrace.Feedback('adaptive')), {'window': 4}),
        (None, {}),
        (rules.same_step(), {'window': 3, 'loss': jax.checkpoint(penalised)}),
    ],
)
def test_a_mask_weighs_the_loss_alone_which_need_not_be_a_number_where_it_is_zero(rule, options):
    compared(rule, reset=(FLAGS, np.ones((B, N))), **options)


@pytest.mark.slow
def test_a_step_function_with_a_weight_of_its_own_in_both_parts():
    def grads(of_loss, ys, **options):
        learner, scale = compiled(), brainstate.ParamState(jnp.array([0.5, 2.0]))

        def step_fn(x, y):
            output = learner(x)
            return of_loss((scale.value * output[0], output[1]), y), scale.value.sum()

        options |= {'weights': {**learner.param_states, ('scale',): scale}, 'has_aux': True}
        return learner.etrace_grad(XS, ys, step_fn=step_fn, inside='exact', window=4, **options)

    got, _, aux, _ = grads(penalised, UNKNOWN, mask=MASK)
    want, *_ = grads(by_hand, (YS, W, K), reduction='sum')
    assert_close(got, want)
    assert_close(aux, np.full(T, 2.5))


def test_losses_come_back_without_the_penalty_and_updates_meet_their_own_mean():
    learner, optimizer = compiled(), optax.sgd(0.1)

    def step_fn(x, y):
        return penalised(learner(x), y)

    _, losses, *_ = learner.etrace_train(
        XS, UNKNOWN, step_fn=step_fn, optimizer=optimizer, update_every=4, mask=MASK
    )
    assert list(np.isnan(losses)) == list(MASK == 0)
    pure, state = start(D_RTRL)
    run = pure.sequence_update(by_hand, optimizer, update_every=4, reduction='sum')
    of_loss = np.where(np.arange(T) < 4, W, 0)
    of_penalty = np.where(np.arange(T) < 4, 1 / 4, 1 / 2)
    params, *_ = jax.jit(run)(PARAMS, optimizer.init(PARAMS), state, XS, (YS, of_loss, of_penalty))
    assert_close({k: p.value for k, p in learner.model.p.items()}, params)


def test_a_single_step_differentiates_the_sum_and_returns_the_loss():
    learner, state = start(D_RTRL)
    grads, value, *_ = learner.grad(penalised)(PARAMS, state, XS[0], YS[0])
    want, one, *_ = learner.grad(by_hand)(PARAMS, state, XS[0], (YS[0], 1.0, 1.0))
    assert_close(grads, want)
    _, alone, *_ = learner.grad(squared)(PARAMS, state, XS[0], YS[0])
    assert value == alone != one


@pytest.mark.parametrize(
    'bad, words',
    [
        (lambda y: Penalised(y.sum(), y.sum(0)), r'Penalised.*penalty.*float64\[2\]'),
        (lambda y: Penalised(y.sum(), 1j * y.sum()), r'penalty.*complex128\[\]'),
        (lambda y: Penalised(y, y.sum()), r'with the loss.*float64\[2, 2\]'),
        (lambda y: Penalised(y.sum(), None), 'penalty.*NoneType.*one real scalar'),
        (lambda y: Penalised(y.sum(), 1), 'penalty.*int'),
    ],
)
def test_what_is_no_pair_of_real_scalars_is_refused(bad, words):
    learner, (pure, state) = compiled(), start(D_RTRL)
    with pytest.raises(StepFunctionError, match=words):
        learner.etrace_grad(XS, step_fn=lambda x: bad(learner(x)[0]))
    with pytest.raises(StepFunctionError, match=words):
        pure.sequence_grad(lambda o, _: bad(o[0]))(PARAMS, state, XS, YS)
    with pytest.raises(StepFunctionError, match=r'Penalised; return \(loss, aux\)'):
        learner.etrace_grad(
            XS, YS, step_fn=lambda x, y: penalised(learner(x), y), mask=MASK, has_aux=True
        )
