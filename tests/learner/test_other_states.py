"""States with units, states that are not hidden, and odd wiring: gradients against plain
backpropagation or the dense recursion.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace.errors import BraintraceWarning
from tests import models, oracles
from tests.compare import assert_close

from .kept import gradient
from .networks import by_steps

D, ES = braintrace.rules.d_rtrl(), braintrace.rules.es_d_rtrl(0.7)

RNG = np.random.default_rng(5)
T, B, I, N = 6, 2, 3, 4  # noqa: E741
XS, YS = RNG.normal(size=(T, B, I)), RNG.normal(size=(T, B, N))
W, R, H, G = (0.6 * RNG.normal(size=s) for s in ((I, N), (I + N, N), (B, N), (B, N)))


def bptt(cell, params, carry):
    return oracles.by_time(cell, params, carry, XS, YS, models.squared)


def leaky(seen=lambda x, t: x):
    """The same of ``Layer``, for which the input of step t is ``seen(x, t)``."""

    def plain(p, c, x):
        h = 0.8 * c[0] + jnp.tanh(seen(x, c[1]) @ p)
        return h, (h, c[1] + 1)

    return {'w': bptt(plain, W, (H, 0))}


class Layer(brainstate.nn.Module):
    """``w`` and one hidden state ``h`` that leaks; ``seen`` is its input."""

    def __init__(self, w=W):
        super().__init__()
        self.w = brainstate.ParamState(jax.tree.map(jnp.asarray, w))

    def init_state(self, **_):
        self.h = brainstate.HiddenState(jnp.asarray(H))

    def seen(self, x):
        return x

    def update(self, x):
        current = braintrace.matmul(self.seen(x), self.w.value)
        self.h.value = 0.8 * self.h.value + jnp.tanh(current)
        return self.h.value


def online(model, rule=D, **options):
    learner = braintrace.compile(model, rule, XS[0])
    return learner, gradient(learner, XS, YS, **options)


def conductance(ops, p, c, x):
    """A conductance g drives a potential v towards 3."""
    g = ops.new('g', 0.6 * c['g'] + ops.matmul(x, p['w']))
    v = ops.new('v', c['v'] + 0.2 * ops.within('g', g) * (3.0 - c['v']))
    return v, {'v': v, 'g': g}


NUMBERS = models.make_case(
    models.Model('conductance', conductance, {'w': (I, N)}, {'v': (B, N), 'g': (B, N)})
)


class Conductance(brainstate.nn.Module):
    """The same with g in mS and v in mV: in two states, in a tree, or in one array in mV."""

    def __init__(self, kept):
        super().__init__()
        self.w, self.kept = brainstate.ParamState(NUMBERS.params['w'] * u.mS), kept

    def init_state(self, **_):
        v, g = NUMBERS.carry['v'] * u.mV, NUMBERS.carry['g'] * u.mS
        if self.kept == 'apart':
            self.v, self.g = brainstate.HiddenState(v), brainstate.HiddenState(g)
        elif self.kept == 'a tree':
            self.s = brainstate.HiddenTreeState({'v': v, 'g': g})
        else:
            self.s = brainstate.HiddenGroupState(u.math.stack([v, g * (u.mV / u.mS)], -1))

    def update(self, x):
        if self.kept == 'apart':
            v, g = self.v.value, self.g.value
        elif self.kept == 'a tree':
            v, g = self.s.get_value('v'), self.s.get_value('g')
        else:
            v, g = self.s.get_value(0), self.s.get_value(1) * (u.mS / u.mV)
        g = 0.6 * g + braintrace.matmul(x, self.w.value)
        v = v + (0.2 * u.ms / u.uF * g * (3.0 * u.mV - v)).to(u.mV)
        if self.kept == 'apart':
            self.v.value, self.g.value = v, g
        elif self.kept == 'a tree':
            self.s.set_value({'v': v, 'g': g})
        else:
            self.s.value = u.math.stack([v, g * (u.mV / u.mS)], -1)
        return v / u.mV


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('kept, rule', [('a tree', D), ('apart', ES), ('an array', D)])
def test_states_with_units_learn_like_their_numbers(kept, rule):
    learner = braintrace.compile(Conductance(kept), rule, NUMBERS.xs[0])
    got = gradient(learner, NUMBERS.xs, NUMBERS.ys)['w']
    assert u.get_unit(got) == u.mS
    steps = oracles.dense_recursion(NUMBERS) if rule is D else oracles.es_recursion(NUMBERS, 0.7)
    assert_close({'w': got.mantissa}, oracles.total(steps))
    assert [g.num_state for g in learner.graph.hidden_groups] == [2]
    learner.reset_state()
    np.testing.assert_allclose(
        learner(NUMBERS.xs[0]),
        NUMBERS.run(models.ops.NumpyOps(), NUMBERS.params, NUMBERS.carry, NUMBERS.xs[0])[0],
    )


def twice(ops, p, c, x):
    """A leaky cell that runs twice in a step: its second read of the old state is cut too."""
    y = ops.matmul(ops.concatenate([x, ops.cut(c['h'])]), p['w'], p['b'])
    h = 0.8 * c['h'] + ops.tanh(y)
    y2 = ops.matmul(
        ops.concatenate([ops.sin(x), 0.8 * ops.cut(c['h']) + ops.tanh(y)]), p['w'], p['b']
    )
    h = ops.new('h', 0.8 * h + ops.tanh(y2))
    return h, {'h': h}


TWICE = models.make_case(models.Model('twice', twice, {'w': (I + N, N), 'b': (N,)}))


class Cell(Layer):
    def init_state(self, **_):
        self.h = brainstate.HiddenState(jnp.asarray(TWICE.carry['h']))

    def update(self, x):
        p, read = self.w.value, jnp.concatenate([x, self.h.value], -1)
        y = braintrace.matmul(read, p['w'], p['b'])
        self.h.value = 0.8 * self.h.value + jnp.tanh(y)
        return self.h.value


class RunsTwice(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell(TWICE.params)

    def update(self, x):
        self.cell(x)
        return self.cell(jnp.sin(x))


def test_a_submodule_that_runs_twice_in_a_step_gets_both_gradients():
    learner = braintrace.compile(RunsTwice(), D, TWICE.xs[0])
    keys = [r.key for r in learner.graph.hidden_param_op_relations]
    assert keys == ['cell/w/w', 'cell/w/w#1']
    (got,) = gradient(learner, TWICE.xs, TWICE.ys).values()
    assert_close(got, oracles.total(oracles.dense_recursion(TWICE)))


class OneLeaf(Layer):
    """Parameters: ``op`` reaches an op, ``gain`` and ``out`` a plain readout, ``idle`` nothing."""

    def update(self, x):
        p = self.w.value
        self.h.value = 0.8 * self.h.value + jnp.tanh(braintrace.matmul(x, p['op'][0]))
        return p['gain'] * self.h.value @ p['out']


def test_of_a_tree_of_parameters_each_leaf_has_its_own_route():
    params = {'op': (W,), 'gain': G[0], 'out': R[:N], 'idle': np.ones(2)}

    def plain(p, h, x):
        h = 0.8 * h + jnp.tanh(x @ p['op'][0])
        return p['gain'] * h @ p['out'], h

    with pytest.warns(BraintraceWarning, match='w/idle reaches neither an output nor a state'):
        learner, grads = online(OneLeaf(params))
    assert_close(grads['w'], bptt(plain, params, H))
    assert {k: r.kind for k, r in learner.graph.routes.items()} == {
        'w/gain': 'same-step',
        'w/idle': 'same-step',
        'w/op/0': 'trace',
        'w/out': 'same-step',
    }


class Delayed(Layer):
    """Reads its own state of three steps ago from brainstate's delay, a ring with a pointer."""

    def __init__(self):
        super().__init__(R)
        with brainstate.environ.context(dt=1.0):
            self.delay = brainstate.nn.Delay(jax.ShapeDtypeStruct((B, N), jnp.float64), time=2.0)

    def seen(self, x):
        return jnp.concatenate([x, self.delay.retrieve_at_step(2)], -1)

    def update(self, x):
        self.delay.update(super().update(x))
        return self.h.value


