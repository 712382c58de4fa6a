"""The contract of ``etrace_grad`` and ``etrace_evolve``, argument by argument."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.errors import OptionError
from tests.compare import assert_close
from tests.tiers import first, in_turn

from .networks import (
    BATCH,
    STEPS,
    UNITS,
    Layer,
    apart,
    by_steps,
    compiled,
    data,
    loss_of,
    same_state,
    squared,
)

MASK = jnp.array([0.0, 1.0, 0.0, 0.5, 0.0, 0.0, 2.0])
FLAGS = np.zeros((STEPS, BATCH), bool)
FLAGS[[3, 0, 5], [1, 2, 1]] = True
CALLS = {
    'lanes start again': {'window': 3, 'reset': FLAGS, 'reduction': 'sum'},
    'by itself': {},
    'one step': {'window': 1, 'mask': MASK, 'reset': jnp.arange(STEPS) == 4},
    'all steps': {'window': None, 'mask': MASK, 'reduction': 'sum'},
    'dropped': {'window': 2, 'keep_trace': False},
    'exact': {'window': 2, 'inside': 'exact', 'mask': jnp.zeros(STEPS)},
}


def gradient(learner, xs, ys, **options):
    options = {'reduction': 'sum', **options}
    return learner.etrace_grad(xs, ys, step_fn=loss_of(learner), **options).grads


def as_pure(learner, **options):
    """A call and the next are those of the pure functions."""
    (xs, ys), (online, params, carry) = data(), learner.pure()
    static, given = apart(options, carry)
    run, state = jax.jit(online.sequence_grad(squared, **static)), online.init(params, carry, xs[0])
    for _ in range(2):
        grads, losses, _, state = run(params, state, xs, ys, **given)
        got = learner.etrace_grad(xs, ys, step_fn=loss_of(learner), **options)
        assert_close((got.grads, got.losses), (grads, losses))
        same_state(learner, state)


@pytest.mark.tier(quick=1)
@in_turn(first('lanes start again'), call=CALLS, rule=['D_RTRL', braintrace.rules.es_d_rtrl(0.8)])
def test_a_call_and_the_next_are_those_of_the_pure_functions(call, rule):
    learner = compiled(rule)
    as_pure(learner, **CALLS[call])
    for entry in learner.get_etrace_of(('cell', 'Wh', 'weight')).values():
        assert all(slot.any() != (call == 'dropped') for slot in entry.values())


def test_without_a_rule_nothing_is_traced_and_training_goes_on():
    learner, (xs, ys) = compiled(None), data()
    as_pure(learner)
    assert learner.etrace.value['trace'] == learner.get_etrace_of(('cell', 'Wh', 'weight')) == {}
    options = {'step_fn': loss_of(learner), 'optimizer': optax.sgd(0.01)}
    before, after = (learner.etrace_train(xs, ys, **options).losses for _ in range(2))
    assert after.mean() < before.mean() and 'no rule learner of Net' in repr(learner)
    with pytest.raises(OptionError, match='made with rule=None'):
        braintrace.verify.diagnose(learner, xs, ys, squared)


@pytest.mark.slow
def test_weights_outside_the_model_get_their_gradient_and_those_of_a_loss_both_parts():
    xs, ys = data()
    outer = brainstate.ParamState(0.3 * jnp.ones((2, 2)))

    def penalty(learner):
        leaves = jax.tree.leaves([s.value for s in learner.param_states.values()])
        return sum((leaf**2).sum() for leaf in leaves)

    learner, stepped = compiled(), compiled()
    step_fn = lambda x, y: squared(learner(x) @ outer.value, y) + penalty(learner)
    weights = {**learner.param_states, ('outer',): outer}
    options = {'step_fn': step_fn, 'weights': weights, 'window': 3, 'reduction': 'sum'}
    got = learner.etrace_grad(xs, ys, **options).grads
    weights = {**stepped.param_states, ('outer',): outer}
    total = by_steps(lambda x: stepped(x) @ outer.value, xs, ys, weights)
    assert jnp.abs(got['outer',]).max() > 0
    for path, state in stepped.param_states.items():
        total[path] = jax.tree.map(lambda g, p: g + 2 * STEPS * p, total[path], state.value)
    assert_close(got, total)


def test_a_subset_of_weights_is_enough_and_comes_back_under_the_names_of_the_call():
    xs, ys = data()
    learner, full = compiled(), compiled()
    some = {k[1]: s for k, s in learner.param_states.items() if 'Wh' in k}
    want = gradient(full, xs, ys)
    assert_close(gradient(learner, xs, ys, weights=some), {'Wh': want['cell', 'Wh', 'weight']})
    readout = {'b': learner.model.readout}
    assert list(gradient(learner, xs, ys, weights=readout)) == ['b']


@pytest.mark.slow
def test_states_that_the_step_function_writes_are_threaded_and_aux_comes_back():
    (xs, ys), learner, other = data(), compiled(), compiled()
    counter = brainstate.ShortTermState(jnp.zeros((), jnp.int32))

    def step_fn(x, y):
        counter.value = counter.value + 1
        out = learner(x)
        return squared(out, y) * counter.value, {'out': out}

    _, losses, aux, _ = learner.etrace_grad(xs, ys, step_fn=step_fn, has_aux=True, window=2)
    assert int(counter.value) == STEPS
    outputs, numbers = other.etrace_evolve(xs), jnp.arange(1, STEPS + 1)
    assert_close(aux, {'out': outputs})
    assert_close(losses, jax.vmap(squared)(outputs, ys) * numbers)


def test_new_values_of_weights_and_of_what_a_step_function_reads_are_seen():
    xs, ys = data()
    learner, other = compiled(), compiled()
    scale = brainstate.ShortTermState(jnp.ones(()))
    step_fn = lambda x, y: scale.value * squared(learner(x), y)
    learner.etrace_grad(xs, ys, step_fn=step_fn)
    scale.value = jnp.asarray(3.0)
    for one in (learner, other):
        one.reset_state()
        for state in one.param_states.values():
            state.value = jax.tree.map(lambda w: 0.5 * w, state.value)
    got = learner.etrace_grad(xs, ys, step_fn=step_fn, reduction='sum').grads
    assert_close(got, jax.tree.map(lambda g: 3 * g, gradient(other, xs, ys)))


@pytest.mark.slow
def test_gradients_and_training_work_inside_jit():
    """The states are threaded by brainstate."""
    xs, ys = data()
    learner, plain = compiled(), compiled()

    def run(learner, xs, ys):
        grads, step_fn = gradient(learner, xs, ys), loss_of(learner)
        return grads, learner.etrace_train(xs, ys, step_fn=step_fn, optimizer=optax.sgd(0.1)).losses

    got = brainstate.transform.jit(lambda xs, ys: run(learner, xs, ys))(xs, ys)
    assert_close(got, run(plain, xs, ys))
    assert (learner.etrace.value['t'] == 2 * STEPS).all()
    assert_close(learner.save(), plain.save())


def test_evolve_moves_hidden_states_as_calls_do_and_the_trace_only_where_it_is_asked():
    xs, ys = data()
    learner, stepped = compiled(), compiled()
    outputs = learner.etrace_evolve(xs)
    assert_close(outputs, jnp.stack([stepped(x) for x in xs]))
    assert_close(learner.etrace.value, stepped.etrace.value)
    hidden = learner.model.cell.h.value
    assert learner.etrace_evolve(xs, return_outputs=False, trace=False) is None
    losses = learner.etrace_evolve(xs, ys, step_fn=loss_of(learner), trace=False)
    assert losses.shape == (STEPS,)
    assert_close(learner.etrace.value, stepped.etrace.value)
    assert jnp.abs(learner.model.cell.h.value - hidden).max() > 1e-3


class WithIntegers(Layer):
    """A parameter that holds an op's weight, a readout and integers that select units."""

    def update(self, x):
        p = self.w.value
        self.h.value = 0.8 * self.h.value + jnp.tanh(braintrace.matmul(x, p['op']))
        return p['gain'] * self.h.value[:, p['units']]


