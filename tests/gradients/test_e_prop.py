"""e-prop against its explicit traces, written in NumPy from the paper.

``e^t = D^t e^{t-1} + D_f^t x^t`` of one hidden number, ``ebar^t = kappa ebar^{t-1} + (dz/dh)^t e^t``
of what the readout reads, ``gradient = sum_t (B^T error^t) ebar^t``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from tests import oracles
from tests.compare import added, assert_close, assert_moves
from tests.models.ops import surrogate

LANES, INPUTS, UNITS, OUTPUTS, STEPS = 2, 3, 5, 2, 9
LEAK, KAPPA, THRESHOLD = 0.9, 0.8, 0.4
KINDS = ('spiking', 'leaky')
stop = jax.lax.stop_gradient
rules = braintrace.rules


@jax.custom_jvp
def spike(v):
    return (v > 0) * 1.0


spike.defjvp(lambda at, moved: (spike(at[0]), moved[0] * surrogate(at[0])))


def cell(kind, params, carry, x, kappa=KAPPA):
    """One recurrent layer under a readout that leaks behind its weights."""
    old, readout = carry['z'], braintrace.matmul
    current = readout(x, params['in']) + readout(stop(old), params['rec'])
    if kind == 'spiking':
        h = LEAK * carry['h'] + current - THRESHOLD * stop(old)
        z = spike(h - THRESHOLD)
    else:
        z = h = LEAK * carry['h'] + (1 - LEAK) * jnp.tanh(current)
    y = kappa * carry['y'] + readout(z, params['out'])
    return y, {'h': h, 'z': z, 'y': y}


def loss(y, target):
    return 0.5 * ((y - target) ** 2).sum()


@functools.cache
def drawn():
    """Parameters, another carry to reset to, inputs, targets."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape)

    params = {'in': draw(INPUTS, UNITS), 'rec': draw(UNITS, UNITS), 'out': draw(UNITS, OUTPUTS)}
    fresh = {'h': draw(LANES, UNITS), 'z': draw(LANES, UNITS), 'y': draw(LANES, OUTPUTS)}
    return params, fresh, draw(STEPS, LANES, INPUTS), draw(STEPS, LANES, OUTPUTS)


def zeros():
    return jax.tree.map(np.zeros_like, drawn()[1])


def explicit(kind, kappa=KAPPA, B=None, flags=None, mask=None, leak=KAPPA, filtered='spike'):
    """The gradient of each step by explicit traces; ``leak``: of the readout in the model.

    ``filtered``: the trace of the spike, or (wrong) that of the membrane.
    """
    params, fresh, xs, ys = drawn()
    B = params['out'] if B is None else B
    h, z, y = (zeros()[k] for k in 'hzy')
    e = {k: np.zeros((LANES, len(params[k]), UNITS)) for k in ('in', 'rec')}
    bar, f, found = dict(e), np.zeros((LANES, UNITS)), []
    for t in range(STEPS):
        if flags is not None:
            at = flags[t][:, None]
            h, z, y = (np.where(at, fresh[k], v) for k, v in zip('hzy', (h, z, y)))
            e, bar = ({k: np.where(at[..., None], 0, v) for k, v in of.items()} for of in (e, bar))
            f = np.where(at, 0, f)
        read = {'in': xs[t], 'rec': z}
        current = xs[t] @ params['in'] + z @ params['rec']
        if kind == 'spiking':
            h = LEAK * h + current - THRESHOLD * z
            slope, psi = np.ones_like(h), surrogate(h - THRESHOLD)
            z = (h > THRESHOLD) * 1.0
        else:
            h = LEAK * h + (1 - LEAK) * np.tanh(current)
            slope, psi, z = (1 - LEAK) * (1 - np.tanh(current) ** 2), np.ones_like(h), h
        y = leak * y + z @ params['out']
        e = {k: LEAK * e[k] + read[k][:, :, None] * slope[:, None] for k in e}
        first, last = (psi, 1.0) if filtered == 'spike' else (np.ones_like(psi), psi)
        bar = {k: kappa * bar[k] + first[:, None] * e[k] for k in e}
        f = leak * f + z
        error = (y - ys[t]) * (1.0 if mask is None else mask[t])
        sent = (error @ B.T * last)[:, None]
        grads = {k: (sent * bar[k]).sum(0) for k in e}
        found.append({**grads, 'out': f.T @ error})
    return found


