"""The contract of ``etrace_train``, argument by argument, and traces of lower precision."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.errors import OptionError, StructureError
from tests.compare import assert_close, errors
from tests.tiers import first, in_turn

from .networks import BATCH, STEPS, Net, apart, compiled, data, loss_of, same_state, shared, squared

ADAM = optax.adam(0.02)
RESET = np.zeros((STEPS, BATCH), bool)
RESET[2, 0] = RESET[5] = True
CALLS = {
    'lanes start anew': {'update_every': 3, 'mask': np.linspace(0.5, 2, STEPS), 'reset': RESET},
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
def test_aux_comes_back_and_one_program_serves_every_call():
    xs, ys = data()
    learner, traced = compiled(), []

    def step_fn(x, y):
        traced.append(None)
        out = learner(x)
        return squared(out, y), {'out': out}

    _, losses, aux, _, opt_state, *_ = train(learner, xs, ys, step_fn=step_fn, has_aux=True)
    assert losses.shape == (STEPS,) and aux['out'].shape == (STEPS, BATCH, 2)
    number = len(traced)
    train(learner, xs, ys, step_fn=step_fn, has_aux=True, opt_state=opt_state)
    assert len(traced) == number


@pytest.mark.parametrize(
    'options, message',
    [
        ({'optimizer': 0.1}, 'optimizer is a float.*optax'),
        ({'update_every': 0}, 'update_every is 0'),
        ({'update_every': True}, 'update_every is True'),
        ({'update_every': None}, 'update_every is None'),
        ({'update_every': 1.5}, 'update_every is 1.5'),
        ({'reduction': 'max'}, 'reduction is .max.'),
        ({'progress': 1}, 'progress is 1'),
        ({'step_fn': None}, 'step_fn is None'),
        ({'opt_state': optax.sgd(0.1, momentum=0.9).init({})}, 'opt_state does not belong'),
    ],
)
def test_bad_options_are_refused(options, message):
    before = values(shared())
    with pytest.raises((OptionError, StructureError), match=message):
        train(shared(), *data(), **options)
    assert_close(values(shared()), before)


@pytest.mark.slow
def test_the_dtypes_of_an_optimisers_state_stay():
    learner, halves = compiled(), optax.adam(0.02, mu_dtype=jnp.float32)
    opt_state = halves.init(values(learner))
    state = train(learner, *data(), optimizer=halves, opt_state=opt_state).opt_state
    assert jax.tree.leaves(state[0].mu)[0].dtype == jnp.float32


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
    assert any('lost: it starts anew' in note for note in error.value.__notes__)
    assert (learner.etrace.value['t'] == 0).all()
    assert_close(values(learner), before)
    train(learner, xs, ys)


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


@pytest.mark.parametrize(
    'options, found',
    [({'trace_dtype': d}, 'trace_dtype is') for d in ('nonsense', jnp.int8, object)],
    ids=str,
)
def test_a_bad_option_of_the_trace_is_refused(options, found):
    with pytest.raises(OptionError, match=found):
        braintrace.D_RTRL(Net(), **options)


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


def long_gradient(**options):
    (xs, ys), learner = data(60), compiled(**options)
    return learner, learner.etrace_grad(xs, ys, step_fn=loss_of(learner), window=1).grads


@pytest.mark.slow
def test_a_trace_in_bfloat16_takes_less_memory_and_stays_close():
    """Each write rounds to 8 bits: 60 steps with 60 writes are 2 % off at the worst parameter."""
    exact, want = long_gradient()
    short, got = long_gradient(trace_dtype=jnp.bfloat16)
    assert short.report.memory * 4 == exact.report.memory
    rows = [row for relation in short.report.relations for row in relation.trace]
    assert {row.dtype for row in rows} == {'bfloat16'}
    size = jnp.linalg.norm
    off = [size(a - b) / size(b) for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True)]
    assert 1e-6 < max(off) < 0.02, off
