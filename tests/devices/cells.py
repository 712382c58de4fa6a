"""Cells of every kind of trace, with the places of their weights on a mesh ``('b', 'm')``."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from saiunit import sparse

import braintrace

B, I, N, O, T = 24, 16, 32, 4, 6  # noqa: E741 - x of a batch has no shape of a part of a weight
mm, ew, split = braintrace.matmul, braintrace.element_wise, jnp.split


class Cell(NamedTuple):
    run: Callable
    shapes: dict
    specs: dict  # of the weights where units are sharded
    states: tuple[str, ...] = ('h',)
    state: tuple[int, ...] = (B, N)
    x: tuple[int, ...] = (B, I)
    indices: bool = False

    def params(self, dtype):
        rng = np.random.default_rng(0)
        shapes = self.shapes.items()
        return {k: jnp.asarray(rng.normal(size=s) / s[0] ** 0.5, dtype) for k, s in shapes}

    def carry(self, dtype):
        return {name: jnp.zeros(self.state, dtype) for name in self.states}

    def data(self, dtype, steps: int = T):
        rng = np.random.default_rng(1)
        ys = jnp.asarray(rng.normal(size=(steps, B, O)), dtype)
        if self.indices:
            return jnp.asarray(rng.integers(0, I, size=(steps, *self.x))), ys
        return jnp.asarray(rng.normal(size=(steps, *self.x)), dtype), ys


def cat(x, h):
    return jnp.concatenate([x, h], -1)


def rnn(p, c, x):
    h = 0.8 * c['h'] + jnp.tanh(mm(cat(x, c['h']), p['w'], p['b']))
    return h @ p['out'], {'h': h}


def gru(p, c, x):
    both = cat(x, c['h'])
    z, r = jax.nn.sigmoid(mm(both, p['z'])), jax.nn.sigmoid(mm(both, p['r']))
    h = (1 - z) * c['h'] + z * jnp.tanh(mm(cat(x, r * c['h']), p['w']))
    return h @ p['out'], {'h': h}


def _lstm(i, f, g, o, p, c):
    cell = jax.nn.sigmoid(f) * c['c'] + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return h @ p['out'], {'c': cell, 'h': h}


def lstm(p, c, x):
    return _lstm(*split(mm(cat(x, c['h']), p['w']), 4, -1), p, c)


def lstm_apart(p, c, x):
    both = cat(x, c['h'])
    return _lstm(*(mm(both, p[k]) for k in 'ifgo'), p, c)


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.defjvp(lambda v, d: (spike(*v), d[0] / (1 + jnp.abs(v[0])) ** 2))


def alif(p, c, x):
    v = 0.9 * c['v'] + mm(cat(x, c['s']), p['w']) - c['s'] * (1 + c['a'])
    s = spike(v - 1 - c['a'])
    return v @ p['out'], {'v': v, 'a': 0.95 * c['a'] + 0.1 * s, 's': s}


def lru(p, c, x):
    h = ew(p['leak'], fn=jax.nn.sigmoid) * c['h'] + mm(x, p['w'])
    return jnp.tanh(h) @ p['out'], {'h': h}


rows, columns = np.divmod(np.arange(N * 4) * 7 % (N * N), N)
MATRIX = sparse.COO((jnp.ones(N * 4), rows, columns), shape=(N, N))


def sparse_lif(p, c, x):
    s = spike(c['v'] - 1)
    v = 0.9 * c['v'] - s + mm(x, p['w']) + braintrace.sparse_matmul(s, p['r'], sparse_mat=MATRIX)
    return v @ p['out'], {'v': v}


def conv(p, c, x):
    y = braintrace.conv(x, p['k'], padding='SAME', dimension_numbers=('NHC', 'HIO', 'NHC'))
    h = 0.9 * c['h'] + jnp.tanh(y)
    return h.mean(1) @ p['out'], {'h': h}


def lora(p, c, x):
    h = 0.9 * c['h'] + jnp.tanh(braintrace.lora_matmul(x, p['B'], p['A'], alpha=2.0))
    return h @ p['out'], {'h': h}


def embedding(p, c, x):
    h = 0.9 * c['h'] + jnp.tanh(braintrace.embedding(x, p['w']))
    return h @ p['out'], {'h': h}


def loop(p, c, x):
    """The op in a loop inside of the step."""

    def turn(h, _):
        return 0.8 * h + 0.2 * jnp.tanh(mm(x, p['w']) + h), None

    h, _ = jax.lax.scan(turn, c['h'], None, length=12)
    return h @ p['out'], {'h': h}


def cell(run, shapes, *states, whole=(), **more):
    """A cell with a readout of N units; weights are cut along their units, or each device has them
    ``whole``.
    """
    cut = {name: P(None, 'm') if len(shape) == 2 else P('m') for name, shape in shapes.items()}
    specs = cut | dict.fromkeys(whole, P()) | {'out': P('m')}
    return Cell(run, {**shapes, 'out': (N, O)}, specs, states or ('h',), **more)


BOTH = I + N, N
CELLS: dict[str, Cell] = {
    'rnn': cell(rnn, {'w': BOTH, 'b': (N,)}),
    'gru': cell(gru, dict.fromkeys('zrw', BOTH)),
    'lstm': cell(lstm, {'w': (I + N, 4 * N)}, 'c', 'h'),
    'lstm_apart': cell(lstm_apart, dict.fromkeys('ifgo', BOTH), 'c', 'h'),
    'alif': cell(alif, {'w': BOTH}, 'v', 'a', 's'),
    'lru': cell(lru, {'w': (I, N), 'leak': (N,)}),
    'sparse_lif': cell(sparse_lif, {'w': (I, N), 'r': (N * 4,)}, 'v', whole=('r',)),
    'conv': Cell(
        *(conv, {'k': (3, 2, 8), 'out': (8, O)}, {'k': P(None, None, 'm'), 'out': P('m')}),
        state=(B, 8, 8),
        x=(B, 8, 2),
    ),
    'lora': cell(lora, {'B': (I, 4), 'A': (4, N)}, whole=('B',)),
    'embedding': cell(embedding, {'w': (I, N)}, x=(B,), indices=True),
    'loop': cell(loop, {'w': (I, N)}),
}


def loss(out, y) -> Any:
    return ((out - y) ** 2).sum()
