"""The gradient meter against BPTT: `python benchmarks/meter.py [SEEDS] [SAMPLES]`.

Four networks at fixed weights: the cosine of D_RTRL by the meter and by BPTT, over seeds; the time
of updates of which one in ten is metered; the bytes of the meter; the time of `compare_rules`.
"""

from __future__ import annotations

import sys
import time
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from cells import Spec, cell, data, initial, loss_of
from runner import in_turn, seconds

import braintrace
from braintrace import functional, rules, verify

SMALL = {'units': 16, 'inputs': 3, 'steps': 30, 'batch': 8}
NETWORKS = {
    'GRU': Spec('gru', **SMALL),
    'two GRUs': Spec('gru', **SMALL, layers=2),
    'ALIF': Spec('alif', **SMALL),
    'minGRU': Spec('mingru', **SMALL),
}


def dot(a, b) -> float:
    return float(sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))))


def accuracy(name: str, seeds: int, samples: int) -> str:
    """The meter beside BPTT at other data for each seed; directions of 100 at once."""
    spec = NETWORKS[name]
    run, (params, carry) = partial(cell, spec), initial(spec)
    learner = functional.online(run, rules.d_rtrl())
    meter = verify.Meter(learner, loss_of, directions=100, keep=samples)
    state = learner.init(params, carry, data(spec)[0][0])
    gradient = jax.jit(learner.sequence_grad(loss_of, keep_trace=False))
    true_of = jax.jit(lambda xs, ys: verify.bptt_gradients(run, params, carry, xs, ys, loss_of))

    @jax.jit
    def read(key, xs, ys, grads):
        step = lambda m, _: (meter.update(m, params, carry, xs, ys, grads), None)
        return jax.lax.scan(step, meter.init(params, carry, key), length=samples // 100)[0]

    off, within = [], 0
    for seed in range(seeds):
        xs, ys = data(spec, seed)
        grads, true = gradient(params, state, xs, ys).grads, true_of(xs, ys)
        want = dot(grads, true) / np.sqrt(dot(grads, grads) * dot(true, true))
        got = meter.reading(read(jax.random.key(seed), xs, ys, grads)).cosine
        off.append(abs(got.value - want))
        within += off[-1] <= max(3 * got.error, 1e-5)
    return (
        f'{name}: cosine of the last seed {got} (BPTT {want:.3f}); farthest off {max(off):.3f}; '
        f'within three errors in {within} of {seeds} seeds of {samples} samples'
    )


def costs() -> list[str]:
    spec = Spec('gru', 64, 3, 100, 16)
    (params, carry), (xs, ys) = initial(spec), data(spec)
    learner = functional.online(partial(cell, spec), rules.d_rtrl())
    state = learner.init(params, carry, xs[0])
    meter = verify.Meter(learner, loss_of)
    metered = meter.init(params, carry)
    gradient = learner.sequence_grad(loss_of, keep_trace=False)

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

    calls = {'plain': lambda: updates(10), 'metered': one_metered}
    times = in_turn({name: partial(seconds, call) for name, call in calls.items()}, 31)
    a, b = (1e3 * np.array(of[1:]) for of in times.values())  # the first turn compiles
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    beside = size((metered.directions, metered.tangents))
    wall, cpu = time.perf_counter(), time.process_time()
    found = verify.compare_rules(learner, xs, ys, loss_of, params=params, carry=carry)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return [
        f'GRU of 64 units, 100 steps, 16 samples, 4 directions: ten updates {np.median(a):.1f} ms, '
        f'with one of them metered {np.median(b):.1f} ms; median of paired ratios '
        f'{np.median(b / a):.2f}',
        f'directions and tangents {beside} bytes; 4 x (parameters + states) = '
        f'{4 * size((params, carry))}; samples that are kept {size(metered.samples)} bytes',
        f'compare_rules: {wall:.0f} s with compilation, {cpu:.0f} s of the CPU, {found}',
    ]


def main(seeds: int = 100, samples: int = 3000) -> None:
    warnings.simplefilter('ignore', braintrace.errors.BraintraceWarning)
    for line in costs():
        print(line, flush=True)
    for name in NETWORKS:
        print(accuracy(name, seeds, samples), flush=True)


if __name__ == '__main__':
    main(*map(int, sys.argv[1:]))
