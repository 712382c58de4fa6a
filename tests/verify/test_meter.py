"""The gradient meter against reverse mode, direction by direction, and by enumeration."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, rules, verify
from braintrace.errors import NotSupportedError, OptionError, StepFunctionError, StructureError
from tests import models, oracles
from tests.compare import assert_close
from tests.models import T
from tests.models.library import LibraryOps

pytestmark = pytest.mark.filterwarnings('ignore::braintrace.errors.BraintraceWarning')
MASK = np.array([1.0, 0.0, 0.5, 1.0, 2.0, 1.5])
B = 2


def meter_of(case, rule=None, **options):
    cell = functools.partial(case.model.cell, LibraryOps())
    return verify.Meter(functional.online(cell, rule or rules.d_rtrl()), case.loss, **options)


def drawn(tree, number=3):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((number, *np.shape(p)))) for p in jax.tree.leaves(tree)]


def dot(a, b):
    return sum(map(np.vdot, jax.tree.leaves(a), jax.tree.leaves(b)))


def cosine_of(a, b):
    return dot(a, b) / np.sqrt(dot(a, a) * dot(b, b))


def still(case, number=3):
    return [jnp.zeros((number, *np.shape(h))) for h in jax.tree.leaves(dict(case.carry))]


def projected(grads, directions):
    return sum(
        np.sum(np.asarray(g) * np.asarray(v), axis=tuple(range(1, v.ndim)))
        for g, v in zip(jax.tree.leaves(grads), directions, strict=True)
    )


SOME = ['leaky', 'gru', 'lstm', 'adaptive_lif']
REVERSE_ALONE = ['lif_by_vjp']  # a derivative for reverse mode alone
REST = [name for name in models.names() if name not in [*SOME, *REVERSE_ALONE]]
ROWS = [*SOME, *(pytest.param(name, marks=pytest.mark.nightly) for name in REST)]


@pytest.mark.parametrize('name', ROWS)
def test_tangents_are_the_gradient_of_bptt_along_any_direction(name):
    case = models.case(name)
    meter, v = meter_of(case, reduction='sum'), drawn(case.params)
    run = functools.partial(meter.along, xs=(case.xs,), ys=case.ys)
    found, _, _ = jax.jit(run)(case.params, dict(case.carry), v, still(case))
    assert_close(found[:, 0], projected(oracles.bptt(case), v))


def test_a_reset_forgets_the_tangents_of_its_samples():
    case = models.case('gru')
    flags, fresh = np.zeros((T, B), bool), {'h': np.full((B, 4), 0.3)}
    flags[[2, 4], 0] = flags[1, 1] = True
    meter, v = meter_of(case, reduction='mean'), drawn(case.params)
    meter.learner.init(case.params, dict(case.carry), case.xs[0])
    start, how = (case.params, dict(case.carry)), (case.ys, MASK, (jnp.asarray(flags), fresh))
    found = meter.along(*start, v, still(case), (case.xs,), *how)[0]
    cell = functools.partial(case.model.cell, LibraryOps())
    want = oracles.by_time(cell, *start, case.xs, case.ys, case.loss, *how[1:])
    assert_close(found[:, 0], projected(want, v) / MASK.sum())


def test_over_all_signs_the_products_are_the_inner_products():
    """Unbiased, without a statistic: the mean over all directions is no estimate."""
    rng = np.random.default_rng(0)
    cell = lambda p, h, x: (h, jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), p['W'])))
    params, h = {'W': rng.standard_normal((3, 2)), 'b': np.ones(1)}, np.zeros((1, 2))
    add = lambda p, h, x: (cell(p, h, x)[0] * p['b'], cell(p, h, x)[1])
    xs, ys = rng.standard_normal((5, 1, 1)), rng.standard_normal((5, 1, 2))
    loss = lambda out, y: jnp.sum((out - y) ** 2)
    learner = functional.online(add, rules.d_rtrl())
    gradient = jax.jit(learner.sequence_grad(loss))
    grads = gradient(params, learner.init(params, h, xs[0]), xs, ys).grads
    signs = np.array(list(itertools.product([-1.0, 1.0], repeat=7)))
    v, still = [signs[:, :6].reshape(-1, 3, 2), signs[:, 6:]], [jnp.zeros((128, 1, 2))]
    meter = verify.Meter(learner, loss, directions=128)
    a, _, _ = jax.jit(meter.along)(params, h, v, still, (xs,), ys)
    true = oracles.by_time(add, params, h, xs, ys, loss)
    true = jax.tree.map(lambda g: g / 5, true)
    b = projected(grads, v)
    np.testing.assert_allclose(np.mean(a[:, 0] * b), dot(true, grads), rtol=1e-10)
    np.testing.assert_allclose(np.mean(a[:, 0] ** 2), dot(true, true), rtol=1e-10)
    of_w = projected({'W': grads['W']}, v[:1])
    np.testing.assert_allclose(np.mean(a[:, 0] * of_w), np.vdot(true['W'], grads['W']), rtol=1e-10)


@functools.cache
def metered(case, rule, updates=30, **options):
    """The reading over some updates of the same sequence, and the rule's gradient."""
    meter = meter_of(case, rule, reduction='sum', **options)
    learner = meter.learner
    state = learner.init(case.params, case.carry, case.xs[0])
    gradient = jax.jit(learner.sequence_grad(case.loss, reduction='sum'))
    grads, carry = gradient(case.params, state, case.xs, case.ys).grads, dict(case.carry)
    step = jax.jit(lambda now: meter.update(now, case.params, carry, case.xs, case.ys, grads))
    now = meter.init(case.params, carry)
    for _ in range(updates):
        now = step(now)
    return meter.reading(now, case.params), grads


