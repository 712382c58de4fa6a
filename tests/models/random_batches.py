"""Random cells in which the batch stands first, second or last, in an op of its own or in none, and
samples read each other. A plan is plain data that is drawn from a seed and printed.

Every cell is position by position, so D-RTRL is exact for it, also where single samples start
again: the oracle is reverse mode through all steps, with the states of these samples put back.
"""

import dataclasses
import random
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import braintrace

B, I, N, O, T = 3, 2, 4, 2, 4
# how y of (B, N) is made: by one op of all samples, by ops of one, or by weights of the batch
OPS = 'matmul', 'loop', 'map', 'vmap', 'patches', 'heads', 'flat', 'gain', 'einsum'
# what a sample reads of the y of others
MIXES = 'own', 'roll', 'reversed', 'first', 'shared'
# where the batch is in the state, and how its old values come in
LAYOUTS = 'first', 'second', 'last', 'delay', 'slots'
DECAYS = 'constant', 'learned', 'flat'


@dataclasses.dataclass(frozen=True)
class Cell:
    op: str
    mix: str
    layout: str
    decay: str
    seed: int | None = None


def draw(seed: int) -> Cell:
    rng = random.Random(seed)
    return Cell(*map(rng.choice, (OPS, MIXES, LAYOUTS, DECAYS)), seed)


def simpler(cell: Cell) -> Iterator[Cell]:
    """Cells with one thing less."""
    plain = {'op': 'matmul', 'mix': 'own', 'layout': 'first', 'decay': 'constant'}
    for name, value in plain.items():
        if getattr(cell, name) != value:
            yield dataclasses.replace(cell, **{name: value})


def made(op: str, p, x):
    """y of all samples."""
    matmul, flat = braintrace.matmul, lambda w: braintrace.element_wise(w).reshape(B, N)
    kinds = {
        'matmul': lambda: matmul(x, p['w']),
        'loop': lambda: jnp.stack([matmul(x[b], p['w']) for b in range(B)]),
        'map': lambda: jax.lax.map(lambda s: matmul(s, p['w']), x),
        'vmap': lambda: jax.vmap(lambda s: matmul(s, p['w']))(x),
        'patches': lambda: matmul(jnp.concatenate([x, 2 - x], 1).reshape(-1, I), p['w'])[::2],
        'heads': lambda: jax.vmap(lambda w: matmul(x, w))(p['heads'])[1],
        'flat': lambda: flat(p['flat']) * x.sum(1, keepdims=True),
        'gain': lambda: braintrace.element_wise(p['gain']) * x.sum(1, keepdims=True),
        # with the batch behind, which its trace has in front
        'einsum': lambda: braintrace.einsum('nb,n->nb', x.sum(1) * jnp.ones((N, 1)), p['einsum']).T,
    }
    return kinds[op]()


def mixed(mix: str, y):
    kinds = {
        'own': lambda: y,
        'roll': lambda: y - 0.3 * jnp.roll(y, 1, 0),
        'reversed': lambda: y[::-1],
        'first': lambda: y[:1] + jnp.zeros_like(y),
        'shared': lambda: jnp.stack([y[0], 0.5 * y[0], y[2]]),
    }
    return kinds[mix]()


def build(cell: Cell):
    """The step, parameters and the first state, and the axis of its batch."""
    shape, axis = {
        'first': ((B, N), 0),
        'second': ((2, B, N), 1),
        'last': ((N, B), 1),
        'delay': ((2, B, N), 1),
        'slots': ((B, 2, N), 0),
    }[cell.layout]

    def keep(p):
        if cell.decay == 'constant':
            return 0.8
        if cell.decay == 'learned':
            k = jax.nn.sigmoid(braintrace.element_wise(p['decay']))
            return k[:, None] if cell.layout == 'last' else k
        k = jax.nn.sigmoid(braintrace.element_wise(p['decays'])).reshape(B, N)
        return {'last': k.T, 'slots': k[:, None]}.get(cell.layout, k)

    def step(p, h, x):
        y = jnp.tanh(mixed(cell.mix, made(cell.op, p, x)))
        if cell.layout == 'delay':
            h = jnp.stack([h[1], keep(p) * h[0] + y])
            return braintrace.matmul(h[1], p['out']), h
        drive = {
            'first': lambda: y,
            'second': lambda: jnp.stack([y, -0.5 * y]),
            'last': lambda: y.T,
            'slots': lambda: jnp.stack([y, -0.5 * y], 1),
        }[cell.layout]()
        h = keep(p) * h + drive
        read = {'first': h, 'second': h[0] - h[1] ** 2, 'last': h.T, 'slots': h.sum(1)}
        return braintrace.matmul(read[cell.layout], p['out']), h

    rng = np.random.default_rng(cell.seed)
    shapes = {'w': (I, N), 'heads': (2, I, N), 'flat': B * N, 'gain': N, 'einsum': N}
    used = cell.op if cell.op in shapes else 'w'
    wanted = {used: shapes[used], 'out': (N, O)}
    wanted |= {'learned': {'decay': N}, 'flat': {'decays': B * N}}.get(cell.decay, {})
    params = {name: jnp.asarray(rng.normal(size=size)) for name, size in wanted.items()}
    return step, params, jnp.asarray(rng.normal(size=shape)), axis


def data(cell: Cell):
    """Inputs, targets and the flags of samples that start again before a step."""
    rng = np.random.default_rng(cell.seed)
    xs, ys = rng.normal(size=(T, B, I)), rng.normal(size=(T, B, O))
    flags = np.zeros((T, B), bool)
    flags[2, rng.integers(B)] = flags[rng.integers(1, T), rng.integers(B)] = True
    return xs, ys, flags


def loss(output, target):
    return jnp.mean((output - target) ** 2)


def by_reverse_mode(cell: Cell):
    """The gradient of the sum of losses: reverse mode, samples put back by `where`."""
    step, params, h0, axis = build(cell)
    xs, ys, flags = data(cell)

    def total(params):
        def one(h, at):
            x, y, again = at
            along = [-1 if k == axis else 1 for k in range(h0.ndim)]
            out, h = step(params, jnp.where(again.reshape(along), h0, h), x)
            return h, loss(out, y)

        return jax.lax.scan(one, h0, (xs, ys, flags))[1].sum()

    return jax.jit(jax.grad(total))(params)