@pytest.mark.slow
def test_a_parameter_with_an_integer_leaf_learns_by_its_other_leaves():
    xs, ys = data()
    weight = jnp.linspace(-0.5, 0.5, 2 * UNITS).reshape(2, UNITS)
    leaves = {'op': weight, 'gain': jnp.ones(2), 'units': jnp.array([0, 2])}
    learner = braintrace.compile(WithIntegers(leaves), 'D_RTRL', xs[0])
    online, params, carry = learner.pure()
    state = online.init(params, carry, xs[0])
    want, *_ = jax.jit(online.sequence_grad(squared, reduction='sum'))(params, state, xs, ys)
    (got,) = gradient(learner, xs, ys, window=None).values()
    assert got['units'].dtype == jax.dtypes.float0
    assert_close({k: got[k] for k in ('op', 'gain')}, {k: want['w',][k] for k in ('op', 'gain')})


T, B, N = 6, 2, 4
SEEN = np.random.default_rng(0).standard_normal((T, B, 5)), np.arange(T * B).reshape(T, B) % 3
AT = SEEN[0][0], SEEN[1][0]


class Policy(brainstate.nn.Module):
    """One input of two arrays: what it sees, and what it did."""

    def __init__(self):
        super().__init__()
        self.look, self.did = braintrace.nn.Linear(5, N), braintrace.nn.Embedding(3, N)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, N)))

    def update(self, seen):
        picture, action = seen
        self.h.value = 0.5 * self.h.value + jnp.tanh(self.look(picture) + self.did(action))
        return self.h.value


@pytest.mark.slow
def test_a_tuple_that_was_compiled_as_one_input_is_one_in_every_call():
    learner, ys = braintrace.compile(Policy(), 'D_RTRL', AT, batch_size=B), jnp.zeros((T, B, N))
    online, params, carry = learner.pure()
    state, verify = online.init(params, carry, AT), braintrace.verify
    want = verify.bptt_gradients(online.cell, params, carry, SEEN, ys, squared)
    found = online.sequence_grad(squared, reduction='sum')(params, state, SEEN, ys)
    assert_close(found.grads, want)
    given = params, state, AT, ys[0]
    one, heads = (f(*given) for f in (online.grad(squared), online.heads(squared)))
    assert_close(heads.grads[0], one.grads)
    assert_close(online.observed(squared)(*given)[0].loss, one.loss)
    score = braintrace.evaluate(learner, SEEN, ys, lambda out, y: squared(out[0], y[0]))
    assert_close(score, one.loss)
    assert verify.hidden_jacobians(online, params, carry, AT)
    assert_close(gradient(learner, SEEN, ys), want)