def test_a_delay_moves_on_and_is_read_as_a_constant():
    def plain(p, c, x):
        old, past = c
        h = 0.8 * old + jnp.tanh(jnp.concatenate([x, jax.lax.stop_gradient(past[-1])], -1) @ p)
        return h, (h, (h, *past[:-1]))

    learner, grads = online(Delayed())
    assert_close({'w': grads['w']}, {'w': bptt(plain, R, (H, (np.zeros((B, N)),) * 3))})
    fresh = braintrace.compile(Delayed(), D, XS[0])
    fresh.etrace_evolve(XS, trace=False)
    moved, want = (
        {k: s.value for k, s in one.model.states(brainstate.ShortTermState).items()}
        for one in (learner, fresh)
    )
    assert len(moved) == 3
    assert_close(moved, want)


class Keyed(Layer):
    """Noise on the input, drawn from a key and from a ``RandomState`` of its own."""

    def init_state(self, **_):
        super().init_state()
        self.key = brainstate.ShortTermState(jax.random.key(1))
        self.rng = brainstate.random.RandomState(2)

    def seen(self, x):
        self.key.value, now = jax.random.split(self.key.value)
        return x + jax.random.normal(now, x.shape) + self.rng.normal(size=x.shape)


def test_random_keys_in_the_model_are_drawn_from_and_kept():
    noise, key, rng = [], jax.random.key(1), brainstate.random.RandomState(2)
    for _ in XS:
        key, now = jax.random.split(key)
        noise.append(jax.random.normal(now, XS[0].shape) + rng.normal(size=XS[0].shape))
    noise, (learner, grads) = jnp.stack(noise), online(Keyed())
    assert_close({'w': grads['w']}, leaky(lambda x, t: x + noise[t]))
    for got, want in ((learner.model.key, key), (learner.model.rng, rng.value)):
        np.testing.assert_array_equal(jax.random.key_data(got.value), jax.random.key_data(want))


