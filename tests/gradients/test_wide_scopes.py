"""RTRL and SnAp-n against plain BPTT and against the NumPy recursion of the numbers that they
keep.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace.rules import rtrl, snap
from tests import models, oracles
from tests.compare import assert_close, assert_drawn_close, assert_moves, at, errors
from tests.gradients import test_updates as updates
from tests.gradients.harness import by_steps, learner_of, other_carry, over_sequence, quick, start
from tests.scoped_oracles import reach, scoped_recursion
from tests.tiers import nightly, slow

pytestmark = pytest.mark.drawn
MASK = np.array([1.0, 0.0, 0.5, 1.0, 2.0, 1.5])
# parameters outside of any op, or of an op whose weight changes, keep their same-step gradient
PLAIN = {
    'plain_input': {'leak', 'w_in'},
    'encoder': {'enc'},
    'vmap_cond': {'one', 'two'},
    'mix_plain_dot': {'u'},
}
REFUSED = {'while_mixing', 'while_mixing_tail'}
GATE = {'lora', 'conv1d', 'adaptive_lif', 'two_layers', 'tail_norm', 'stored_spike', 'cond', 'scan'}
RAGGED = np.zeros((6, 2), bool)
RAGGED[[2, 4], 0] = RAGGED[[1, 2], 1] = True


def rows(names, quick=(), gate=()):
    marks = {name: [] if name in quick else [slow if name in gate else nightly] for name in names}
    return pytest.mark.parametrize('name', [pytest.param(n, marks=m) for n, m in marks.items()])


@functools.cache
def scoped(case, n):
    return scoped_recursion(case, reach(case, n))


def scoped_of(n):
    """The oracle of SnAp-n."""
    return lambda case: scoped(case, n)


@rows([*models.MODELS, *(p for p in models.PROGRAMS if p not in REFUSED)], ['gru'], GATE)
def test_rtrl_is_back_propagation_through_time(name):
    case = models.case(name)
    got, want = over_sequence(case, rtrl(), 3)[0], oracles.bptt(case)
    same = oracles.same_step(case)
    assert_drawn_close(got, {k: same[k] if k in PLAIN.get(name, ()) else want[k] for k in want})


CLOSED = [
    'leaky',
    'lstm_fused',
    'gru',
    'sparse',
    'lora',
    'tail_norm',
    'normalised',
    'learned_decay',
]
OPEN = ['conv1d', 'conv2d', 'neighbours', 'tail_swap']


@rows(CLOSED, gate=['lstm_fused'])
def test_a_reach_that_is_closed_is_back_propagation_through_time(name):
    case = models.case(name)
    assert_drawn_close(over_sequence(case, snap(2), 3)[0], oracles.bptt(case))


@rows(CLOSED + OPEN, ['conv1d'], ['sparse', 'lora', 'conv2d'])
def test_the_reach_of_two_steps_is_the_recursion_of_these_numbers(name):
    case = models.case(name)
    assert_drawn_close(over_sequence(case, snap(2), 3)[0], oracles.total(scoped(case, 2)))


@slow
def test_the_reach_grows_with_n():
    case, want = models.case('conv1d'), oracles.bptt(models.case('conv1d'))
    assert_drawn_close(over_sequence(case, snap(3), 3)[0], oracles.total(scoped(case, 3)))
    two, three = (errors(over_sequence(case, snap(n), 3)[0], want) for n in (2, 3))
    assert two["['k']"] > 2 * three["['k']"] > 1e-4


SETTINGS = [
    pytest.param('conv1d', snap(2), scoped_of(2), id='snap-conv1d', marks=slow),
    pytest.param('gru', rtrl(), scoped_recursion, id='rtrl-gru', marks=slow),
    pytest.param('sparse', snap(2), scoped_of(2), id='snap-sparse', marks=nightly),
    pytest.param('lora', rtrl(), scoped_recursion, id='rtrl-lora', marks=nightly),
    pytest.param('learned_decay', rtrl(), scoped_recursion, id='rtrl-decay', marks=nightly),
]
settings = pytest.mark.parametrize('name, rule, oracle', SETTINGS)


@settings
def test_single_steps_windows_and_updates_have_one_set_of_numbers(name, rule, oracle):
    case = models.case(name)
    for t, (_, _, grads) in enumerate(by_steps(case, rule)):
        assert_drawn_close(grads, at(oracle(case), t))
    for window in (1, None):
        got, state, _ = over_sequence(case, rule, window)
        assert_drawn_close(got, oracles.total(oracle(case)))
    got, updated, _ = updates.gradients(case, rule, 2)
    assert_drawn_close(got, updates.grouped(oracle(case), 2))
    assert_drawn_close(updated.trace, state.trace)


@settings
def test_resets_of_lanes_and_a_mask(name, rule, oracle):
    case, carry0 = models.case(name), other_carry(models.case(name))
    want = oracles.restarted(oracle, case, RAGGED, carry0)
    assert_moves(oracles.total(want))
    got, _, _ = over_sequence(case, rule, 3, reset=(RAGGED, carry0), mask=MASK)
    assert_drawn_close(got, oracles.total(want, MASK))
    got, _, _ = updates.gradients(case, rule, 2, reset=(RAGGED, carry0))
    assert_drawn_close(got, updates.grouped(want, 2))


@slow
@pytest.mark.parametrize('window', [2, pytest.param(4, marks=nightly)])
def test_exact_windows_over_rtrl_are_back_propagation_through_time(window):
    case = models.case('gru')
    learner, state = start(case, rtrl())
    run = quick(learner.sequence_grad(case.loss, window, 'sum', inside='exact'))
    got, _, _ = run(case.params, state, case.xs, case.ys)
    assert_drawn_close(got, oracles.bptt(case))


@pytest.mark.parametrize('keep', [pytest.param(2, marks=slow), pytest.param(4, marks=nightly)])
def test_few_entries_of_each_row_carry_the_trace(keep):
    case = models.case('leaky')
    mask = np.random.default_rng(7).random((4, 4)).argsort(-1).argsort(-1) < keep
    want = oracles.total(scoped_recursion(case, carries=np.kron(np.eye(2), mask)))
    assert (mask.sum(-1) == keep).all()
    got = over_sequence(case, rtrl(keep=keep, seed=7), 3)[0]
    assert_drawn_close(got, want)
    far = errors(got, oracles.bptt(case))
    assert all(e < 1e-10 for e in far.values()) == (keep == 4)


@slow
def test_each_layer_alone_leaves_out_what_the_first_does_to_the_second():
    case = models.case('two_layers')
    want, rule = oracles.bptt(case), rtrl('each')
    off = errors(over_sequence(case, rule, 3)[0], want)
    left_out = learner_of(case, rule).first.graph.left_out
    params = {r.key for r in learner_of(case, rule).first.graph.hidden_param_op_relations}
    assert 0 < len(left_out) < len(params)
    exact = {path for path, e in off.items() if e < 1e-10}
    assert exact and exact < set(off)


# ---- a sparse recurrent layer --------------------------------------------------------------------


def ring(number=16, seed=3):
    """A layer whose recurrent matrix has few entries, which a constant mask says."""
    rng = np.random.default_rng(seed)
    mask = rng.random((number, number)) < 0.15
    shapes = {'w_in': (3, number), 'w': (number, number), 'out': (number, 2)}

    def cell(ops, p, c, x):
        y = ops.matmul(c['h'], p['w'] * mask) + ops.matmul(x, p['w_in'])
        h = ops.new('h', ops.tanh(y))
        return h @ p['out'], {'h': h}

    return mask, models.Model('ring', cell, shapes, {'h': (2, number)})


@slow
def test_the_error_falls_with_n_on_a_sparse_layer():
    mask, model = ring()
    case = models.make_case(model, steps=12)
    want, off = oracles.bptt(case), []
    for n in (2, 3, 4, 6):
        off.append(max(errors(over_sequence(case, snap(n), None)[0], want).values()))
    assert off == sorted(off, reverse=True) and off[0] < 0.3 and off[-1] < off[0] / 100
    graph = learner_of(case, snap(2)).first.graph
    (carrier,) = next(r for r in graph.hidden_param_op_relations if r.key == 'w').groups
    two_steps = np.eye(16, dtype=int) + mask.T > 0
    assert sorted((carrier.kept.rows >= 0).sum(-1)) == sorted(two_steps.sum(0))
    assert graph.scope.colours.max() + 1 < 16


# ---- models of brainstate ------------------------------------------------------------------------


@slow
@pytest.mark.parametrize('rule', [rtrl(), snap(2)], ids=['rtrl', 'snap'])
def test_a_model_of_brainstate(rule):
    import brainstate

    xs, ys = jnp.ones((5, 3, 2)), jnp.zeros((5, 3, 4))
    brainstate.random.seed(0)
    model = braintrace.nn.GRUCell(2, 4)
    learner = braintrace.compile(model, rule, xs[0], batch_size=3)

    def loss(out, y):
        return ((out - y) ** 2).sum()

    got = learner.etrace_grad(
        xs, ys, step_fn=lambda x, y: loss(learner(x), y), window=2, reduction='sum'
    )
    brainstate.nn.init_all_states(model, batch_size=3)

    def whole():
        losses = brainstate.transform.for_loop(lambda x, y: loss(model(x), y), xs, ys)
        return losses.sum()

    want = brainstate.transform.grad(whole, model.states(brainstate.ParamState))()
    for key, g in want.items():
        assert_close(got[key], g, 1e-4)
    assert 'VJPs each step' in str(learner.report)
    entries = learner.get_etrace_of('Wr/weight')
    assert {e.shape for slots in entries.values() for e in slots.values()} == {
        (3, 4, 6, 4),
        (3, 4, 4),
    }


@slow
def test_a_network_with_units_and_spikes():
    import brainstate
    import saiunit as u

    brainstate.random.seed(0)
    model = braintrace.nn.LIF(3, tau=5.0 * u.ms) if hasattr(braintrace.nn, 'LIF') else None
    if model is None:
        pytest.skip('no LIF')


# ---- the report ----------------------------------------------------------------------------------


def test_places_and_resets_of_a_wide_trace():
    case = models.case('leaky')
    learner, state = start(case, rtrl())
    (entry,) = jax.tree.leaves(state.trace['w']['h']['weight'])
    assert entry.shape == (2, 4, 7, 4) and 'trace/w/h/weight' in state.laned
    report = braintrace.report(learner.first.graph, rtrl())
    assert report.exact and report.memory == sum(e.nbytes for e in jax.tree.leaves(state.trace))
    specs = learner.partition_specs(
        jax.tree.map(lambda _: jax.sharding.PartitionSpec(None), case.params), 'data'
    )
    assert specs.trace['w']['h']['weight'][0] == 'data'
