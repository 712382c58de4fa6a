"""Where a parameter meets a state without an equation of its own, in branches and at the border of
a step: either the gradient is that of reverse mode, or the report tells what is lost.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, rules
from braintrace.errors import UntracedParameterError
from tests.gradients.harness import assert_exact, of_shapes

D_RTRL, RTRL = rules.d_rtrl(), rules.rtrl()
H = np.zeros((1, 2))
XS = np.linspace(-1.0, 1.2, 6).reshape(6, 1, 1)
YS = np.ones((6, 1, 2))


def check(cell, params, carry, rule=D_RTRL, **options):
    """The learner of a marked cell, which has the gradient of reverse mode."""
    options = {'window': 4, 'mark': 'auto', **options}
    learner = assert_exact(cell, rule, params, carry, XS, YS, **options)
    assert learner.report.exact
    return learner


# branches -----------------------------------------------------------------------------------------


def in_each_branch(p, c, x):
    """A bias in six branches, of which each step takes another one."""
    branches = [lambda h, k=k: (k % 3 - 1.1) * h + p['b'] for k in range(6)]
    h = jax.lax.switch(c['n'] * 5 % 6, branches, c['h'] + x)
    return h, {'h': h, 'n': c['n'] + 1}


@pytest.mark.slow
def test_a_parameter_in_several_branches_has_an_op_in_each():
    params = {'b': np.array([0.3, -0.2])}
    carry = {'h': H, 'n': np.array(0)}
    assert len(check(in_each_branch, params, carry).graph.ops) == 6


# a parameter that is a new state ------------------------------------------------------------------


def becomes_states(p, c, x):
    """A parameter as two states and an output, one of a branch, and one out of a long loop."""
    taken = jax.lax.cond(x.sum() > 0.0, lambda: p['b'], lambda: 0.5 * c['branch'])
    last, _ = jax.lax.scan(lambda h, b: (b, None), c['loop'], jnp.stack([p['b'] * p['a']] * 9))
    h = 0.8 * c['h'] + jnp.tanh(x @ p['w']) * c['branch'] + c['loop'] ** 2 + c['b'] * c['twin']
    new = {'h': h, 'b': p['b'], 'twin': p['b'], 'branch': taken, 'loop': last, 'pure': p['a'] ** 2}
    return h + p['b'] + c['pure'], new


P = {'a': np.array([[0.9, -0.4]]), 'b': np.array([[0.2, 0.3]]), 'w': np.array([[0.3, 0.5]])}
NAMES = ('h', 'b', 'twin', 'branch', 'loop', 'pure')


@pytest.mark.slow
@pytest.mark.parametrize('rule', [D_RTRL, RTRL], ids=lambda rule: rule.name)
def test_a_parameter_that_is_a_new_state_keeps_its_history(rule):
    check(becomes_states, P, dict.fromkeys(NAMES, H), rule, policy=braintrace.Policy(strict=True))


def told(cell, carry, **options):
    """The report and the kinds of the warnings of a cell that is compiled."""
    learner, _ = of_shapes(cell, D_RTRL, P, carry, XS[0], **options)
    history = {row.path: row.history for row in learner.report.parameters}
    found = {(d.kind, d.path) for d in learner.graph.diagnostics if d.level == 'warning'}
    return history, found - {('unused', 'a')}


def by_hand(p, c, x):
    drive = braintrace.matmul(x, p['w']) + braintrace.element_wise(p['b']) * c['b']
    return c['h'], {'h': 0.8 * c['h'] + drive, 'b': p['b']}


def without_an_op(p, c, x):
    return c['h'], {'h': 0.8 * c['h'] + braintrace.matmul(x, p['w']) + c['b'], 'b': p['b']}


@pytest.mark.parametrize(
    'cell, history, kind',
    [(by_hand, 'part', 'partial-trace'), (without_an_op, 'none', 'not-etp-op')],
    ids=['by hand', 'without an op'],
)
def test_a_new_state_that_no_op_makes_of_its_parameter_is_told(cell, history, kind):
    carry = {'h': H, 'b': H}
    found, kinds = told(cell, carry)
    assert found['b'] == history
    assert kinds == {(kind, 'b')}
    with pytest.raises(UntracedParameterError, match=r'\bb (has a trace|is not_etp_op)'):
        functional.online(cell, D_RTRL, policy=braintrace.Policy(strict=True)).init(P, carry, XS[0])


def delay(p, c, x):
    """Two further states that keep a parameter, and the old hidden state, for later."""
    h = 0.8 * c['h'] + x @ p['w'] + c['b']
    return h * c['older'], {'h': h, 'b': p['b'], 'old': c['h'], 'older': 0.5 * c['old']}


def test_what_states_that_are_not_hidden_keep_of_parameters_and_of_each_other_is_told():
    carry = dict.fromkeys(('h', 'b', 'old', 'older'), H)
    history, kinds = told(delay, carry, mark='auto', hidden=lambda path, leaf: path[0] == 'h')
    assert history == {'a': 'not needed', 'b': 'none', 'w': 'part'}
    assert kinds == {('lost-relation', 'b'), ('lost-relation', 'w')}


def test_a_step_whose_weight_is_drawn_has_a_gradient_also_without_a_trace():
    """No op owns a weight that is made of a parameter and of a drawn number."""

    def cell(p, c, x):
        key, sub = jax.random.split(c['key'])
        w = p['w'] + 0.1 * jax.random.normal(sub, p['w'].shape)
        h = 0.8 * c['h'] + braintrace.matmul(x, w)
        return h, {'h': h, 'key': key}

    params, carry = {'w': np.ones((1, 2))}, {'h': H, 'key': jax.random.key(0)}
    learner, loss = functional.online(cell, rules.same_step()), lambda h, y: ((h - y) ** 2).sum()
    got = learner.grad(loss)(params, learner.init(params, carry, XS[0]), XS[0], YS[0])[0]
    want = jax.grad(lambda p: loss(cell(p, carry, XS[0])[0], YS[0]))(params)
    np.testing.assert_allclose(got['w'], want['w'], rtol=1e-5)
