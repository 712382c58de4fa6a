"""States in a ``HiddenGroupState``, a ``HiddenTreeState`` or a tree learn like single ones."""

import dataclasses
import functools

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace.errors import StructureError
from tests import models, oracles
from tests.compare import assert_close
from tests.tiers import pairwise, slow

from .kept import FORMS, Table, Tree, gradient, learner_of
from .networks import by_steps

D, ES = braintrace.rules.d_rtrl(), braintrace.rules.es_d_rtrl(0.7)
NEURON, GROUP = 'synapse', 'a group'
some_forms = pytest.mark.parametrize(
    'form', [GROUP, *(pytest.param(form, marks=slow) for form in ('a named tree', 'a dict'))]
)


@functools.cache
def expected(name, rule):
    case = models.case(name)
    return oracles.total(
        oracles.dense_recursion(case) if rule is D else oracles.es_recursion(case, 0.7)
    )


def table_gradient(name, form, rule, **options):
    case, learner = models.case(name), learner_of(name, form, rule)
    return learner, gradient(learner, case.xs, case.ys, **options)


def structure(graph, rename=lambda path: path):
    groups = {frozenset(map(rename, g.paths)): (g.shape, g.num_state) for g in graph.hidden_groups}
    relations = {
        (r.key, r.primitive.name): [frozenset(map(rename, g.paths)) for g in r.groups]
        for r in graph.hidden_param_op_relations
    }
    return groups, relations, {k: (r.kind, r.reason) for k, r in graph.routes.items()}


@pairwise(
    lambda form, name, rule: form == GROUP and name == NEURON,
    form=FORMS,
    name=[NEURON, 'lstm_reading_cell', 'op_between_states', 'spiking_three'],
    rule=[D, ES],
)
def test_states_kept_together_are_hidden_states_of_their_own(name, form, rule):
    learner, grads = table_gradient(name, form, rule)
    assert_close(grads, expected(name, rule))
    separate = learner_of(name, None, rule)
    assert structure(learner.graph) == structure(separate.graph, learner.model.path)


def in_steps(learner, call, case):
    """Gradients of single calls, added up."""
    return {k[0]: g for k, g in by_steps(call, case.xs, case.ys, learner.param_states).items()}


@some_forms
def test_lanes_are_reset_to_the_states_at_compile_time(form):
    case, flags = models.case(NEURON), np.zeros((models.T, 2), bool)
    flags[2, 1] = flags[4, 0] = True
    want = oracles.restarted(oracles.dense_recursion, case, flags, case.carry)
    assert_close(table_gradient(NEURON, form, D, reset=flags)[1], oracles.total(want))


def test_reset_state_and_states_made_anew_after_compiling():
    case, learner = models.case(NEURON), learner_of(NEURON, GROUP, D)
    again = lambda: gradient(learner, case.xs, case.ys)
    first, before = again(), learner.model.i_states
    learner.reset_state()
    np.testing.assert_array_equal(before.value, np.stack([case.carry['i'], case.carry['v']], -1))
    assert_close(again(), first)
    brainstate.nn.init_all_states(learner.model)
    learner.init_state()
    assert learner.model.i_states is not before
    assert_close(again(), first)


@pytest.mark.parametrize('form', [GROUP, pytest.param('a named tree', marks=slow)])
def test_a_vectorised_learner_equals_the_batched_one(form):
    """Every lane starts like the first."""
    case = models.case(NEURON)
    alike = {k: np.stack([v[0]] * len(v)) for k, v in case.carry.items()}
    case = dataclasses.replace(case, carry=alike)
    learner = braintrace.D_RTRL(Table(case, form, lane=True))
    brainstate.nn.init_all_states(learner.model)
    learner.compile_graph(case.xs[0, 0])
    lanes = brainstate.nn.Map(learner, init_map_size=models.model.B)
    lanes.init_all_states()
    want = oracles.total(oracles.dense_recursion(case))
    assert_close(in_steps(learner, lanes, case), want)


