"""Settings of JAX: each call runs under them, and its numbers are those without."""

import functools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, nn, rules
from tests import oracles
from tests.compare import assert_close, assert_same_kinds
from tests.functional.plain import loss
from tests.settings import FLOAT64, OTHERS, STRICT, under
from tests.tiers import slow

pytestmark = pytest.mark.filterwarnings('ignore::braintrace.errors.BraintraceWarning')
B, I, N, O, T = 5, 3, 4, 2, 4  # noqa: E741
DRAWING = ('signs', 'uoro', 'a model')  # other numbers where float64 is the default
NO_JIT = {'no jit': jax.disable_jit}
EAGER = ('single steps', 'updates')
CHECKED = ('single steps', 'updates', 'control flow', 'noise, a mask and resets')


def drawn(*shape: int, dtype=np.float32) -> jax.Array:
    """Numbers that are on the device already."""
    return jax.device_put(np.random.default_rng(shape).normal(size=shape).astype(dtype))


XS, YS, X = drawn(T, B, I), drawn(T, B, O), drawn(B, I)
Y = drawn(B, O)
FLAGS = jax.device_put(np.arange(T * B).reshape(T, B) % 5 == 3)
ONE = jax.device_put(np.arange(B) % 2 == 0)
MASK = jax.device_put((np.arange(T) % 3 != 0).astype(np.float32))
SHAPES = {'w': (I + N, N), 'b': (N,), 'a': (N,), 'out': (N, O)}
P = {name: drawn(*shape) for name, shape in SHAPES.items()}
KEY, COUNT = jax.random.key(1), jax.device_put(np.int32(0))
C = {'h': drawn(B, N), 'o': drawn(B, O)}


def carry(of):
    """First values; the key is a new one, since a key may be used once."""
    if of is noisy:
        return {'h': C['h'], 'n': COUNT, 'key': jax.random.clone(KEY)}
    return C if of is cell else {'h': C['h']}


def cell(p, c, x):
    """Leaky units and a leaky readout."""
    y = braintrace.matmul(jnp.concatenate([x, c['h']], -1), p['w'], p['b'])
    h = jax.nn.sigmoid(p['a'])[None] * c['h'] + jnp.tanh(y)
    o = 0.8 * c['o'] + braintrace.matmul(h, p['out'])
    return o, {'h': h, 'o': o}


def noisy(p, c, x):
    """A counter and a key beside a state."""
    key, own = jax.random.split(c['key'])
    h = 0.6 * c['h'] + jnp.tanh(x @ p['w'][:I]) + jax.random.normal(own, c['h'].shape, x.dtype)
    return h @ p['out'], {'h': h, 'n': c['n'] + 1, 'key': key}


def flowing(p, c, x):
    """A branch, a loop and plain products."""
    read = jnp.concatenate([x, c['h']], -1)
    moved, still = lambda h: jnp.tanh(h + read @ p['w']), lambda h: h + p['b'][None]
    h = jax.lax.cond(x[0, 0] > 0, moved, still, c['h'])
    h = jax.lax.fori_loop(0, 3, lambda _, h: 0.9 * h + 0.1 * jnp.tanh(h * p['a'][None]), h)
    return h @ p['out'], {'h': h}


def echo(p, c, x):
    h = jnp.tanh(0.8 * c['h'] + jnp.concatenate([x, c['h'][:, :1]], -1))
    return h @ p['out'], {'h': h}


def penalised(o, y):
    return braintrace.Penalised(loss(o, y), (o**2).mean())


def hidden(path, leaf) -> bool:
    return path[-1] not in ('n', 'key')


def started(rule, of=cell):
    learner = functional.online(of, rule, hidden=hidden, mark=None if of is cell else 'auto')
    return learner, learner.init(P, carry(of), X)


def gradient(rule, of=cell, loss=loss, given=dict, **options):
    """Of a sequence; ``given()``: its mask and resets."""
    learner, state = started(rule, of)
    run = jax.jit(learner.sequence_grad(loss, reduction='sum', **options))
    grads, losses, *_ = run(P, state, XS, YS, **given())
    return grads, losses


def masked():
    return {'mask': MASK, 'reset': (FLAGS, carry(noisy))}


def steps(rule):
    learner, state = started(rule)
    run = jax.jit(learner.grad(loss))
    grads, _, _, state = run(P, state, X, Y)
    state = jax.jit(functional.reset)(state, ONE, C)
    return run(P, state, X, Y)[:3], grads, jax.jit(learner.step)(P, state, X)[0]