@functools.cache
def learner_of(kind, rule, kappa=KAPPA):
    return braintrace.functional.online(functools.partial(cell, kind, kappa=kappa), rule)


def started(learner):
    params, _, xs, _ = drawn()
    return params, learner.init(params, zeros(), xs[0])


def quick(fn):
    return jax.jit(fn, compiler_options=oracles.QUICK)


def over_sequence(learner, window=None, **options):
    params, state = started(learner)
    inside = {'inside': options.pop('inside', 'trace')}
    run = learner.sequence_grad(loss, window=window, reduction='sum', **inside)
    return quick(run)(params, state, *drawn()[2:], **options)[0]


def weights_sent_back(learner, key='out'):
    """B of an op, as its learner has it."""
    started(learner)
    (number,) = learner.graph.feedback[key].values()
    return np.asarray(learner.graph.program.constants[number])


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('window', [4, pytest.param(1, marks=pytest.mark.slow), None])
def test_it_is_the_gradient_of_explicit_traces(kind, window):
    want = added(explicit(kind))
    assert_moves(want)
    assert_close(over_sequence(learner_of(kind, rules.e_prop(KAPPA)), window), want)


@pytest.mark.parametrize('kind', KINDS)
def test_random_feedback_sends_the_error_back_through_b(kind):
    learner = learner_of(kind, rules.e_prop(KAPPA, 'random'))
    B = weights_sent_back(learner)
    assert_close(over_sequence(learner, 4), added(explicit(kind, B=B)))
    assert np.abs(B - drawn()[0]['out']).max() > 0.1


@pytest.mark.parametrize('kind', KINDS)
def test_rflo_is_random_feedback_without_a_filter(kind):
    learner = learner_of(kind, rules.rflo())
    B = weights_sent_back(learner)
    assert_close(over_sequence(learner), added(explicit(kind, kappa=0.0, B=B)))


@pytest.mark.parametrize('feedback', ['symmetric', pytest.param('random', marks=pytest.mark.slow)])
def test_each_step_gives_the_gradient_of_explicit_traces(feedback):
    learner = learner_of('spiking', rules.e_prop(KAPPA, feedback))
    B = None if feedback == 'symmetric' else weights_sent_back(learner)
    (params, state), step = started(learner), quick(learner.grad(loss))
    for x, target, want in zip(*drawn()[2:], explicit('spiking', B=B), strict=True):
        _, grads, state = step(params, state, x, target)
        assert_close(grads, want)


@pytest.mark.parametrize('window', [None, pytest.param(2, marks=pytest.mark.slow)])
def test_resets_of_lanes_and_masks(window):
    flags, mask = np.zeros((STEPS, LANES), bool), np.linspace(0, 2, STEPS)
    flags[[2, 4], 0] = flags[[1, 4, 7], 1] = True
    reset = flags, drawn()[1]
    learner = learner_of('spiking', rules.e_prop(KAPPA))
    got = over_sequence(learner, window, mask=mask, reset=reset)
    assert_close(got, added(explicit('spiking', flags=flags, mask=mask)))


@pytest.mark.slow
def test_single_steps_after_a_reset():
    flags, learner = np.zeros((STEPS, LANES), bool), learner_of('leaky', rules.e_prop(KAPPA))
    flags[[2, 5], 0] = flags[3] = True
    (params, state), step = started(learner), quick(learner.grad(loss))
    rows = zip(*drawn()[2:], flags, explicit('leaky', flags=flags), strict=True)
    for x, target, flag, want in rows:
        state = braintrace.functional.reset(state, flag, drawn()[1])
        _, grads, state = step(params, state, x, target)
        assert_close(grads, want)