class WholeArray(brainstate.nn.Module):
    """Two coupled states, kept and updated as one array."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.w = brainstate.ParamState(jnp.asarray(case.params['w'][: case.xs.shape[-1]]))

    def init_state(self, batch_size=None, **_):
        both = [jnp.asarray(self.case.carry[k]) for k in 'iv']
        self.s = brainstate.HiddenGroupState(jnp.stack(both, -1))

    def update(self, x):
        drive = jnp.tanh(braintrace.matmul(x, self.w.value))[..., None]
        s = self.s.value
        self.s.value = 0.7 * s - 0.2 * jnp.sin(s[..., ::-1]) + drive * jnp.array([1.0, 0.5])
        return self.s.get_value(0) * self.s.get_value(1)


def test_arithmetic_on_the_whole_array_couples_its_states_position_by_position():
    case = models.case(NEURON)

    def cell(p, c, x):
        drive = jnp.tanh(x @ p['w'])
        i = 0.7 * c[0] - 0.2 * jnp.sin(c[1]) + drive
        v = 0.7 * c[1] - 0.2 * jnp.sin(c[0]) + 0.5 * drive
        return i * v, (i, v)

    learner, data = braintrace.compile(WholeArray(case), D, case.xs[0]), (case.xs, case.ys[..., :1])
    params, first = {'w': learner.model.w.value}, tuple(case.carry[k] for k in 'iv')
    want = oracles.by_time(cell, params, first, *data, models.squared)
    assert_close(gradient(learner, *data), want)


class Holding(brainstate.nn.Module):
    """An op beside a state that ``new`` moves on."""

    def __init__(self, state, new):
        super().__init__()
        self.w, self.state, self.new = brainstate.ParamState(jnp.ones((3, 4))), state, new

    def update(self, x):
        self.state.value = self.new(self.state.value)
        return braintrace.matmul(x, self.w.value)


V = np.ones((2, 4))
GROUPED, NAMED = brainstate.HiddenGroupState, brainstate.HiddenTreeState
REFUSED = {  # a state and its value, what a step makes of it, what is said
    'no states': (GROUPED, V[..., :0], lambda x: x, 'state:|HiddenGroupState|[2, 0]|one at least'),
    'equal names': (NAMED, {'1': V, 1: V}, lambda x: x, "state:|['1', '1']|name of its own"),
    'lost name': (
        *(NAMED, {'v': V, 'a': V}, lambda x: x[..., :1]),
        "['v', 'a']|[2, 4, 1]|holds 1 states",
    ),
    'lost state': (GROUPED, V, lambda x: x[..., :3], "state|'3'|before the step|after it"),
    'unit': (brainstate.HiddenState, V * u.mV, lambda x: x.mantissa * u.mA, 'state|mV|mA|Convert'),
    'tree': (Tree, {'a': V}, lambda x: {'b': x['a']}, "state|'a'|'b'|before the step"),
}


@pytest.mark.parametrize('name', REFUSED)
def test_a_value_that_does_not_fit_its_state_is_refused_and_left_as_it_was(name):
    kind, value, new, words = REFUSED[name]
    model = Holding(kind(value), new)
    before = model.state.value
    with pytest.raises(StructureError) as caught:
        braintrace.D_RTRL(model).compile_graph(jnp.ones((2, 3)))
    assert all(word in str(caught.value) for word in words.split('|')), caught.value
    assert model.state.value is before


def test_a_group_state_that_grew_since_it_was_compiled_is_refused():
    learner = learner_of(NEURON, GROUP, D)
    learner.model.i_states = brainstate.HiddenGroupState(jnp.zeros((2, 4, 3)))
    with pytest.raises(
        StructureError, match=r'carry i_states/2: absent when compiled, float64\[2, 4\] now'
    ):
        learner(models.case(NEURON).xs[0])
