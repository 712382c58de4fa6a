"""Hidden states that are functions of the other new states of their group, such as a stored spike:
they have no part in a trace, and the gradients are those of the recursion that keeps them in it.
"""

from functools import partial

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import rules
from tests import oracles
from tests.compare import assert_close
from tests.gradients.harness import over_sequence, restarts, start
from tests.models.library import LibraryOps
from tests.models.model import B, I, M, Model, N, O, make_case
from tests.models.spiking import THRESHOLD

D_RTRL, ES_D_RTRL = rules.d_rtrl(), rules.es_d_rtrl(0.8)
ORACLES = {D_RTRL: oracles.dense_recursion, ES_D_RTRL: partial(oracles.es_recursion, decay=0.8)}


def a_case(others):
    """A membrane ``v`` that reads the old ``z``; ``others(ops, params, carry, x, v)`` makes the
    other new states.
    """

    def cell(ops, p, c, x):
        y = ops.matmul(ops.concatenate([x, ops.cut(c['z'])]), p['w'])
        v = ops.new('v', 0.8 * c['v'] - 0.7 * c['z'] + y)
        made = others(ops, p, c, x, ops.within('v', v))
        new = {name: ops.new(name, value) for name, value in made.items()}
        return sum(ops.dot(h, p['out']) for h in new.values()), {'v': v, **new}

    params = {'w': (I + N, N), 'out': (N, O)} | OWN.get(others, {})
    states = ['v', 'z', *STAY.get(others, []), *ALSO.get(others, [])]
    return make_case(Model(others.__name__, cell, params, dict.fromkeys(states, (B, N))))


def leaky(ops, p, c, x, v):
    return {'z': ops.spike_by_vjp((v - THRESHOLD) / 0.5)}


def refractory(ops, p, c, x, v):
    """No gradient reaches the counter ``r``, which silences the spike."""
    r = ops.where(ops.xp.real(c['z']) > 0.5, 2.0, c['r'] - 1.0)
    return {'r': r, 'z': ops.where(ops.xp.real(r) > 0.0, 0.0, ops.spike(v - THRESHOLD))}


def chained(ops, p, c, x, v):
    """One derived state is made of another, of which there are two."""
    z = ops.spike(v - THRESHOLD)
    return {'z': z, 'copy': z, 'rate': ops.tanh(z + 0.3 * v)}


# further states that are derived, and further ones that are not
ALSO, STAY = {chained: ['copy', 'rate']}, {refractory: ['r']}


def names(graph, positions):
    return sorted(graph.program.carry_names[c] for c in positions)


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('rule', ORACLES, ids=lambda rule: rule.name)
@pytest.mark.parametrize('others', [leaky, refractory, chained])
def test_gradients_are_those_of_the_recursion_over_all_states(others, rule):
    case = a_case(others)
    graph = start(case, rule)[0].first.graph
    assert names(graph, graph.derived.states) == sorted(['z', *ALSO.get(others, [])])
    assert names(graph, graph.states) == sorted(['v', *STAY.get(others, [])])
    want = oracles.total(oracles.restarted(ORACLES[rule], case, *restarts(case)))
    for window in (1, 3):
        assert_close(over_sequence(case, rule, window, reset=restarts(case))[0], want)


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:u reads the old v')
def test_a_state_of_another_shape_that_reads_a_derived_one_adds_nothing_to_its_group():
    """The derivatives of ``u`` by ``z`` and of ``v`` by itself are taken apart, though no state
    reads both ``z`` and ``v``.
    """

    def cell(ops, p, c, x):
        v = ops.new('v', 0.8 * c['v'] + ops.matmul(x, p['w']))
        u = ops.new('u', 0.6 * c['u'] + ops.part(c['z'], 0, M) + ops.matmul(c['z'], p['w2']))
        z = ops.new('z', ops.spike(ops.within('v', v) - THRESHOLD))
        return ops.dot(u, p['out']) + ops.dot(z, p['out_z']), {'v': v, 'u': u, 'z': z}

    params = {'w': (I, N), 'w2': (N, M), 'out': (M, O), 'out_z': (N, O)}
    carry = {'v': (B, N), 'u': (B, M), 'z': (B, N)}
    case = make_case(Model('across', cell, params, carry, groups=(('v', 'z'), ('u',))))
    graph = start(case, D_RTRL)[0].first.graph
    assert names(graph, graph.derived.states) == ['z']
    assert_close(over_sequence(case, D_RTRL, 3)[0], oracles.total(oracles.dense_recursion(case)))


def adaptive(ops, p, c, x, v):
    """``v`` reads the threshold by the spike alone."""
    a = 0.9 * c['a'] + c['z']
    return {'a': a, 'z': ops.spike(v - THRESHOLD - 0.3 * a)}


STAY[adaptive] = ['a']