class Dropped(Layer):
    def __init__(self):
        super().__init__()
        self.dropout = brainstate.nn.Dropout(0.6)

    def seen(self, x):
        return self.dropout(x)


@pytest.mark.slow
def test_a_dropped_input_keeps_the_trace():
    with brainstate.environ.context(fit=True):
        learner = braintrace.compile(Dropped(), D, XS[0])
        brainstate.random.seed(7)
        grads = gradient(learner, XS, YS)
    brainstate.random.seed(7)
    masks = jnp.stack([brainstate.random.bernoulli(0.6, (B, I)) for _ in XS]) / 0.6
    assert learner.graph.routes['w'].kind == 'trace'
    assert_close(grads, leaky(lambda x, t: x * masks[t]))
    with brainstate.environ.context(fit=False):
        assert_close(online(Dropped())[1], leaky())


def test_parameters_and_hidden_states_outside_the_model_are_what_they_are_inside():
    w, h = brainstate.ParamState(jnp.asarray(W)), brainstate.HiddenState(jnp.asarray(H))

    class Bare(brainstate.nn.Module):
        def update(self, x):
            h.value = 0.8 * h.value + jnp.tanh(braintrace.matmul(x, w.value))
            return h.value

    learner = braintrace.compile(Bare(), D, XS[0])
    assert len(learner.graph.hidden_param_op_relations) == 1
    assert_close(gradient(learner, XS, YS, weights={'w': w}), leaky())
    learner.reset_state()
    np.testing.assert_array_equal(h.value, H)
    assert_close(by_steps(learner, XS, YS, {'w': w}), leaky())
