"""States that are matrices, each of which one element of an op's result feeds at several positions:
linear attention and its kin, and other tails that repeat a result.
"""

import numpy as np

from tests.models.model import B, I, Model, N, alone, cell_of, of, shown, states

K, D, H = 2, 3, 2  # keys, values, heads
WIDE = 2 * K + D
DECAYS = np.array([0.9, 0.6])
PLACES = np.array([[True, False], [True, True], [False, True]])  # of a sparse product
S = {'s': (B, K, D)}
QKV = {'q': (I, K), 'k': (I, K), 'v': (I, D)}


outer = lambda k, v: k[..., :, None] * v[..., None, :]
read = lambda q, s: (q[..., None] * s).sum(-2)
projected = lambda ops, p, x, names: [ops.matmul(x, p[name]) for name in names]


def linear_attention(ops, p, c, x):
    """Without decay, and with a normaliser in a group of its own (Katharopoulos et al., 2020)."""
    q, k, v = projected(ops, p, x, 'qkv')
    q, k = ops.exp(q), ops.exp(k)
    s, n = ops.new('s', c['s'] + outer(k, v)), ops.new('n', c['n'] + k)
    return read(q, s) / (4.0 + (q * n).sum(-1)[..., None] ** 2), {'s': s, 'n': n}


def retention(ops, p, c, x):
    """A fixed decay for each head (Sun et al., 2023)."""
    q, k = (y.reshape(B, H, K) for y in projected(ops, p, x, 'qk'))
    v = ops.matmul(x, p['v']).reshape(B, H, D)
    s = ops.new('s', DECAYS[:, None, None] * c['s'] + outer(k, v))
    return read(q, s).reshape(B, H * D), {'s': s}


def gated_attention(ops, p, c, x):
    """A decay for each row (Yang et al., 2024)."""
    q, k, v = projected(ops, p, x, 'qkv')
    g = ops.sigmoid(ops.matmul(x, p['g'], p['b']))
    s = ops.new('s', g[..., None] * c['s'] + outer(k, v))
    return read(q, s), {'s': s}


def fused(ops, p, c, x):
    """Every part out of one product."""
    y = ops.matmul(x, p['w'], p['b'])
    g, k, v, q = y[..., :K], y[..., K : 2 * K], y[..., 2 * K : WIDE], y[..., WIDE:]
    s = ops.new('s', ops.sigmoid(g)[..., None] * c['s'] + outer(ops.tanh(k), v))
    return read(q, s), {'s': s}


def head_decay(ops, p, c, x):
    """A decay for each head, of one product with the keys."""
    y = ops.matmul(x, p['w'])
    g, k = ops.sigmoid(y[:, :H]), y[:, H:].reshape(B, H, K)
    v = ops.matmul(x, p['v']).reshape(B, H, D)
    s = ops.new('s', g[..., None, None] * c['s'] + outer(k, v))
    return read(ops.tanh(s).sum(-1), s).reshape(B, H * D), {'s': s}


def mlstm(ops, p, c, x):
    """A matrix memory with exponential gates, its stabiliser held constant (Beck et al., 2024)."""
    q, k, v = projected(ops, p, x, 'qkv')
    i, f = ops.matmul(x, p['i']), -ops.softplus(-ops.matmul(x, p['f'], p['b']))  # logarithms
    old = ops.constant(c['m'])
    new = ops.new('m', ops.constant(ops.where((f + old - i).real > 0, f + old, i)))
    i, f = ops.exp(i - new), ops.exp(f + old - new)
    s = ops.new('s', f[..., None] * c['s'] + i[..., None] * outer(k, v))
    n = ops.new('n', f * c['n'] + i * k)
    return read(q, s) / (1.0 + (q * n).sum(-1)[..., None] ** 2), {'s': s, 'n': n, 'm': new}


def mamba(ops, p, c, x):
    """A selective state space (Gu and Dao, 2023): positions are channels and their states."""
    delta = ops.softplus(ops.matmul(x, p['delta'], p['b']))
    a = ops.element_wise(p['a'], lambda a: -ops.exp(a))
    u, into = ops.matmul(x, p['in']), ops.matmul(x, p['k'])
    s = ops.new('s', ops.exp(delta[..., None] * a) * c['s'] + outer(delta * u, into))
    skip = ops.element_wise(p['skip'], ops.tanh) * u
    return (s * ops.matmul(x, p['q'])[..., None, :]).sum(-1) + skip, {'s': s}


def two_rows(ops, p, c, x):
    """One weight whose two rows are read at every position."""
    k, y = ops.element_wise(p['k'], ops.tanh), ops.matmul(x, p['w'])
    a = ops.new('a', k[0] * c['a'] + k[1] * c['b'] + y)
    b = ops.new('b', k[0] * c['b'] - k[1] * c['a'] + ops.sin(y))
    return a * b, {'a': a, 'b': b}


