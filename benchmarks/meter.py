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


def paired(ten_plain, one_metered, turns: int = 30) -> tuple[float, float, float]:
    """Milliseconds of both, and the median of their ratios; the calls in turn."""
    found = []
    for turn in range(turns + 1):
        ms = []
        for call in (ten_plain, one_metered):
            start = time.perf_counter()
            call()
            ms.append(1e3 * (time.perf_counter() - start))
        if turn:  # the first one compiles
            found.append(ms)
    a, b = np.array(found).T
    return float(np.median(a)), float(np.median(b)), float(np.median(b / a))


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

    def updates(number: int) -> None:
        for _ in range(number):
            jax.block_until_ready(plain(params, state, xs, ys))

    def one_metered() -> None:
        updates(9)
        jax.block_until_ready(both(metered, params, state, xs, ys))

    without, with_it, ratio = paired(lambda: updates(10), one_metered)
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    beside = size((metered.directions, metered.tangents))
    wall, cpu = time.perf_counter(), time.process_time()
    found = verify.compare_rules(learner, xs, ys, loss, params=params, carry=carry)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return [
        f'GRU of 64 units, 100 steps, 16 samples, 4 directions: ten updates {without:.1f} ms, with '
        f'one of them metered {with_it:.1f} ms; median of paired ratios {ratio:.2f}',
        f'directions and tangents {beside} bytes; 4 x (parameters + states) = '
        f'{4 * size((params, carry))}; samples that are kept {size(metered.samples)} bytes',
        f'compare_rules: {wall:.0f} s with compilation, {cpu:.0f} s of the CPU, {found}',
    ]


def main(seeds: int = 100, samples: int = 3000) -> None:
    warnings.simplefilter('ignore', braintrace.errors.BraintraceWarning)
    for line in costs():
        print(line, flush=True)
    for name in networks():
        print(accuracy(name, seeds, samples), flush=True)


if __name__ == '__main__':
    main(*map(int, sys.argv[1:]))
