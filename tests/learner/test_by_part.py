"""Rules for parts of a network: which op a pattern means, what is refused, and learners that have
them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, nn, rules
from braintrace.errors import OptionError
from tests.compare import assert_close
from tests.precision import float64 as float64

ES, D, NONE = rules.es_d_rtrl(0.9), rules.d_rtrl(), rules.same_step()
X = jnp.zeros((2, 3))


def chosen(parts, default=D):
    """The rule of each op of a GRU."""
    learner = braintrace.compile(nn.GRUCell(3, 4), rules.by_part(parts, default), X, batch_size=2)
    found = learner.report.axes
    return {
        key: rule for keys, rule in (a.split(' by ') for a in found) for key in keys.split(', ')
    }


Z, R, H = (f'W{gate}/weight/weight' for gate in 'zrh')


@pytest.mark.parametrize(
    'parts, want',
    [
        ({'Wz': ES}, [ES, D, D]),
        ({'W?/weight/bias': ES}, [ES, ES, ES]),
        ({Z: ES, '*': NONE}, [ES, NONE, NONE]),
        ({'h': ES}, [ES, D, ES]),  # the gate Wr feeds no hidden group position by position
    ],
    ids=str,
)
def test_a_pattern_means_ops_parameters_layers_and_groups(parts, want):
    assert chosen(parts) == dict(zip((Z, R, H), map(repr, want), strict=True))


@pytest.mark.parametrize(
    'parts, text',
    [
        ({'W': ES}, f"'W' matches nothing; there are .*{H}"),
        ({'*': ES, 'Wz': NONE}, f"all that 'Wz' matches .{Z}. belongs to patterns in front"),
        ({}, 'parts is {}; give a dict'),
        ({3: ES}, 'a pattern of by_part is 3'),
        ({'Wz': 'D_RTRL'}, "the rule of 'Wz' is 'D_RTRL'; give a value of braintrace.rules"),
        ({'Wz': rules.rtrl()}, r"the rule of 'Wz' is rtrl\(\), which follows paths between"),
        ({'Wz': rules.signs()}, 'can not be beside another'),
        ({'Wz': rules.by_part({'Wz': ES}, D)}, 'can not be beside another'),
        ({'Wz': rules.rflo()}, 'Give a feedback to the whole'),
        ({'Wz': rules.d_rtrl().filtered(0.9)}, 'a filter to the model'),
        ({'Wz': ES, 'Wh': rules.d_rtrl(credit='whole')}, 'whose credit differs'),
        ({'Wh': rules.d_rtrl(scope='own')}, 'whose scope differs'),
    ],
    ids=str,
)
def test_what_is_refused(parts, text):
    with pytest.raises(OptionError, match=text):
        chosen(parts)


def test_a_report_tells_each_parameter_what_its_rule_leaves_out():
    rule = rules.by_part({'Wz': ES, 'Wh': NONE}, D)
    report = braintrace.compile(nn.GRUCell(3, 4), rule, X, batch_size=2).report
    rows = {row.path: row for row in report.parameters}
    assert [rows[path].history for path in (Z, H)] == ['part', 'none']
    assert 'remembers no earlier step' in report.explain(H)
    assert 'an input factor' not in report.explain(H)
    assert 'an input factor and an output factor' in report.explain(Z)
    shapes = {op.key: [row.shape for row in op.trace] for op in report.relations}
    assert shapes == {Z: [(2, 4, 1), (2, 7)], H: []}


def cell(p, h, x):
    new = 0.7 * h + jnp.tanh(braintrace.matmul(x, p['in']) + braintrace.matmul(h, p['rec']))
    return braintrace.matmul(new, p['out']), new


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape))


def params():
    return {'in': drawn(3, 4), 'rec': 0.3 * drawn(4, 4), 'out': drawn(4, 2)}


MIXED = rules.by_part({'in': ES, 'out': NONE}, D)


def loss(out, y):
    return ((out - y) ** 2).sum()


def learner_of(rule):
    learner = functional.online(cell, rule)
    return learner, learner.init(params(), jnp.zeros((2, 4)), drawn(2, 3))


@pytest.mark.parametrize('axis', [{'credit': 'whole'}, {'scope': 'own'}], ids=str)
def test_parts_share_credit_scope_and_feedback(float64, axis):
    feedback = braintrace.Feedback('random')
    one, none = (rule.with_feedback(feedback) for rule in (rules.d_rtrl(**axis), NONE))
    both = rules.by_part({'in': NONE}, rules.d_rtrl(**axis)).with_feedback(feedback)

    def found(rule):
        learner, state = learner_of(rule)
        return jax.jit(learner.sequence_grad(loss))(
            params(), state, drawn(6, 2, 3), drawn(6, 2, 2)
        )[0]

    got, of_one = found(both), found(one)
    assert_close(got, {**of_one, 'in': found(none)['in']})
    assert not np.allclose(got['in'], of_one['in'])


@pytest.mark.slow
def test_a_sample_that_is_not_finite_starts_anew_in_every_part(float64):
    """The other sample learns as if the bad one had no past, and so does that one from then on."""
    xs, ys = drawn(8, 2, 3), drawn(8, 2, 2)
    learner, state = learner_of(MIXED)
    optimizer, carry0 = optax.sgd(0.0), jnp.zeros((2, 4))
    learn = learner.sequence_update(loss, optimizer, 2, not_finite='reset')
    run = jax.jit(
        lambda xs: learn(params(), optimizer.init(params()), state, xs, ys, reset=(None, carry0))
    )
    end = run(xs.at[3, 1].set(np.nan)).state
    # it is put back after step 3, the last one of the second update
    later = learner.sequence_grad(loss)
    flags = jnp.zeros((8, 2), bool).at[4, 1].set(True)
    want = jax.jit(later)(params(), state, xs, ys, reset=(flags, carry0)).state
    assert_close(learner.traces(params(), end), learner.traces(params(), want))
    assert end.t.tolist() == [8, 4]