def split_bias(ops, p, h, r, x):
    """A bias of all gates, split and read by all samples."""
    b = ops.element_wise(p['b'])
    gate = ops.sigmoid(ops.matmul(x, p['w']) + b[:N])
    return gate * h + ops.tanh(ops.matmul(x, p['u']) + b[N:])


def turned(ops, p, c, x):
    """Two states of a group read one result, each in its own order."""
    y = ops.matmul(x, p['w'])
    a = ops.new('a', 0.8 * c['a'] + 0.1 * c['b'] + y)
    b = ops.new('b', 0.7 * c['b'] + 0.2 * c['a'] + ops.tanh(ops.flip(y)))
    return a + b**2, {'a': a, 'b': b}


def neighbours(ops, p, h, r, x):
    """An element of a result at its own position and at the next one."""
    y = ops.matmul(x, p['w'])
    return 0.8 * h + ops.tanh(y + 0.5 * ops.shift(y, 1))


def tied(ops, p, c, x):
    """A result times itself."""
    y = ops.matmul(x, p['w'])
    s = ops.new('s', 0.8 * c['s'] + outer(y, y))
    return read(y, s), {'s': s}


def normalised(ops, p, c, x):
    """Keys of length one: the length is mixing, the keys are not."""
    k = ops.matmul(x, p['k'])
    s = ops.new('s', 0.8 * c['s'] + outer(k / (0.5 + ops.norm(k)), x))
    return s.sum(-2), {'s': s}


def of_other_ops(ops, p, c, x):
    """Keys and values by a sparse product and one of low rank."""
    k = ops.sparse_matmul(x, p['k'], PLACES)
    v = ops.lora_matmul(x, p['B'], p['A'], 0.5)
    s = ops.new('s', 0.8 * c['s'] + outer(ops.tanh(k), v))
    return read(x[:, :K], s), {'s': s}


def convolved(ops, p, c, x):
    """Keys by a convolution, times the input."""
    k = ops.conv(x, p['k'], p['b'])
    s = ops.new('s', 0.8 * c['s'] + outer(ops.tanh(k), x))
    return s.sum(-2), {'s': s}


GATED = {**QKV, 'g': (I, K), 'b': (K,)}
HEADS = {'s': (B, H, K, D)}
MLSTM = {**QKV, 'i': (I, 1), 'f': (I, 1), 'b': (1,)}
MAMBA = {'delta': (I, K), 'b': (K,), 'a': (K, D), 'in': (I, K), 'k': (I, D), 'q': (I, D)}
OTHERS = {'k': (int(PLACES.sum()),), 'B': (I, 2), 'A': (2, D)}


def row(cell, params, carry=S, **options) -> Model:
    """Where nothing is cut; a parameter may feed several groups, which no unrolling keeps apart."""
    return of(cell, params, carry, exact=True, cut_bptt=False, **options)


MODELS = [
    row(linear_attention, QKV, {**S, 'n': (B, K)}, groups=alone('s', 'n')),
    row(retention, {'q': (I, H * K), 'k': (I, H * K), 'v': (I, H * D)}, HEADS),
    row(gated_attention, GATED),
    row(gated_attention, GATED, {'s': (K, D)}, x=(I,), name='gated_attention_vector'),
    row(fused, {'w': (I, WIDE + K), 'b': (WIDE + K,)}, name='fused_attention'),
    row(head_decay, {'w': (I, H + H * K), 'v': (I, H * D)}, HEADS),
    row(mlstm, MLSTM, {**S, 'n': (B, K), 'm': (B, 1)}, groups=alone('s', 'n', 'm')),
    row(mamba, MAMBA | {'skip': (K,)}),
    row(two_rows, {'k': (2, N), 'w': (I, N)}, states('ab')),
    row(
        cell_of(split_bias, shown),
        {'b': (2 * N,), 'w': (I, N), 'u': (I, N)},
        states('h'),
        name='split_bias',
    ),
    row(turned, {'w': (I, N)}, states('ab')),
    row(cell_of(neighbours, shown), {'w': (I, N)}, states('h'), name='neighbours'),
    row(tied, {'w': (I, K)}, {'s': (B, K, K)}),
    of(normalised, {'k': (I, K)}, {'s': (B, K, I)}, cut_bptt=False, name='normalised_keys'),
    row(of_other_ops, OTHERS, name='attention_of_other_ops'),
    row(
        convolved,
        {'k': (2, I, K), 'b': (K,)},
        {'s': (B, 4, K, I)},
        x=(B, 4, I),
        name='attention_of_conv',
    ),
]
