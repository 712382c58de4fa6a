"""Cells with a matrix for each sample."""

import brainstate
import numpy as np

from braintrace import nn
from tests.nn.rows.row import Row

START = {'state_init': brainstate.nn.init.Normal(scale=0.5)}
BIAS = {'b_init': brainstate.nn.init.Normal(scale=0.3), **START}
DECAY = np.array([0.9, 0.6])


def affine(ops, p, x):
    return ops.matmul(x, p['weight'], p.get('bias'))


def attention(decay=None):
    def formula(ops, p, s, x):
        old = s['S']
        heads, keys, values = old.shape[-3:]

        def of(name, size):
            return affine(ops, p[f'{name}.weight'], x).reshape(*x.shape[:-1], heads, size)

        a = decay[:, None] if decay is not None else ops.sigmoid(of('Wa', keys)) ** (1 / 16)
        written = of('Wk', keys)[..., None] * of('Wv', values)[..., None, :]
        S = ops.new('S', a[..., None] * old + written)
        o = (of('Wq', keys)[..., None] * S).sum(-2)
        return o.reshape(*x.shape[:-1], heads * values), {'S': S}

    return formula


def delta(ops, p, s, x):
    """As a product with ``1 - beta k k^T``, in one head after another."""
    old = s['S']
    heads, keys, values = old.shape[-3:]

    def of(name, size):
        return affine(ops, p[f'{name}.weight'], x).reshape(*x.shape[:-1], heads, size)

    q, k, v = of('Wq', keys), of('Wk', keys), of('Wv', values)
    length = lambda y: ops.sqrt((y * y).sum(-1) + 1e-6)[..., None]
    q, k = (y / ops.mixing(length, y) for y in (q, k))
    beta = ops.sigmoid(of('Wb', 1))[..., None]
    told = ops.mixing(lambda k, S: (k[..., None] * S).sum(-2), k, ops.cut(old))
    S = ops.new('S', old + beta * k[..., None] * (v - told)[..., None, :])
    return (q[..., None] * S).sum(-2).reshape(*x.shape[:-1], heads * values), {'S': S}


def mamba(ops, p, s, x):
    delta = ops.softplus(affine(ops, p['Wd.weight'], x))
    a = ops.element_wise(p['A_log'], lambda a: -ops.exp(a))
    written = (delta * x)[..., None] * affine(ops, p['WB.weight'], x)[..., None, :]
    h = ops.new('h', ops.exp(delta[..., None] * a) * s['h'] + written)
    skip = ops.element_wise(p['D'], lambda d: d)
    return (h * affine(ops, p['WC.weight'], x)[..., None, :]).sum(-1) + skip * x, {'h': h}


ROWS = [
    Row('gla', lambda: nn.GLACell(3, 6, 4, heads=2, **BIAS), attention(), exact=True),
    Row(
        'retention',
        lambda: nn.GLACell(3, 4, heads=2, decay=DECAY, **START),
        attention(DECAY),
        exact=True,
    ),
    Row('delta', lambda: nn.DeltaNetCell(3, 6, 4, heads=2, **BIAS), delta, cut_bptt=False),
    Row('mamba', lambda: nn.MambaCell(3, 2, **START), mamba, exact=True),
]
