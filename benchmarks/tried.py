"""Times of several ways to read, write and keep a trace, which ``docs/performance.md`` lists under
"What was tried".

python benchmarks/tried.py
"""

from __future__ import annotations

import re
import time

import jax
import jax.numpy as jnp
import numpy as np

B, I, O, T = 16, 1024, 512, 48
TRACE = f'f32[{B},{I},{O}]'


def draw(k, *shape):
    return jax.random.normal(jax.random.key(k), shape)


def timed(name, fn, *args, donate=(), repeats=9, per=1):
    run, times = jax.jit(fn, donate_argnums=donate), []
    text = run.lower(*args).compile().as_text()
    copies = len(re.findall(re.escape(TRACE) + r'\S* copy\(', text))
    for _ in range(repeats):
        given = jax.block_until_ready(
            [jnp.array(a) if i in donate else a for i, a in enumerate(args)]
        )
        start = time.perf_counter()
        jax.block_until_ready(run(*given))
        times.append(time.perf_counter() - start)
    print(
        f'  {name:60s} {np.median(times) / per * 1e3:8.2f} ms'
        + (f', {copies} copies of the trace' if copies else ''),
        flush=True,
    )


def slices(e, c, lanes=range(B)):
    return sum(e[b] * c[b][None] for b in lanes)


def block_rows(e, c):
    """``slices`` for 64 rows at a time."""
    rows = jnp.arange(0, I, 64)
    return jax.lax.map(lambda i: slices(jax.lax.dynamic_slice_in_dim(e, i, 64, 1), c), rows)


def of_bits(e, c):
    """``slices`` of a trace in bfloat16 that is stored as its bits."""
    return slices(jax.lax.bitcast_convert_type(e.astype(jnp.uint32) << 16, jnp.float32), c)


def by_eight(e, c):
    """``slices`` in two parts, the first done before the second starts."""
    return jax.lax.optimization_barrier(slices(e, c, range(8))) + slices(e, c, range(8, B))


def slices_behind(e, c):
    """``slices`` of a trace whose lanes are its second axis."""
    return sum(e[:, b] * c[b][None] for b in range(B))


def in_loop(e, c):
    return jax.lax.fori_loop(0, B, lambda b, g: g + e[b] * c[b][None], jnp.zeros((I, O)))


READS = {
    'read alone': lambda e, c: e.sum(),
    'einsum': lambda e, c: jnp.einsum('bio,bo->io', e, c),
    'sum over axis 0': lambda e, c: (e * c[:, None]).sum(0),
    'sum of slices': slices,
    'sum of slices, eight at a time': by_eight,
    'product first, slices after': lambda e, c: sum(jax.lax.optimization_barrier(e * c[:, None])),
    'loop over lanes': in_loop,
    'blocks of 64 rows': block_rows,
}
READS_BEHIND = {
    'sum of slices, lanes behind the rows': slices_behind,
    'the same as a sum over an axis': lambda e, c: (e * c[None]).sum(1),
}


def reading():
    print('< c, e >')
    e, c = draw(0, B, I, O), draw(1, B, O)
    for name, fn in READS.items():
        timed(name, fn, e, c)
    short = e.astype(jnp.bfloat16)
    bits = jax.lax.bitcast_convert_type(short, jnp.uint16)
    timed('sum of slices, bfloat16', lambda e, c: slices(e.astype(jnp.float32), c), short, c)
    timed('sum of slices, bfloat16 as bits', of_bits, bits, c)
    behind = jnp.moveaxis(e, 0, 1).copy()
    for name, fn in READS_BEHIND.items():
        timed(name, fn, behind, c)


def temporary():
    """A loop over an array that lives during one call only."""
    print('temporary memory, ms for each MiB')
    for size in (16, 24, 64, 128):

        def fill(x, size=size):
            wide = jnp.broadcast_to(x, (size * 2**18,))
            return jax.lax.fori_loop(0, 2, lambda i, a: a.at[i].set(x[0] + i), wide)[5]

        timed(f'{size} MiB', fill, jnp.ones(1), per=size)


def every_step(order):
    """One read, one weight update and one write of the trace at every step."""

    def run(e, w, f):
        def step(carry, f):
            e, w, n = carry
            w, d = w - 1e-3 * slices(e, f['c']), f['d']
            if order == 'barrier on the trace':
                e, w = jax.lax.optimization_barrier((e, w))
            if order == 'barrier on a factor':
                d, w = jax.lax.optimization_barrier((d, w))
            if order == 'the write depends on the read':
                d = jnp.where(n < 0, d + w[0, 0], d)
            return (e * d[:, None] + f['x'][:, :, None] * f['q'][:, None], w, n + 1), None

        return jax.lax.scan(step, (e, w, jnp.int32(0)), f)[0]

    return run


