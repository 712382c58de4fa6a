"""Several losses of one step: each gradient is that of its own call, also of mapped samples."""

import brainstate
import jax
import jax.numpy as jnp
import pytest

import braintrace
from braintrace import functional, nn, rules
from braintrace.errors import OptionError, StepFunctionError
from tests import oracles
from tests.compare import assert_close
from tests.functional.plain import drawn
from tests.precision import float64 as float64

B, I, N, T = 3, 2, 5, 4  # noqa: E741
LOSSES = (lambda y, t: jnp.mean(jnp.sin(y) * t), lambda y, t: jnp.mean((y - t) ** 2))
NETS = {
    'GRU': lambda: brainstate.nn.Sequential(nn.GRUCell(I, N), nn.Linear(N, 2)),
    'LRU': lambda: nn.LRUCell(I, N),
    'LIF': lambda: brainstate.nn.Sequential(nn.Linear(I, N), nn.LIF(N, 3.0), nn.Linear(N, 2)),
}
RULES = [rules.d_rtrl(), rules.es_d_rtrl(0.7), rules.same_step(), rules.snap(2)]
pytestmark = pytest.mark.usefixtures('float64')


def learner_of(net, rule, batch=B):
    """``(learner, params, carry)``, in float64."""
    brainstate.random.seed(0)
    model = NETS[net]()
    size = {} if batch is None else {'batch_size': batch}
    brainstate.nn.init_all_states(model, **size)
    example = jnp.zeros((I,) if batch is None else (batch, I))
    cell, *trees = braintrace.adapters.from_brainstate(model, example)
    params, carry = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), trees)
    return functional.online(cell, rule), params, carry


def data():
    return drawn(T, B, I), drawn(T, B, 1)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('rule', RULES, ids=str)
@pytest.mark.parametrize('net', NETS)
def test_heads_are_calls_of_grad_and_of_mapped_samples_those_of_one_sample(net, rule):
    learner, params, carry = learner_of(net, rule)
    xs, ys = data()
    state = learner.init(params, carry, xs[0])
    single, _, of_one = learner_of(net, rule, batch=None)
    fresh = [jax.tree.map(lambda c, b=b: c[b], carry) for b in range(B)]
    ones = [single.init(params, one, xs[0, b]) for b, one in enumerate(fresh)]
    by_sample = jax.vmap(single.init, (None, 0, 0))(params, carry, xs[0])
    heads = jax.jit(learner.heads(*LOSSES))
    samples = jax.jit(jax.vmap(single.heads(*LOSSES), (None, 0, 0, 0)))
    calls = jax.jit(lambda *given: [learner.grad(loss)(*given) for loss in LOSSES])
    calls_of_one = jax.jit(lambda *given: [single.grad(loss)(*given) for loss in LOSSES])
    flags = drawn(T, B) > 0.7
    assert flags.any()
    for x, y, flag in zip(xs, ys, flags, strict=True):
        found, apart = heads(params, state, x, y), samples(params, by_sample, x, y)
        of_calls = calls(params, state, x, y)
        for k, (grads, value, *_) in enumerate(of_calls):
            assert_close((found.loss[k], found.grads[k]), (value, grads))
        _, _, outputs, new = of_calls[0]
        assert_close((found.outputs, found.state), (outputs, new))
        assert_close((apart.outputs, apart.state.carry), (outputs, new.carry))
        for b in range(B):
            of_calls = calls_of_one(params, ones[b], x[b], y[b])
            for k, (grads, value, *_) in enumerate(of_calls):
                of_sample = jax.tree.map(lambda g, b=b: g[b], (apart.loss[k], apart.grads[k]))
                assert_close(of_sample, (value, grads))
            ones[b] = functional.reset(of_calls[0].state, flag[b], fresh[b])
        state = functional.reset(found.state, flag, carry)
        by_sample = jax.vmap(functional.reset)(apart.state, flag, carry)


def plain_params():
    return {'a': drawn(N), 'w': drawn(I, N), 'out': drawn(N, 2)}


def marked(p, h, x):
    a = braintrace.element_wise(p['a'], jax.nn.sigmoid)
    h = a * h + jnp.tanh(braintrace.matmul(x, p['w']))
    return (h @ p['out'], h), h


def test_gradients_by_sample_add_up_to_backpropagation_through_that_sample():
    losses = (lambda o, y: jnp.sum(o[0] ** 2 * y), lambda o, y: jnp.sum(jnp.sin(o[1])))
    (xs, ys), params, h = data(), plain_params(), drawn(B, N)
    learner = functional.online(marked, rules.d_rtrl())
    state, sums = jax.vmap(learner.init, (None, 0, 0))(params, h, xs[0]), [0, 0]
    heads = jax.jit(jax.vmap(learner.heads(*losses), (None, 0, 0, 0)))
    for x, y in zip(xs, ys, strict=True):
        grads, _, _, state = heads(params, state, x, y)
        sums = [jax.tree.map(jnp.add, s, g) if s else g for s, g in zip(sums, grads, strict=True)]
    for loss, found in zip(losses, sums, strict=True):
        of_sample = lambda h, x, y, loss=loss: oracles.by_time(marked, params, h, x, y, loss)
        assert_close(found, jax.vmap(of_sample, (0, 1, 1))(h, xs, ys))


def test_pull_takes_any_cotangent_back_and_changes_no_state():
    learner, params, carry = learner_of('GRU', rules.d_rtrl())
    xs, ys = data()
    _, state = learner.step(params, learner.init(params, carry, xs[0]), xs[0])
    outputs, pull, new = learner.vjp(params, state, xs[1])
    grads, _, of_step, after = learner.grad(LOSSES[0])(params, state, xs[1], ys[1])
    assert_close((outputs, new), (of_step, after))
    cotangent = jax.grad(LOSSES[0])(outputs, ys[1])
    assert_close(pull(cotangent), grads)
    assert_close(pull(2 * cotangent), jax.tree.map(lambda g: 2 * g, grads))


def test_no_loss_no_scalar_and_a_call_of_the_learner_are_refused():
    learner, params, carry = learner_of('GRU', rules.d_rtrl())
    x = data()[0][0]
    state = learner.init(params, carry, x)
    inner = lambda y, t: jnp.mean(learner.step(params, state, x)[0])
    with pytest.raises(OptionError, match='no loss'):
        learner.heads()
    for head, words in ((lambda y, t: y, 'one real scalar'), (inner, 'called the learner')):
        with pytest.raises(StepFunctionError, match=words):
            learner.heads(head)(params, state, x, x)
