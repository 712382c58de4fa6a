"""Draws `meter.svg`: the cosine of learning rules over training, by the gradient meter and by BPTT.

A GRU learns to repeat its input of five steps ago, by each rule. `python docs/pictures/meter.py
[FILE]` needs matplotlib and optax, and takes about a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from drawing import BLUE, FAINT, GREEN, INK, ORANGE, PINK, save, style, target
from matplotlib.figure import Figure

import braintrace
from braintrace import functional, rules, verify

UNITS, BATCH, INPUTS, STEPS, DELAY = 16, 8, 2, 30, 5
UPDATES, PART = 400, 50
RULES = {
    'same step': (rules.same_step(), FAINT),
    'ES 0.9': (rules.es_d_rtrl(0.9), ORANGE),
    'ES 0.99': (rules.es_d_rtrl(0.99), PINK),
    'D_RTRL': (rules.d_rtrl(), BLUE),
    'D_RTRL, whole credit': (rules.d_rtrl(credit='whole'), GREEN),
}


def matrix(key: int, rows: int, columns: int) -> jax.Array:
    return jax.random.normal(jax.random.key(key), (rows, columns)) / np.sqrt(rows)


def gru(p, h, x):
    joined = jnp.concatenate([x, h], -1)
    z, r = (jax.nn.sigmoid(braintrace.matmul(joined, p[k])) for k in 'zr')
    new = jnp.tanh(braintrace.matmul(jnp.concatenate([x, r * h], -1), p['h']))
    h = (1 - z) * h + z * new
    return h @ p['out'], h


def loss(output, aim):
    return jnp.mean((output - aim) ** 2)


def trained(rule) -> tuple[np.ndarray, list]:
    """The products of the gradients at each update, and a reading of each part of training."""
    learner, optimizer = functional.online(gru, rule), optax.adam(3e-3)
    params = {k: matrix(i, INPUTS + UNITS, UNITS) for i, k in enumerate('zrh')}
    params, carry = params | {'out': matrix(9, UNITS, INPUTS)}, jnp.zeros((BATCH, UNITS))
    state = learner.init(params, carry, jnp.zeros((BATCH, INPUTS)))
    gradient = learner.sequence_grad(loss, keep_trace=False)
    meter = verify.Meter(learner, loss, directions=8)

    def dot(a, b):
        return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))

    def update(now, key):
        params, opt_state, metered = now
        xs = jax.random.normal(key, (STEPS, BATCH, INPUTS))
        ys = jnp.roll(xs, DELAY, 0).at[:DELAY].set(0)
        got = gradient(params, state, xs, ys).grads
        metered = meter.update(metered, params, carry, xs, ys, got)
        true = verify.bptt_gradients(gru, params, carry, xs, ys, loss)
        true = jax.tree.map(lambda g: g / STEPS, true)
        updates, opt_state = optimizer.update(got, opt_state)
        products = jnp.stack([dot(got, true), dot(got, got), dot(true, true)])
        return (optax.apply_updates(params, updates), opt_state, metered), products

    part = jax.jit(lambda now, keys: jax.lax.scan(update, now, keys))
    keys, now, found, readings = jax.random.split(jax.random.key(1), UPDATES), None, [], []
    now = params, optimizer.init(params), None
    for i in range(0, UPDATES, PART):
        metered = meter.init(params, carry, jax.random.key(i))
        now, products = part((*now[:2], metered), keys[i : i + PART])
        found.append(np.asarray(products, float).mean(0))
        readings.append(meter.reading(now[2]).cosine)
    return np.array(found), readings


def main(arguments: list[str]) -> Path:
    with style('meter'):
        figure = Figure(figsize=(7.2, 3.8), layout='constrained')
        axes = figure.subplots()
        at = np.arange(0, UPDATES, PART) + PART / 2
        for name, (rule, color) in RULES.items():
            products, readings = trained(rule)
            true = products[:, 0] / np.sqrt(products[:, 1] * products[:, 2])
            axes.plot(at, true, '--', color=color, lw=1)
            values, errors = zip(*((e.value, e.error) for e in readings))
            axes.errorbar(at, values, errors, fmt='o', ms=4, capsize=2, color=color, label=name)
        axes.axhline(1, color=INK, lw=0.6)
        axes.set(xlabel='update', ylabel='cosine to the true gradient', ylim=(-0.05, 1.05))
        figure.legend(loc='outside right center', frameon=False)
        return save(figure, target(arguments, 'meter.svg'))


if __name__ == '__main__':
    print(main(sys.argv[1:]))
