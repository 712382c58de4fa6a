"""Several learners for one set of parameters: ways to write a cell, acting and learning, a stream
in pieces; a trace that is dropped, no rule, several seeds in one program.
"""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional
from tests import oracles
from tests.compare import added, assert_close
from tests.late import LATE
from tests.precision import float64 as float64

from .plain import D_RTRL, ES, B, N, T, both_rules, carry, cell, data, loss, params, started


def test_a_learner_without_a_rule_acts_on_the_carry_of_one_that_learns():
    """One takes a step to act, the other to learn, in turns."""
    (xs, ys), p = data(), params()
    learner, state = started()
    actor, acting = started(rule=None)
    assert acting.trace == {} and jax.tree.structure(acting.carry) == jax.tree.structure(
        state.carry
    )
    grad, act = jax.jit(learner.grad(loss)), jax.jit(actor.step)
    for x, y in zip(xs, ys, strict=True):
        _, _, out, new = grad(p, state, x, y)
        shown, acted = act(p, acting.replace(carry=state.carry), x)
        assert_close((shown, acted.carry), (out, new.carry))
        assert_close((shown, acted.carry), cell(p, state.carry, x))
        state = new
    assert state.t.tolist() == [len(xs)] * 2


PIECES = slice(0, 2), slice(2, 4)


@pytest.mark.tier(quick=1)
@both_rules
def test_a_sequence_in_pieces_is_the_sequence(rule):
    """Each piece goes on from the state that the last one returned."""
    (xs, ys), p = (a[:4] for a in data()), params()
    learner, start = started(rule=rule)
    run = jax.jit(learner.sequence_grad(loss, reduction='sum'))
    want, state, found = run(p, start, xs, ys), start, []
    for piece in PIECES:
        grads, losses, _, state = run(p, state, xs[piece], ys[piece])
        found.append((grads, losses.sum()))
    assert_close(added(found), (want.grads, want.losses.sum()), 1e-11)
    assert_close((state.carry, state.t), (want.state.carry, want.state.t))


@pytest.mark.slow
def test_updates_in_pieces_are_the_updates_of_the_sequence():
    (xs, ys), p = (a[:4] for a in data()), params()
    learner, start = started()
    optimizer = optax.adam(1e-2)
    train = jax.jit(learner.sequence_update(loss, optimizer))
    want = train(p, optimizer.init(p), start, xs, ys)
    opt_state, state = optimizer.init(p), start
    for piece in PIECES:
        p, _, _, state, opt_state, *_ = train(p, opt_state, state, xs[piece], ys[piece])
    assert_close((p, opt_state, state.carry), (want[0], want.opt_state, want.state.carry), 1e-11)


# -- a trace that is dropped, no rule, several seeds ----------------------------------------------

BEFORE = 2
PENDING, OPTIMIZER = LATE, optax.adam(0.1)


def diagonal(p, h, x):
    """No unit reads another one, so D-RTRL is backpropagation through time."""
    h = jnp.sin(h) + jnp.tanh(braintrace.matmul(x, p['w'][:3]))
    return h @ p['out'], h


def through_time(of, of_old_state=lambda h: h):
    """The gradient of the sequence's losses by reverse mode, with a function around old states."""
    cell = lambda p, h, x: of(p, of_old_state(h), x)
    return oracles.by_time(cell, params(), carry(), *data(), loss, np.arange(T) >= BEFORE)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('rule, window', [(PENDING, None), (D_RTRL, 2), (ES, None)], ids=str)
def test_a_dropped_trace_has_been_read_and_counts_as_empty(rule, window):
    learner, start = started(diagonal, rule)
    calls = [learner.sequence_grad(loss, window, 'sum', keep_trace=k) for k in (True, False)]
    given = [a[BEFORE:] for a in data()]
    run = jax.jit(lambda state: [call(params(), state, *given) for call in calls])
    step = jax.jit(lambda state, x: learner.step(params(), state, x)[1])
    kept, dropped = run(reduce(step, data()[0][:BEFORE], start))
    assert_close(dropped[0], kept[0] if rule is ES else through_time(diagonal))
    assert_close((dropped.state.carry, dropped.losses), (kept.state.carry, kept.losses))
    assert dropped.state.t.tolist() == [0] * B
    again, fresh = run(dropped.state), run(start.replace(carry=dropped.state.carry))
    for (grads, losses, *_), want in zip(again, fresh, strict=True):
        assert_close((grads, losses), (want[0], want.losses))


def test_without_a_rule_a_gradient_is_that_of_its_step_alone():
    learner, start = started(cell, None)
    call = jax.jit(learner.sequence_grad(loss, 2, 'sum'))
    grads, _, _, end = call(params(), start, *data(), mask=jnp.arange(T) >= BEFORE)
    assert_close(grads, through_time(cell, jax.lax.stop_gradient), 1e-12)
    assert end.trace == {} and end.t.tolist() == [T] * B


@pytest.mark.slow
def test_without_a_rule_updates_and_resets_are_those_of_single_steps():
    learner, start = started(cell, None)
    (xs, ys), flags, fresh = (a[:4] for a in data()), jnp.arange(4) == 3, jnp.ones((B, N))
    run, p, state = (
        jax.jit(learner.sequence_update(loss, OPTIMIZER, update_every=2)),
        params(),
        start,
    )
    got = run(p, OPTIMIZER.init(p), start, xs, ys, reset=(flags, fresh))
    grad, opt_state = jax.jit(learner.grad(loss)), OPTIMIZER.init(p)
    for k in (0, 2):
        found = []
        for i in (k, k + 1):
            of_step = grad(p, functional.reset(state, flags[i], fresh), xs[i], ys[i])
            found, state = [*found, of_step.grads], of_step.state
        mean = jax.tree.map(lambda g: g / 2, added(found))
        updates, opt_state = OPTIMIZER.update(mean, opt_state)
        p = optax.apply_updates(p, updates)
    assert_close((got.params, got.state.carry), (p, state.carry), 1e-12)


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('rule', [D_RTRL, PENDING, None, ES], ids=str)
def test_several_seeds_in_one_program_are_each_seed_by_itself(rule):
    """The last seed has a past, the others have none."""
    learner, new = started(cell, rule)
    train = learner.sequence_update(loss, OPTIMIZER, update_every=2)
    learn, at_once = jax.jit(train), jax.jit(jax.vmap(train, (0, 0, 0, None, None)))
    weights = [jax.tree.map(lambda p, k=k: (1 + k / 4) * p, params()) for k in range(3)]
    past = learn(weights[0], OPTIMIZER.init(weights[0]), new, *data()).state
    each = list(zip(weights, map(OPTIMIZER.init, weights), [new, new, past], strict=True))
    got = at_once(*jax.tree.map(lambda *several: jnp.stack(several), *each), *data())
    for k, given in enumerate(each):
        assert_close(jax.tree.map(lambda a, k=k: a[k], got), learn(*given, *data()), 1e-10)
