"""RTRL and SnAp-n against plain BPTT and against the NumPy recursion of the numbers that they
keep.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, nn, rules
from braintrace.errors import BraintraceWarning, NotSupportedError, OptionError
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


@pytest.mark.tier(quick=1, one_in=2)
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


@pytest.mark.slow
@rows(CLOSED, gate=['lstm_fused'])
def test_a_reach_that_is_closed_is_back_propagation_through_time(name):
    case = models.case(name)
    assert_drawn_close(over_sequence(case, snap(2), 3)[0], oracles.bptt(case))


@pytest.mark.tier(quick=1)
@rows(CLOSED + OPEN, ['conv1d'], ['lora', 'conv2d'])
def test_the_reach_of_two_steps_is_the_recursion_of_these_numbers(name):
    case = models.case(name)
    assert_drawn_close(over_sequence(case, snap(2), 3)[0], oracles.total(scoped(case, 2)))


@nightly
def test_the_reach_grows_with_n():
    case, want = models.case('conv1d'), oracles.bptt(models.case('conv1d'))
    assert_drawn_close(over_sequence(case, snap(3), 3)[0], oracles.total(scoped(case, 3)))
    two, three = (errors(over_sequence(case, snap(n), 3)[0], want) for n in (2, 3))
    assert two["['k']"] > 2 * three["['k']"] > 1e-4


SETTINGS = [
    pytest.param('conv1d', snap(2), scoped_of(2), id='snap-conv1d', marks=slow),
    pytest.param('gru', rtrl(), scoped_recursion, id='rtrl-gru', marks=slow),
    pytest.param('sparse', snap(2), scoped_of(2), id='snap-sparse', marks=slow),
    pytest.param('lora', rtrl(), scoped_recursion, id='rtrl-lora', marks=slow),
    pytest.param('learned_decay', rtrl(), scoped_recursion, id='rtrl-decay', marks=slow),
]
settings = pytest.mark.parametrize('name, rule, oracle', SETTINGS)


@pytest.mark.slow
@settings
def test_single_steps_windows_and_updates_have_one_set_of_numbers(name, rule, oracle):
    case = models.case(name)
    for t, (_, _, grads) in enumerate(by_steps(case, rule)):
        assert_drawn_close(grads, at(oracle(case), t))
    for window in (1, None):
        got, _, _, state = over_sequence(case, rule, window)
        assert_drawn_close(got, oracles.total(oracle(case)))
    got, updated, _ = updates.gradients(case, rule, 2)
    assert_drawn_close(got, updates.grouped(oracle(case), 2))
    assert_drawn_close(updated.trace, state.trace)


@pytest.mark.slow
@settings
def test_resets_of_lanes_and_a_mask(name, rule, oracle):
    case, carry0 = models.case(name), other_carry(models.case(name))
    want = oracles.restarted(oracle, case, RAGGED, carry0)
    assert_moves(oracles.total(want))
    got, *_ = over_sequence(case, rule, 3, reset=(RAGGED, carry0), mask=MASK)
    assert_drawn_close(got, oracles.total(want, MASK))
    got, _, _ = updates.gradients(case, rule, 2, reset=(RAGGED, carry0))
    assert_drawn_close(got, updates.grouped(want, 2))


@pytest.mark.slow
@pytest.mark.parametrize('window', [2, 4])
def test_exact_windows_over_rtrl_are_back_propagation_through_time(window):
    case = models.case('gru')
    learner, state = start(case, rtrl())
    run = quick(learner.sequence_grad(case.loss, window, 'sum', inside='exact'))
    got, *_ = run(case.params, state, case.xs, case.ys)
    assert_drawn_close(got, oracles.bptt(case))


@pytest.mark.parametrize('keep', [pytest.param(2, marks=slow), pytest.param(4, marks=slow)])
def test_few_entries_of_each_row_carry_the_trace(keep):
    case = models.case('leaky')
    mask = np.random.default_rng(7).random((4, 4)).argsort(-1).argsort(-1) < keep
    want = oracles.total(scoped_recursion(case, carries=np.kron(np.eye(2), mask)))
    assert (mask.sum(-1) == keep).all()
    got = over_sequence(case, rtrl(keep=keep, seed=7), 3)[0]
    assert_drawn_close(got, want)
    far = errors(got, oracles.bptt(case))
    assert all(e < 1e-10 for e in far.values()) == (keep == 4)


@pytest.mark.slow
def test_each_layer_alone_leaves_out_what_the_first_does_to_the_second():
    case = models.case('two_layers')
    want, rule = oracles.bptt(case), rtrl('each')
    off = errors(over_sequence(case, rule, 3)[0], want)
    left_out = learner_of(case, rule).first.graph.found('rule')
    params = {r.key for r in learner_of(case, rule).first.graph.hidden_param_op_relations}
    assert 0 < len(left_out) < len(params)
    exact = {path for path, e in off.items() if e < 1e-10}
    assert exact and exact < set(off)


def rolled(ops, p, c, x):
    y = ops.lora_matmul(x, p['B'], p['A'], alpha=1.7)
    h = ops.new('h', ops.tanh(y + 0.8 * ops.roll(c['h'], 1)))
    return h @ p['out'], {'h': h}


@slow
def test_entries_of_another_layout_move_slot_by_slot():
    shapes = {'B': (3, 2), 'A': (2, 5), 'out': (5, 2)}
    case = models.make_case(models.Model('rolled', rolled, shapes, {'h': (2, 5)}))
    got, want = over_sequence(case, snap(2), 3)[0], oracles.total(scoped(case, 2))
    assert_drawn_close(got, want)
    assert_moves(want)
    graph = learner_of(case, snap(2)).first.graph
    assert graph.hidden_param_op_relations[0].groups[0].kept.rows.shape == (5, 2)


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize('rule', [snap(2), rtrl()], ids=['snap', 'rtrl'])
def test_a_model_of_brainstate(rule):
    import brainstate

    xs = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 2)), jnp.float32)
    ys = jnp.zeros((5, 3, 4), jnp.float32)
    brainstate.random.seed(0)
    model = nn.GRUCell(2, 4)
    learner = braintrace.compile(model, rule, xs[0], batch_size=3)

    def loss(out, y):
        return ((out - y) ** 2).sum()

    got = learner.etrace_grad(
        xs, ys, step_fn=lambda x, y: loss(learner(x), y), window=2, reduction='sum'
    ).grads
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


@pytest.mark.slow
def test_a_network_of_spiking_units_in_volts_and_milliseconds():
    import brainstate
    import saiunit as u

    class Network(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.Linear(3 + 4, 4)
            self.units = nn.LIF(
                4, tau=5.0 * u.ms, R=1.0, V_th=1.0 * u.volt, V_rest=0.0 * u.volt,
                V_reset=0.0 * u.volt,
            )  # fmt: skip

        def update(self, x):
            inputs = jnp.concatenate([x, self.units.get_spike()], -1)
            self.units(20 * self.weights(inputs) * u.volt)
            return self.units.V.value / u.volt

    xs = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2, 3)), jnp.float32)
    with brainstate.environ.context(dt=1.0 * u.ms):
        model = Network()
        learner = braintrace.compile(model, snap(2), xs[0], batch_size=2)
        got = learner.etrace_grad(
            xs, step_fn=lambda x: (learner(x) ** 2).sum(), window=4, reduction='sum'
        ).grads
        brainstate.nn.init_all_states(model, batch_size=2)

        def whole():
            return (brainstate.transform.for_loop(model, xs) ** 2).sum()

        want = brainstate.transform.grad(whole, model.states(brainstate.ParamState))()
    for key, g in want.items():
        assert_close(got[key], g, 1e-4)


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


# ---- what is refused, and told -------------------------------------------------------------------

OPTIONS = [
    (lambda: rtrl('every'), "layers is 'every'; give 'joint' or 'each'"),
    (lambda: rtrl(keep=0), 'keep is 0; give an int from 1'),
    (lambda: rtrl(keep=True), 'keep is True'),
    (lambda: rtrl(seed=-1), 'seed is -1; give an int >= 0'),
    (lambda: snap(0), r'n is 0; give an int >= 1 \(same_step\(\) is SnAp-0\)'),
    (lambda: snap(True), 'n is True'),
    (lambda: snap(2, credit='half'), "credit is 'half'"),
]


@pytest.mark.parametrize('make, text', OPTIONS)
def test_options_that_no_rule_has(make, text):
    with pytest.raises(OptionError, match=text):
        make()


def shape(*size):
    return jax.ShapeDtypeStruct(size, np.float32)


def compiled(cell, rule, carry, policy=None):
    """A learner of a cell with one matrix ``w`` (3 + 4, 4), compiled for two lanes."""
    options = {} if policy is None else {'policy': policy}
    learner = functional.online(cell, rule, **options)
    jax.eval_shape(learner.init, {'w': shape(7, 4)}, carry, shape(2, 3))
    return learner


def product(p, h, x):
    return braintrace.matmul(jnp.concatenate([x, h], -1), p['w'])


def over_lanes(p, h, x):
    y = product(p, h, x)
    h = jnp.tanh(y - y.mean(0))
    return h, h


def complex_state(p, c, x):
    z = 0.5 * c + product(p, c.real, x)
    return z.real, z


def in_a_loop(p, h, x):
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(product(p, h, x)), None), h, None, 3)
    return h, h


def shared_by_lanes(p, c, x):
    h = jnp.tanh(product(p, c['h'], x))
    return h, {'h': h, 'sum': 0.9 * c['sum'] + h.sum(0)}


def with_another(p, c, x):
    h = jnp.tanh(product(p, c['h'], x))
    return h, {'h': h, 'k': 0.9 * c['k']}


def sorted_state(p, h, x):
    h = jnp.sort(0.8 * h, -1) + jnp.tanh(product(p, h, x))
    return h, h


def constant_state(p, c, x):
    h = jnp.tanh(product(p, c['h'], x))
    return h, {'h': h, 'k': c['k']}


REFUSALS = {
    'lanes': (over_lanes, shape(2, 4), None, r'lanes of a batch read one another: .*d_rtrl'),
    'complex': (
        complex_state,
        jax.ShapeDtypeStruct((2, 4), np.complex64),
        None,
        'hidden state carry is complex64.*two states',
    ),
    'loop': (
        in_a_loop,
        shape(2, 4),
        braintrace.Policy(unroll=0),
        r'stands in a loop of 3 turns.*Policy\(unroll=3\)',
    ),
    'mixed': (
        shared_by_lanes,
        {'h': shape(2, 4), 'sum': shape(4)},
        None,
        r'the hidden state sum has the shape \[4\], and the batch of 2 is not its axis 0',
    ),
    'named': (
        with_another,
        {'h': shape(2, 4), 'k': shape(2, 4)},
        None,
        r'axis 0 of the hidden state k is not known to be the batch.*Policy\(batched=',
    ),
    'sorted': (
        sorted_state,
        shape(2, 4),
        None,
        'are not known to be apart: the step makes the indices of scatter-add',
    ),
    'constant': (
        constant_state,
        {'h': shape(2, 4), 'k': shape(2, 4)},
        None,
        'the step never changes the hidden state k.*Keep it in params',
    ),
}


@pytest.mark.parametrize('rule', [rtrl(), snap(2)], ids=['rtrl', 'snap'])
@pytest.mark.parametrize('name', REFUSALS)
def test_steps_that_have_no_wide_trace(name, rule):
    cell, carry, policy, text = REFUSALS[name]
    with pytest.raises(NotSupportedError, match=text):
        compiled(cell, rule, carry, policy)


def plain(p, h, x):
    h = jnp.tanh(product(p, h, x))
    return h, h


def test_more_paths_than_there_are():
    with pytest.raises(OptionError, match='keep is 5, and carry has 4 hidden numbers'):
        compiled(plain, rtrl(keep=5), shape(2, 4))


def test_a_trace_is_written_at_each_update():
    learner = compiled(plain, rtrl(), shape(2, 4))
    with pytest.raises(OptionError, match='write_every is 3; RTRL writes its trace'):
        learner.first.rule.delay(learner.first.graph, 1, 3)


def test_a_large_trace_is_told_of_before_it_is_made(monkeypatch):
    from braintrace.functional import _findings

    monkeypatch.setattr(_findings, 'LARGE', 200)
    with pytest.warns(BraintraceWarning, match=r'GiB: w \[2, 4, 7, 4\].*d_rtrl'):
        compiled(plain, rtrl(), shape(2, 4))
    with pytest.warns(BraintraceWarning, match=r'GiB: w \[2, 7, 4\].*es_d_rtrl'):
        compiled(plain, rules.d_rtrl(), shape(2, 4))


def test_a_closed_reach_is_exact_in_the_report_and_an_open_one_is_not():
    report = braintrace.report(compiled(plain, snap(2), shape(2, 4)).first.graph, snap(2))
    assert report.exact and '4 at most; 4 VJPs' in str(report)
    case = models.case('conv1d')
    report = braintrace.report(start(case, snap(2))[0].first.graph, snap(2))
    assert not report.exact
    assert 'influence that needs more than 2 steps to arrive' in report.approximation
    few = braintrace.report(compiled(plain, rtrl(keep=2), shape(2, 4)).first.graph, rtrl(keep=2))
    assert 'all but 2 ways into each hidden number' in few.approximation
