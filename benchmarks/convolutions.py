"""A convolution in a loop over time: ``braintrace.conv`` beside ``jax.lax.conv_general_dilated``.

python benchmarks/convolutions.py

Each row is a layer, its padding ``'SAME'``. Milliseconds a step of ours and of JAX's, and their
ratio, for the values, for values and both derivatives, and for forward mode, which pays for these:
medians of turns in which both run.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

import braintrace

STEPS, TURNS = 20, 7
# name: the axes of x, kernel and y, and the sizes of x and kernel in this order
ROWS = {
    '28 x 28, 1 to 8 channels, stride 2': (
        *(('NHWC', 'HWIO', 'NHWC'), (16, 28, 28, 1), (3, 3, 1, 8)),
        {'strides': 2},
    ),
    '16 x 16, 16 to 32 channels': (
        *(('NHWC', 'HWIO', 'NHWC'), (32, 16, 16, 16), (3, 3, 16, 32)),
        {},
    ),
    'the same, channels in front': (
        *(('NCHW', 'OIHW', 'NCHW'), (32, 16, 16, 16), (32, 16, 3, 3)),
        {},
    ),
    '16 x 16, 32 channels, each alone': (
        *(('NHWC', 'HWIO', 'NHWC'), (16, 16, 16, 32), (3, 3, 1, 32)),
        {'feature_group_count': 32},
    ),
    'one sample, 20 x 20, 8 to 16 channels, 5 x 5': (
        *(('NHWC', 'HWIO', 'NHWC'), (1, 20, 20, 8), (5, 5, 8, 16)),
        {},
    ),
    'sound of 100 samples, 20 to 32 channels': (
        *(('NWC', 'WIO', 'NWC'), (16, 100, 20), (9, 20, 32)),
        {},
    ),
    'volume of 8 x 8 x 8, 4 to 8 channels': (
        *(('NXYZC', 'XYZIO', 'NXYZC'), (4, 8, 8, 8, 4), (3, 3, 3, 4, 8)),
        {},
    ),
}


def values(convolve, kernel, xs):
    return jax.lax.scan(lambda total, x: (total + convolve(x, kernel).sum(), None), 0.0, xs)[0]


def gradients(convolve, kernel, xs):
    def step(total, x):
        y, pull = jax.vjp(convolve, x, kernel)
        of_x, of_kernel = pull(jnp.cos(y))
        return total + of_kernel, of_x.sum()

    return jax.lax.scan(step, jnp.zeros_like(kernel), xs)


def forward_mode(convolve, kernel, xs):
    def step(total, x):
        return total + jax.jvp(convolve, (x, kernel), (x, kernel))[1].sum(), None

    return jax.lax.scan(step, 0.0, xs)[0]


def by_jax(x, kernel, strides=1, **options):
    return jax.lax.conv_general_dilated(x, kernel, (strides,) * (x.ndim - 2), 'SAME', **options)


def main():
    rng = np.random.default_rng(0)
    print(f'JAX {jax.__version__}, {jax.default_backend()}')
    for name, (layout, *shapes, options) in ROWS.items():
        x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
        xs, options = jnp.stack([x] * STEPS), options | {'dimension_numbers': layout}
        told = []
        for task in (values, gradients, forward_mode):
            ways = [
                jax.jit(partial(task, partial(f, **options))) for f in (braintrace.conv, by_jax)
            ]
            a, b = (jax.block_until_ready(run(kernel, xs)) for run in ways)
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-2), a, b)
            times = [[], []]
            for _ in range(TURNS):
                for run, of_run in zip(ways, times):
                    start = time.perf_counter()
                    jax.block_until_ready(run(kernel, xs))
                    of_run.append(time.perf_counter() - start)
            ours, theirs = (median(t) / STEPS * 1e3 for t in times)
            told.append(f'{task.__name__} {ours:.2f} / {theirs:.2f} = {ours / theirs:.2f}')
        print(f'  {name}: {"; ".join(told)}', flush=True)


if __name__ == '__main__':
    main()
