"""Gradients of ``sequence_update``, taken where the optimiser gets them, against the NumPy
recursions; and updates against a plain loop.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from tests import models, oracles
from tests.compare import assert_close, at
from tests.gradients.harness import MASK, other_carry, quick, start, step_program, updated_by_time
from tests.gradients.rows import CORE, is_core
from tests.late import LATE
from tests.tiers import first, in_turn, none

RULES = {
    'd_rtrl': (braintrace.rules.d_rtrl(), oracles.dense_recursion),
    'late': (LATE, oracles.dense_recursion),
    'es_d_rtrl': (
        braintrace.rules.es_d_rtrl(0.7),
        functools.partial(oracles.es_recursion, decay=0.7),
    ),
}
FEW = 'gru lstm_fused adaptive_lif learned_decay sparse lora conv1d spiking_three'.split()
FEW += ['stored_spike']


class Seen(NamedTuple):
    """The state of :func:`recorder`: gradients of each update, and their number."""

    grads: object
    number: jax.Array


def recorder(updates: int):
    """An optimiser that changes nothing and keeps what it gets."""

    def init(params):
        return Seen(
            jax.tree.map(lambda p: jnp.zeros((updates, *p.shape), p.dtype), params), jnp.int32(0)
        )

    def update(grads, state, params):
        kept = jax.tree.map(lambda kept, g: kept.at[state.number].set(g), state.grads, grads)
        return jax.tree.map(jnp.zeros_like, params), Seen(kept, state.number + 1)

    return optax.GradientTransformation(init, update)


def gradients(case, rule, every, reduction='sum', xs=None, **options):
    """Gradients of each update, and the state and losses after all."""
    learner, state = start(case, rule)
    optimizer = recorder(-(-len(case.xs) // every))
    run = quick(learner.sequence_update(case.loss, optimizer, every, reduction))
    given = case.params, optimizer.init(case.params), state, case.xs if xs is None else xs, case.ys
    params, losses, _, state, seen, *_ = run(*given, **options)
    assert_close(params, case.params)
    return jax.tree.map(np.asarray, seen.grads), state, losses


def grouped(steps, every, weights=None):
    """Per-step gradients, weighted and summed over the steps of each update."""
    weights = np.ones(6) if weights is None else weights

    def leaf(g):
        g = g * weights.reshape(-1, *(1,) * (g.ndim - 1))
        return np.stack([g[i : i + every].sum(0) for i in range(0, len(g), every)])

    return jax.tree.map(leaf, steps)


@pytest.mark.tier(quick=0)
@in_turn(is_core, name=sorted(CORE), rule=RULES)
def test_each_update_gets_the_gradient_of_its_step(name, rule):
    """Six steps: a trace that is written late is so once after four, two are left."""
    case, (rule, oracle) = models.case(name), RULES[rule]
    assert_close(gradients(case, rule, 1)[0], grouped(oracle(case), 1))


@pytest.mark.tier(quick=0)
@in_turn(first('gru'), name=['gru', 'sparse'], rule=RULES, every=[2, 4, 7])
def test_how_often_the_weights_change_changes_no_trace(name, rule, every):
    case, (rule, oracle) = models.case(name), RULES[rule]
    got, state, losses = gradients(case, rule, every)
    assert_close(got, grouped(oracle(case), every))
    _, stepped, wanted = gradients(case, rule, 1)
    assert_close(state.trace, stepped.trace)
    assert_close(state.carry, stepped.carry)
    np.testing.assert_allclose(losses, wanted, rtol=1e-12)


@pytest.mark.tier(quick=0)
@in_turn(first('gru'), name=FEW, rule=RULES, every=[1, 2])
def test_masks_and_resets_of_lanes(name, rule, every):
    case, (rule, oracle) = models.case(name), RULES[rule]
    carry0, flags = other_carry(case), np.zeros((len(case.xs), 2), bool)
    flags[[2, 5], 0] = flags[[1, 3], 1] = (
        True  # at the first and at the last step of an update, with steps pending
    )
    want = oracles.restarted(oracle, case, flags, carry0)
    got, _, _ = gradients(case, rule, every, reset=(flags, carry0), mask=MASK)
    assert_close(got, grouped(want, every, MASK))


@pytest.mark.slow
def test_the_mean_is_that_of_each_update():
    case, (rule, oracle) = models.case('gru'), RULES['d_rtrl']
    got, _, _ = gradients(case, rule, 4, reduction='mean', mask=MASK)
    weights = np.concatenate([MASK[:4] / MASK[:4].sum(), MASK[4:] / MASK[4:].sum()])
    assert_close(got, grouped(oracle(case), 4, weights))


ONCE = 'gru lora sparse learned_decay scan_two_layers conv1d lstm_fused vmap_weights'.split()
ONCE += 'tail_flip lru spiking_three'.split()
LOOPED = [(name, 1) for name in ONCE]
LOOPED += [(name, every) for name in ('gru', 'spiking_three') for every in (2, 4)]


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('name, every, rule', [(*row, rule) for row in LOOPED for rule in RULES])
def test_updates_are_those_of_a_plain_loop(name, rule, every):
    """Weights change under a trace that is not written: as gradients and updates by hand."""
    case, optimizer = models.case(name), optax.adam(0.05)
    learner, state = start(case, RULES[rule][0])
    train = quick(learner.sequence_update(case.loss, optimizer, every, 'sum'))
    got = train(case.params, optimizer.init(case.params), state, case.xs, case.ys)

    params, opt_state, losses = case.params, optimizer.init(case.params), []
    step, change = step_program(case, RULES[rule][0]), jax.jit(optimizer.update)
    for i in range(0, len(case.xs), every):
        total = jax.tree.map(jnp.zeros_like, params)
        for x, y in zip(case.xs[i : i + every], case.ys[i : i + every]):
            grads, loss, _, state = step(params, state, x, y)
            total, losses = jax.tree.map(jnp.add, total, grads), [*losses, loss]
        updates, opt_state = change(total, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_close(jax.tree.map(np.asarray, got[0]), jax.tree.map(np.asarray, params))
    assert_close(got.state.trace, state.trace)
    np.testing.assert_allclose(got.losses, np.stack(losses), rtol=1e-10)
    moved = [
        float(np.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(case.params))
    ]
    assert min(moved) > 1e-3


@in_turn(none, name=['leaky', 'gru', 'spiking_three'], rule=['d_rtrl', 'late'])
def test_what_a_reset_ends_need_not_be_a_number(name, rule):
    """A NaN input spoils its own step; after its lane's reset, no update and no trace."""
    case, (rule, oracle) = models.case(name), RULES[rule]
    flags = np.zeros((len(case.xs), 2), bool)
    flags[2, 0] = True
    want = grouped(oracles.restarted(oracle, case, flags, case.carry), 1)
    xs, reset = np.array(case.xs), (flags, case.carry)
    xs[1, 0] = np.nan
    got, state, _ = gradients(case, rule, 1, xs=xs, reset=reset)
    assert any(np.isnan(g[1]).any() for g in jax.tree.leaves(got))
    assert_close(at(got, slice(2, None)), at(want, slice(2, None)))
    learner, first = start(case, rule)
    whole = quick(learner.sequence_grad(case.loss, window=None))
    after = whole(case.params, first, xs, case.ys, reset=reset)[3]
    assert_close(after.trace, state.trace)


def test_an_op_without_x_that_feeds_a_state_which_reads_none():
    """What the second state owes to earlier steps is zero by structure, to the newest it is not."""

    def cell(p, carry, x):
        a, v = carry
        b = braintrace.element_wise(p['b'])
        a = 0.8 * a + jnp.tanh(v) + 0.5 * b
        return a @ p['out'], (a, b + x)

    rng, optimizer = np.random.default_rng(3), optax.sgd(0.002)
    params = {'b': rng.normal(size=4), 'out': rng.normal(size=(4, 2))}
    xs, ys = rng.normal(size=(9, 3, 4)), rng.normal(size=(9, 3, 2))
    loss, carry = lambda out, y: jnp.sum((out - y) ** 2), (np.ones((3, 4)), np.ones((3, 4)))
    now = updated_by_time(cell, params, carry, xs, ys, 0.002, loss)
    for rule in (braintrace.rules.d_rtrl(), LATE):
        learner = braintrace.functional.online(cell, rule)
        state = learner.init(params, carry, xs[0])
        update = quick(learner.sequence_update(loss, optimizer))
        assert_close(update(params, optimizer.init(params), state, xs, ys).params, now)