def updates(rule):
    (learner, state), optimizer = started(rule), optax.sgd(0.1)
    run = jax.jit(learner.sequence_update(loss, optimizer, 2))
    found = run(P, optimizer.init(P), state, XS, YS)
    return found.params, found.losses


def learning(rule):
    with jax.transfer_guard('allow'):  # of the generator of first values
        brainstate.random.seed(0)
        model = brainstate.nn.Sequential(nn.MinimalRNNCell(I, N), nn.LIF(N, tau=4.0))
        learner = braintrace.compile(model, rule, X, batch_size=B)

    def step_fn(x, y):
        return (learner(x) ** 2).sum() + y.sum()

    options = {'step_fn': step_fn, 'optimizer': optax.trace(0.9), 'mask': MASK, 'reset': FLAGS}
    trained = learner.etrace_train(XS, YS, **options).opt_state
    return trained, braintrace.evaluate(learner, XS, YS, lambda out, ys: out.sum())


RULES = {
    'same step': rules.same_step(),
    'd_rtrl': rules.d_rtrl(),
    'own': rules.d_rtrl(scope='own'),
    'e_prop': rules.e_prop(0.8, 'random'),
    'adaptive': rules.e_prop(0.8, 'adaptive'),
    'rtrl': rules.rtrl(),
    'snap': rules.snap(2),
    'signs': rules.signs(),
    'uoro': rules.uoro(),
}
CALLS = {
    **{name: functools.partial(gradient, rule, window=None) for name, rule in RULES.items()},
    'windows': lambda: gradient(rules.es_d_rtrl((0.7, 0.3)), window=2, loss=penalised),
    'single steps': lambda: steps(rules.d_rtrl(credit='whole', trace_dtype=jnp.bfloat16)),
    'updates': lambda: updates(rules.es_d_rtrl(0.7)),
    'control flow': lambda: gradient(rules.d_rtrl(), flowing),
    'an echo state': lambda: gradient(rules.rtrl(), echo, window=2, inside='exact'),
    'noise by rtrl': lambda: gradient(rules.rtrl(), noisy),
    'noise, a mask and resets': lambda: gradient(rules.d_rtrl(), noisy, given=masked),
    'no rule': lambda: gradient(None),
    'a model': lambda: learning(rules.d_rtrl()),
}


@functools.cache
def wanted(name: str):
    return jax.tree.map(np.asarray, CALLS[name]())


def check(settings, name: str):
    """The numbers and dtypes of a call under settings are those without."""
    with under(settings):
        got = CALLS[name]()
    got = jax.tree.map(np.asarray, got)
    assert_same_kinds(got, wanted(name))
    assert_close(got, wanted(name), 2e-4)


@pytest.mark.parametrize('setting', OTHERS)
def test_a_gradient_is_the_same_under_each_other_setting(setting):
    check({setting: OTHERS[setting]}, 'same step')


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', CALLS)
def test_every_call_obeys_all_settings_that_refuse_mistakes(name):
    left_out = {FLOAT64} if name in DRAWING else set()
    if name == 'a model':  # brainstate makes first values of numbers of the host
        left_out.add('transfers')
    check({k: v for k, v in STRICT.items() if k not in left_out}, name)


@slow
@pytest.mark.parametrize('name', EAGER)
def test_calls_run_without_jit(name):
    check(NO_JIT, name)


@slow
@pytest.mark.parametrize('name', CHECKED)
def test_calls_run_with_checks_and_another_generator(name):
    check(OTHERS, name)


@slow
def test_an_echo_state_learns_in_exact_windows():
    """Nothing is traced where no parameter reaches a state: reverse mode is the whole."""
    with jax.enable_x64(True):
        data = *jax.tree.map(lambda a: a.astype(float), (P, carry(echo), XS, YS)), loss
        want = oracles.by_time(echo, *data)['out']
        for rule in (rules.rtrl(), rules.snap(2), rules.d_rtrl()):
            run = functional.online(echo, rule, mark='auto')
            grad = jax.jit(run.sequence_grad(loss, window=3, inside='exact', reduction='sum'))
            p, h, xs, ys, _ = data
            assert_close(grad(p, run.init(p, h, xs[0]), xs, ys).grads['out'], want)
