"""Single samples start again, wherever the batch stands and whatever samples read of each other."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import braintrace
from braintrace import functional, rules
from braintrace.errors import OptionError, StructureError
from tests.compare import assert_close, assert_drawn_close
from tests.gradients.harness import quick
from tests.gradients.test_random_programs import check_or_name_the_smallest, examples
from tests.models import random_batches
from tests.models.random_batches import B, Cell, N, build, by_reverse_mode, data, loss
from tests.models.random_programs import seeds


def start(cell, rule):
    step, params, h0, _ = build(cell)
    learner = functional.online(step, rule)
    return learner, params, h0, learner.init(params, h0, data(cell)[0][0])


def by_windows(cell, rule, window=2):
    (learner, params, h0, state), (xs, ys, flags) = start(cell, rule), data(cell)
    gradient = quick(learner.sequence_grad(loss, reduction='sum', window=window))
    return gradient(params, state, xs, ys, reset=(flags, h0)).grads


def by_single_steps(cell, rule):
    (learner, params, h0, state), (xs, ys, flags) = start(cell, rule), data(cell)
    gradient, restart, total = quick(learner.grad(loss)), quick(functional.reset), None
    for x, y, again in zip(xs, ys, flags, strict=True):
        grads, _, _, state = gradient(params, restart(state, again, h0), x, y)
        total = grads if total is None else {n: total[n] + g for n, g in grads.items()}
    return total


# each op, mix, layout and decay at least once
CELLS = [
    Cell('matmul', 'roll', 'first', 'constant', 0),
    Cell('loop', 'own', 'last', 'learned', 1),
    Cell('flat', 'own', 'second', 'flat', 2),
    Cell('patches', 'first', 'slots', 'flat', 3),
    Cell('map', 'shared', 'delay', 'constant', 4),
    Cell('heads', 'reversed', 'first', 'flat', 5),
    Cell('gain', 'own', 'slots', 'learned', 6),
    Cell('vmap', 'shared', 'last', 'constant', 7),
    Cell('einsum', 'own', 'first', 'constant', 8),
]


def check(cell):
    assert_drawn_close(by_windows(cell, rules.d_rtrl()), by_reverse_mode(cell))


@pytest.mark.slow
@pytest.mark.parametrize('cell', CELLS, ids=lambda c: f'{c.op}-{c.mix}-{c.layout}-{c.decay}')
def test_a_sample_that_starts_anew_leaves_no_trace(cell):
    way = by_single_steps if cell.seed % 2 else by_windows
    assert_close(way(cell, rules.d_rtrl()), by_reverse_mode(cell), 1e-10)


# of two factors each sample has its own where an op's rows, or all of an op, belong to one
APART = [
    (Cell('loop', 'own', 'last', 'learned', 8), rules.es_d_rtrl(0.7)),
    (Cell('matmul', 'reversed', 'delay', 'flat', 9), rules.signs()),
]


@pytest.mark.slow
@pytest.mark.parametrize(('cell', 'rule'), APART, ids=['es_d_rtrl', 'signs'])
def test_windows_and_single_steps_agree_where_a_sample_starts_anew(cell, rule):
    assert_close(by_windows(cell, rule, 3), by_single_steps(cell, rule), 1e-10)


def test_a_factor_that_samples_share_is_not_reset_in_one_of_them():
    cell = Cell('matmul', 'roll', 'first', 'constant')
    words = r'the trace of w \(etp_mm, .*random_batches.py:\d+.*ES_D_RTRL.*rules.d_rtrl\(\)'
    for way in (by_windows, by_single_steps):
        with pytest.raises(StructureError, match=words):
            way(cell, rules.es_d_rtrl(0.7))


@dataclasses.dataclass(frozen=True, repr=False)
class Summed(rules.StepRule):
    """A trace that is a sum over samples."""

    name, approximation = 'SUMMED', 'samples share a trace'

    def start(self, pair):
        return {'e': jnp.zeros(pair.op.weight_avals['weight'].shape)}

    def step(self, pair, e, x, d, df):
        return {'e': 0.9 * e['e'] + x.T @ df[..., 0]}

    def read(self, pair, e, lam):
        return {'weight': e['e'] * lam.sum()}


def test_a_sum_over_samples_is_not_reset_in_one_of_them():
    cell = Cell('matmul', 'own', 'first', 'constant')
    with pytest.raises(StructureError, match='SUMMED is one for several samples'):
        by_windows(cell, Summed())


def test_numbers_of_a_trace_are_zero_where_a_sample_has_no_past():
    cell = Cell('flat', 'own', 'second', 'constant', 0)
    learner, params, h0, state = start(cell, rules.d_rtrl())
    xs, ys, _ = data(cell)
    step = quick(learner.step)
    for x in xs[:2]:
        _, state = step(params, state, x)
    again = functional.reset(state, jnp.array([False, True, False]), h0)
    seen = quick(learner.observed(loss))(params, again, xs[2], ys[2])[-1]
    entry = seen.before['flat']['carry']['weight'][0].reshape(2, B, N)
    assert (entry[:, 1] == 0).all() and (entry[:, ::2] != 0).all()


def reported(rule, batch):
    """The report of a step whose batch is as long as the weight."""
    learner = functional.online(lambda p, h, x: (h, 0.5 * h + braintrace.matmul(x, p)), rule)
    learner.init(jnp.ones((2, N)), jnp.zeros((batch, N)), jnp.ones((batch, 2)))
    return learner.report


def test_a_trace_like_the_weight_is_of_all_samples_however_many_these_are():
    rule = rules.uoro('batch')
    assert reported(rule, 2).at(7).memory == reported(rule, 7).memory


@pytest.mark.slow
@pytest.mark.parametrize(
    'rule, how',
    [
        (rules.d_rtrl(), lambda x, w: jnp.broadcast_to((x @ w)[:1], (len(x), N))),
        (rules.rtrl(), lambda x, w: jax.lax.map(lambda sample: sample @ w, x)),
        (rules.snap(2), lambda x, w: jnp.tanh(x @ w).T),
    ],
    ids=['the first sample drives all', 'an op for each sample', 'the batch stands second'],
)
def test_where_a_trace_grows_otherwise_with_the_batch_no_other_size_is_told(rule, how):
    cell = lambda w, h, x: (h, 0.5 * h + how(x, w))
    learner = functional.online(cell, rule, mark='auto')
    shape = jax.eval_shape(how, jnp.ones((3, 2)), jnp.ones((2, N))).shape
    learner.init(jnp.ones((2, N)), jnp.zeros(shape), jnp.ones((3, 2)))
    with pytest.raises(OptionError, match='is not known at batch size 5.*Compile it at that size'):
        learner.report.at(5)
    assert learner.report.memory_of_sample == 0


@pytest.mark.drawn
@pytest.mark.nightly
@examples(60)
@given(seed=seeds)
def test_many_random_batches(seed):
    check_or_name_the_smallest(random_batches.draw(seed), check, random_batches.simpler)
