"""RTRL and SnAp-n against plain BPTT. ``test_rules.py`` compares them with their formulas."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, nn, rules
from braintrace.errors import BraintraceWarning, NotSupportedError
from braintrace.functional import _findings
from braintrace.rules import rtrl, snap
from tests import models, oracles
from tests.compare import assert_close, assert_drawn_close, assert_moves, errors
from tests.gradients import test_updates as updates
from tests.gradients.formulas import RULES, SCOPED
from tests.gradients.harness import learn, over_sequence, quick, restarts, start
from tests.scoped_oracles import reach, scoped_recursion
from tests.tiers import nightly, slow

pytestmark = pytest.mark.drawn
# parameters outside of any op, or of an op whose weight changes, keep their same-step gradient
PLAIN = {
    'plain_input': {'leak', 'w_in'},
    'encoder': {'enc'},
    'vmap_cond': {'one', 'two'},
    'mix_plain_dot': {'u'},
}
REFUSED = {'while_mixing', 'while_mixing_tail'}
GATE = {'lora', 'conv1d', 'adaptive_lif', 'two_layers', 'tail_norm', 'stored_spike', 'cond', 'scan'}


def rows(names, quick=(), gate=()):
    marks = {name: [] if name in quick else [slow if name in gate else nightly] for name in names}
    return pytest.mark.parametrize('name', [pytest.param(n, marks=m) for n, m in marks.items()])


@pytest.mark.tier(quick=1)
@rows([*models.MODELS, *(p for p in models.PROGRAMS if p not in REFUSED)], ['gru'], GATE)
def test_rtrl_is_back_propagation_through_time(name):
    case = models.case(name)
    got, want = over_sequence(case, rtrl(), 3)[0], oracles.bptt(case)
    same = oracles.same_step(case)
    assert_drawn_close(got, {k: same[k] if k in PLAIN.get(name, ()) else want[k] for k in want})


@pytest.mark.slow
@pytest.mark.parametrize('name, rule', SCOPED)
def test_updates_and_resets_get_the_gradients_of_the_formula(name, rule):
    case, (rule, formula) = models.case(name), RULES[rule]
    got, updated, _ = updates.gradients(case, rule, 2)
    assert_drawn_close(got, updates.grouped(formula(case), 2))
    assert_drawn_close(updated.trace, over_sequence(case, rule, None)[3].trace)
    got, _, _ = updates.gradients(case, rule, 2, reset=restarts(case))
    assert_drawn_close(got, updates.grouped(formula(case, restarts(case)), 2))


@pytest.mark.slow
@pytest.mark.parametrize('window', [2, 4])
def test_exact_windows_over_rtrl_are_back_propagation_through_time(window):
    case = models.case('gru')
    learner, state = start(case, rtrl())
    run = quick(learner.sequence_grad(case.loss, window, 'sum', inside='exact'))
    assert_drawn_close(run(case.params, state, case.xs, case.ys)[0], oracles.bptt(case))


@pytest.mark.slow
@pytest.mark.parametrize('keep', [2, 4])
def test_few_entries_of_each_row_carry_the_trace(keep):
    case = models.case('leaky')
    mask = np.random.default_rng(7).random((4, 4)).argsort(-1).argsort(-1) < keep
    assert (mask.sum(-1) == keep).all()
    got = over_sequence(case, rtrl(keep=keep, seed=7), 3)[0]
    carries = np.kron(np.eye(2), mask)
    assert_drawn_close(got, oracles.total(scoped_recursion(case, carries=carries)))
    far = errors(got, oracles.bptt(case))
    assert all(e < 1e-10 for e in far.values()) == (keep == 4)


@pytest.mark.slow
def test_each_layer_alone_leaves_out_what_the_first_does_to_the_second():
    case, rule = models.case('two_layers'), rtrl('each')
    off, graph = errors(over_sequence(case, rule, 3)[0], oracles.bptt(case)), graph_of(case, rule)
    assert 0 < len(graph.found('rule')) < len({r.key for r in graph.hidden_param_op_relations})
    exact = {path for path, e in off.items() if e < 1e-10}
    assert exact and exact < set(off)


def graph_of(case, rule):
    return start(case, rule)[0].first.graph


def rolled(ops, p, c, x):
    y = ops.lora_matmul(x, p['B'], p['A'], alpha=1.7)
    h = ops.new('h', ops.tanh(y + 0.8 * ops.roll(c['h'], 1)))
    return h @ p['out'], {'h': h}


@slow
def test_entries_of_another_layout_move_slot_by_slot():
    shapes = {'B': (3, 2), 'A': (2, 5), 'out': (5, 2)}
    case = models.make_case(models.Model('rolled', rolled, shapes, {'h': (2, 5)}))
    want = oracles.total(scoped_recursion(case, reach(case, 2)))
    assert_moves(want)
    assert_drawn_close(over_sequence(case, snap(2), 3)[0], want)
    relation = graph_of(case, snap(2)).hidden_param_op_relations[0]
    assert relation.groups[0].kept.rows.shape == (5, 2)


# ---- models of brainstate ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('rule', [snap(2), rtrl()], ids=str)
def test_a_model_of_brainstate(rule):
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3, 2)), jnp.float32)
    model = nn.GRUCell(2, 4)
    learner = braintrace.compile(model, rule, xs[0], batch_size=3, seed=0)
    step_fn = lambda x: (learner(x) ** 2).sum()
    got = learner.etrace_grad(xs, step_fn=step_fn, window=2, reduction='sum').grads
    brainstate.nn.init_all_states(model, batch_size=3)

    def whole():
        return (brainstate.transform.for_loop(model, xs) ** 2).sum()

    want = brainstate.transform.grad(whole, model.states(brainstate.ParamState))()
    assert_close({key: got[key] for key in want}, want, 1e-4)
    assert 'VJPs each step' in str(learner.report)
    entries = learner.get_etrace_of('Wr/weight').values()
    assert {e.shape for of in entries for e in of.values()} == {(3, 4, 6, 4), (3, 4, 4)}


# ---- the report ----------------------------------------------------------------------------------


def test_places_and_resets_of_a_wide_trace():
    case = models.case('leaky')
    learner, state = start(case, rtrl())
    (entry,) = jax.tree.leaves(state.trace['w']['h']['weight'])
    assert entry.shape == (2, 4, 7, 4) and 'trace/w/h/weight' in state.laned
    report = braintrace.report(learner.first.graph, rtrl())
    assert report.exact and report.memory == sum(e.nbytes for e in jax.tree.leaves(state.trace))
    nowhere = jax.tree.map(lambda _: jax.sharding.PartitionSpec(None), case.params)
    specs = learner.partition_specs(nowhere, 'data')
    assert specs.trace['w']['h']['weight'][0] == 'data'


# ---- what is refused, and told -------------------------------------------------------------------


def shape(*size, dtype=np.float32):
    return jax.ShapeDtypeStruct(size, dtype)


H = shape(2, 4)


def compiled(cell, rule, carry=H, policy=None):
    """A learner of a cell with one matrix ``w`` (3 + 4, 4), compiled for two lanes."""
    options = {} if policy is None else {'policy': policy}
    learner = functional.online(cell, rule, **options)
    jax.eval_shape(learner.init, {'w': shape(7, 4)}, carry, shape(2, 3))
    return learner


def layer(p, h, x):
    return jnp.tanh(product(p, h, x))


def product(p, h, x):
    return braintrace.matmul(jnp.concatenate([x, h], -1), p['w'])


def plain(p, h, x):
    return (h := layer(p, h, x)), h


def leaky(p, h, x):
    return (h := 0.9 * h + layer(p, h, x)), h


def over_lanes(p, h, x):
    y = product(p, h, x)
    return (h := jnp.tanh(y - y.mean(0))), h


def last_lane(p, h, x):
    y = product(p, h, x)
    return (h := jnp.tanh(y + y[-1:])), h


def complex_state(p, c, x):
    z = 0.5 * c + product(p, c.real, x)
    return z.real, z


def in_a_loop(p, h, x):
    h, _ = jax.lax.scan(lambda h, _: (layer(p, h, x), None), h, None, 3)
    return h, h


def sorted_state(p, h, x):
    return (h := jnp.sort(0.8 * h, -1) + layer(p, h, x)), h


def beside(name, value):
    """A layer and another state ``value(old, h)``."""

    def cell(p, c, x):
        h = layer(p, c['h'], x)
        return h, {'h': h, name: value(c[name], h)}

    return cell


TWO = {'h': H, 'k': H}
REFUSALS = {
    'lanes': (over_lanes, H, 'lanes of a batch read one another: .*d_rtrl'),
    'last lane': (last_lane, H, 'lanes of a batch read one another: .*d_rtrl'),
    'complex': (complex_state, shape(2, 4, dtype=np.complex64), 'is complex64.*two states'),
    'loop': (in_a_loop, H, r'is in a loop of 3 turns.*Policy\(unroll=3\)'),
    'mixed': (
        beside('sum', lambda old, h: 0.9 * old + h.sum(0)),
        {'h': H, 'sum': shape(4)},
        r'sum has the shape \[4\], and the batch of 2 is not its axis 0',
    ),
    'named': (beside('k', lambda old, h: 0.9 * old), TWO, r'k is not known.*Policy\(batched='),
    'sorted': (sorted_state, H, 'are not known to be apart: .* the indices of scatter-add'),
    'constant': (beside('k', lambda old, h: old), TWO, 'never changes the hidden state k.*params'),
}


@pytest.mark.parametrize('rule', [rtrl(), snap(2)], ids=['rtrl', 'snap'])
@pytest.mark.parametrize('name', REFUSALS)
def test_steps_that_have_no_wide_trace(name, rule):
    cell, carry, text = REFUSALS[name]
    policy = braintrace.Policy(unroll=0) if name == 'loop' else None
    with pytest.raises(NotSupportedError, match=text):
        compiled(cell, rule, carry, policy)


def test_a_large_trace_is_told_of_before_it_is_made(monkeypatch):
    monkeypatch.setattr(_findings, 'LARGE', 200)
    with pytest.warns(BraintraceWarning, match=r'GiB: w \[2, 4, 7, 4\].*d_rtrl'):
        compiled(plain, rtrl())
    with pytest.warns(BraintraceWarning, match=r'GiB: w \[2, 7, 4\].*es_d_rtrl'):
        compiled(leaky, rules.d_rtrl())


def test_a_closed_reach_is_exact_in_the_report_and_an_open_one_is_not():
    report = braintrace.report(compiled(plain, snap(2)).first.graph, snap(2))
    assert report.exact and '4 at most; 4 VJPs' in str(report)
    report = braintrace.report(graph_of(models.case('conv1d'), snap(2)), snap(2))
    assert not report.exact
    assert 'influence that needs more than 2 steps to arrive' in report.approximation
    few = braintrace.report(compiled(plain, rtrl(keep=2)).first.graph, rtrl(keep=2))
    assert 'all but 2 ways into each hidden number' in few.approximation


def broadcast(p, h, x):
    """A bias and a gain of each unit, which marking broadcasts to the batch."""
    h = 0.8 * h + p['gain'] * jnp.tanh(x @ p['w'] + h @ p['r'] + p['bias'])
    return h, h


def driven_by_one(p, h, x):
    """The first sample's row of a weight of each sample drives all samples."""
    h = 0.8 * h + jnp.tanh(x @ p['w'] + h @ p['r']) + (p['each'] + 0 * h)[:1]
    return h, h


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('rule', [rtrl(), snap(4)], ids=repr)
@pytest.mark.parametrize('cell', [broadcast, driven_by_one])
def test_a_bias_that_is_marked_has_the_memory_of_one_sample_for_each(cell, rule):
    rng, batch, steps = np.random.default_rng(0), 3, 9
    shapes = {'w': (2, 4), 'r': (4, 4)}
    shapes |= {'bias': (4,), 'gain': (4,)} if cell is broadcast else {'each': (batch, 4)}
    params = {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}
    xs, ys = rng.normal(size=(steps, batch, 2)), rng.normal(size=(steps, batch, 4))
    flags, h = rng.random((steps, batch)) < 0.15, np.zeros((batch, 4))
    data, reset = (params, h, xs, ys, models.squared), (flags, h)
    got, learner = learn(cell, rule, *data, window=3, given={'reset': reset}, mark='auto')
    assert_close(got, oracles.by_time(cell, *data, reset=reset))
    if cell is broadcast:
        # four numbers in each sample, and 8, 16, 4 and 4 weights whose y keeps all of them
        assert learner.report(64).memory == 64 * learner.report.memory_of_sample == 64 * 4 * 32 * 8