EXACT = [name for name in models.names(exact=True) if name not in REVERSE_ALONE]


@pytest.mark.parametrize(
    'name',
    [*EXACT[:1], *(pytest.param(name, marks=pytest.mark.nightly) for name in EXACT[1:])],
)
def test_where_the_report_says_exact_the_meter_reads_one(name):
    case = models.case(name)
    meter = meter_of(case)
    meter.learner.init(case.params, case.carry, case.xs[0])
    assert meter.learner.report.exact
    reading, _ = metered(case, rules.d_rtrl())
    for e in (reading.cosine, reading.ratio, *reading.factors.values()):
        assert abs(e.value - 1) < max(1e-6, 3 * e.error), (e, reading)
    assert reading.cosine.error < 1e-6


@pytest.mark.parametrize(
    'name', ['gru', *(pytest.param(n, marks=pytest.mark.nightly) for n in ['lstm', 'two_layers'])]
)
def test_readings_are_those_of_bptt_within_their_errors(name):
    case = models.case(name)
    reading, grads = metered(case, rules.same_step(), updates=60, directions=32)
    true = oracles.bptt(case)
    cosine = cosine_of(true, grads)
    ratio = np.sqrt(dot(grads, grads) / dot(true, true))
    assert cosine < 0.99
    for want, e in ((cosine, reading.cosine), (ratio, reading.ratio)):
        assert abs(e.value - want) < 4 * e.error < 0.2
    each = reading.factors.values(), jax.tree.leaves(true), jax.tree.leaves(grads)
    for e, g, own in zip(*each, strict=True):
        assert abs(e.value - np.vdot(g, own) / np.vdot(own, own)) < 4 * e.error
    assert reading.samples == 60 * 32


def linear(decay=0.5):
    def cell(p, h, x):
        h = decay * h + braintrace.matmul(x, p['W'])
        return h, h

    return cell, {'W': jnp.ones((2, 3))}, jnp.zeros((2, 3))


def mean_square(h, y):
    return jnp.mean((h - y) ** 2)


