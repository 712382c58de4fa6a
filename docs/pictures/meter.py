"""Draws `meter.svg`: the cosine of learning rules over training, by the gradient meter and by BPTT.

Left a GRU learns to repeat its input of five steps ago, right LIF and ALIF units learn to tell on
which side they saw more cues (`tasks.evidence`), each by several rules. `python
docs/pictures/meter.py [FILE]` needs matplotlib and optax, and takes some minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from drawing import BLUE, FAINT, GREEN, INK, ORANGE, PINK, SKY, save, style, target
from matplotlib.figure import Figure

import braintrace
from braintrace import functional, rules, tasks, verify

LOOKS = {
    'same step': (rules.same_step(), FAINT),
    'ES 0.9': (rules.es_d_rtrl(0.9), ORANGE),
    'ES 0.99': (rules.es_d_rtrl(0.99), PINK),
    'e-prop': (rules.e_prop('auto'), SKY),
    'D_RTRL': (rules.d_rtrl(), BLUE),
    'D_RTRL, whole credit': (rules.d_rtrl(credit='whole'), GREEN),
}
DIRECTIONS, POINTS = 8, 8


class Setting(NamedTuple):
    """A cell with its first weights and states, and ``sample(key) -> xs, ys`` of an update."""

    cell: Callable
    params: dict
    carry: tuple
    sample: Callable
    loss: Callable
    updates: int
    rate: float
    rules: tuple[str, ...]


def matrix(key: int, rows: int, columns: int, gain: float = 1.0) -> jax.Array:
    return gain * jax.random.normal(jax.random.key(key), (rows, columns)) / np.sqrt(rows)


def copying() -> Setting:
    units, batch, inputs, steps, delay = 16, 8, 2, 30, 5

    def gru(p, h, x):
        joined = jnp.concatenate([x, h], -1)
        z, r = (jax.nn.sigmoid(braintrace.matmul(joined, p[k])) for k in 'zr')
        new = jnp.tanh(braintrace.matmul(jnp.concatenate([x, r * h], -1), p['h']))
        h = (1 - z) * h + z * new
        return h @ p['out'], h

    def sample(key):
        xs = jax.random.normal(key, (steps, batch, inputs))
        return xs, jnp.roll(xs, delay, 0).at[:delay].set(0)

    params = {k: matrix(i, inputs + units, units) for i, k in enumerate('zrh')}
    return Setting(
        gru,
        params | {'out': matrix(9, units, inputs)},
        jnp.zeros((batch, units)),
        sample,
        lambda output, aim: jnp.mean((output - aim) ** 2),
        400,
        3e-3,
        tuple(name for name in LOOKS if name != 'e-prop'),  # it has no readout that leaks
    )


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.defjvp(lambda p, t: (spike(p[0]), t[0] * 0.3 * jnp.maximum(1 - jnp.abs(p[0]), 0)))


def evidence() -> Setting:
    task, units, batch = tasks.evidence(), 40, 16
    adapts = 1.0 * (jnp.arange(units) >= units // 2)  # the second half are ALIF units

    def lif_and_alif(p, state, x):
        v, a, z, out = state
        y = braintrace.matmul(jnp.concatenate([x, z], -1), p['W'])
        reset = jax.lax.stop_gradient(z)
        v = 0.6 * v + y - 0.6 * reset
        a = 0.995 * a + reset
        z = spike(v - 0.6 - 0.1 * adapts * a)
        out = 0.6 * out + braintrace.matmul(z, p['out'])
        return out, (v, a, z, out)

    def sample(key):
        batch_ = task.sample(key, batch)
        mask = jnp.broadcast_to(batch_.mask[:, None], batch_.ys.shape)
        return batch_.xs, (batch_.ys, mask)

    def loss(output, target):
        label, asked = target
        losses = optax.softmax_cross_entropy_with_integer_labels(output, label)
        return jnp.mean(asked * losses) * task.steps / 15  # it is asked at 15 steps

    rest = jnp.zeros((batch, units))
    return Setting(
        lif_and_alif,
        {'W': matrix(0, task.inputs + units, units, 1.5), 'out': matrix(9, units, 2)},
        (rest, rest, rest, jnp.zeros((batch, 2))),
        sample,
        loss,
        200,
        1e-2,
        tuple(LOOKS),
    )


def trained(setting: Setting, rule) -> tuple[np.ndarray, list, np.ndarray]:
    """In parts of training: products of the gradients, readings of the meter, losses."""
    cell, params, carry, sample, loss = setting[:5]
    learner, optimizer = functional.online(cell, rule), optax.adam(setting.rate)
    example, _ = sample(jax.random.key(0))
    state = learner.init(params, carry, example[0])
    gradient = learner.sequence_grad(loss, keep_trace=False)
    meter = verify.Meter(learner, loss, directions=DIRECTIONS)

    def dot(a, b):
        return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))

    def update(now, key):
        params, opt_state, metered = now
        xs, ys = sample(key)
        found = gradient(params, state, xs, ys)
        metered = meter.update(metered, params, carry, xs, ys, found.grads)
        true = verify.bptt_gradients(cell, params, carry, xs, ys, loss)
        true = jax.tree.map(lambda g: g / len(xs), true)
        updates, opt_state = optimizer.update(found.grads, opt_state)
        products = [dot(found.grads, b) for b in (true, found.grads)] + [dot(true, true)]
        now = optax.apply_updates(params, updates), opt_state, metered
        return now, jnp.stack([*products, found.losses.mean()])

    part = jax.jit(lambda now, keys: jax.lax.scan(update, now, keys))
    keys = jax.random.split(jax.random.key(1), setting.updates)
    now, rows, readings = (params, optimizer.init(params), None), [], []
    for i, some in enumerate(jnp.split(keys, POINTS)):
        metered = meter.init(params, carry, jax.random.key(i))
        now, seen = part((*now[:2], metered), some)
        rows.append(np.asarray(seen, float).mean(0))
        readings.append(meter.reading(now[2]).cosine)
    *products, losses = np.array(rows).T
    return np.array(products), readings, losses


def panel(axes, setting: Setting) -> None:
    at = (np.arange(POINTS) + 0.5) * setting.updates / POINTS
    for name in setting.rules:
        rule, color = LOOKS[name]
        (both, own, true), readings, losses = trained(setting, rule)
        axes.plot(at, both / np.sqrt(own * true), '--', color=color, lw=1)
        values, errors = zip(*((e.value, e.error) for e in readings))
        axes.errorbar(at, values, errors, fmt='o', ms=4, capsize=2, color=color, label=name)
        off = max(abs(v - t) for v, t in zip(values, both / np.sqrt(own * true)))
        print(f'{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}; farthest from BPTT {off:.3f}')
    axes.axhline(1, color=INK, lw=0.6)
    axes.set(xlabel='update', ylim=(-0.15, 1.05))


def main(arguments: list[str]) -> Path:
    with style('meter'):
        figure = Figure(figsize=(7.2, 3.8), layout='constrained')
        left, right = figure.subplots(1, 2, sharey=True)
        panel(left, copying())
        panel(right, evidence())
        left.set(title='a GRU on copy', ylabel='cosine to the true gradient')
        right.set(title='LIF and ALIF on evidence')
        figure.legend(*right.get_legend_handles_labels(), loc='outside lower center', ncols=3)
        return save(figure, target(arguments, 'meter.svg'))


if __name__ == '__main__':
    print(main(sys.argv[1:]))
