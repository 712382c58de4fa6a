"""e-prop of the library against losses that others published, over five updates.

NEST: ``test_eprop_bsshslm_2020_plasticity.py`` of its test suite, at commit 28b4f556; TensorFlow:
the code of the authors of e-prop, as run for that test. Networks, data and updates are written here
from a description of them. The largest relative differences measured in float64:

=========================== ======= ==========
task                        NEST    TensorFlow
=========================== ======= ==========
regression                  7.8e-15 6.0e-8
classification, one sample  1.5e-12 1.5e-7
classification, two samples 6.7e-13
=========================== ======= ==========
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, rules
from tests import oracles

UNITS, UPDATES, TRACED = 100, 5, 250  # steps in a window, so that a later one reads the trace
stop, matmul = jax.lax.stop_gradient, braintrace.matmul


@dataclasses.dataclass(frozen=True, eq=False)
class Given(braintrace.Feedback):
    """Feedback weights that are given."""

    weights: np.ndarray | None = None

    def draw(self, op, constants):
        return {'weight': self.weights}


def single(array):
    """Weights as the published tests round them."""
    return array.astype(np.float32).astype(float)


def learner_of(cell, kappa, B):
    rule = rules.e_prop(kappa, Given('random', weights=B))
    return functional.online(cell, rule)


def gradient_of(learner, loss, params, carry, x):
    """``(params, xs, ys) -> gradient`` of a sequence; a unit does not read itself."""
    state = learner.init(params, carry, x)
    run = learner.sequence_grad(loss, window=TRACED, reduction='sum')

    def gradient(params, xs, ys):
        grads = run(params, state, xs, ys)[0]
        return {**grads, 'rec': grads['rec'] * (1 - np.eye(UNITS))}

    return gradient


def outputs(cell, params, carry, xs):
    return jax.lax.scan(lambda carry, x: cell(params, carry, x)[::-1], carry, xs)[1]


def by_rate(spikes, scale):
    """For each spike the derivative of the loss by the firing rates, which shall be 0.01."""
    rates = spikes.mean(0)
    return jnp.broadcast_to(300 * (rates - 0.01) * scale / len(spikes), spikes.shape)


def surrogate(threshold, height):
    """A spike where ``height > 0``, with the derivative of a triangle."""
    slope = 0.3 / threshold * jnp.maximum(0, 1 - jnp.abs(height) / threshold)
    return stop((height > 0) * 1.0 - slope * height) + stop(slope) * height


# regression -----------------------------------------------------------------------------------


def patterns():
    """``(params, B, inputs, target)`` in the order of the published draws."""
    rng, steps = np.random.RandomState(1), 1000
    params = {'in': single(rng.randn(100, UNITS) / 10), 'rec': single(rng.randn(UNITS, UNITS) / 10)}
    params['out'], B = (single(rng.randn(UNITS, 1) / 10) for _ in range(2))
    np.fill_diagonal(params['rec'], 0)
    xs = (rng.rand(steps, 100) < 0.05) * 1.0
    xs[0] = 0
    amplitudes, phases = rng.uniform(0.5, 2, 4), rng.uniform(0, 2 * np.pi, 4)
    waves = [
        a * np.sin(np.linspace(f, f + 2 * np.pi * (steps // period), steps))
        for a, f, period in zip(amplitudes, phases, (1000, 500, 333, 200), strict=True)
    ]
    target = sum(waves) - sum(waves)[0]
    return params, B, xs[:, None], (target / np.abs(target).max())[:, None, None]


LEAK = float(np.exp(-1 / 30))


def lif(params, carry, x, leak=LEAK, threshold=0.03):
    z = stop(carry['z'])
    current = matmul(x, params['in']) + matmul(z, params['rec'])
    v = leak * carry['v'] + (1 - leak) * current - threshold * z
    z = surrogate(threshold, v - threshold)
    y = leak * carry['y'] + (1 - leak) * matmul(z, params['out'])
    return (y, z), {'v': v, 'z': z, 'y': y}


@pytest.mark.slow
def test_regression():
    params, B, xs, targets = patterns()
    carry = {'v': np.zeros((1, UNITS)), 'z': np.zeros((1, UNITS)), 'y': np.zeros((1, 1))}

    def loss(made, wanted):
        (y, z), (target, of_rate) = made, wanted
        return 0.5 * ((y - target) ** 2).sum() + (of_rate * z).sum()

    learner = learner_of(lif, LEAK, B)
    gradient = gradient_of(learner, loss, params, carry, xs[0])

    @functools.partial(jax.jit, compiler_options=oracles.QUICK)
    def update(params):
        ys, spikes = outputs(lif, params, carry, xs)
        grads = gradient(params, xs, (targets, by_rate(spikes, 1)))
        new = jax.tree.map(lambda p, g: p - 1e-4 * g, params, grads)
        return 0.5 * ((ys - targets) ** 2).sum(), new

    losses = []
    for _ in range(UPDATES):
        loss_before, params = update(params)
        losses.append(float(loss_before))
    nest = [101.964356999041, 103.466731126205, 103.340607074771, 103.680244037686]
    tensorflow = [101.964363098144, 103.466735839843, 103.340606689453, 103.680244445800]
    np.testing.assert_allclose(losses, [*nest, 104.412775748752], rtol=1e-12)
    np.testing.assert_allclose(losses, [*tensorflow, 104.412780761718], rtol=1e-7)


# classification -------------------------------------------------------------------------------

STEPS, RECALL = 2250, 150


def cues(batch):
    """``(params, B, [(inputs, label) of each update])`` in the order of the published draws."""
    rng, bound = np.random.RandomState(1), np.sqrt(3 / 51)
    params = {'in': single(rng.randn(40, UNITS) / np.sqrt(40))}
    params['rec'] = single(rng.randn(UNITS, UNITS) / 10)
    params['out'] = single(rng.uniform(-bound, bound, (UNITS, 2)))
    B, data = single(rng.randn(UNITS, 2)), []
    np.fill_diagonal(params['rec'], 0)
    for _ in range(UPDATES):
        chances = [np.array([0.3, 0.7], np.float32), np.array([0.7, 0.3], np.float32)]
        sides = [rng.choice([0, 1], 7, p=chances[i]) for i in rng.choice([0, 1], batch)]
        rates = np.zeros((batch, STEPS, 40))
        rates[:, :, 30:], rates[:, -RECALL:, 20:30] = 0.01, 0.04
        for sample, of_sample in enumerate(sides):
            for k, side in enumerate(of_sample):
                on = slice(RECALL * k + 50, RECALL * (k + 1))
                rates[sample, on, 10 * side : 10 * side + 10] = 0.04
        spikes = (rng.rand(batch, STEPS, 40) < rates) * 1.0
        spikes[:, 0] = 0
        labels = np.eye(2)[[int(of_sample.sum() > 3) for of_sample in sides]]
        data.append((spikes.transpose(1, 0, 2), labels))
    return params, B, data


FAST, SLOW = float(np.exp(-1 / 20)), float(np.exp(-1 / 2000))
BETA = np.repeat([0.0, 1.7 * (1 - SLOW) / (1 - FAST)], UNITS // 2)


def adaptive(params, carry, x, threshold=0.6):
    """Half of the units adapt; a unit that fired rests."""
    z = stop(carry['z'])
    current = matmul(x, params['in']) + matmul(z, params['rec'])
    v = FAST * carry['v'] + current - threshold * z
    b = SLOW * carry['b'] + carry['z']
    rest = jnp.maximum(carry['rest'] - 1, 0)
    z = jnp.where(rest > 0, 0.0, surrogate(threshold, v - threshold - BETA * b))
    rest = jnp.where(z > 0, 5, rest)
    y = FAST * carry['y'] + (1 - FAST) * matmul(z, params['out'])
    return (y, z), {'v': v, 'b': b, 'z': z, 'y': y, 'rest': rest}


def adam(params, grads, means, squares, k):
    """Adam with the small number outside of the correction, as the published tests have it."""
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, grads)
    squares = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, squares, grads)
    rate = 5e-3 * jnp.sqrt(1 - 0.999**k) / (1 - 0.9**k)
    moved = jax.tree.map(
        lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), params, means, squares
    )
    return moved, means, squares


def classified(batch):
    """The losses before each update."""
    params, B, data = cues(batch)
    zeros, integers = np.zeros((batch, UNITS)), np.zeros((batch, UNITS), np.int32)
    carry = {'v': zeros, 'b': zeros, 'z': zeros, 'rest': integers, 'y': np.zeros((batch, 2))}
    recalled = np.repeat([0.0, 1 / (RECALL * batch)], [STEPS - RECALL, RECALL])

    def loss(made, wanted):
        (y, z), (label, weight, of_rate) = made, wanted
        return -(jax.nn.log_softmax(y) * label).sum() * weight + (of_rate * z).sum()

    learner = learner_of(adaptive, FAST, B)
    gradient = gradient_of(learner, loss, params, carry, data[0][0][0])

    @functools.partial(jax.jit, compiler_options=oracles.QUICK)
    def update(learnt, k, xs, label):
        ys, spikes = outputs(adaptive, learnt[0], carry, xs)
        labels = jnp.broadcast_to(label, (STEPS, *label.shape))
        wanted = labels, recalled, by_rate(spikes, 1 / (RECALL * batch))
        grads = gradient(learnt[0], xs, wanted)
        value = -(jax.nn.log_softmax(ys[-RECALL:]) * label).sum(-1).mean()
        return value, adam(learnt[0], grads, *learnt[1:], k)

    nothing = jax.tree.map(np.zeros_like, params)
    learnt, losses = (params, nothing, nothing), []
    for k, (xs, label) in enumerate(data):
        value, learnt = update(learnt, k + 1.0, xs, label)
        losses.append(float(value))
    return losses


@pytest.mark.slow
def test_classification_of_one_sample():
    losses = classified(1)
    nest = [0.741152550006, 0.740388187700, 0.665785233177, 0.663644193322, 0.729428962844]
    tensorflow = [0.741152524948, 0.740388214588, 0.665785133838, 0.663644134998, 0.729429066181]
    np.testing.assert_allclose(losses, nest, rtol=1e-11)
    np.testing.assert_allclose(losses, tensorflow, rtol=1e-6)


@pytest.mark.nightly
def test_classification_of_two_samples():
    nest = [0.702163370672, 0.735555303152, 0.740354864111, 0.683882815282, 0.707841122268]
    np.testing.assert_allclose(classified(2), nest, rtol=1e-11)
