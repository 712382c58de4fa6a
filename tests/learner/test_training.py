"""The contract of ``etrace_train``, argument by argument, and traces of lower precision."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace._windows import turns
from braintrace.errors import OptionError, StructureError
from tests.compare import assert_close, errors

from .networks import BATCH, STEPS, Net, compiled, data, loss_of, squared

ADAM = optax.adam(0.02)
rules = pytest.mark.parametrize('rule', ['D_RTRL', braintrace.rules.es_d_rtrl(0.8)])


def values(learner):
    return {k: s.value for k, s in learner.param_states.items()}


def train(learner, xs, ys, **options):
    return learner.etrace_train(
        xs, ys, **{'step_fn': loss_of(learner), 'optimizer': ADAM, **options}
    )


def by_hand(learner, xs, ys, every, optimizer=ADAM, **options):
    """An update after each call of ``etrace_grad``."""
    opt_state, losses, step_fn = optimizer.init(values(learner)), [], loss_of(learner)
    for i in range(0, len(xs), every):
        cut = {k: v[i : i + every] for k, v in options.items()}
        grads, loss, *_ = learner.etrace_grad(
            xs[i : i + every], ys[i : i + every], step_fn=step_fn, window=1, **cut
        )
        updates, opt_state = optimizer.update(grads, opt_state, values(learner))
        for k, s in learner.param_states.items():
            s.value = optax.apply_updates(s.value, updates[k])
        losses.append(loss)
    return jnp.concatenate(losses), opt_state


@pytest.mark.tier(quick=0, one_in=4)
@rules
@pytest.mark.parametrize('every', [1, 3])
def test_it_is_a_loop_of_gradients_and_updates(rule, every):
    xs, ys = data()
    reset = np.zeros((STEPS, BATCH), bool)
    reset[2, 0] = reset[5] = True
    given = {'mask': np.linspace(0.5, 2.0, STEPS), 'reset': reset}
    one, two = compiled(rule), compiled(rule)
    _, losses, _, _, opt_state, *_ = train(one, xs, ys, update_every=every, **given)
    want, want_state = by_hand(two, xs, ys, every, **given)
    np.testing.assert_allclose(losses, want, rtol=1e-10)
    assert_close(values(one), values(two))
    assert_close(opt_state, want_state)
    assert_close(one.etrace.value, two.etrace.value)
    np.testing.assert_allclose(one.model.cell.h.value, two.model.cell.h.value, rtol=1e-10)
    assert max(errors(values(one), values(compiled(rule))).values()) > 1e-3  # it has learned


@pytest.mark.slow
def test_a_stream_in_chunks_is_the_stream_in_one_call():
    xs, ys = data()
    whole, parts = compiled(), compiled()
    _, losses, _, _, want, *_ = train(whole, xs, ys)
    _, first, _, _, opt_state, *_ = train(parts, xs[:3], ys[:3])
    _, second, _, _, opt_state, *_ = train(parts, xs[3:], ys[3:], opt_state=opt_state)
    np.testing.assert_allclose(np.concatenate([first, second]), losses, rtol=1e-10)
    assert_close(values(parts), values(whole))
    assert_close(opt_state, want)


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


@pytest.mark.slow
def test_progress_shows_a_line(capfd):
    xs, ys = data()
    _, losses, *_ = train(compiled(), xs, ys, progress=True)
    jax.effects_barrier()
    jax.block_until_ready(losses)
    assert f'{STEPS}/{STEPS} steps' in capfd.readouterr().err


def test_progress_shows_the_loss_that_counts(capfd):
    xs, ys = data()
    last = jnp.arange(STEPS) == STEPS - 1
    _, losses, *_ = train(compiled(), xs, ys, progress=True, mask=last, update_every=STEPS)
    jax.effects_barrier()
    assert f'loss {float(losses[-1]):.4g},' in capfd.readouterr().err


@pytest.mark.parametrize(
    ('rate', 'length', 'most'),
    [(50, 200, 25), (1000, 10_000, 55), (1e5, 10**6, 55), (10, 10**4, 101)],
)
def test_progress_reports_a_few_times_a_second_and_at_most_a_hundred_times(
    rate, length, most, capfd, monkeypatch
):
    clock = [0.0]
    monkeypatch.setattr(turns.time, 'perf_counter', lambda: clock[0])
    line, due, reports = turns._Line(length), 0, 0
    line(0, 0.0)
    for done in range(length // 100, length + 1, length // 100):
        clock[0] = done / rate
        if done >= due:
            due, reports = line(done, 0.5), reports + 1
    assert 3 <= reports <= most
    assert (
        f'{length}/{length} steps, {rate:.0f} steps/s, loss 0.5, 0 s left' in capfd.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    'steps', [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 103, 250))]
)
def test_progress_changes_no_number(steps, capfd):
    rng = np.random.default_rng(0)
    xs, ys = (
        jnp.asarray(rng.normal(size=(steps, BATCH, 2))),
        jnp.asarray(rng.normal(size=(steps, BATCH, 2))),
    )
    for call in ({'update_every': 1}, {'update_every': 7}):
        learner, shown = compiled(), compiled()
        want = train(learner, xs, ys, **call)
        got = train(shown, xs, ys, progress=True, **call)
        assert_close(
            {'calls': got, 'weights': values(shown), 'trace': shown.etrace.value},
            {'calls': want, 'weights': values(learner), 'trace': learner.etrace.value},
        )
    assert f'{steps}/{steps} steps' in capfd.readouterr().err


@pytest.mark.slow
def test_a_mapped_model_trains_like_a_batched_one():
    xs, ys = data()
    brainstate.random.seed(0)
    lanes = brainstate.nn.Map(Net(), init_map_size=BATCH)
    lanes.init_all_states()
    learner, batched = braintrace.ETraceLearner(lanes, braintrace.rules.d_rtrl()), compiled()
    learner.compile_graph(xs[0])
    losses, want = train(learner, xs, ys).losses, train(batched, xs, ys).losses
    np.testing.assert_allclose(losses, want, rtol=1e-10)
    assert_close({k[1:]: v for k, v in values(learner).items()}, values(batched))


@pytest.mark.slow
def test_it_runs_inside_jit():
    """Inside ``jit`` the states are threaded by brainstate."""
    xs, ys = data()
    plain, jitted = compiled(), compiled()
    _, want, *_ = train(plain, xs, ys)
    got = brainstate.transform.jit(lambda xs, ys: train(jitted, xs, ys).losses)(xs, ys)
    np.testing.assert_allclose(got, want, rtol=1e-10)
    assert_close(values(jitted), values(plain))


@pytest.mark.parametrize(
    'options, message',
    [
        ({'optimizer': 0.1}, 'optimizer is a float.*optax'),
        ({'write_every': 65}, 'write_every is 65.*at most 64'),
        ({'update_every': 0}, 'update_every is 0'),
        ({'update_every': True}, 'update_every is True'),
        ({'update_every': None}, 'update_every is None'),
        ({'update_every': 2, 'write_every': 3}, 'write_every is 3.*multiple of the 2'),
        ({'write_every': 1.5}, 'write_every is 1.5'),
        ({'reduction': 'max'}, 'reduction is .max.'),
        ({'progress': 1}, 'progress is 1'),
        ({'step_fn': None}, 'step_fn is None'),
    ],
)
def test_bad_options_are_refused(options, message):
    learner = compiled()
    before = values(learner)
    with pytest.raises(OptionError, match=message):
        train(learner, *data(), **options)
    assert_close(values(learner), before)


def test_the_state_of_another_optimiser_is_refused():
    learner = compiled()
    with pytest.raises(StructureError, match='opt_state does not belong'):
        train(learner, *data(), opt_state=optax.sgd(0.1, momentum=0.9).init(values(learner)))


@pytest.mark.slow
def test_the_dtypes_of_an_optimisers_state_stay():
    learner = compiled()
    halves = optax.adam(0.02, mu_dtype=jnp.float32)
    _, _, _, _, state, *_ = train(
        learner, *data(), optimizer=halves, opt_state=halves.init(values(learner))
    )
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
        losses, _ = train(learner, xs, ys, step_fn=step_fn)
        jax.block_until_ready(losses)
    assert any('lost: it starts anew' in note for note in error.value.__notes__)
    assert (learner.etrace.value['t'] == 0).all()
    assert_close(values(learner), before)
    train(learner, xs, ys)


def test_a_boolean_parameter_is_refused_by_name():
    def cell(p, h, x):
        h = 0.5 * h + braintrace.matmul(x, p['w'])
        return h, h

    learner, params = (
        braintrace.functional.online(cell, braintrace.rules.d_rtrl()),
        {'w': jnp.ones((2, 3)), 'n': jnp.ones(3, bool)},
    )
    state = learner.init(params, jnp.zeros((1, 3)), jnp.ones((1, 2)))
    run = learner.sequence_update(lambda out, y: jnp.sum((out - y) ** 2), ADAM)
    with pytest.raises(StructureError, match='parameter n is bool'):
        run(params, ADAM.init({'w': params['w']}), state, jnp.ones((4, 1, 2)), jnp.ones((4, 1, 3)))


def test_what_is_not_trainable_stays_under_weight_decay():
    def cell(p, h, x):
        h = 0.5 * h + jnp.tanh(braintrace.matmul(x, p['w']) + p['fixed'])
        return h, h

    optimizer = optax.adamw(0.1, weight_decay=0.5)
    learner = braintrace.functional.online(
        cell, braintrace.rules.d_rtrl(), trainable=lambda path, leaf: path != ('fixed',)
    )
    params = {'w': jnp.ones((2, 3)), 'fixed': jnp.ones(3)}
    state = learner.init(params, jnp.zeros((1, 3)), jnp.ones((1, 2)))
    new, *_ = learner.sequence_update(lambda out, y: jnp.sum((out - y) ** 2), optimizer)(
        params, optimizer.init(params), state, jnp.ones((4, 1, 2)), jnp.zeros((4, 1, 3))
    )
    assert (new['fixed'] == 1).all() and (new['w'] < 1).all()


# -- single steps between two writes of the trace --------------------------------------------------


@pytest.mark.slow
def test_single_steps_may_stay_pending_in_the_state_of_a_learner():
    """Steps, a sequence, a reset, steps: with ``write_every`` as without, the trace too."""
    xs, ys = data()
    learners = compiled(), compiled(write_every=3)
    params = next(iter(learners[0].param_states))
    shown = []
    for learner in learners:

        def one(x, y, learner=learner):
            return squared(learner(x), y)

        seen, step = [], brainstate.transform.grad(one, learner.param_states)
        for t in range(4):
            seen += [step(xs[t], ys[t]), learner.get_etrace_of(params)]
        seen += [learner.etrace_grad(xs, ys, step_fn=one).grads, learner.get_etrace_of(params)]
        seen += [step(xs[0], ys[0]), learner.get_etrace_of(params)]
        learner.reset_state()
        for t in range(4):
            seen += [step(xs[t], ys[t]), learner.get_etrace_of(params)]
        shown.append(dict(enumerate(seen)))
    assert_close(shown[1], shown[0])


@pytest.mark.parametrize('every', [0, True, 2.0, '3', 65])
def test_a_bad_number_of_single_steps_is_refused(every):
    with pytest.raises(OptionError, match=r'write_every is .* give a number of steps from 1 to 64'):
        braintrace.D_RTRL(Net(), write_every=every)


def test_a_large_trace_is_written_once_in_several_single_steps():
    """By itself, from 4 MiB on; smaller ones at each step."""

    def pending(units):
        def cell(params, h, x):
            h = jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params))
            return h, h

        learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl())
        args = [
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in ((units + 8, units), (16, units), (16, 8))
        ]
        state = jax.eval_shape(learner.init, *args)
        return {leaf.shape for leaf in jax.tree.leaves(state.trace)} - {(16, units + 8, units)}

    assert not pending(128)
    assert {(16, 520), (16, 512)} <= pending(512)


# -- precision of the trace ------------------------------------------------------------------------


def long_gradient(**options):
    xs, ys = data(60)
    learner = compiled(**options)
    return learner, learner.etrace_grad(xs, ys, step_fn=loss_of(learner), window=1).grads


@pytest.mark.slow
def test_a_trace_in_bfloat16_takes_less_memory_and_stays_close():
    """Each write rounds to 8 bits: 60 steps with 60 writes are 2 % off at the worst parameter."""
    exact, want = long_gradient()
    short, got = long_gradient(trace_dtype=jnp.bfloat16)
    shown = short.get_etrace_of(next(iter(short.param_states)))
    assert shown and {e.dtype for e in jax.tree.leaves(shown)} == {jnp.dtype(jnp.bfloat16)}
    assert short.report.memory * 4 == exact.report.memory
    rows = [row for relation in short.report.relations for row in relation.trace]
    assert {row.dtype for row in rows} == {'bfloat16'}
    errors = [
        float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    assert 1e-6 < max(errors) < 0.02, errors


@pytest.mark.parametrize('dtype', ['nonsense', jnp.int8, object()])
def test_a_trace_dtype_that_is_no_float_is_refused(dtype):
    with pytest.raises(OptionError, match='trace_dtype is'):
        braintrace.D_RTRL(Net(), trace_dtype=dtype)