def lane_by_lane(e, w, f):
    def step(carry, f):
        e, w = carry

        def lane(g, s):
            eb, c, d, x, q = s
            return g + eb * c[None], eb * d[None] + x[:, None] * q[None]

        g, e = jax.lax.scan(lane, jnp.zeros((I, O)), (e, f['c'], f['d'], f['x'], f['q']))
        return (e, w - 1e-3 * g), None

    return jax.lax.scan(step, (e, w), f)[0]


def in_own_loop(pending):
    """A gradient, an update and a write by single steps: the trace is written at each step, or four
    steps are pending before a write.
    """

    def run(e, w, f):
        def plain(carry, f):
            e, w = carry
            new = e * f['d'][:, None] + f['x'][:, :, None] * f['q'][:, None]
            return (new, w - 1e-3 * slices(e, f['c'])), None

        def delayed(carry, f):
            e, p, x, q, n, w = carry
            full = n == 4
            e = jax.lax.cond(
                full,
                lambda e: e * p[:, None] + sum(x[k][:, :, None] * q[k][:, None] for k in range(4)),
                lambda e: e,
                e,
            )
            p, q, n = jnp.where(full, 1, p), jnp.where(full, 0, q), jnp.where(full, 0, n)
            w = w - 1e-3 * (slices(e, f['c'] * p) + jnp.einsum('kbi,kbo->io', x, q * f['c']))
            x, q = (
                jax.lax.dynamic_update_index_in_dim(a, b, n, 0)
                for a, b in ((x, f['x']), (q * f['d'], f['q']))
            )
            return (e, p * f['d'], x, q, n + 1, w), None

        if not pending:
            return jax.lax.scan(plain, (e, w), f)[0]
        e, p, x, q, _, w = jax.lax.scan(
            delayed,
            (e, jnp.ones((B, O)), jnp.zeros((4, B, I)), jnp.zeros((4, B, O)), jnp.int32(0), w),
            f,
        )[0]
        return e * p[:, None] + sum(x[k][:, :, None] * q[k][:, None] for k in range(4)), w

    return run


def steps():
    print('a read, an update and a write at every step')
    f = {
        'x': draw(0, T, B, I),
        'd': jax.random.uniform(jax.random.key(1), (T, B, O)),
        'q': draw(2, T, B, O),
        'c': draw(3, T, B, O),
    }
    e, w = jnp.zeros((B, I, O)), jnp.zeros((I, O))
    timed('one read and write of the trace, nothing else', lambda e: e * 0.5 + 1, e, donate=(0,))
    for order in (
        'no order',
        'barrier on the trace',
        'barrier on a factor',
        'the write depends on the read',
    ):
        timed(order, every_step(order), e, w, f, donate=(0, 1), per=T)
    timed('own loop, old and new trace', in_own_loop(False), e, w, f, donate=(0, 1), per=T)
    timed('own loop, four steps pending', in_own_loop(True), e, w, f, donate=(0, 1), per=T)
    timed('lane by lane in a scan', lane_by_lane, e, w, f, donate=(0, 1), per=T)


def writing():
    print('p e + sum over K rows of x (x) q')
    e, p = jnp.zeros((B, I, O)), jnp.ones((B, O))

    def batched(e, x, q, p):
        return e * p[:, None] + jnp.einsum('kbi,kbo->bio', x, q)

    for k in (1, 2, 4, 8):
        x, q = draw(0, k, B, I), draw(1, k, B, O)
        timed(
            f'K = {k}, outer products in one expression',
            lambda e, x, q, p, k=k: (
                e * p[:, None] + sum(x[i][:, :, None] * q[i][:, None] for i in range(k))
            ),
            e,
            x,
            q,
            p,
            donate=(0,),
        )
        timed(f'K = {k}, one batched product', batched, e, x, q, p, donate=(0,))
    x, q = draw(0, 50, B, I), draw(1, 50, B, O)

    def lanes(e, x, q, p):
        return jax.lax.fori_loop(
            0, B, lambda b, e: e.at[b].set(e[b] * p[b][None] + x[:, b].T @ q[:, b]), e
        )

    timed('K = 50, one batched product', batched, e, x, q, p, donate=(0,))
    timed('K = 50, a product for each lane, in place', lanes, e, x, q, p, donate=(0,))
    timed('K = 50, the batched product alone', lambda x, q: jnp.einsum('kbi,kbo->bio', x, q), x, q)
    for k in (50, 100, 170):  # rows carried beside the trace in place of a write
        x, q = draw(0, k, B, I), draw(1, k, B, O)
        timed(
            f'{k} rows kept, read by a later gradient',
            lambda x, q, c: jnp.einsum('kbi,kbo->io', x, q * c),
            x,
            q,
            draw(2, B, O),
        )
    print('products of one sequence of 50 steps')
    timed('weight gradient', lambda x, q: jnp.einsum('kbi,kbo->io', x, q), x, q)
    timed('forward, step by step', lambda x, w: jax.lax.map(lambda a: a @ w, x), x, draw(2, I, O))


if __name__ == '__main__':
    reading()
    temporary()
    steps()
    writing()
