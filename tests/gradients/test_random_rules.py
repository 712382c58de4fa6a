"""``signs`` and ``uoro`` against their formulas in NumPy, with the same signs drawn outside, and
their mean over many seeds against the rules that they estimate.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, verify
from braintrace.errors import NotSupportedError, OptionError
from braintrace.rules import d_rtrl, signs, uoro
from tests import models, oracles
from tests.compare import added, assert_drawn_close, at, errors
from tests.gradients import random_traces
from tests.gradients.harness import by_steps, other_carry, over_sequence, quick, start

pytestmark = pytest.mark.drawn
SEED = 3
MASK = np.array([1.0, 0.0, 0.5, 1.0, 2.0, 1.5])
FEW = ['leaky', 'gru', 'lstm_fused', 'spiking_two', 'conv1d', 'lora', 'sparse', 'vector']


def sigmoid_slope(w):
    return np.exp(-w) / (1 + np.exp(-w)) ** 2


SLOPES = {
    'learned_decay': {'decay': sigmoid_slope, 'gain': np.exp},
    'conv1d': {'decay': sigmoid_slope},
}
RULES = {
    'signs': (signs(seed=SEED), random_traces.signs),
    'uoro': (uoro(seed=SEED), random_traces.uoro),
    'uoro_batch': (uoro('batch', SEED), functools.partial(random_traces.uoro, pair='batch')),
    'signs_all': (signs('all', SEED), functools.partial(random_traces.signs, scope='all')),
}


def rows(names, quick=()):
    """Each model with each rule: in the gate with one of them in turn, so that each rule is there,
    at night with all; the pairs in ``quick`` are not slow.
    """
    table = []
    for i, name in enumerate(names):
        for k, rule in enumerate(RULES):
            late = (
                pytest.mark.slow
                if i == k % len(names) or (i >= len(RULES) and i % len(RULES) == k)
                else pytest.mark.nightly
            )
            table.append(pytest.param(name, rule, marks=[] if (name, rule) in quick else late))
    return pytest.mark.parametrize('name, rule', table)


@functools.cache
def formula(name, rule, resets=None):
    """The oracle of a row; ``resets``: whether some lanes start anew."""
    case = models.case(name)
    options = {'slopes': tuple(SLOPES.get(name, {}).items())} if rule[:5] != 'signs' else {}
    lanes = 1 if name == 'vector' else 2
    given = restarts(case) if resets else None
    return RULES[rule][1](case, SEED, resets=given, lanes=lanes, **options)


def restarts(case):
    flags = np.zeros((6, 2), bool)
    flags[[2, 4], 0] = flags[[1, 2], 1] = True
    return flags, other_carry(case)


@pytest.mark.tier(quick=1, one_in=4)
@rows(
    [*FEW, 'learned_decay'], quick=[('leaky', 'signs'), ('leaky', 'uoro'), ('leaky', 'signs_all')]
)
def test_a_window_gives_the_gradient_of_the_formula(name, rule):
    got = over_sequence(models.case(name), RULES[rule][0], 4)[0]
    assert_drawn_close(got, oracles.total(formula(name, rule).steps))


@pytest.mark.tier(quick=1)
@rows(['leaky', 'lstm_fused'])
def test_each_step_gives_the_gradient_of_the_formula(name, rule):
    for t, (_, _, grads) in enumerate(by_steps(models.case(name), RULES[rule][0])):
        assert_drawn_close(grads, at(formula(name, rule).steps, t))


@pytest.mark.slow
@rows(['gru', 'conv1d'])
def test_every_window_gives_the_same_numbers(name, rule):
    case = models.case(name)
    for window in (1, None):
        got = over_sequence(case, RULES[rule][0], window)[0]
        assert_drawn_close(got, oracles.total(formula(name, rule).steps))


@pytest.mark.tier(quick=1)
@rows(['leaky', 'learned_decay', 'spiking_two'], quick=[('leaky', 'uoro')])
def test_a_reset_of_some_lanes_empties_their_traces_and_the_key_goes_on(name, rule):
    case = models.case(name)
    got = over_sequence(case, RULES[rule][0], 4, reset=restarts(case))[0]
    assert_drawn_close(got, oracles.total(formula(name, rule, True).steps))


@pytest.mark.tier(quick=1)
@rows(['leaky', 'sparse'])
def test_a_mask_weighs_the_losses_and_nothing_else(name, rule):
    got = over_sequence(models.case(name), RULES[rule][0], 4, mask=MASK)[0]
    assert_drawn_close(got, oracles.total(formula(name, rule).steps, MASK))


@pytest.mark.slow
@rows(['leaky', 'lstm_fused'], quick=[('leaky', 'signs')])
def test_an_exact_window_meets_the_trace_at_its_border(name, rule):
    case = models.case(name)
    learner, state = start(case, RULES[rule][0])
    run = quick(learner.sequence_grad(case.loss, window=2, inside='exact', reduction='sum'))
    got = run(case.params, state, case.xs, case.ys)[0]
    assert_drawn_close(got, random_traces.at_borders(case, formula(name, rule), 2))


@pytest.mark.slow
@rows(['leaky'])
def test_a_later_call_continues_the_stream(name, rule):
    case = models.case(name)
    first, _, _, state = over_sequence(case, RULES[rule][0], 1, slice(0, 3))
    second, _, _, state = over_sequence(case, RULES[rule][0], None, slice(3, 6), state)
    assert_drawn_close(added([first, second]), oracles.total(formula(name, rule).steps))


@pytest.mark.slow
def test_a_dropped_trace_leaves_the_key_to_go_on():
    """Else every batch of a loop would have the same signs, and nothing would average out."""
    case = models.case('leaky')
    for rule in (signs(), uoro()):
        learner, state = start(case, rule)
        run = quick(learner.sequence_grad(case.loss, keep_trace=False))
        first, _, _, end = run(case.params, state, case.xs, case.ys)
        again = end.replace(carry=state.carry)
        second, *_ = run(case.params, again, case.xs, case.ys)
        assert errors(second, first)["['w']"] > 1e-3
        whole = functional.reset(end, jnp.array(True), state.carry)
        third, *_ = run(case.params, whole, case.xs, case.ys)
        assert_drawn_close(third, second)


# -- the mean over seeds ---------------------------------------------------------------------------


@functools.cache
def draws(name, rule, number, steps=8):
    """Gradients of many seeds, and what their mean should be, as flat arrays."""
    case = models.case(name, steps=steps)
    learner, state = start(case, rule)
    run = learner.sequence_grad(case.loss, reduction='sum', window=None)

    def one(key):
        trace = {**state.trace, '(key)': key}
        return run(case.params, state.replace(trace=trace), case.xs, case.ys)[0]

    keys = jax.random.split(jax.random.key(0), number)
    found = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=256))(keys)
    found = np.concatenate([np.asarray(g).reshape(number, -1) for g in jax.tree.leaves(found)], 1)
    if rule.credit == 'cut':
        want = over_sequence(case, d_rtrl(credit='cut'), None)[0]
    else:
        want = oracles.bptt(case)
    return found, oracles.flat(want)


def distance(found, want):
    """Root mean square of the distance of a mean from ``want`` along each direction in which the
    draws vary, in its standard errors, and the number of directions: entries of a gradient lie
    close together, so the errors of their own would say one thing many times.
    """
    moving = found.std(0) > 1e-9 * np.abs(want).max()
    scale = found.std(0)[moving]
    sizes, along = np.linalg.eigh(np.atleast_2d(np.corrcoef(found[:, moving], rowvar=False)))
    away = (found.mean(0) - want)[moving] / scale @ along
    free = sizes > 1e-6 * sizes.max()
    z = away[free] / (sizes[free] / len(found)) ** 0.5
    return np.sqrt((z**2).mean()), free.sum()


def error_of(found, want):
    return np.linalg.norm(found.mean(0) - want) / np.linalg.norm(want)


MARKS = {
    ('leaky', signs()): [],
    ('leaky', signs('all')): pytest.mark.slow,
    ('leaky', uoro()): pytest.mark.slow,
}


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(
    'name, rule',
    [
        pytest.param(name, rule, marks=MARKS.get((name, rule), pytest.mark.nightly))
        for name in ('leaky', 'gru', 'learned_decay', 'spiking_two', 'sparse')
        for rule in (signs(), signs('all'), uoro(), uoro('batch'))
    ],
    ids=str,
)
def test_the_mean_of_4096_seeds_has_no_bias_and_its_error_falls(name, rule):
    found, want = draws(name, rule, 4096)
    z, number = distance(found, want)
    margin = 4 / np.sqrt(2 * number)  # 4 deviations of such a root mean square
    assert 1 - margin < z < 1 + margin
    assert distance(found, 1.2 * want)[0] > 1 + margin
    few, more = (
        np.sqrt(np.mean([error_of(part, want) ** 2 for part in np.split(found, parts)]))
        for parts in (256, 16)
    )
    assert 2 < few / more < 8  # 4, within a factor of 2


# -- what it is a value of -------------------------------------------------------------------------


@pytest.mark.slow
def test_equal_seeds_draw_equal_signs_and_others_do_not():
    case = models.case('leaky')
    for make in (lambda seed: signs(seed=seed), lambda seed: uoro(seed=seed)):
        first, same, other = (over_sequence(case, make(s), 4)[0] for s in (SEED, SEED, SEED + 1))
        assert_drawn_close(first, same)
        assert errors(first, other)["['w']"] > 1e-3


@pytest.mark.slow
def test_the_first_step_is_exact():
    for rule in (signs(), uoro()):
        case = models.case('leaky', steps=1)
        assert_drawn_close(over_sequence(case, rule, None)[0], oracles.bptt(case))


@pytest.mark.parametrize(
    'make, found',
    [
        (lambda: signs('each'), "scope is 'each'"),
        (lambda: signs(seed=True), 'seed is True'),
        (lambda: uoro('lane'), "pair is 'lane'"),
        (lambda: uoro(seed=0.5), 'seed is 0.5'),
        (lambda: uoro(seed=2**32), r'seed is 4294967296; give an int from 0 to 2\*\*32 - 1'),
        (lambda: signs(seed=-1), 'seed is -1'),
    ],
)
def test_other_values_are_refused(make, found):
    with pytest.raises(OptionError, match=found):
        make()


def looked_up(params, h, x):
    h = 0.8 * h + jnp.tanh(braintrace.embedding(x, params['w']))
    return h, h


def multiplied(params, h, x):
    h = 0.8 * h + jnp.tanh(braintrace.matmul(jax.nn.one_hot(x, 5, dtype=float), params['w']))
    return h, h


@pytest.mark.tier(quick=1)
@pytest.mark.slow
@pytest.mark.parametrize('rule', [signs(), uoro()], ids=['signs', 'uoro'])
def test_a_lookup_is_a_product_with_ones(rule):
    rng = np.random.default_rng(0)
    params, h = {'w': rng.standard_normal((5, 3))}, np.zeros((2, 3))
    xs, ys = rng.integers(0, 5, (6, 2)), rng.standard_normal((6, 2, 3))
    found = []
    for cell in (looked_up, multiplied):
        learner = functional.online(cell, rule)
        run = quick(learner.sequence_grad(models.squared))
        found.append(run(params, learner.init(params, h, xs[0]), xs, ys)[0])
    assert_drawn_close(*found)


def shared(params, h, x):
    """All samples read one threshold, which they move."""
    v = 0.8 * h['v'] + braintrace.matmul(x, params['w'])
    return v - h['a'], {'v': v, 'a': 0.9 * h['a'] + 0.1 * v.mean(0)}


def crossed(params, h, x):
    """Every sample reads the mean of all."""
    h = 0.8 * h + jnp.tanh(braintrace.matmul(x, params['w']) - h.mean(0))
    return h, h


@jax.custom_jvp
def centred(h):
    return h - h.mean(0)


@centred.defjvp
def _centred_jvp(primals, tangents):
    return centred(*primals), tangents[0] - tangents[0].mean(0)


def hidden_inside(params, h, x):
    """Every sample reads the mean of all, within a function with a derivative of its own."""
    h = 0.8 * h + jnp.tanh(braintrace.matmul(x, params['w']) + centred(h))
    return h, h


def one_way(params, h, x):
    """Sample 1 reads sample 0."""
    h = 0.8 * h + jnp.tanh(braintrace.matmul(x, params['w']))
    return h, h.at[1].add(h[0])


@pytest.mark.parametrize('cell', [hidden_inside, one_way])
def test_lanes_that_meet_anywhere_in_a_step_are_seen(cell):
    start = {'w': np.zeros((4, 3))}, np.zeros((5, 3)), np.zeros((5, 4))
    with pytest.raises(NotSupportedError, match=r"read one another: .*pair='batch'"):
        jax.eval_shape(functional.online(cell, uoro()).init, *start)


@pytest.mark.tier(quick=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    'cell, carry',
    [(shared, {'v': np.zeros((2, 3)), 'a': np.zeros(3)}), (crossed, np.zeros((2, 3)))],
    ids=['shared', 'crossed'],
)
def test_samples_that_read_one_another_need_one_pair(cell, carry):
    rng = np.random.default_rng(0)
    params, xs, ys = (rng.standard_normal(s) for s in ((4, 3), (4, 2, 4), (4, 2, 3)))
    params = {'w': params}
    with pytest.raises(NotSupportedError, match="pair='batch'"):
        functional.online(cell, uoro()).init(params, carry, xs[0])
    learner = functional.online(cell, uoro('batch'))
    state = learner.init(params, carry, xs[0])
    run = learner.sequence_grad(models.squared, reduction='sum', window=None)
    want = verify.bptt_gradients(cell, params, carry, xs, ys, models.squared)

    def one(key):
        trace = {**state.trace, '(key)': key}
        return run(params, state.replace(trace=trace), xs, ys)[0]['w'].ravel()

    found = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 2048)))
    want = np.asarray(want['w']).ravel()
    z, number = distance(found, want)
    bound = 1 + 4 / np.sqrt(2 * number)
    assert z < bound < distance(found, 1.2 * want)[0]