def test_what_reads_a_derived_state_reads_all_that_it_is_made_of():
    (group,) = start(a_case(adaptive), D_RTRL)[0].first.graph.hidden_groups
    assert group.paths == ('a', 'v') and np.all(group.reads)


# states that stay in the trace --------------------------------------------------------------------


def of_parameter(ops, p, c, x, v):
    """An update may change the threshold before the next step reads the spike."""
    return {'z': ops.spike(v - ops.plain(p['own']))}


def of_op(ops, p, c, x, v):
    return {'z': ops.spike(v - ops.element_wise(p['own'], ops.softplus))}


def of_input(ops, p, c, x, v):
    return {'z': ops.spike(v - THRESHOLD) * ops.dot(x, np.ones((I, 1)))}


def of_old_state(ops, p, c, x, v):
    return {'z': ops.spike(v - 0.2 * c['v'])}


def of_another_group(ops, p, c, x, v):
    """``i`` reads no old state, so it is no part of the group."""
    i = ops.matmul(x, p['own'])
    return {'i': i, 'z': ops.spike(v - i)}


def moved(ops, p, c, x, v):
    return {'z': ops.flip(ops.spike(v - THRESHOLD))}


def moved_alone(ops, p, c, x, v):
    """``z`` is made of other positions of ``i``, and ``a`` reads both."""
    i = ops.matmul(x, p['own'])
    return {'i': i, 'z': ops.flip(ops.spike(i)), 'a': 0.9 * c['a'] + c['i'] + c['z']}


def steep(ops, p, c, x, v):
    """The derivative may be infinite at a first carry, which no step has made."""
    return {'z': ops.sqrt(v**2)}


OWN = {of_parameter: {'own': (N,)}, of_op: {'own': (N,)}}
OWN |= dict.fromkeys([of_another_group, moved_alone], {'own': (I, N)})
STAY |= {of_another_group: ['i'], moved_alone: ['a', 'i']}


@pytest.mark.filterwarnings('ignore:parameter own', 'ignore:own. no trace')
@pytest.mark.parametrize(
    'others',
    [of_parameter, of_op, of_input, of_old_state, of_another_group, moved, moved_alone, steep],
)
def test_a_state_made_of_anything_else_stays_in_the_trace(others):
    graph = start(a_case(others), D_RTRL)[0].first.graph
    assert names(graph, graph.states) == sorted(['v', 'z', *STAY.get(others, [])])
    assert not graph.derived.states


def test_an_infinite_derivative_at_the_first_carry_reaches_no_gradient():
    case = a_case(steep)
    case.carry['v'][:] = 0.0
    assert_close(over_sequence(case, D_RTRL, 3)[0], oracles.total(oracles.dense_recursion(case)))


# readers elsewhere --------------------------------------------------------------------------------


class Neuron(brainstate.nn.Module):
    """A membrane that is reset by the spike of the step before, which is a state."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(0.8 * np.random.default_rng(0).standard_normal((I, N)))
        self.v = brainstate.HiddenState(jnp.zeros((B, N)))
        self.z = brainstate.HiddenState(jnp.zeros((B, N)))

    def update(self, x):
        self.v.value = 0.9 * self.v.value - self.z.value + braintrace.matmul(x, self.w.value)
        self.z.value = LibraryOps().spike(self.v.value - THRESHOLD)


XS = np.random.default_rng(1).standard_normal((8, B, I))


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('window', [None, 3, 1])
def test_a_loss_may_read_the_old_and_the_new_spike_itself(window):
    learner = braintrace.compile(Neuron(), 'D_RTRL', XS[0])
    assert names(learner.graph, learner.graph.derived.states) == ['z']

    def step_fn(x):
        old, model = learner.model.z.value, learner.model
        learner(x)
        return jnp.sum(jnp.sin(model.z.value + model.v.value)) + jnp.sum(jnp.cos(old))

    grads = learner.etrace_grad(XS, step_fn=step_fn, window=window, reduction='sum').grads

    def cell(w, h, x):
        v = 0.9 * h[0] - h[1] + x @ w
        z = LibraryOps().spike(v - THRESHOLD)
        return jnp.sum(jnp.sin(z + v)) + jnp.sum(jnp.cos(h[1])), (v, z)

    first = (jnp.zeros((B, N)), jnp.zeros((B, N)))
    want = oracles.by_time(cell, learner.model.w.value, first, XS, XS, lambda loss, _: loss)
    assert_close(grads[('w',)], want)


def test_the_report_names_a_derived_state():
    report = braintrace.compile(Neuron(), 'D_RTRL', XS[0]).report()
    (group,) = report.groups
    assert (group.members, group.derived) == (('v',), ('z',))
    assert 'v; made of them, without a trace: z' in str(report)
    assert 'hidden group v (of which z is made)' in report.explain('w')
