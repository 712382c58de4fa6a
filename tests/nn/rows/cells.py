"""Gated cells."""

from __future__ import annotations

import brainstate

from braintrace import nn
from tests.nn.rows.row import Row

DRAWN = {
    'b_init': brainstate.nn.init.Normal(0.3),
    'state_init': brainstate.nn.init.Normal(0.5),
}


def affine(ops, p, *parts):
    """``[parts] @ weight + bias`` of a ``Linear``."""
    return ops.matmul(ops.concatenate(parts), p['weight'], p.get('bias'))


def vanilla(ops, p, s, x):
    h = ops.new('h', ops.relu(affine(ops, p['W.weight'], x, ops.cut(s['h']))))
    return h, {'h': h}


def gru(ops, p, s, x):
    h = s['h']
    z = ops.sigmoid(affine(ops, p['Wz.weight'], x, ops.cut(h)))
    r = ops.sigmoid(affine(ops, p['Wr.weight'], x, ops.cut(h)))
    candidate = ops.tanh(affine(ops, p['Wh.weight'], x, r * ops.cut(h)))
    h = ops.new('h', (1 - z) * h + z * candidate)
    return h, {'h': h}


def lstm(ops, p, s, x):
    i, g, f, o = ops.split(affine(ops, p['W.weight'], x, ops.cut(s['h'])), 4)
    c = ops.new('c', ops.sigmoid(f + 1) * s['c'] + ops.sigmoid(i) * ops.tanh(g))
    h = ops.new('h', ops.sigmoid(o) * ops.tanh(ops.within('c', c)))
    return h, {'h': h, 'c': c}


def min_gru(ops, p, s, x):
    z, g = ops.split(affine(ops, p['W.weight'], x), 2)
    h = ops.new('h', (1 - ops.sigmoid(z)) * s['h'] + ops.sigmoid(z) * g)
    return h, {'h': h}


ROWS = [
    Row('vanilla', lambda: nn.VanillaRNNCell(3, 5, **DRAWN), vanilla),
    Row('gru', lambda: nn.GRUCell(3, 5, **DRAWN), gru, owner={'Wr.weight': None}),
    Row('lstm', lambda: nn.LSTMCell(3, 5, **DRAWN), lstm),
    Row('min_gru', lambda: nn.MiniGRU(3, 5, **DRAWN), min_gru, exact=True),
]
