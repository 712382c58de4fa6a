"""The contract of ``etrace_train``, argument by argument, and traces of lower precision."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.errors import NotFiniteError, OptionError, StructureError
from tests.compare import assert_close, assert_same_kinds, errors
from tests.tiers import first, in_turn

from .networks import (
    BATCH,
    INPUTS,
    STEPS,
    UNITS,
    Layer,
    Net,
    apart,
    compiled,
    data,
    loss_of,
    same_state,
    squared,
)

ADAM = optax.adam(0.02, mu_dtype=jnp.float32)
RESET = np.zeros((STEPS, BATCH), bool)
RESET[2, 0] = RESET[5] = True
CALLS = {
    'lanes start again': {'update_every': 3, 'mask': np.linspace(0.5, 2, STEPS), 'reset': RESET},
    'each step': {'reset': np.arange(STEPS) == 4, 'reduction': 'sum'},
    'two steps': {'update_every': 2},
    'exact': {'update_every': 2, 'inside': 'exact'},
}


def values(learner):
    return {k: s.value for k, s in learner.param_states.items()}


def train(learner, xs, ys, **options):
    return learner.etrace_train(
        xs, ys, **{'step_fn': loss_of(learner), 'optimizer': ADAM, **options}
    )


@pytest.mark.tier(quick=0)
@in_turn(first(), call=CALLS, rule=['D_RTRL', braintrace.rules.es_d_rtrl(0.8)])
def test_a_call_and_the_next_are_those_of_the_pure_functions(call, rule):
    (xs, ys), learner, options = data(), compiled(rule), CALLS[call]
    online, params, carry = learner.pure()
    static, given = apart(options, carry)
    run = jax.jit(online.sequence_update(squared, ADAM, **static))
    state, opt_state = online.init(params, carry, xs[0]), ADAM.init(params)
    want, held = params, None
    for _ in range(2):
        want, losses, _, state, opt_state, *_ = run(want, opt_state, state, xs, ys, **given)
        got = train(learner, xs, ys, opt_state=held, **options)
        held = got.opt_state
        assert_close((got.losses, held, values(learner)), (losses, opt_state, want))
        same_state(learner, state)
    assert_same_kinds(held, ADAM.init(params))
    assert max(errors(want, params).values()) > 1e-3  # it has learned


def test_only_the_weights_that_are_named_change():
    xs, ys = data()
    learner = compiled()
    before, weights = values(learner), {('readout',): learner.model.readout}
    train(learner, xs, ys, weights=weights)
    after = values(learner)
    moved = {k for k in after if max(errors(after[k], before[k]).values()) > 1e-5}
    assert moved == {('readout',)}


@pytest.mark.slow
def test_a_failure_while_running_leaves_an_empty_trace_and_says_so():
    xs, ys = data()
    learner = compiled()
    learner.etrace_evolve(xs)
    before = values(learner)

    def fail(x):
        raise RuntimeError('out of paper')

    def step_fn(x, y):
        x = jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return squared(learner(x), y)

    with pytest.raises(Exception, match='out of paper') as error:
        jax.block_until_ready(train(learner, xs, ys, step_fn=step_fn).losses)
    assert any('lost: it starts again' in note for note in error.value.__notes__)
    assert (learner.etrace.value['t'] == 0).all()
    assert_close(values(learner), before)
    train(learner, xs, ys)


K, LANE, RATE = 3, 1, 0.1  # the step and the lane of an input that is no number


def spoiled():
    return data()[0].at[K, LANE, 0].set(np.nan)


def by_hand(xs):
    """D-RTRL of ``Layer`` with the loss ``mean(h**2)``: the weights, the states, the size of each
    gradient; the update of step K is left out, and its lane starts again.
    """
    w, sizes = np.full((INPUTS, UNITS), 0.5), []
    h, e = np.zeros((BATCH, UNITS)), np.zeros((BATCH, INPUTS))
    for t, x in enumerate(xs):
        h, e = 0.8 * h + x @ w, 0.8 * e + x
        grad = np.einsum('bi,bo->io', e, 2 * h / h.size)
        sizes.append(np.sqrt((grad**2).sum()))
        if t == K:
            h[LANE], e[LANE] = 0, 0
        else:
            w = w - RATE * grad
    return w, h, np.array(sizes)


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_left_out_and_its_sample_starts_anew():
    w, h, sizes = by_hand(np.asarray(spoiled()))
    rows, learner = [], compiled(model=Layer)

    def step_fn(x):
        h = learner(x)
        return jnp.mean(h**2), h[0]

    def run(how):
        return learner.etrace_train(
            spoiled(),
            step_fn=step_fn,
            optimizer=optax.sgd(RATE),
            has_aux=True,
            observe=lambda grads, state: (optax.tree.norm(grads), state.carry['h',]),
            progress=lambda *told: rows.append(told[2][0]),
            not_finite=how,
        )

    found = run('reset')
    norms, states = found.observed
    assert_close((learner.model.w.value, learner.model.h.value), (w, h))
    assert_close(states[-1], h)
    np.testing.assert_allclose([norms, np.concatenate(rows)], [sizes, sizes], rtol=1e-12)
    assert found.skipped.updates == 1 and found.skipped.samples.tolist() == [0, 1, 0]
    assert found.aux.shape == (STEPS, UNITS) and not np.isfinite(found.losses[K])
    learner.reset_state()
    with pytest.raises(NotFiniteError, match=r'sample 1 \(1 x\).*step 3') as told:
        run('raise')
    assert told.value.so_far.skipped.updates == 1


def updated(params, optimizer, **options):
    """The parameters of a small cell after four steps."""

    def cell(p, h, x):
        return h, 0.5 * h + jnp.tanh(braintrace.matmul(x, p['w']) + p['fixed'])

    learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl(), **options)
    state = learner.init(params, jnp.zeros((1, 3)), jnp.ones((1, 2)))
    run = learner.sequence_update(lambda out, y: jnp.sum((out - y) ** 2), optimizer)
    xs, ys = jnp.ones((4, 1, 2)), jnp.zeros((4, 1, 3))
    return run(params, optimizer.init(params), state, xs, ys).params


def test_a_boolean_parameter_is_refused_by_name():
    with pytest.raises(StructureError, match='parameter fixed is bool'):
        updated({'w': jnp.ones((2, 3)), 'fixed': jnp.ones(3, bool)}, optax.sgd(0.1))


def test_what_is_not_trainable_stays_under_weight_decay():
    params, optimizer = {'w': jnp.ones((2, 3)), 'fixed': jnp.ones(3)}, optax.adamw(0.1)
    new = updated(params, optimizer, trainable=lambda path, leaf: path != ('fixed',))
    assert (new['fixed'] == 1).all() and (new['w'] < 1).all()


@pytest.mark.parametrize('dtype', ['nonsense', jnp.int8, object], ids=str)
def test_a_bad_dtype_of_the_trace_is_refused(dtype):
    with pytest.raises(OptionError, match='trace_dtype is'):
        braintrace.D_RTRL(Net(), trace_dtype=dtype)


def test_a_large_trace_is_written_one_step_late():
    """From 4 MiB on."""

    def pending(units):
        def cell(params, h, x):
            h = 0.9 * h + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params))
            return h, h

        learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl())
        shapes = (units + 8, units), (16, units), (16, 8)
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        state = jax.eval_shape(learner.init, *args)
        return {leaf.shape for leaf in jax.tree.leaves(state.trace)} - {(16, units + 8, units)}

    assert not pending(128)
    assert {(16, 520), (16, 512)} <= pending(512)
