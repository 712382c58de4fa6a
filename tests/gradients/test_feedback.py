"""Feedback weights against an op with a ``custom_vjp`` of its own, by back-propagation through
time.

The model is one layer that leaks, whose past its online gradient has whole, under two readouts.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braintrace import Feedback, functional, rules
from tests import models, oracles
from tests.compare import assert_close, assert_moves
from tests.gradients.harness import quick
from tests.models.library import LibraryOps
from tests.models.model import squared as loss

B, I, N, O, T = 2, 3, 6, 2, 5
LEAK, DECAY = 0.9, 0.1
RNG = np.random.default_rng(0)
MASK = np.array(
    [[True, False], [True, True], [False, True], [False, False], [True, True], [True, False]]
)
PLAIN, OPS = models.ops.JaxOps(), LibraryOps()
READOUTS = {
    'matmul': ({'w': (N, O)}, lambda ops, z, p: ops.matmul(z, p['w'])),
    'conv': ({'w': (3, 2, 2)}, lambda ops, z, p: ops.conv(z.reshape(B, 3, 2), p['w'])),
    'sparse': ({'w': (7,)}, lambda ops, z, p: ops.sparse_matmul(z, p['w'], MASK)),
    'lora': ({'w': (N, 2), 'A': (2, O)}, lambda ops, z, p: ops.lora_matmul(z, p['w'], p['A'])),
}
XS = RNG.standard_normal((T, B, I))


@functools.cache
def weights(kind):
    rng = np.random.default_rng(1)
    out = {name: rng.standard_normal(shape) for name, shape in READOUTS[kind][0].items()}
    return {'in': rng.standard_normal((I, N)), 'out': out}


def cell(apply, ops, params, carry, x):
    """``apply(z, out)`` is the readout."""
    h = LEAK * carry['h'] + ops.matmul(x, params['in'])
    z = jnp.tanh(h)
    return apply(z, params['out']), {'h': h}


@functools.cache
def targets(kind):
    y, _ = jax.eval_shape(
        functools.partial(cell, of(kind, PLAIN), PLAIN), weights(kind), start(), XS[0]
    )
    return np.random.default_rng(2).standard_normal((T, *y.shape))


def start():
    return {'h': np.zeros((B, N))}


def of(kind, ops):
    return functools.partial(READOUTS[kind][1], ops)


def sent_back(kind):
    """The readout with a derivative rule of its own, by ``through``, the weights of the error."""
    apply = of(kind, PLAIN)

    @jax.custom_vjp
    def readout(z, out, through):
        return apply(z, out)

    def backward(kept, error):
        z, out, through = kept
        (to_z,) = jax.vjp(lambda z: apply(z, through), z)[1](error)
        (to_out,) = jax.vjp(lambda out: apply(z, out), out)[1](error)
        return to_z, to_out, jax.tree.map(jnp.zeros_like, through)

    readout.defvjp(lambda z, out, through: (apply(z, out), (z, out, through)), backward)
    return readout


def by_time(kind, through, only=None):
    """The gradient of the losses, or of one of them; ``through(out, t)``."""
    readout = sent_back(kind)

    def step(params, carry, at):
        x, t = at
        apply = lambda z, out: readout(z, out, through(out, t))
        return cell(apply, PLAIN, params, carry, x)

    counts = None if only is None else np.arange(T) == only
    data = weights(kind), start(), (XS, np.arange(T)), targets(kind), loss
    return oracles.by_time(step, *data, counts)


@functools.cache
def learner_of(kind, rule):
    online = functional.online(functools.partial(cell, of(kind, OPS), OPS), rule)
    return online, online.init(weights(kind), start(), XS[0])


def drawn(kind, rule):
    """What the learner drew, by name of the weight."""
    graph = learner_of(kind, rule)[0].graph
    ((_, numbers),) = graph.feedback.items()
    return {
        'A' if name == 'lora_a' else 'w': graph.program.constants[v] for name, v in numbers.items()
    }


def over_sequence(kind, rule, window=None, inside='trace'):
    learner, state = learner_of(kind, rule)
    run = learner.sequence_grad(loss, window=window, reduction='sum', inside=inside)
    return quick(run)(weights(kind), state, XS, targets(kind))


RANDOM = rules.rflo()
ADAPTIVE = rules.e_prop(feedback=Feedback('adaptive', decay=DECAY, seed=2))


def fading(offset):
    return lambda out, t: jax.tree.map(lambda w, b: w + (1 - DECAY) ** t * b, out, offset)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('kind', READOUTS)
def test_random_feedback_is_that_of_an_op_with_a_rule_of_its_own(kind):
    through = drawn(kind, RANDOM)
    want = by_time(kind, lambda out, t: through)
    assert_moves(want)
    assert_close(over_sequence(kind, RANDOM, 2)[0], want)


@pytest.mark.slow
@pytest.mark.parametrize('kind', READOUTS)
def test_adaptive_feedback_comes_nearer_to_the_weights_at_each_step(kind):
    want = by_time(kind, fading(drawn(kind, ADAPTIVE)))
    assert_close(over_sequence(kind, ADAPTIVE, 2)[0], want)
    symmetric = over_sequence(kind, rules.d_rtrl(), 2)[0]
    assert np.abs(symmetric['in'] - want['in']).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize('inside, window', [('trace', 1), ('exact', 2), ('exact', None)])
def test_adaptive_feedback_counts_steps_in_every_window(inside, window):
    want = by_time('matmul', fading(drawn('matmul', ADAPTIVE)))
    grads, _, _, state = over_sequence('matmul', ADAPTIVE, window, inside)
    assert_close(grads, want)
    assert int(state.trace['(feedback)']) == T


@pytest.mark.slow
def test_adaptive_feedback_gets_the_updates_of_the_weights():
    """An update after each step, by the gradient that each weight has then."""
    learner, state = learner_of('matmul', ADAPTIVE)
    optimizer, params = optax.sgd(0.1), weights('matmul')
    train = jax.jit(learner.sequence_update(loss, optimizer))
    got = train(params, optimizer.init(params), state, XS, targets('matmul'))[0]
    offset = drawn('matmul', ADAPTIVE)
    step = jax.jit(learner.grad(loss))
    for t in range(T):
        B = jax.tree.map(lambda w, b, t=t: w + (1 - DECAY) ** t * b, params['out'], offset)
        grads, _, _, state = step(params, state, XS[t], targets('matmul')[t])
        if t == 0:
            assert_close(grads, by_time('matmul', lambda out, t, B=B: B, only=0))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert_close(got, params)


def test_options_change_the_numbers():
    named = drawn('matmul', RANDOM)['w']
    for options in ({'seed': 1}, {'scale': 0.7}):
        rule = rules.e_prop(feedback=Feedback('random', **options))
        assert np.abs(drawn('matmul', rule)['w'] - named).max() > 0.1
    assert drawn('matmul', RANDOM)['w'].std() == pytest.approx(N**-0.5, rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize('rule', [rules.same_step(), rules.es_d_rtrl(0.5)])
def test_other_rules_take_feedback(rule):
    random = rule.with_feedback(Feedback('random'))
    through = drawn('matmul', random)
    (params, learner, state), zs = (weights('matmul'), *learner_of('matmul', random)), XS[0]
    got = learner.grad(loss)(params, state, zs, targets('matmul')[0]).grads
    assert_close(got, by_time('matmul', lambda out, t: through, only=0))
