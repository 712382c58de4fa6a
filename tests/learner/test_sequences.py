"""The contract of ``etrace_grad`` and ``etrace_evolve``, argument by argument."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from tests.compare import assert_close
from tests.tiers import first, in_turn

from .networks import BATCH, STEPS, UNITS, Net, by_steps, compiled, data, loss_of, squared

WINDOWS = [3, 1, 2, None]
SOME_WINDOWS = [3, *(pytest.param(w, marks=pytest.mark.slow) for w in WINDOWS[1:])]


def gradient(learner, xs, ys, **options):
    options = {'reduction': 'sum', **options}
    return learner.etrace_grad(xs, ys, step_fn=loss_of(learner), **options).grads


@pytest.mark.tier(quick=0, one_in=2)
@pytest.mark.parametrize('rule', ['D_RTRL', braintrace.rules.es_d_rtrl(0.8)])
def test_two_calls_continue_the_stream_of_one(rule):
    xs, ys = data()
    whole, parts = compiled(rule), compiled(rule)
    want = gradient(whole, xs, ys)
    got = jax.tree.map(
        jnp.add, gradient(parts, xs[:3], ys[:3], window=2), gradient(parts, xs[3:], ys[3:])
    )
    assert_close(got, want)
    np.testing.assert_allclose(parts.model.cell.h.value, whole.model.cell.h.value, rtol=1e-12)


@functools.cache
def without_options(rule):
    return gradient(compiled(rule), *data())


@pytest.mark.tier(quick=0, one_in=4)
@in_turn(first(3), window=WINDOWS, rule=['D_RTRL', braintrace.rules.es_d_rtrl(0.8)])
def test_drop_leaves_a_zero_trace_and_keeps_the_hidden_state(rule, window):
    xs, ys = data()
    dropped, fresh = compiled(rule), compiled(rule)
    assert_close(gradient(dropped, xs, ys, keep_trace=False, window=window), without_options(rule))
    assert (dropped.etrace.value['t'] == 0).all()
    for entry in dropped.get_etrace_of(('cell', 'Wh', 'weight')).values():
        assert all((slot == 0).all() for slot in entry.values())
    fresh.model.cell.h.value = dropped.model.cell.h.value
    assert_close(gradient(dropped, xs, ys), gradient(fresh, xs, ys))


def test_without_a_rule_gradients_are_those_of_single_steps_and_nothing_is_traced():
    learner, (xs, ys) = compiled(None), data()
    online, params, carry = learner.pure()

    def loss(params):
        h, total = carry, 0
        for x, y in zip(xs, ys, strict=True):
            out, h = online.cell(params, jax.lax.stop_gradient(h), x)
            total += squared(out, y)
        return total

    got = gradient(learner, xs, ys)
    assert_close(got, jax.jit(jax.grad(loss))(params), 1e-12)
    assert learner.etrace.value['trace'] == learner.get_etrace_of(('cell', 'Wh', 'weight')) == {}
    options = {'step_fn': loss_of(learner), 'optimizer': optax.sgd(0.01)}
    before, after = (learner.etrace_train(xs, ys, **options).losses for _ in range(2))
    assert after.mean() < before.mean() and 'no rule learner of Net' in repr(learner)
    with pytest.raises(braintrace.errors.OptionError, match='made with rule=None'):
        braintrace.verify.diagnose(learner, xs, ys, squared)


@pytest.mark.slow
def test_mean_divides_by_the_sum_of_the_mask():
    xs, ys = data()
    mask = jnp.array([1.0, 0.0, 2.0, 0.0, 0.0, 1.0, 1.0])
    total = gradient(compiled(), xs, ys, mask=mask, window=3)
    assert_close(
        gradient(compiled(), xs, ys, mask=mask, reduction='mean'),
        jax.tree.map(lambda g: g / 5, total),
    )
    zero = gradient(compiled(), xs, ys, mask=jnp.zeros(STEPS), reduction='mean')
    assert all((g == 0).all() for g in jax.tree.leaves(zero))


MASK = jnp.array([0.0, 1.0, 0.0, 0.5, 0.0, 0.0, 2.0])


@functools.cache
def weighted_steps():
    """The sum of the gradients of single calls with weighted losses, and the trace after them."""
    stepped, total = compiled(), None
    step = brainstate.transform.jit(
        lambda x, y, m: brainstate.transform.grad(
            lambda: m * squared(stepped(x), y), stepped.param_states
        )()
    )
    for row in zip(*data(), MASK):
        got = step(*row)
        total = got if total is None else jax.tree.map(jnp.add, total, got)
    return total, stepped.etrace.value


@pytest.mark.tier(quick=0, one_in=2)
@pytest.mark.parametrize('window', SOME_WINDOWS)
def test_the_mask_weighs_losses_and_nothing_else(window):
    learner, (total, trace) = compiled(), weighted_steps()
    options = {'mask': MASK, 'window': window, 'reduction': 'sum'}
    grads, losses, *_ = learner.etrace_grad(*data(), step_fn=loss_of(learner), **options)
    assert_close(grads, total)
    assert losses.shape == (STEPS,) and (losses > 0).all()
    assert_close(learner.etrace.value, trace)


@functools.cache
def two_streams(rule):
    """The gradients of two learners, of which the second one begins at step 4."""
    xs, ys = data()
    return jax.tree.map(
        jnp.add, gradient(compiled(rule), xs[:4], ys[:4]), gradient(compiled(rule), xs[4:], ys[4:])
    )


@pytest.mark.tier(quick=0, one_in=4)
@in_turn(first(3), window=WINDOWS, rule=['D_RTRL', braintrace.rules.es_d_rtrl(0.8)])
def test_a_reset_of_all_lanes_starts_anew(rule, window):
    xs, ys = data()
    flags = jnp.arange(STEPS) == 4
    learner = compiled(rule)
    assert_close(gradient(learner, xs, ys, reset=flags, window=window), two_streams(rule))
    assert (learner.etrace.value['t'] == 3).all()


FLAGS = np.zeros((STEPS, BATCH), bool)
FLAGS[[3, 0, 5], [1, 2, 1]] = True


@functools.cache
def lane_by_lane(rule):
    """The gradients of learners of one lane each, a new one after each reset."""
    (xs, ys), total = data(), None
    for lane in range(BATCH):
        starts = [0, *[t for t in range(1, STEPS) if FLAGS[t, lane]], STEPS]
        for a, b in zip(starts, starts[1:]):
            part = gradient(
                compiled(rule, batch=1), xs[a:b, lane : lane + 1], ys[a:b, lane : lane + 1]
            )
            total = part if total is None else jax.tree.map(jnp.add, total, part)
    return total


@pytest.mark.tier(quick=0, one_in=4)
@in_turn(first(3), window=WINDOWS, rule=['D_RTRL', braintrace.rules.es_d_rtrl(0.8)])
def test_a_reset_of_one_lane_leaves_the_others_alone(rule, window):
    assert_close(gradient(compiled(rule), *data(), reset=FLAGS, window=window), lane_by_lane(rule))


@pytest.mark.slow
def test_aux_and_losses_come_back_in_every_combination():
    xs, ys = data()

    def with_aux(learner):
        def step_fn(x, y):
            out = learner(x)
            return squared(out, y), {'out': out}

        return step_fn

    a, b = compiled(), compiled()
    grads, losses, aux, _ = a.etrace_grad(xs, ys, step_fn=with_aux(a), has_aux=True, window=2)
    grads_only, _, aux_only, _ = b.etrace_grad(xs, ys, step_fn=with_aux(b), has_aux=True)
    assert losses.shape == (STEPS,) and aux['out'].shape == (STEPS, BATCH, 2)
    assert_close(grads, grads_only)
    np.testing.assert_allclose(aux['out'], aux_only['out'], rtol=1e-12)
    np.testing.assert_allclose(losses, [squared(o, y) for o, y in zip(aux['out'], ys)], rtol=1e-12)


@pytest.mark.slow
def test_weights_outside_the_model_get_their_gradient():
    xs, ys = data()
    outer = brainstate.ParamState(0.3 * jnp.ones((2, 2)))

    def run(window):
        learner = compiled()
        weights = {**learner.param_states, ('outer',): outer}
        return learner.etrace_grad(
            xs,
            ys,
            step_fn=lambda x, y: squared(learner(x) @ outer.value, y),
            weights=weights,
            window=window,
            reduction='sum',
        ).grads

    got = run(3)
    stepped, total = compiled(), None
    for x, y in zip(xs, ys):
        part = brainstate.transform.grad(
            lambda x=x, y=y: squared(stepped(x) @ outer.value, y),
            {**stepped.param_states, ('outer',): outer},
        )()
        total = part if total is None else jax.tree.map(jnp.add, total, part)
    assert_close(got, total)
    assert jnp.abs(got['outer',]).max() > 0


@pytest.mark.slow
def test_a_parameter_read_by_the_loss_itself_gets_both_parts():
    xs, ys = data()

    def penalty(learner):
        return sum(
            (leaf**2).sum()
            for s in learner.param_states.values()
            for leaf in jax.tree.leaves(s.value)
        )

    learner, plain = compiled(), compiled()
    got = learner.etrace_grad(
        xs, ys, step_fn=lambda x, y: squared(learner(x), y) + penalty(learner), reduction='sum'
    ).grads
    want = jax.tree.map(
        lambda g, p: g + 2 * STEPS * p,
        gradient(plain, xs, ys),
        {k: s.value for k, s in plain.param_states.items()},
    )
    assert_close(got, want)


@pytest.mark.slow
def test_a_subset_of_weights_is_enough():
    xs, ys = data()
    learner, full = compiled(), compiled()
    some = {k: s for k, s in learner.param_states.items() if 'Wh' in k}
    want = gradient(full, xs, ys)
    assert_close(gradient(learner, xs, ys, weights=some), {k: want[k] for k in some})


@pytest.mark.slow
def test_states_that_the_step_function_writes_are_threaded():
    xs, ys = data()
    learner = compiled()
    counter = brainstate.ShortTermState(jnp.zeros((), jnp.int32))

    def step_fn(x, y):
        counter.value = counter.value + 1
        return squared(learner(x), y) * counter.value

    _, losses, *_ = learner.etrace_grad(xs, ys, step_fn=step_fn, window=2)
    assert int(counter.value) == STEPS
    other = compiled()
    _, plain, *_ = other.etrace_grad(xs, ys, step_fn=loss_of(other))
    np.testing.assert_allclose(losses, plain * jnp.arange(1, STEPS + 1), rtol=1e-12)


def test_values_that_the_step_function_only_reads_are_not_frozen_into_the_program():
    xs, ys = data()
    learner = compiled()
    scale = brainstate.ShortTermState(jnp.ones(()))

    def step_fn(x, y):
        return scale.value * squared(learner(x), y)

    def run(value):
        learner.reset_state()
        scale.value = jnp.asarray(value)
        return learner.etrace_grad(xs, ys, step_fn=step_fn).grads

    assert_close(run(3.0), jax.tree.map(lambda g: 3 * g, run(1.0)))


@pytest.mark.slow
def test_new_weights_are_seen_by_the_next_call():
    xs, ys = data()
    learner, other = compiled(), compiled()
    step_fn = loss_of(learner)
    learner.etrace_grad(xs, ys, step_fn=step_fn)
    for one in (learner, other):
        one.reset_state()
        for state in one.param_states.values():
            state.value = jax.tree.map(lambda w: 0.5 * w, state.value)
    assert_close(
        learner.etrace_grad(xs, ys, step_fn=step_fn, reduction='sum').grads, gradient(other, xs, ys)
    )


def test_a_memory_budget_bounds_the_window_and_changes_no_number():
    xs, ys = data()
    assert_close(
        gradient(compiled(), xs, ys, memory_budget=1), gradient(compiled(), xs, ys, window=None)
    )


@pytest.mark.slow
def test_etrace_grad_works_inside_jit():
    xs, ys = data()
    learner, plain = compiled(), compiled()
    step_fn = loss_of(learner)
    run = brainstate.transform.jit(
        lambda xs, ys: learner.etrace_grad(xs, ys, step_fn=step_fn, reduction='sum').grads
    )
    assert_close(run(xs, ys), gradient(plain, xs, ys))
    assert (learner.etrace.value['t'] == STEPS).all()


@pytest.mark.slow
def test_progress_is_written_and_changes_nothing(capfd):
    xs, ys = data()
    assert_close(gradient(compiled(), xs, ys, progress=True), gradient(compiled(), xs, ys))
    jax.effects_barrier()
    assert f'{STEPS}/{STEPS} steps' in capfd.readouterr().err


def test_evolve_moves_hidden_state_and_trace_as_calls_do():
    xs, _ = data()
    learner, stepped = compiled(), compiled()
    outputs = learner.etrace_evolve(xs)
    np.testing.assert_allclose(outputs, jnp.stack([stepped(x) for x in xs]), rtol=1e-12)
    assert_close(learner.etrace.value, stepped.etrace.value)


def test_evaluation_leaves_the_trace_as_it_was():
    xs, ys = data()
    learner = compiled()
    gradient(learner, xs, ys)
    before = learner.etrace.value
    hidden = learner.model.cell.h.value
    assert learner.etrace_evolve(xs, return_outputs=False, trace=False) is None
    assert_close(learner.etrace.value, before)
    assert jnp.abs(learner.model.cell.h.value - hidden).max() > 1e-3


def test_evolve_runs_a_step_function():
    xs, ys = data()
    learner = compiled()
    losses = learner.etrace_evolve(xs, ys, step_fn=loss_of(learner), trace=False)
    assert losses.shape == (STEPS,)


@pytest.mark.slow
def test_a_plain_recurrent_weight_still_learns_by_its_same_step_gradient():
    class Plain(Net):
        def __init__(self):
            super().__init__()
            self.skip = brainstate.ParamState(jnp.ones((2, UNITS)))

        def update(self, x):
            out = super().update(x)
            self.cell.h.value = self.cell.h.value + x @ self.skip.value
            return out + self.cell.h.value.sum(-1, keepdims=True)

    xs, ys = data()
    learner, stepped = compiled(model=Plain), compiled(model=Plain)
    got = gradient(learner, xs, ys, window=3)
    assert_close(got, by_steps(stepped, xs, ys))
    assert jnp.abs(got['skip',]).max() > 0
    assert learner.graph.routes['skip'].kind == 'same-step'


class WithIntegers(brainstate.nn.Module):
    """A parameter that holds an op's weight, a readout and integers that select units."""

    def __init__(self):
        super().__init__()
        weight = jnp.linspace(-0.5, 0.5, 2 * UNITS).reshape(2, UNITS)
        self.w = brainstate.ParamState(
            {'op': weight, 'gain': jnp.ones(2), 'units': jnp.array([0, 2])}
        )

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((BATCH, UNITS)))

    def update(self, x):
        p = self.w.value
        self.h.value = 0.8 * self.h.value + jnp.tanh(braintrace.matmul(x, p['op']))
        return p['gain'] * self.h.value[:, p['units']]


@pytest.mark.slow
def test_a_parameter_with_an_integer_leaf_learns_by_its_other_leaves():
    xs, ys = data()
    learner = braintrace.compile(WithIntegers(), 'D_RTRL', xs[0])
    online, params, carry = learner.pure()
    state = online.init(params, carry, xs[0])
    want, *_ = jax.jit(online.sequence_grad(squared, reduction='sum'))(params, state, xs, ys)
    (got,) = gradient(learner, xs, ys, window=None).values()
    assert got['units'].dtype == jax.dtypes.float0
    assert_close({k: got[k] for k in ('op', 'gain')}, {k: want['w',][k] for k in ('op', 'gain')})


def test_weights_come_back_under_the_names_of_the_call():
    xs, ys = data()
    learner = compiled()
    step_fn, readout = loss_of(learner), learner.model.readout
    for name in ('a', 'b'):
        grads = learner.etrace_grad(xs, ys, step_fn=step_fn, weights={name: readout}).grads
        assert list(grads) == [name]
