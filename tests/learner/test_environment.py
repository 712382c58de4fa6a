"""What a step reads of ``brainstate.environ``: its right value at each step, or a refusal."""

import functools

import brainstate
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u
from brainstate.environ import all as all_of
from brainstate.environ import get as get_of

import braintrace
from braintrace import nn, verify
from braintrace._learner.environment import ABSENT, reads
from braintrace.errors import CompileError, StepFunctionError, StructureError

T, B, I, N = 12, 2, 3, 4
XS = np.random.default_rng(0).standard_normal((T, B, I))
STEPS = np.arange(T)


class Refractory(brainstate.nn.Module):
    """A neuron that is deaf until some time after its last spike."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(I, N, w_init=jnp.full((I, N), 0.6))

    def init_state(self, batch_size=None, **kwargs):
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, N)))
        self.last = brainstate.ShortTermState(jnp.full((batch_size, N), -100.0) * u.ms)

    def update(self, x):
        t = brainstate.environ.get('t')
        deaf = t - self.last.value < 2.5 * u.ms
        v = jnp.where(deaf, 0.0, 0.8 * self.v.value + jnp.abs(self.into(x)))
        self.last.value = u.math.where(v > 1, t, self.last.value)
        self.v.value = jnp.where(v > 1, 0.0, v)
        return v


def at(i):
    return brainstate.environ.context(i=i, t=i * 1.0 * u.ms)


def by_numpy():
    """The potentials, by the formula of the neuron."""
    v, last, found = np.zeros((B, N)), np.full((B, N), -100.0), []
    for i, x in enumerate(np.asarray(XS)):
        v = np.where(i - last < 2.5, 0.0, 0.8 * v + np.abs(x @ np.full((I, N), 0.6)))
        found.append(v)
        v, last = np.where(v > 1, 0.0, v), np.where(v > 1, i, last)
    return np.stack(found)


@pytest.fixture
def timed():
    return made_timed()


@functools.cache
def made_timed():
    with at(0), brainstate.environ.context(dt=1.0 * u.ms):
        learner = braintrace.compile(Refractory(), 'D_RTRL', XS[0], batch_size=B)

    def step(i, x):
        with at(i):
            return learner(x)

    return learner, step, lambda i, x: step(i, x).sum()


def uses(learner, xs=XS):
    """Each call that runs a step, and the axis of time in front of what it returns."""
    step = lambda x: learner(x).mean()
    return {
        'call': lambda: learner(xs[0])[None],
        'evolve': lambda: learner.etrace_evolve(xs),
        'grad': lambda: learner.etrace_grad(xs, step_fn=step, keep_trace=False).losses,
        'the model alone': lambda: learner.etrace_evolve(xs, trace=False),
        'evaluate': lambda: braintrace.evaluate(learner, xs, xs, lambda o, y: o),
    }


CALLS = {
    'the learner': lambda learner, step, loss: [step(i, x) for i, x in enumerate(XS)],
    'etrace_evolve': lambda learner, step, loss: learner.etrace_evolve(STEPS, XS, step_fn=step),
    'the model alone': lambda learner, step, loss: learner.etrace_evolve(
        STEPS, XS, step_fn=step, trace=False
    ),
    'evaluate': lambda learner, step, loss: braintrace.evaluate(learner, XS, XS, lambda o, y: o),
    'for_loop': lambda learner, step, loss: brainstate.transform.for_loop(step, STEPS, XS),
    'etrace_grad': lambda learner, step, loss: (
        learner.etrace_grad(STEPS, XS, step_fn=loss, window=4).losses
    ),
    'etrace_train': lambda learner, step, loss: (
        learner.etrace_train(STEPS, XS, step_fn=loss, optimizer=optax.sgd(0.0)).losses
    ),
}


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize('name', CALLS)
def test_the_time_of_each_step_is_read_anew(timed, name):
    brainstate.nn.init_all_states(timed[0], batch_size=B)
    got, want = jnp.asarray(CALLS[name](*timed)), by_numpy()
    assert (want == 0).any() and (want > 1).sum() > 5
    assert np.allclose(got, want if got.ndim == 3 else want.sum((1, 2)), atol=1e-5)
    assert brainstate.environ.get('t', default=None) is None


def test_pure_functions_take_the_time_as_a_last_input(timed):
    brainstate.nn.init_all_states(timed[0], batch_size=B)
    online, params, carry = timed[0].pure()
    state, times = online.init(params, carry, XS[0], {'t': 0.0 * u.ms}), {'t': STEPS * 1.0 * u.ms}
    loss = lambda v, y: v.sum()
    found = online.sequence_grad(loss)(params, state, (XS, times), XS)
    assert np.allclose(found.losses, by_numpy().sum((1, 2)), atol=1e-5)
    with pytest.raises(StructureError, match=r"reads \['t'\] of brainstate.environ: give a dict"):
        online.cell(params, carry, XS[0])


def test_a_time_that_is_not_set_or_stands_still_is_refused(timed):
    learner, step, loss = timed
    with pytest.raises(StructureError, match="reads 't' of brainstate.environ, which is not set"):
        learner(XS[0])
    for trace in (True, False):
        with at(0), pytest.raises(StepFunctionError, match="'t'.*the same at all steps"):
            learner.etrace_evolve(XS, trace=trace)
    with pytest.raises(CompileError, match=r"reads 't' .* not set. Compile inside of `with"):
        braintrace.compile(Refractory(), 'D_RTRL', XS[0], batch_size=B)


class Switched(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.drop = nn.Linear(I, 50), brainstate.nn.Dropout(0.5)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 50)))

    def update(self, x):
        shift = brainstate.environ.get('shift', 0.0)
        self.h.value = jnp.tanh(self.into(x)) + shift
        return self.drop(self.h.value)


def zeros(outputs):
    return round(float((outputs == 0).mean()), 1)


def test_dropout_is_that_of_now_where_the_model_runs_and_refused_where_the_compiled_step_does():
    with brainstate.environ.context(fit=True):
        learner = braintrace.compile(Switched(), 'D_RTRL', XS[0], batch_size=B)
        assert zeros(learner.etrace_evolve(XS)) == zeros(learner.etrace_evolve(XS, trace=False)) > 0
    assert zeros(learner.etrace_evolve(XS)) > 0  # as compiled, where fit is not set
    with brainstate.environ.context(fit=False):
        *compiled, alone, evaluated = uses(learner).values()
        assert zeros(alone()) == zeros(evaluated()) == 0
        for call in (*compiled, learner.pure):
            with pytest.raises(StructureError, match=r'fit = True, .*fit = False now.*trace=False'):
                call()


def test_an_array_of_any_name_is_an_input_and_a_number_is_compiled():
    def with_shift(shift, call):
        with brainstate.environ.context(shift=shift, fit=False):
            return call()

    def made():
        brainstate.random.seed(0)
        return braintrace.compile(Switched(), 'D_RTRL', XS[0], batch_size=B)

    learner = with_shift(jnp.zeros(()), made)
    for call in uses(learner, XS[:2]).values():
        low, high = (with_shift(jnp.asarray(s), call) for s in (0.0, 2.0))
        assert np.allclose(high - low, 2.0, atol=1e-5)
        for odd in ('high', None, 2 * u.mV, np.array('high')):
            found = r'for shift = float.*\[\] of brainstate.environ, which has shift = .* now. Give'
            with pytest.raises(StructureError, match=found) as caught:
                with_shift(odd, call)
            assert len(str(caught.value)) < 250
    constant = with_shift(0.5, made)
    with_shift(0.5, lambda: constant(XS[0]))
    with pytest.raises(StructureError, match=r'shift = 0.5, .* shift = 0.6 now'):
        with_shift(0.6, lambda: constant(XS[0]))


def test_the_dt_that_a_context_had_is_kept_and_another_one_refused():
    model = brainstate.nn.Sequential(nn.Linear(I, N), nn.Expon(N, 5 * u.ms))
    with brainstate.environ.context(dt=1 * u.ms):
        learner = braintrace.compile(model, 'D_RTRL', XS[0], batch_size=B)
        want = learner.etrace_evolve(XS, trace=False)
    learner.reset_state()
    assert jnp.array_equal(learner.etrace_evolve(XS, trace=False), want)
    assert np.allclose(braintrace.evaluate(learner, XS, XS, lambda o, y: o), want, atol=1e-6)
    other = pytest.raises(StructureError, match=r'dt = 1 ms.*dt = 0.5 ms now')
    for call in uses(learner).values():
        with brainstate.environ.context(dt=1000 * u.us):
            call()
        with brainstate.environ.context(dt=0.5 * u.ms), other:
            call()


def test_where_python_asks_for_an_array_it_is_compiled():
    class Asks(Switched):
        def update(self, x):
            return super().update(x) if brainstate.environ.get('on') else x

    def called(on):
        with brainstate.environ.context(on=jnp.asarray(on), fit=False):
            return learner(XS[0]).shape

    with brainstate.environ.context(on=jnp.asarray(True), fit=False):
        learner = braintrace.compile(Asks(), 'D_RTRL', XS[0], batch_size=B)
    assert called(True) == (B, 50)
    with pytest.raises(StructureError, match='on = True, .*on = False now'):
        called(False)


def test_one_step_after_the_other_compiles_once(timed):
    learner = timed[0]
    brainstate.nn.init_all_states(learner, batch_size=B)
    programs, losses = len(learner._bound.programs), []
    step = lambda x: learner(x).sum()
    for i in range(4):
        with at(i):
            losses.append(learner.etrace_grad(XS[i : i + 1], step_fn=step).losses[0])
    assert np.allclose(losses, by_numpy()[:4].sum((1, 2)), atol=1e-5)
    assert len(learner._bound.programs) == programs + 1


class Shifted(Switched):
    def update(self, x):
        return super().update(x) + brainstate.environ.get('t') + brainstate.environ.get('more')


def test_an_evaluation_says_what_it_misses():
    more, score = {'more': jnp.ones(())}, lambda: uses(learner)['evaluate']()
    with brainstate.environ.context(t=0.0, fit=False, **more):
        learner = braintrace.compile(Shifted(), 'D_RTRL', XS[0], batch_size=B)
    for values, missing in (({}, 'dt'), ({'dt': 0.5}, 'more')):
        found = rf'Call it inside of `with brainstate.environ.context\({missing}=...\):`'
        with brainstate.environ.context(**values), pytest.raises(CompileError, match=found):
            score()
    with brainstate.environ.context(t=0.0, **more), pytest.raises(StructureError, match='dt=...'):
        score()
    with brainstate.environ.context(dt=0.5, **more):  # as they say
        assert score().shape == (*XS.shape[:2], 50)


READS = {
    'get': lambda: brainstate.environ.get('gain'),
    'an imported get': lambda: get_of('gain'),
    'all': lambda: brainstate.environ.all()['gain'],
    'an imported all': lambda: all_of()['gain'],
}


class Gained(brainstate.nn.Module):
    def __init__(self, read):
        super().__init__()
        self.cell, self.read = nn.GRUCell(I, N), read

    def update(self, x):
        with brainstate.environ.context(own=1):  # which is no read of what is around it
            return self.cell(x) * self.read()


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', READS)
def test_a_read_is_seen_however_it_is_spelt(name):
    def called(gain):
        with brainstate.environ.context(gain=gain, other=float('all' not in name)):
            return learner(XS[0])

    for low, high in ((jnp.ones(()), jnp.full((), 2.0)), (1.0, 2.0)):
        with brainstate.environ.context(gain=low, other=0.0):
            learner = braintrace.compile(Gained(READS[name]), 'D_RTRL', XS[0], batch_size=B)
        if isinstance(low, float):
            with pytest.raises(StructureError, match='gain = 1.0, .*gain = 2.0 now'):
                called(high)
        else:
            outputs = called(high)
            assert np.allclose(outputs, 2.0 * learner.model.cell.h.value, atol=1e-6)


def test_a_read_in_a_block_that_stands_in_another_one_is_told_to_both():
    with brainstate.environ.context(gain=1.0), reads() as outer:
        with reads() as inner:
            brainstate.environ.get('gain')
        brainstate.environ.get('more', default=None)
    assert inner == {'gain': 1.0} and outer == {'gain': 1.0, 'more': ABSENT}


def test_a_value_in_the_place_of_what_is_not_set_is_that_of_the_step():
    model = Gained(lambda: brainstate.environ.get('gain', default=jnp.full((), 3.0)))
    learner = braintrace.compile(model, 'D_RTRL', XS[0], batch_size=B)
    assert np.allclose(learner(XS[0]), 3.0 * model.cell.h.value, atol=1e-6)
    found = r'gain = nothing, .*gain = float.*\[2\] now'
    with brainstate.environ.context(gain=jnp.ones(2)), pytest.raises(StructureError, match=found):
        learner(XS[0])


class Clocked(brainstate.nn.Module):
    """A model whose gain is of the environment, or an input."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(I, N)

    def update(self, x, scale=None):
        if scale is None:
            scale = brainstate.environ.get('gain') * brainstate.environ.get('t') / u.ms
        return self.cell(x) * u.maybe_decimal(scale)