def test_a_stream_in_windows_of_odd_lengths_reads_one_where_the_rule_is_exact():
    cell, params, h = linear(0.1)
    learner = functional.online(cell)
    meter = verify.Meter(learner, mean_square, memory=32)
    gradient, update = jax.jit(learner.sequence_grad(mean_square)), jax.jit(meter.update)
    state, now = learner.init(params, h, h[:, :2]), meter.init(params, h)
    for i in range(200):
        xs = jax.random.normal(jax.random.key(i), ((3, 5)[i % 2], 2, 2))
        ys = jnp.ones((*xs.shape[:2], 3))
        found = gradient(params, state, xs, ys)
        now, state = update(now, params, state, xs, ys, found.grads), found.state
    reading = meter.reading(now, params)
    assert reading.samples >= 80
    assert abs(reading.cosine.value - 1) < 1e-6
    assert abs(reading.factors['W'].value - 1) < 1e-6
    assert reading.looks_back == '16 to 32 steps'


@pytest.mark.slow
def test_a_direction_of_a_stream_is_counted_as_soon_as_the_next_one_is_born():
    """By reverse mode from the step in which it was born."""
    cell, params, h = linear(0.9)
    learner, halves = functional.online(cell), 4  # of 4 steps, two updates
    meter = verify.Meter(learner, mean_square, memory=8)
    xs = jax.random.normal(jax.random.key(0), (4 * halves, 2, 2))
    ys, state, now = jnp.ones((4 * halves, 2, 3)), learner.init(params, h, xs[0]), None
    born, carries, gradient = [], [], learner.sequence_grad(mean_square)
    for i in range(0, len(xs), 2):
        now = now or meter.init(params, h)
        if i % 4 == 0:
            born, carries = [*born, now.directions[0][1]], [*carries, state.carry]
        found = gradient(params, state, xs[i : i + 2], ys[i : i + 2])
        now = meter.update(now, params, state, xs[i : i + 2], ys[i : i + 2], found.grads)
        state = found.state
    assert int(now.number) == 4 * (halves - 1)

    def loss_of(params, life, update):
        """The loss of an update of the second half of a life, from the first half's start on."""
        steps = slice(4 * life, 4 * life + 6 + 2 * update)
        run = lambda h, at: (lambda out: (out[1], mean_square(out[0], at[1])))(
            cell(params, h, at[0])
        )
        return jax.lax.scan(run, carries[life], (xs[steps], ys[steps]))[1][-2:].mean()

    for life in range(halves - 1):
        true = [jax.grad(loss_of)(params, life, update)['W'] for update in (0, 1)]
        want = sum(np.sum(np.asarray(g * born[life]), axis=(1, 2)) ** 2 for g in true)
        assert_close(now.samples[4 * life : 4 * life + 4, 0, 0], want)


def test_a_stream_that_jumps_counts_no_direction_that_was_alive():
    """And a carry that was rounded otherwise is no jump."""
    cell, params, h = linear()
    meter = verify.Meter(functional.online(cell), mean_square, memory=8)
    x, ys, grads = jnp.ones((2, 2, 2)), jnp.zeros((2, 2, 3)), {'W': jnp.ones((2, 3))}
    now, carry, ages, update = meter.init(params, h), h, [], jax.jit(meter.update)
    for rounded in (1 + 1e-15, 1, 1):
        now = update(now, params, carry, x, ys, grads)
        carry = now.carry[0] * rounded
        ages.append(int(now.age))
    assert ages == [-2, 0, 2] and float(jnp.abs(now.sums).max()) > 0
    jumped = update(now, params, h + 1, x, ys, grads)
    assert int(jumped.age) == -2 and not jumped.sums.any()
    v, s = now.directions[0][1], jumped.tangents[0][1]
    assert_close(s, 1.5 * jnp.broadcast_to(v.sum(1)[:, None], s.shape))


