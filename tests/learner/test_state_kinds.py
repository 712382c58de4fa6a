"""States in a ``HiddenGroupState``, a ``HiddenTreeState`` or a tree learn like single ones."""

import dataclasses
import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace.errors import StructureError
from tests import models, oracles
from tests.compare import assert_close
from tests.tiers import pairwise

from .kept import (
    AsDict,
    AsTuple,
    Group,
    Named,
    OneByOne,
    Separate,
    Stacked,
    Table,
    Tree,
    gradient,
    learner_of,
    slow,
)

D, ES = braintrace.rules.d_rtrl(), braintrace.rules.es_d_rtrl(0.7)
NEURON = 'synapse'
TOGETHER, TREES = [Group, Named, OneByOne, Stacked], [AsTuple, AsDict]
rules = pytest.mark.parametrize('rule', [D, ES], ids=lambda r: r.name)
some_forms = pytest.mark.parametrize(
    'form', [Group, pytest.param(Named, marks=slow), pytest.param(AsDict, marks=slow)]
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


@pytest.mark.tier(one_in=8)
@pairwise(
    lambda form, name, rule: form is Group and name == NEURON,
    form=[*TOGETHER, *TREES],
    name=[NEURON, 'lstm_reading_cell', 'op_between_states', 'spiking_three'],
    rule=[D, ES],
)
def test_states_kept_together_are_hidden_states_of_their_own(name, form, rule):
    learner, grads = table_gradient(name, form, rule)
    assert_close(grads, expected(name, rule))
    separate = learner_of(name, Separate, rule)
    paths = {s: f.column(s) for f in learner.model.forms for s in f.names}
    assert structure(learner.graph) == structure(separate.graph, paths.get)


def in_steps(learner, call, xs, ys):
    """Gradients of single calls, added up."""
    step = brainstate.transform.jit(
        lambda x, y: brainstate.transform.grad(
            lambda: models.squared(call(x), y), learner.param_states
        )()
    )
    grads = [step(x, y) for x, y in zip(xs, ys)]
    return {k[0]: sum(g[k] for g in grads) for k in grads[0]}


@pytest.mark.tier(quick=0, one_in=2)
@some_forms
def test_single_calls_give_the_same_gradient_and_the_same_trace(form):
    case, learner, separate = (
        models.case(NEURON),
        learner_of(NEURON, form, D),
        learner_of(NEURON, Separate, D),
    )
    assert_close(in_steps(learner, learner, case.xs, case.ys), expected(NEURON, D))
    separate.etrace_evolve(case.xs)
    (found,) = learner.get_etrace_of(learner.model.w).items()
    (want,) = separate.get_etrace_of(('w',)).values()
    assert found[0] == ('w', ','.join(map(learner.model.forms[0].column, ('i', 'v'))))
    assert_close(found[1], want)
    assert jnp.abs(want['weight']).max() > 0


@pytest.mark.tier(one_in=2)
@some_forms
def test_lanes_are_reset_to_the_states_at_compile_time(form):
    case, flags = models.case(NEURON), np.zeros((models.T, 2), bool)
    flags[2, 1] = flags[4, 0] = True
    want = oracles.restarted(oracles.dense_recursion, case, flags, case.carry)
    assert_close(table_gradient(NEURON, form, D, reset=flags)[1], oracles.total(want))


def test_reset_state_and_states_made_anew_after_compiling():
    case, learner = models.case(NEURON), learner_of(NEURON, Group, D)

    def step_fn(x, y):
        return models.squared(learner(x), y)

    first, before = (
        learner.etrace_grad(case.xs, case.ys, step_fn=step_fn).grads,
        learner.model.i_states,
    )
    learner.reset_state()
    np.testing.assert_array_equal(before.value, np.stack([case.carry['i'], case.carry['v']], -1))
    assert_close(learner.etrace_grad(case.xs, case.ys, step_fn=step_fn).grads, first)
    brainstate.nn.init_all_states(learner.model)
    learner.init_state()
    assert learner.model.i_states is not before
    assert_close(learner.etrace_grad(case.xs, case.ys, step_fn=step_fn).grads, first)


def vectorised_by_map(learner, x):
    brainstate.nn.init_all_states(learner.model)
    learner.compile_graph(x)
    lanes = brainstate.nn.Map(learner, init_map_size=models.model.B)
    lanes.init_all_states()
    return lanes


def with_equal_lanes(case):
    """The same case, every lane started like the first."""
    return dataclasses.replace(
        case, carry={k: np.stack([v[0]] * len(v)) for k, v in case.carry.items()}
    )


@pytest.mark.parametrize('form', [Group, pytest.param(Named, marks=slow)])
def test_a_vectorised_learner_equals_the_batched_one(form):
    case = with_equal_lanes(models.case(NEURON))
    learner = braintrace.D_RTRL(Table(case, form, lane=True))
    lanes = vectorised_by_map(learner, case.xs[0, 0])
    got = in_steps(learner, lanes, case.xs, case.ys)
    assert_close(got, oracles.total(oracles.dense_recursion(case)))


class WholeArray(brainstate.nn.Module):
    """Two coupled states, kept and updated as one array."""

    def __init__(self, case):
        super().__init__()
        self.case, self.w = (
            case,
            brainstate.ParamState(jnp.asarray(case.params['w'][: case.xs.shape[-1]])),
        )

    def init_state(self, batch_size=None, **_):
        both = [jnp.asarray(self.case.carry[k]) for k in 'iv']
        self.s = brainstate.HiddenGroupState(jnp.stack(both, -1))

    def update(self, x):
        drive = jnp.tanh(braintrace.matmul(x, self.w.value))[..., None]
        s = self.s.value
        s = 0.7 * s - 0.2 * jnp.sin(s[..., ::-1]) + drive * jnp.array([1.0, 0.5])
        self.s.value = s
        return self.s.get_value(0) * self.s.get_value(1)


def test_arithmetic_on_the_whole_array_couples_its_states_position_by_position():
    case = models.case(NEURON)

    def total(w):
        def step(c, x):
            drive = jnp.tanh(x @ w)
            i = 0.7 * c[0] - 0.2 * jnp.sin(c[1]) + drive
            v = 0.7 * c[1] - 0.2 * jnp.sin(c[0]) + 0.5 * drive
            return (i, v), i * v

        outputs = jax.lax.scan(step, tuple(jnp.asarray(case.carry[k]) for k in 'iv'), case.xs)[1]
        return models.squared(outputs, case.ys[..., :1])

    learner = braintrace.compile(WholeArray(case), D, case.xs[0])
    got = gradient(learner, case.xs, case.ys[..., :1])
    assert_close(got, {'w': jax.grad(total)(learner.model.w.value)})


class Holding(brainstate.nn.Module):
    """An op beside a state that ``new`` moves on."""

    def __init__(self, state, new):
        super().__init__()
        self.w, self.state, self.new = brainstate.ParamState(jnp.ones((3, 4))), state, new

    def update(self, x):
        self.state.value = self.new(self.state.value)
        return braintrace.matmul(x, self.w.value)


V = np.ones((2, 4))


@pytest.mark.parametrize(
    'state, new, words',
    [
        (
            lambda: brainstate.HiddenGroupState(V[..., :0]),
            lambda x: x,
            ['state:', 'HiddenGroupState', '[2, 0]', 'one at least'],
        ),
        (
            lambda: brainstate.HiddenTreeState({'1': V, 1: V}),
            lambda x: x,
            ['state:', "['1', '1']", 'name of its own'],
        ),
        (
            lambda: brainstate.HiddenTreeState({'v': V, 'a': V}),
            lambda x: x[..., :1],
            ["['v', 'a']", '[2, 4, 1]', 'holds 1 states'],
        ),
        (
            lambda: brainstate.HiddenGroupState(V),
            lambda x: x[..., :3],
            ['state', "'3'", 'before the step', 'after it'],
        ),
        (
            lambda: brainstate.HiddenState(V * u.mV),
            lambda x: x.mantissa * u.mA,
            ['state', 'mV', 'mA', 'Convert'],
        ),
        (
            lambda: Tree({'a': V}),
            lambda x: {'b': x['a']},
            ['state', "'a'", "'b'", 'before the step'],
        ),
    ],
    ids=['no states', 'equal names', 'lost name', 'lost state', 'unit', 'tree'],
)
def test_a_value_that_does_not_fit_its_state_is_refused_and_left_as_it_was(state, new, words):
    model = Holding(state(), new)
    before = model.state.value
    with pytest.raises(StructureError) as caught:
        braintrace.D_RTRL(model).compile_graph(jnp.ones((2, 3)))
    assert all(word in str(caught.value) for word in words), caught.value
    assert model.state.value is before


def test_a_group_state_that_grew_since_it_was_compiled_is_refused():
    learner = learner_of(NEURON, Group, D)
    learner.model.i_states = brainstate.HiddenGroupState(jnp.zeros((2, 4, 3)))
    with pytest.raises(
        StructureError, match=r'carry i_states/2: absent when compiled, float64\[2, 4\] now'
    ):
        learner(models.case(NEURON).xs[0])
