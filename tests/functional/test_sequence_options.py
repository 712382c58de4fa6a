"""Calls over a sequence: a trace that is dropped, no rule, several seeds in one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, rules
from braintrace.errors import OptionError
from tests.compare import assert_close
from tests.precision import float64 as float64

B, I, N, T, BEFORE = 2, 3, 4, 6, 2  # noqa: E741
D_RTRL, PENDING, ES = rules.d_rtrl(), rules.d_rtrl(write_every=3), rules.es_d_rtrl(0.7)
OPTIMIZER = optax.adam(0.1)


def cell(p, h, x):
    h = 0.5 * h + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), p['w']))
    return h @ p['out'], h


def diagonal(p, h, x):
    """No unit reads another one, so D-RTRL is backpropagation through time."""
    h = jnp.sin(h) + jnp.tanh(braintrace.matmul(x, p['w'][:I]))
    return h @ p['out'], h


def loss(out, target):
    return ((out - target) ** 2).sum()


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape))


def params():
    return {'w': drawn(I + N, N), 'out': drawn(N, 2)}


def data():
    return drawn(BEFORE + T, B, I), drawn(BEFORE + T, B, 2)


def started(of, rule):
    learner = functional.online(of, rule)
    return learner, learner.init(params(), drawn(B, N), data()[0][0])


def through_time(of, of_old_state=lambda h: h):
    """The gradient of the sequence's losses by reverse mode, with a function around old states."""

    def total(p):
        h, losses = drawn(B, N), 0
        for k, (x, y) in enumerate(zip(*data(), strict=True)):
            out, h = of(p, of_old_state(h), x)
            losses += loss(out, y) * (k >= BEFORE)
        return losses

    return jax.jit(jax.grad(total))(params())


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('rule, window', [(PENDING, None), (D_RTRL, 4), (ES, None)], ids=str)
def test_a_dropped_trace_has_been_read_and_counts_as_empty(rule, window):
    learner, start = started(diagonal, rule)
    calls = [learner.sequence_grad(loss, window, 'sum', keep_trace=k) for k in (True, False)]
    given = [a[BEFORE:] for a in data()]
    run = jax.jit(lambda state: [call(params(), state, *given) for call in calls])
    step = jax.jit(lambda state, x: learner.step(params(), state, x)[1])
    kept, dropped = run(functools.reduce(step, data()[0][:BEFORE], start))
    assert_close(dropped[0], kept[0] if rule is ES else through_time(diagonal))
    assert_close((dropped.state.carry, dropped.losses), (kept.state.carry, kept.losses))
    assert dropped.state.t.tolist() == [0] * B
    again, fresh = run(dropped.state), run(start.replace(carry=dropped.state.carry))
    for (grads, losses, *_), want in zip(again, fresh, strict=True):
        assert_close((grads, losses), (want[0], want.losses))


def test_without_a_rule_a_gradient_is_that_of_its_step_alone():
    learner, start = started(cell, None)
    call = jax.jit(learner.sequence_grad(loss, 4, 'sum'))
    grads, _, _, end = call(params(), start, *data(), mask=jnp.arange(BEFORE + T) >= BEFORE)
    assert_close(grads, through_time(cell, jax.lax.stop_gradient), 1e-12)
    assert end.trace == {} and end.t.tolist() == [BEFORE + T] * B


@pytest.mark.slow
def test_without_a_rule_updates_and_resets_are_those_of_single_steps():
    learner, start = started(cell, None)
    flags, fresh, (xs, ys) = np.arange(BEFORE + T) == 3, jnp.ones((B, N)), data()
    run = jax.jit(learner.sequence_update(loss, OPTIMIZER, update_every=2))
    got, _, _, end, *_ = run(
        params(), OPTIMIZER.init(params()), start, xs, ys, reset=(jnp.asarray(flags), fresh)
    )
    want, opt_state, h = params(), OPTIMIZER.init(params()), start.carry

    @jax.jit
    def grad(p, olds, x, y):
        return jax.grad(lambda p: sum(loss(cell(p, *at)[0], y) for *at, y in zip(olds, x, y)) / 2)(
            p
        )

    for k in range(0, BEFORE + T, 2):
        olds = []
        for i in (k, k + 1):
            olds.append(fresh if flags[i] else h)
            h = cell(want, olds[-1], xs[i])[1]
        updates, opt_state = OPTIMIZER.update(
            grad(want, olds, xs[k : k + 2], ys[k : k + 2]), opt_state
        )
        want = optax.apply_updates(want, updates)
    assert_close((got, end.carry), (want, h), 1e-12)


@pytest.mark.tier(quick=0, one_in=2)
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


@pytest.mark.parametrize(
    'options, words',
    [
        ({'keep_trace': 'drop'}, "^keep_trace is 'drop'; choose True or False.$"),
        ({'keep_trace': None}, 'keep_trace is None'),
    ],
    ids=str,
)
def test_what_is_no_choice_is_refused_with_the_choices(options, words):
    with pytest.raises(OptionError, match=words):
        functional.online(cell, D_RTRL).sequence_grad(loss, **options)
