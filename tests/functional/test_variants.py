"""Several learners for one set of parameters: ways to write a cell, acting and learning, a stream
in pieces.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import braintrace
from braintrace import functional
from tests.compare import assert_close
from tests.precision import float64 as float64

from .plain import D_RTRL, both_rules, carry, cell, data, loss, params, started


def inner(p, x):
    def step(h, _):
        return 0.9 * h + 0.1 * jnp.tanh(braintrace.matmul(x, p['w'][:3], p['b'])), None

    return step


def unrolled(p, h, x):
    for _ in range(10):
        h, _ = inner(p, x)(h, None)
    return h @ p['out'], h


def scanned(p, h, x):
    h, _ = jax.lax.scan(inner(p, x), h, None, length=10)
    return h @ p['out'], h


@pytest.mark.slow
def test_an_unrolled_and_a_scanned_cell_share_parameters_and_gradients():
    runs = []
    for of in (unrolled, scanned):
        learner, state = started(of)
        runs.append(jax.jit(learner.sequence_grad(loss))(params(), state, *data())[0])
    assert_close(*runs)


def test_a_learner_without_a_rule_acts_on_the_carry_of_one_that_learns():
    """One takes a step to act, the other to learn, in turns."""
    (xs, ys), p = data(), params()
    learner, state = started()
    actor, acting = started(rule=None)
    assert acting.trace == {} and jax.tree.structure(acting.carry) == jax.tree.structure(
        state.carry
    )
    for x, y in zip(xs, ys, strict=True):
        _, _, out, new = learner.grad(loss)(p, state, x, y)
        shown, acted = actor.step(p, acting.replace(carry=state.carry), x)
        assert_close((shown, acted.carry), (out, new.carry))
        assert_close((shown, acted.carry), cell(p, state.carry, x))
        state = new
    assert state.t.tolist() == [len(xs)] * 2


@pytest.mark.tier(quick=1)
@both_rules
def test_a_sequence_in_pieces_is_the_sequence(rule):
    """Each piece goes on from the state that the last one returned."""
    (xs, ys), p = (a[:4] for a in data()), params()
    learner, start = started(rule=rule)
    run = jax.jit(learner.sequence_grad(loss, reduction='sum'))
    want, losses, _, end = run(p, start, xs, ys)
    total, state, each = jax.tree.map(jnp.zeros_like, p), start, []
    for k in (0, 2):
        grads, some, _, state = run(p, state, xs[k : k + 2], ys[k : k + 2])
        total, each = jax.tree.map(jnp.add, total, grads), [*each, some]
    assert_close((total, jnp.concatenate(each)), (want, losses), 1e-11)
    assert_close((state.carry, state.t), (end.carry, end.t))


@pytest.mark.slow
def test_updates_in_pieces_are_the_updates_of_the_sequence():
    (xs, ys), p = (a[:4] for a in data()), params()
    learner, start = started()
    optimizer = optax.adam(1e-2)
    train = jax.jit(learner.sequence_update(loss, optimizer))
    want = train(p, optimizer.init(p), start, xs, ys)
    opt_state, state = optimizer.init(p), start
    for piece in (slice(0, 2), slice(2, 4)):
        p, _, _, state, opt_state, *_ = train(p, opt_state, state, xs[piece], ys[piece])
    assert_close((p, opt_state, state.carry), (want[0], want.opt_state, want.state.carry), 1e-11)


def test_a_variant_is_made_anew_and_leaves_the_first_as_it_was():
    """The factory is ``functional.online``; the fields of a learner do not change."""
    learner, state = started()
    (xs, ys), p = data(), params()
    want = learner.grad(loss)(p, state, xs[0], ys[0])
    frozen = functional.online(cell, D_RTRL, trainable=lambda path, _: path != ('w',))
    other = frozen.init(p, carry(), xs[0])
    assert not frozen.grad(loss)(p, other, xs[0], ys[0]).grads['w'].any()
    assert_close(learner.grad(loss)(p, state, xs[0], ys[0]), want, 0)


def test_a_jitted_function_keeps_what_it_closed_over():
    """The sharp edge of docs/howto/sharp_bits.md: it is the program of the first call."""
    (xs, _), chosen = data(), {'scale': 1.0}

    def scaled(p, h, x):
        return cell(p, h, chosen['scale'] * x)

    learner, state = started(scaled)
    before = learner.step(params(), state, xs[0])[0]
    chosen['scale'] = 2.0
    assert_close(learner.step(params(), state, xs[0])[0], before, 0)
    assert_close(jax.jit(learner.step)(params(), state, xs[0])[0], before, 0)
    anew, state = started(scaled)
    assert_close(anew.step(params(), state, xs[0])[0], cell(params(), carry(), 2 * xs[0])[0])
