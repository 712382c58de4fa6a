"""A trace that is written one step late: precision, resets, maps, a look at it."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional
from braintrace._rules import layout as k
from tests.compare import assert_close
from tests.late import LATE
from tests.tiers import in_turn, none

from .networks import BATCH, UNITS, by_steps, compiled, data, loss_of

RNG = np.random.default_rng(5)
LANES, STEPS = 3, 5


def draw(*shape, dtype=jnp.float64):
    return jnp.asarray(RNG.normal(size=shape), dtype)


def loss(out, _):
    return jnp.sum(out**3).astype(jnp.float64)


def steps(cell, params, carry, xs, rule, resets=None, **options):
    """The gradient of each single step, some lanes reset before some of them."""
    learner = functional.online(cell, rule, **options)
    state, found = learner.init(params, carry, xs[0]), []
    grad = jax.jit(learner.grad(loss))
    for t, x in enumerate(xs):
        if resets is not None and t in resets:
            state = functional.reset(state, jnp.array(resets[t]), carry)
        grads, _, _, state = grad(params, state, x, 0.0)
        found.append(grads)
    return found


def both(*args, tolerance=1e-12, **options):
    """Written late as at once."""
    want, got = (steps(*args, rule, **options) for rule in (braintrace.rules.d_rtrl(), LATE))
    assert_close(dict(enumerate(got)), dict(enumerate(want)), tolerance)
    return got


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(
    ('weights', 'states'),
    [
        ('bfloat16', 'float32'),
        ('float16', 'float32'),
        ('float32', 'float64'),
        ('float64', 'float32'),
    ],
)
def test_weights_and_states_of_different_precision(weights, states):
    def cell(w, h, x):
        h = (0.9 * h + jnp.tanh(braintrace.matmul(h.astype(weights), w).astype(states))).astype(
            states
        ) + x
        return h, h

    both(
        cell,
        draw(4, 4, dtype=weights) / 2,
        jnp.zeros((LANES, 4), states),
        draw(STEPS, LANES, 4, dtype=states),
        tolerance=8 * float(max(jnp.finfo(weights).eps, jnp.finfo(states).eps)),
    )


def test_states_of_different_precision_in_one_group():
    def cell(w, carry, x):
        h, a = carry
        h = (0.8 * h - 0.1 * a + braintrace.matmul(x, w)).astype(jnp.float32)
        a = 0.9 * a + jnp.tanh(h).astype(jnp.float64)
        return a, (h, a)

    both(
        cell,
        draw(2, 4),
        (jnp.zeros((LANES, 4), jnp.float32), jnp.zeros((LANES, 4))),
        draw(STEPS, LANES, 2),
        tolerance=1e-6,
    )


def looped(w, h, x):
    h = jax.lax.scan(lambda h, xi: (jnp.tanh(braintrace.matmul(xi, w) + 0.5 * h), None), h, x)[0]
    return h, h


def unbatched(p, h, x):
    """An op whose input has no batch axis, beside one with it; inputs as many as lanes."""
    h = jnp.tanh(
        0.8 * h
        + braintrace.matmul(x[0, :1].repeat(LANES) + jnp.arange(LANES), p['w'])
        + braintrace.matmul(x, p['v'])
    )
    return h, h


RESETS = {1: [True, False, False], 3: [False, True, True]}


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('length', [2, LANES])
def test_a_reset_of_a_lane_does_not_take_the_turns_of_a_loop_for_lanes(length):
    """Neither in pending steps nor in ES_D_RTRL's factors, whose rows start with the turns."""
    w, h, xs = draw(2, 4), draw(LANES, 4), draw(STEPS, length, LANES, 2)
    both(looped, w, h, xs, resets=RESETS, policy=braintrace.Policy(unroll=1))
    rule, options = braintrace.rules.es_d_rtrl(0.7), {'policy': braintrace.Policy(unroll=1)}
    got = steps(looped, w, h, xs, rule, resets=RESETS, **options)
    for lane in range(LANES):
        # lanes do not meet: each alone, with its own resets, adds up to the whole
        mine = {t: [flags[lane]] for t, flags in RESETS.items()}
        alone = steps(
            looped, w, h[lane : lane + 1], xs[:, :, lane : lane + 1], rule, mine, **options
        )
        got = [g - mine_alone for g, mine_alone in zip(got, alone, strict=True)]
    assert max(float(abs(g).max()) for g in got) < 1e-12


def test_a_reset_of_a_lane_does_not_take_an_input_for_lanes():
    params = {'w': draw(LANES, 4), 'v': draw(LANES, 4)}
    both(unbatched, params, draw(LANES, 4), draw(STEPS, LANES, LANES), resets=RESETS)


@in_turn(none, rule=[braintrace.rules.d_rtrl(), LATE], keep=[True, False])
def test_a_mapped_learner_takes_sequences_and_shows_its_trace_with_its_lanes(rule, keep, capfd):
    """One model, states of each of two lanes; nothing of a progress is shown inside a map."""
    (xs, ys), learner = data(), compiled(rule)
    brainstate.nn.Map(learner, init_map_size=2).init_all_states(batch_size=BATCH)
    kept = lambda path, state: isinstance(state, brainstate.HiddenState) or state is learner.etrace
    shown = lambda of: of.get_etrace_of(next(iter(of.param_states)))

    def run(x, y, learner=learner, progress=True):
        options = {'step_fn': loss_of(learner), 'keep_trace': keep, 'progress': progress}
        return learner.etrace_grad(x, y, **options).grads

    got = brainstate.transform.vmap2(run, state_in_axes={0: kept}, state_out_axes={0: kept})(
        jnp.stack([xs, -xs]), jnp.stack([ys, ys])
    )
    for lane, sign in enumerate((1, -1)):
        alone = compiled()
        want = run(sign * xs, ys, alone, False), shown(alone)
        found = got, shown(learner)
        assert_close(jax.tree.map(lambda a, lane=lane: a[lane], found), want)
    assert learner.etrace.value['t'].tolist() == [[len(xs) if keep else 0] * BATCH] * 2


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_trace_is_shown_in_the_dtype_that_was_asked_for(dtype):
    xs, ys = data()
    learner = compiled(trace_dtype=dtype)
    by_steps(learner, xs[:3], ys[:3])
    shown = jax.tree.leaves(learner.get_etrace_of(next(iter(learner.param_states))))
    assert {e.dtype for e in shown} == {jnp.dtype(dtype)} and {e.shape[-2] for e in shown} <= {
        UNITS
    }
    assert any(e.any() for e in shown)


def test_numbers_are_stored_as_bfloat16_rounds_them():
    plain, odd = [0.0, -0.0, 1.0, 65504.1, 1 + 2**-8, 1 + 3 * 2**-8], [np.inf, -np.inf, np.nan]
    x = jnp.asarray([*plain, *odd, -1e-40, 3e38, 3.4e38], jnp.float32)
    bits = k.stored(x, k.stored_dtype(jnp.bfloat16))
    np.testing.assert_array_equal(
        k.read(bits, jnp.float32), x.astype(jnp.bfloat16).astype(jnp.float32)
    )
    np.testing.assert_array_equal(jnp.signbit(k.read(bits).astype(jnp.float32)), jnp.signbit(x))
    assert k.read(bits, jnp.float32).dtype == jnp.float32 and k.read(bits).dtype == jnp.bfloat16
