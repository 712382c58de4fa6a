"""The doctor and the report under every kind of learning rule."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import nn, rules
from tests.verify.asked import diagnosed, row_of


def cell(params, h, x):
    h = 0.6 * h + 0.4 * jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['w']))
    return braintrace.matmul(h, params['out']), h


def told(rule):
    rng = np.random.default_rng(0)
    params = {'w': rng.standard_normal((5, 3)), 'out': rng.standard_normal((3, 2))}
    data = rng.standard_normal((2, 4, 2, 2))
    found = diagnosed(cell, *data, params, np.zeros((2, 3)), rule)
    return '\n'.join(found.findings), row_of(found, 'w')


def test_of_a_rule_without_a_trace_all_history_is_dropped():
    found, row = told(rules.same_step())
    assert row.dropped == 1 and 'there is no trace' in found


@pytest.mark.slow
@pytest.mark.parametrize(
    'rule', [rules.uoro(), rules.signs(), rules.signs('all')], ids=['uoro', 'signs', 'all']
)
def test_of_a_random_rule_its_estimate_is_told_and_no_defect(rule):
    found, _ = told(rule)
    assert found.count('a random estimate') == 1 and 'The lowest cosine' in found
    assert 'should have the whole gradient' not in found


@pytest.mark.slow
def test_with_feedback_the_weights_of_the_oracle_are_told():
    found, row = told(rules.rflo())
    assert row.dropped is None and 'BPTT (its error goes back through W) is' in found


@pytest.mark.slow
def test_what_a_rule_drops_is_its_own():
    assert told(rules.rtrl())[1].dropped == 0
    found, row = told(rules.d_rtrl(scope='own'))
    assert row.dropped is None and 'is not measured: D_RTRL follows paths between' in found
    cut, whole = (told(rules.d_rtrl(credit=c))[1].dropped for c in ('cut', 'whole'))
    assert 0 < whole < 1 and abs(whole - cut) > 1e-3


class Model(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = (nn.GRUCell(2, 4), nn.LeakyRateReadout(4, 3, tau=5.0))

    def update(self, x):
        return self.out(self.cell(x))


@pytest.mark.parametrize(
    'rule', [rules.rtrl(), rules.uoro(), rules.signs('all'), rules.d_rtrl(scope='own')]
)
def test_the_report_of_a_graph_shows_it_as_the_rule_sees_it(rule):
    model, x = Model(), jnp.zeros((3, 2))
    brainstate.nn.init_all_states(model, batch_size=3)
    graph = braintrace.compile_etrace_graph(model, x)
    wanted, seen = braintrace.report(graph, rule), rule.scoped(graph)
    assert braintrace.report(seen, rule).as_dict() == wanted.as_dict()
    other = rules.d_rtrl()
    assert braintrace.report(seen, other).as_dict() == braintrace.report(graph, other).as_dict()
    trace = jax.eval_shape(lambda: rule.init(seen))
    relations = [trace[rel.key] for rel in seen.hidden_param_op_relations]
    assert wanted.memory == sum(e.size * e.dtype.itemsize for e in jax.tree.leaves(relations))