@pytest.mark.slow
def test_a_diagnosis_takes_the_environment_as_inputs():
    loss, ys = lambda o, y: ((o - y) ** 2).sum(), XS[..., :1] * np.ones(N)
    brainstate.random.seed(0)
    model = Clocked()
    with brainstate.environ.context(gain=jnp.ones(()), t=0.0 * u.ms):
        learner = braintrace.compile(model, 'D_RTRL', XS[0], batch_size=B)
    with brainstate.environ.context(gain=jnp.full((), 2.0), t=3.0 * u.ms, dt=0.5 * u.ms):
        got = verify.diagnose(learner, XS, ys, loss)
    scale = 2.0 * (3.0 + 0.5 * STEPS)
    other = braintrace.compile(model, 'D_RTRL', XS[0], jnp.ones(()), batch_size=B)
    want = verify.diagnose(other, (XS, jnp.asarray(scale, float)), ys, loss)
    for a, b in zip(got.rows, want.rows, strict=True):
        assert np.allclose((a.cosine, a.norm_ratio), (b.cosine, b.norm_ratio), rtol=1e-5)
    assert min(row.cosine for row in got.rows) < 0.99
    with pytest.raises(StructureError, match=r"reads 'gain' .*Call it inside of `with"):
        verify.diagnose(learner, XS, ys, loss)
