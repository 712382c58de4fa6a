"""Calls at their borders: tuples, keys of weights, pickles, functions of progress."""

import copy
import pickle

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, nn, rules, verify
from braintrace.errors import NotSupportedError, OptionError, StructureError
from tests.compare import assert_close

T, B, N = 6, 2, 4
RNG = np.random.default_rng(0)
SEEN = RNG.standard_normal((T, B, 5)), RNG.integers(0, 3, (T, B))
YS = jnp.zeros((T, B, N))
AT = SEEN[0][0], SEEN[1][0]


def loss(y, target):
    return jnp.mean((y - target) ** 2)


class Policy(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        brainstate.random.seed(0)
        self.look, self.did = nn.Linear(5, N), nn.Embedding(3, N)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, N)))

    def update(self, seen):
        picture, action = seen
        self.h.value = 0.5 * self.h.value + jnp.tanh(self.look(picture) + self.did(action))
        return self.h.value


@pytest.mark.slow
def test_a_tuple_that_was_compiled_as_one_input_is_one_in_every_call():
    learner = braintrace.compile(Policy(), 'D_RTRL', AT, batch_size=B)
    online, params, carry = learner.pure()
    state = online.init(params, carry, AT)
    want = verify.bptt_gradients(online.cell, params, carry, SEEN, YS, loss)
    found = online.sequence_grad(loss, reduction='sum')(params, state, SEEN, YS)
    assert_close(found.grads, want, 1e-5)
    one, heads = (f(params, state, AT, YS[0]) for f in (online.grad(loss), online.heads(loss)))
    assert_close(heads.grads[0], one.grads, 1e-6)
    assert np.allclose(online.observed(loss)(params, state, AT, YS[0])[0].loss, one.loss)
    assert np.allclose(
        braintrace.evaluate(learner, SEEN, YS, lambda o, y: loss(o[0], y[0])), one.loss
    )
    assert verify.hidden_jacobians(online, params, carry, AT)
    step = lambda x, y: loss(learner(x), y)
    grads = learner.etrace_grad(SEEN, YS, step_fn=step, reduction='sum').grads
    assert_close(grads, want, 1e-5)


def test_other_inputs_than_those_of_a_step_are_refused_with_and_without_a_trace():
    learner = braintrace.compile(Policy(), 'D_RTRL', AT, batch_size=B)
    for trace in (True, False):
        with pytest.raises(StructureError, match=r'inputs 1: absent when compiled, .* now'):
            learner.etrace_evolve(*SEEN, trace=trace)


def compiled():
    brainstate.random.seed(0)
    return braintrace.compile(nn.GRUCell(5, N), 'D_RTRL', AT[0], batch_size=B)


def test_keys_of_weights_without_an_order_are_refused_and_the_advice_works():
    learner, gain = compiled(), brainstate.ParamState(jnp.ones(N))
    step = lambda x: (learner(x) * gain.value).sum()
    weights = learner.param_states
    with pytest.raises(OptionError, match=r"keys of weights have no order.*\('extra',\)"):
        learner.etrace_grad(SEEN[0], step_fn=step, weights={**weights, 'extra': gain})
    found = learner.etrace_grad(SEEN[0], step_fn=step, weights={**weights, ('extra',): gain})
    assert found.grads['extra',].shape == (N,)


def test_a_learner_says_why_it_is_not_pickled_and_a_pure_one_is():
    with pytest.raises(NotSupportedError, match=r'Pickle `learner.save\(\)`'):
        pickle.dumps(compiled())
    learner = functional.online(nn_cell, rules.d_rtrl())
    state = learner.init(jnp.ones((5, N)), jnp.zeros((B, N)), AT[0])
    for other in (copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))):
        assert 'not compiled' in repr(other) and 'not compiled' not in repr(learner)
        other.init(jnp.ones((5, N)), jnp.zeros((B, N)), AT[0])
        assert other.step(jnp.ones((5, N)), pickle.loads(pickle.dumps(state)), AT[0])


def nn_cell(params, h, x):
    h = 0.5 * h + braintrace.matmul(x, params)
    return h, h


@pytest.mark.slow
def test_a_function_of_progress_sees_the_last_update_and_may_change_it():
    learner, seen = compiled(), []
    xs, ys = jnp.tile(SEEN[0], (20, 1, 1)), jnp.ones((120, B, N))
    score = lambda: float(braintrace.evaluate(learner, xs, ys, loss))
    step, adam = lambda x, y: loss(learner(x), y), optax.adam(1e-2)

    def train(act, every=1):
        def progress(done, losses):
            seen.append(act())

        learner.etrace_train(
            xs, ys, step_fn=step, optimizer=adam, update_every=every, progress=progress
        )

    for every in (1, 120):  # several blocks of updates, and one
        train(lambda: (score(), len(learner.save())), every)
        assert seen[-1][0] == score()
    assert seen[0][0] > seen[-1][0]

    def zero():
        for state in learner.param_states.values():
            state.value = jax.tree.map(jnp.zeros_like, state.value)

    train(zero)
    assert not any(
        np.any(x) for s in learner.param_states.values() for x in jax.tree.leaves(s.value)
    )
    train(lambda: learner(xs[0]))


def test_messages_show_an_array_by_its_shape_and_its_range_or_ends():
    long = jnp.linspace(5, 6, 80)
    for call in (
        lambda: functional.online({'W': jnp.ones((30, 30)), 'b': long}),
        lambda: functional.online(nn_cell, long),
        lambda: nn.LIF(80, tau=-long),
    ):
        with pytest.raises(OptionError, match=r' \.\.\. |\(80,\) from -6 to -5') as caught:
            call()
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize('way', ['jit', 'vmap'])
def test_a_cell_that_closes_over_hidden_arrays_is_right_or_refused_in_words(way):
    def grads(scale, rule, call):
        def cell(params, h, x):
            h = jnp.tanh(scale * h + braintrace.matmul(x, params))
            return h, h

        learner = functional.online(cell, rule)
        params = jnp.full((5, N), 0.1)
        state = learner.init(params, jnp.zeros((B, N)), AT[0])
        _, state = learner.step(params, state, AT[0])
        return call(learner)(params, state, SEEN[0][1], YS[0]).grads

    of_loss = lambda learner: learner.grad(loss)
    around = jax.jit if way == 'jit' else lambda f: lambda s: jax.vmap(f)(s[None])[0]
    got = around(lambda s: grads(s, rules.d_rtrl(), of_loss))(jnp.asarray(0.3))
    assert_close({'w': got}, {'w': grads(0.3, rules.d_rtrl(), of_loss)}, 1e-6)
