"""``signs`` and ``uoro``: their mean over many seeds against the rules that they estimate, keys,
and batches whose samples meet. ``test_rules.py`` compares them with their formulas.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional
from braintrace.errors import NotSupportedError
from braintrace.rules import d_rtrl, signs, uoro
from tests import models, oracles
from tests.compare import assert_drawn_close, errors
from tests.gradients.harness import over_sequence, quick, start
from tests.tiers import nightly, slow

pytestmark = pytest.mark.drawn


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


def test_units_are_no_samples_where_there_are_as_many():
    """Else each unit would have the estimate of one sample."""

    def cell(p, h, x):
        h = braintrace.element_wise(p['decay'], jnp.tanh) * h + braintrace.matmul(x, p['w'])
        return h, h

    for units in (2, 3):  # of a batch of 2
        params = {'decay': jnp.ones(units), 'w': jnp.ones((4, units))}
        state = functional.online(cell, uoro()).init(params, jnp.ones((2, units)), jnp.ones((2, 4)))
        assert state.trace['decay']['all']['weight'].shape == (2, units)


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


ESTIMATES = (signs(), signs('all'), uoro(), uoro('batch'))


@pytest.mark.parametrize(
    'name, rule',
    [
        ('leaky', signs()),
        *(pytest.param('leaky', rule, marks=slow) for rule in (signs('all'), uoro())),
        pytest.param('leaky', uoro('batch'), marks=nightly),
        *(
            pytest.param(name, rule, marks=nightly)
            for name in ('gru', 'learned_decay', 'spiking_two', 'sparse')
            for rule in ESTIMATES
        ),
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
    want = oracles.by_time(cell, params, carry, xs, ys, models.squared)

    def one(key):
        trace = {**state.trace, '(key)': key}
        return run(params, state.replace(trace=trace), xs, ys)[0]['w'].ravel()

    found = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), 2048)))
    want = np.asarray(want['w']).ravel()
    z, number = distance(found, want)
    bound = 1 + 4 / np.sqrt(2 * number)
    assert z < bound < distance(found, 1.2 * want)[0]
