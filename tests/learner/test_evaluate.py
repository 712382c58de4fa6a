"""Evaluation takes any batch, is what the model says, and leaves everything as it was."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import nn
from braintrace.errors import OptionError, StructureError

XS = jax.random.normal(jax.random.key(0), (7, 6, 2))


class Network(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.drop = nn.LSTMCell(2, 4), brainstate.nn.Dropout(0.5)
        self.readout = nn.FilteredReadout(4, 3, tau=5.0)

    def update(self, x):
        return self.readout(self.drop(self.cell(x)))


def outputs_of(learner, xs):
    return braintrace.evaluate(learner, xs, xs, lambda outputs, ys: outputs)


class Constant(brainstate.nn.Module):
    """Its op reads the same numbers in every lane."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.full((2, 2), 0.2))

    def init_state(self):
        self.h = brainstate.HiddenState(jnp.zeros(2))

    def update(self, x):
        self.h.value = jnp.tanh(self.h.value + x + braintrace.matmul(jnp.ones(2), self.w.value))
        return self.h.value


def test_a_model_in_lanes_whose_ops_have_none_has_their_number():
    learner = braintrace.compile(Constant(), 'D_RTRL', XS[0, :3], batch_size=3, vmap=True)
    assert learner.graph.lanes == 3
    first = jnp.tanh(XS[0, :3] + 0.4)
    expected = jnp.stack([first, jnp.tanh(first + XS[1, :3] + 0.4)])
    assert np.allclose(outputs_of(learner, XS[:2, :3]), expected, atol=1e-6)


@pytest.mark.parametrize('vmap', [False, True])
def test_every_batch_is_judged_and_nothing_changes(vmap):
    with brainstate.environ.context(fit=True, dt=1.0):
        model = Network()
        learner = braintrace.compile(model, 'D_RTRL', XS[0, :3], batch_size=3, vmap=vmap)
        learner(XS[0, :3])
        before = learner.save()
        whole = outputs_of(learner, XS)
        assert np.allclose(outputs_of(learner, XS[:, :1]), whole[:, :1], atol=1e-6)
        after = learner.save()
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        learner(XS[1, :3])  # goes on with the batch that it was compiled for
    with brainstate.environ.context(fit=False, dt=1.0):
        by_hand = Network()
        brainstate.nn.init_all_states(by_hand, batch_size=6)
        for path, state in by_hand.states(brainstate.ParamState).items():
            state.value = learner.param_states[path].value
        wanted = jnp.stack([by_hand(x) for x in XS])
    assert np.allclose(whole, wanted, atol=1e-5)


class Noisy(brainstate.nn.Module):
    """Its first states are drawn, and with ``noise`` numbers of its steps too."""

    def __init__(self, noise):
        super().__init__()
        self.cell = nn.VanillaRNNCell(2, 4, state_init=brainstate.nn.init.Normal())
        self.noise = noise

    def update(self, x):
        return self.cell(x) + (brainstate.random.normal(size=4) if self.noise else 0)


@pytest.mark.parametrize('noise', [True, False])
def test_numbers_that_a_model_draws_leave_the_generator_as_it_was(noise):
    model, generator = Noisy(noise), brainstate.random.DEFAULT
    learner = braintrace.compile(model, None, XS[0], batch_size=6)
    key = generator.value
    found = [outputs_of(learner, XS) for _ in range(2)]
    assert np.array_equal(*found) and bool(key == generator.value)
    learner(XS[0])
    model.cell.init_state(6)
    assert not bool(key == generator.value)  # so it does draw


def test_it_sees_the_parameters_as_they_are_now():
    model = nn.VanillaRNNCell(2, 4)
    learner = braintrace.compile(model, 'D_RTRL', XS[0, 0])
    first = outputs_of(learner, XS[:, 0])
    for state in learner.param_states.values():
        state.value = jax.tree.map(lambda p: 0 * p, state.value)
    assert np.any(first) and not np.any(outputs_of(learner, XS[:, 0]))


class Kept(brainstate.nn.Module):
    """A scale that goes on from call to call, a state without ``init_state``, one from a parameter,
    and an input without a batch.
    """

    def __init__(self):
        super().__init__()
        self.map, self.start = nn.Linear(2, 2), brainstate.ParamState(jnp.ones(2))
        self.scale = brainstate.LongTermState(jnp.ones(2))
        self.total = brainstate.HiddenState(jnp.zeros(2))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.broadcast_to(self.start.value, (batch_size, 2)))

    def update(self, gain, x):
        self.h.value = jnp.tanh(self.map(x) + self.start.value * self.h.value)
        self.scale.value = self.scale.value + 0.1
        self.total.value = self.total.value + gain * self.scale.value
        return {'out': (self.total.value * self.h.value,)}


def test_each_call_begins_with_the_values_of_then():
    model, gains = Kept(), jnp.arange(7.0)
    learner = braintrace.compile(model, None, gains[0], XS[0], batch_size=6)
    for _ in range(2):
        found = outputs_of(learner, (gains, XS[:, :3]))['out'][0]
        scale, total, wanted = model.scale.value, jnp.zeros(2), []
        h = jnp.broadcast_to(model.start.value, (3, 2))
        for gain, x in zip(gains, XS[:, :3]):
            h = jnp.tanh(model.map(x) + model.start.value * h)
            scale, total = scale + 0.1, total + gain * (scale + 0.1)
            wanted.append(total * h)
        assert np.allclose(found, jnp.stack(wanted), rtol=1e-5)
        learner(gains[1], XS[0])
        model.start.value = model.start.value - 3


def test_it_may_run_inside_a_compiled_function():
    learner = braintrace.compile(nn.VanillaRNNCell(2, 4), 'D_RTRL', XS[0], batch_size=6)
    inside = brainstate.transform.jit(lambda xs: outputs_of(learner, xs).sum())
    assert np.allclose(inside(XS), outputs_of(learner, XS).sum(), rtol=1e-5)


def test_what_does_not_fit_is_refused():
    model = nn.VanillaRNNCell(2, 4)
    with pytest.raises(OptionError, match='learner is VanillaRNNCell'):
        braintrace.evaluate(model, XS, XS, len)
    learner = braintrace.compile(model, 'D_RTRL', XS[0], batch_size=6)
    with pytest.raises(OptionError, match='metric is None'):
        braintrace.evaluate(learner, XS, XS, None)
    with pytest.raises(OptionError, match=r'called as metric\(outputs, ys\): len: too many'):
        braintrace.evaluate(learner, XS, XS, len)
    for xs in (XS[0], XS[:, :, :1], XS[:, :, None], (XS, XS)):
        with pytest.raises(StructureError, match=r'a step was compiled for \[\[6, 2\]\]'):
            braintrace.evaluate(learner, xs, jnp.zeros(len(jax.tree.leaves(xs)[0])), jnp.add)
    with pytest.raises(StructureError, match='unequal lengths'):
        braintrace.evaluate(learner, XS, XS[1:], jnp.add)
