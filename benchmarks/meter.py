"""The gradient meter against BPTT: `python benchmarks/meter.py [SEEDS] [SAMPLES]`.

Four networks at fixed weights: the cosine of D_RTRL by the meter and by BPTT, over seeds; the time
of updates of which one in ten is metered; the bytes of the meter; the time of `compare_rules`.
"""

from __future__ import annotations

import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import braintrace
from braintrace import functional, rules, verify

UNITS, BATCH, INPUTS, STEPS = 16, 8, 3, 30


def matrix(key: int, rows: int, columns: int, gain: float = 1.0) -> jax.Array:
    return gain * jax.random.normal(jax.random.key(key), (rows, columns)) / np.sqrt(rows)


def joined(*arrays):
    return jnp.concatenate(arrays, -1)


def gru_step(p, h, x):
    z = jax.nn.sigmoid(braintrace.matmul(joined(x, h), p['z']))
    r = jax.nn.sigmoid(braintrace.matmul(joined(x, h), p['r']))
    return (1 - z) * h + z * jnp.tanh(braintrace.matmul(joined(x, r * h), p['h']))


def gru_params(key: int, inputs: int, units: int) -> dict:
    return {c: matrix(key + i, inputs + units, units) for i, c in enumerate('zrh')}


def gru(p, h, x):
    h = gru_step(p, h, x)
    return h @ p['out'], h


def two_grus(p, h, x):
    first = gru_step(p['first'], h[0], x)
    second = gru_step(p['second'], h[1], first)
    return second @ p['out'], (first, second)


def min_lstm(p, c, x):
    f, i = (jax.nn.sigmoid(braintrace.matmul(x, p[k])) for k in 'fi')
    c = (f * c + i * braintrace.matmul(x, p['h'])) / (f + i)
    return c @ p['out'], c


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.defjvp(lambda p, t: (spike(p[0]), t[0] * 0.3 * jnp.maximum(1 - jnp.abs(p[0]), 0)))


def lif_and_alif(p, state, x):
    v, z, u, a, s = state
    v = 0.9 * v + braintrace.matmul(joined(x, z), p['lif']) - jax.lax.stop_gradient(z)
    z = spike(v - 0.5)
    u = 0.95 * u + braintrace.matmul(joined(z, s), p['alif']) - jax.lax.stop_gradient(s)
    a = 0.99 * a + s
    s = spike(u - 0.5 - 0.2 * a)
    return s @ p['out'], (v, z, u, a, s)


def networks(units: int = UNITS, batch: int = BATCH) -> dict:
    h, n = jnp.zeros((batch, units)), units
    out, gru_ = {'out': matrix(9, n, 2)}, gru_params(1, INPUTS, n)
    both = {'first': gru_, 'second': gru_params(11, n, n)}
    spiking = {'lif': matrix(1, INPUTS + n, n, 1.5), 'alif': matrix(2, 2 * n, n, 1.5)}
    gates = {k: matrix(i, INPUTS, n) for i, k in enumerate('fih')}
    return {
        'GRU': (gru, gru_ | out, h),
        'two GRUs': (two_grus, both | out, (h, h)),
        'LIF and ALIF': (lif_and_alif, spiking | out, (h,) * 5),
        'minLSTM': (min_lstm, gates | out, h),
    }


def loss(outputs, target):
    return jnp.mean((outputs - target) ** 2)


def data(key: int, steps: int, batch: int):
    xs = jax.random.normal(jax.random.key(key), (steps, batch, INPUTS))
    return xs, jnp.roll(xs[..., :2], 5, 0)


def dot(a, b) -> float:
    return float(sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))))


def accuracy(name: str, seeds: int, samples: int) -> str:
    """The meter beside BPTT at other data for each seed; directions of 100 at once."""
    cell, params, carry = networks()[name]
    learner = functional.online(cell, rules.d_rtrl())
    meter = verify.Meter(learner, loss, directions=100, keep=samples)
    state = learner.init(params, carry, jnp.zeros((BATCH, INPUTS)))
    gradient = jax.jit(learner.sequence_grad(loss, keep_trace=False))
    true_of = jax.jit(lambda xs, ys: verify.bptt_gradients(cell, params, carry, xs, ys, loss))

    @jax.jit
    def read(key, xs, ys, grads):
        step = lambda m, _: (meter.update(m, params, carry, xs, ys, grads), None)
        return jax.lax.scan(step, meter.init(params, carry, key), length=samples // 100)[0]

    off, within = [], 0
    for seed in range(seeds):
        xs, ys = data(seed, STEPS, BATCH)
        grads, true = gradient(params, state, xs, ys).grads, true_of(xs, ys)
        want = dot(grads, true) / np.sqrt(dot(grads, grads) * dot(true, true))
        got = meter.reading(read(jax.random.key(seed), xs, ys, grads)).cosine
        off.append(abs(got.value - want))
        within += off[-1] <= max(3 * got.error, 1e-5)
    return (
        f'{name}: cosine of the last seed {got} (BPTT {want:.3f}); farthest off {max(off):.3f}; '
        f'within three errors in {within} of {seeds} seeds of {samples} samples'
    )


def best_of(calls: dict, times: int = 12) -> dict[str, float]:
    """Milliseconds, the calls in turn."""
    found: dict[str, list] = {name: [] for name in calls}
    for _ in range(times):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            found[name].append(1e3 * (time.perf_counter() - start))
    return {name: min(ms) for name, ms in found.items()}


def costs() -> list[str]:
    cell, params, carry = networks(64, 16)['GRU']
    learner = functional.online(cell, rules.d_rtrl())
    xs, ys = data(0, 100, 16)
    state = learner.init(params, carry, xs[0])
    meter = verify.Meter(learner, loss)
    metered = meter.init(params, carry)
    gradient = learner.sequence_grad(loss, keep_trace=False)

    @jax.jit
    def plain(params, state, xs, ys):
        return gradient(params, state, xs, ys).grads

    @jax.jit
    def both(metered, params, state, xs, ys):
        grads = gradient(params, state, xs, ys).grads
        return grads, meter.update(metered, params, carry, xs, ys, grads)

    at = params, state, xs, ys
    calls = {'plain': lambda: plain(*at), 'metered': lambda: both(metered, *at)}
    best_of(calls, 1)
    ms = best_of(calls)
    one_in_ten = 0.9 + 0.1 * ms['metered'] / ms['plain']
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    beside = size((metered.directions, metered.tangents))
    start = time.perf_counter()
    found = verify.compare_rules(learner, xs, ys, loss, params=params, carry=carry)
    seconds = time.perf_counter() - start
    return [
        f'GRU of 64 units, 100 steps, 16 samples, 4 directions: an update {ms["plain"]:.0f} ms, a '
        f'metered one {ms["metered"]:.0f} ms; one in ten metered {one_in_ten:.2f} x without',
        f'directions and tangents {beside} bytes; 4 x (parameters + states) = '
        f'{4 * size((params, carry))}; samples that are kept {size(metered.samples)} bytes',
        f'compare_rules: {seconds:.0f} s with compilation, {found}',
    ]


def main(seeds: int = 100, samples: int = 3000) -> None:
    warnings.simplefilter('ignore', braintrace.errors.BraintraceWarning)
    for line in costs():
        print(line, flush=True)
    for name in networks():
        print(accuracy(name, seeds, samples), flush=True)


if __name__ == '__main__':
    main(*map(int, sys.argv[1:]))