def test_sequence_update_learns_as_the_learner_does_and_reads():
    cell, params, h = linear(0.1)
    learner, optimizer = functional.online(cell), optax.adam(1e-2)
    meter = verify.Meter(learner, mean_square, memory=12)
    xs, state = jax.random.normal(jax.random.key(1), (301, 2, 2)), learner.init(params, h, h[:, :2])
    ys, mask = jnp.ones((301, 2, 3)), (jnp.arange(301) % 5 > 0).astype(float)
    flags = jnp.zeros((301, 2), bool).at[50, 0].set(True)
    rest = (xs, ys, mask, (flags, h))
    start = params, optimizer.init(params), state
    want = learner.sequence_update(mean_square, optimizer, 3)(*start, *rest)
    run = jax.jit(meter.sequence_update(optimizer, 3))
    found, now = run(*start, meter.init(params, h), *rest)
    assert_close(found.params, want.params)
    assert_close(found.losses, want.losses)
    assert int(now.updates) == 101
    reading = meter.reading(now)
    assert abs(reading.cosine.value - 1) < 1e-3 and reading.cosine.known


@pytest.mark.slow
def test_several_losses_have_a_reading_each():
    cell, params, h = linear(0.3)
    learner, other = functional.online(cell), lambda h, y: jnp.sum(h**3)
    meter = verify.Meter(learner, (mean_square, other))
    state, now = learner.init(params, h, h[:, :2]), meter.init(params, h)
    x, y = jnp.ones((2, 2)), jnp.zeros((2, 3))
    for _ in range(6):
        found = learner.heads(mean_square, other)(params, state, x, y)
        now = meter.step(now, params, h, x, y, found.grads)
    for reading in meter.reading(now):
        assert abs(reading.cosine.value - 1) < 1e-6


@pytest.mark.slow
def test_only_what_is_learned_is_measured():
    cell = lambda p, h, x: (h + p['b'], 0.5 * h + braintrace.matmul(x, p['W']))
    params, h = {'W': jnp.ones((2, 3)), 'b': jnp.ones(3)}, jnp.zeros((2, 3))
    learner = functional.online(cell, trainable=lambda path, leaf: path[0] == 'W')
    meter, xs, ys = verify.Meter(learner, mean_square), jnp.ones((4, 2, 2)), jnp.zeros((4, 2, 3))
    state, now = learner.init(params, h, xs[0]), meter.init(params, h)
    grads = learner.sequence_grad(mean_square)(params, state, xs, ys).grads
    for _ in range(6):
        now = meter.update(now, params, state, xs, ys, grads)
    reading = meter.reading(now, params)
    assert list(reading.factors) == ['W'] and abs(reading.cosine.value - 1) < 1e-9


def test_before_it_knows_it_says_so():
    cell, params, h = linear()
    meter = verify.Meter(functional.online(cell), mean_square)
    reading = meter.reading(meter.init(params, h), params)
    assert 'not yet' in str(reading) and reading.samples == 0
    assert reading.as_dict()['cosine']['value'] is None
    assert reading.as_dict()['factors']['W']['error'] is None


def test_a_reading_is_a_table_a_dict_and_a_figure():
    reading, _ = metered(models.case(EXACT[0]), rules.d_rtrl())
    assert 'its step should be scaled by' in str(reading) and '<table' in reading._repr_html_()
    assert reading.as_dict()['cosine']['samples'] == 120
    assert [update for update, _ in reading.curve][-1] == 30
    assert reading.figure().axes[0].get_ylabel() == 'cosine to the true gradient'


@jax.custom_vjp
def stubborn(v):
    return jnp.tanh(v)


stubborn.defvjp(lambda v: (jnp.tanh(v), v), lambda v, g: (g,))


@pytest.mark.parametrize('wrap', [lambda f: f, jax.jit, jax.checkpoint])
def test_an_op_without_forward_mode_is_named(wrap):
    _, params, h = linear()
    cell = lambda p, h, x: (h, wrap(stubborn)(0.5 * h + braintrace.matmul(x, p['W'])))
    meter = verify.Meter(functional.online(cell), mean_square)
    now, grads = meter.init(params, h), {'W': jnp.ones((2, 3))}
    line = cell.__code__.co_firstlineno
    says = rf'custom_vjp_call.*stubborn.* at .*test_meter\.py:{line} .*jax\.custom_jvp'
    with pytest.raises(NotSupportedError, match=says):
        meter.step(now, params, h, jnp.ones((2, 2)), jnp.zeros((2, 3)), grads)


