"""Every way of resetting a learner puts back every hidden state, of each lane its own."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace.errors import StructureError

from .networks import Layer

BATCH, UNITS, T = 3, 4, 5
XS = np.linspace(-2.0, 2.0, T * BATCH * 2).reshape(T, BATCH, 2)
FLAGS = np.zeros((T, BATCH), bool)
FLAGS[3, 1] = True


class Refractory(brainstate.nn.Module):
    """A membrane, an integer refractory count, a spike flag, and random keys of each sample."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.full((2, UNITS), 0.7))

    def init_state(self, *args, **kwargs):
        self.v = brainstate.HiddenState(jnp.full((BATCH, UNITS), 0.1))
        self.rest = brainstate.HiddenState(jnp.ones((BATCH, UNITS), int))
        self.spike = brainstate.HiddenState(jnp.zeros((BATCH, UNITS), bool))

    def update(self, x):
        v = jnp.where(
            self.rest.value > 0, 0.0, 0.9 * self.v.value + braintrace.matmul(x, self.w.value)
        )
        self.spike.value = (v > 0.2) & ~self.spike.value
        self.rest.value = jnp.where(self.spike.value, 3, jnp.maximum(self.rest.value - 1, 0))
        self.v.value = v
        return v


def started():
    return braintrace.compile(Refractory(), 'D_RTRL', XS[0])


def by_calls(learner):
    for x, flags in zip(XS, FLAGS, strict=True):
        learner.reset_state(lanes=flags)
        learner(x)


def by_gradient(learner):
    learner.etrace_grad(XS, step_fn=lambda x: learner(x).sum(), reset=FLAGS, window=2)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('way', [by_calls, by_gradient])
def test_a_lane_that_starts_anew_is_like_a_new_learner(way):
    """Also where a call gave buffers of the start away."""
    learner, fresh = started(), started()
    assert [g.name for g in learner.graph.hidden_groups] == ['v']
    before = jax.tree.map(np.asarray, learner.initial.value)
    way(learner)
    learner.reset_state()
    way(learner)
    jax.tree.map(np.testing.assert_array_equal, learner.initial.value, before)
    for x in XS[3:]:
        fresh(x)
    for name in ('v', 'rest', 'spike'):
        got, want = getattr(learner.model, name).value, getattr(fresh.model, name).value
        np.testing.assert_allclose(got[1], want[1], atol=1e-12, err_msg=name)
    assert learner.etrace.value['t'].tolist() == [5, 2, 5]
    assert (learner.model.rest.value != fresh.model.rest.value).any(), 'the other lanes go on'


class Drawn(Layer):
    """Its initial states are drawn, so those of two lanes differ."""

    def init_state(self, *args, **kwargs):
        self.h = brainstate.HiddenState(brainstate.random.randn(UNITS))


def of_new_states(learner):
    @brainstate.transform.vmap_new_states(state_tag='new', axis_size=BATCH)
    def initialise():
        brainstate.nn.init_all_states(learner)

    initialise()
    return brainstate.nn.Vmap(learner, vmap_states='new'), learner.states('new')


def of_a_map(learner):
    lanes = brainstate.nn.Map(learner, init_map_size=BATCH)
    lanes.init_all_states()
    return lanes, learner.states(brainstate.ShortTermState, brainstate.HiddenState)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('mapped', [of_new_states, of_a_map])
def test_each_lane_of_a_mapped_learner_goes_back_to_its_own_start(mapped):
    learner = braintrace.compile(Drawn(), 'D_RTRL', XS[0, 0])
    lanes, states = mapped(learner)
    start = learner.model.h.value

    @brainstate.transform.vmap(in_states=states)
    def reset():
        brainstate.nn.reset_all_states(learner)

    assert start.shape == (BATCH, UNITS) and (start[0] != start[1]).any()
    for x in XS[:2]:
        lanes(x)
    reset()
    assert (learner.model.h.value == start).all() and not learner.etrace.value['t'].any()
    lanes(XS[0])
    brainstate.nn.reset_all_states(lanes)
    assert (learner.model.h.value == start).all()


@pytest.mark.parametrize('reset', ['learner', 'all'])
def test_a_reset_inside_a_map_over_states_puts_back_each_lane(reset):
    model, x = braintrace.nn.VanillaRNNCell(2, UNITS), jnp.asarray(XS[0])
    brainstate.nn.vmap_init_all_states(model, axis_size=BATCH, state_tag='new')
    learner = braintrace.D_RTRL(model)
    learner.compile_graph(x)
    first = learner(x)

    @brainstate.transform.vmap(in_states=learner.states('new'))
    def put_back():
        learner.reset_state() if reset == 'learner' else brainstate.nn.reset_all_states(learner)

    put_back()
    assert model.h.value.shape == (BATCH, UNITS) and not model.h.value.any()
    assert not learner.etrace.value['t'].any() and (learner(x) == first).all()


def test_a_lane_of_a_state_that_its_module_does_not_reset_is_refused():
    class Bare(Layer):
        def __init__(self):
            super().__init__()
            super().init_state()

        def init_state(self, *args, **kwargs):
            pass

    learner = braintrace.D_RTRL(Bare())
    learner.compile_graph(jnp.asarray(XS[0]))
    put_back = brainstate.transform.vmap(learner.reset_state, in_states={('h',): learner.model.h})
    with pytest.raises(StructureError, match="lane of the states .'h'. .* outside of it"):
        put_back()