def refused(error, says, call, *args, **options):
    with pytest.raises(error, match=says):
        call(*args, **options)


def test_bad_input_is_named():
    cell, params, h = linear()
    learner = functional.online(cell)
    make = functools.partial(verify.Meter, learner, mean_square)
    for name, value in (('memory', 0), ('memory', True), ('directions', 0), ('keep', 2)):
        refused(OptionError, f'{name} is {value}', make, **{name: value})
    refused(OptionError, 'reduction', make, reduction='max')
    refused(OptionError, 'loss_fn', verify.Meter, learner, 3)
    refused(OptionError, 'learner is 3', verify.Meter, 3, mean_square)
    meter, x, y = make(), jnp.ones((2, 2)), jnp.zeros((2, 3))
    now, other = meter.init(params, h), ({'W': jnp.ones((2, 4))}, jnp.zeros((2, 4)))
    refused(StructureError, 'another learner', meter.step, now, *other, x, y, params)
    wrong = {'W': jnp.ones((3, 2))}
    refused(StructureError, 'grads have the shapes', meter.step, now, params, h, x, y, wrong)
    other = {'W': jnp.ones(2), 'b': jnp.ones(2)}
    refused(StructureError, 'another learner', meter.reading, now, other)
    wrong = verify.Meter(learner, lambda h, y: h > 0)
    args = wrong.init(params, h), params, h, x, y, params
    refused(StepFunctionError, 'one real scalar', wrong.step, *args)
    short, (xs, ys) = make(memory=3), (jnp.stack([a, a]) for a in (x, y))
    args = short.init(params, h), params, h, xs, ys, params
    refused(OptionError, 'give 4 at least', short.update, *args)


# -- compare_rules ---------------------------------------------------------------------------------


def compared(**options):
    case = models.case('gru')
    learner = meter_of(case).learner
    learner.init(case.params, case.carry, case.xs[0])
    return case, verify.compare_rules(
        learner, case.xs, case.ys, case.loss, params=case.params, carry=dict(case.carry), **options
    )


def test_compare_rules_reads_the_cosines_of_bptt():
    some = [rules.d_rtrl(), rules.snap(2)]
    case, found = compared(rules=some, directions=512, bound=0.999)
    true = oracles.bptt(case)
    assert found.cheapest.startswith('snap') and found.rows[0].exact
    for row in found.rows:
        rule = next(r for r in some if str(r) == row.rule)
        learner = meter_of(case, rule).learner
        state = learner.init(case.params, case.carry, case.xs[0])
        gradient = jax.jit(learner.sequence_grad(case.loss))
        grads = gradient(case.params, state, case.xs, case.ys).grads
        assert abs(row.cosine.value - cosine_of(true, grads)) < max(1e-6, 4 * row.cosine.error)
        assert row.trace_bytes == learner.report.memory
    assert '*' in str(found) and found.as_dict()['cheapest'] == found.cheapest


@pytest.mark.nightly
def test_compare_rules_by_default_and_in_pieces():
    _, found = compared(memory=2, directions=32)
    assert len(found.rows) + len(found.left_out) == 8
    values = [row.cosine.value for row in found.rows]
    assert values == sorted(values, reverse=True)
    assert found.rows[0].reading.samples == 3 * 32


def test_compare_rules_refuses():
    refused(OptionError, 'memory', compared, memory=0)
    refused(OptionError, 'has 6', compared, memory=9)
    refused(OptionError, '20', compared, directions=2)
    refused(OptionError, "rules is 'd_rtrl'; give a list", compared, rules='d_rtrl')
    refused(OptionError, 'give a list of rules', compared, rules=rules.d_rtrl())
    args = 3, jnp.ones(2), jnp.ones(2), mean_square
    refused(OptionError, 'compiled with any rule', verify.compare_rules, *args)
