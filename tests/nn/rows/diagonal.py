"""Cells in which no position reads another one."""

import brainstate

from braintrace import nn
from tests.nn.rows.cells import DRAWN, STATE, affine
from tests.nn.rows.row import Row


def min_gru(ops, p, s, x):
    z, g = ops.split(affine(ops, p['W.weight'], x), 2)
    h = ops.new('h', (1 - ops.sigmoid(z)) * s['h'] + ops.sigmoid(z) * g)
    return h, {'h': h}


def min_lstm(ops, p, s, x):
    f, i, g = ops.split(affine(ops, p['W.weight'], x), 3)
    f, i = ops.sigmoid(f), ops.sigmoid(i)
    h = ops.new('h', f / (f + i) * s['h'] + i / (f + i) * g)
    return h, {'h': h}


def elstm(ops, p, s, x):
    f, z = ops.split(affine(ops, p['W.weight'], x), 2)
    f = ops.sigmoid(f + of(ops, p, 'w_f') * s['c'])
    z = ops.tanh(z + of(ops, p, 'w_z') * s['c'])
    c = ops.new('c', f * s['c'] + (1 - f) * z)
    return ops.sigmoid(affine(ops, p['Wo.weight'], x, c)) * c, {'c': c}


def of(ops, p, name):
    """A parameter that is used element by element."""
    return ops.element_wise(p[name], lambda value: value)


def rotated(ops, decay, angle, re, im):
    a, b = decay * ops.cos(angle), decay * ops.sin(angle)
    return a * re - b * im, b * re + a * im


def lru(ops, p, s, x):
    decay = ops.exp(-ops.exp(of(ops, p, 'nu_log')))
    angle, scale = ops.exp(of(ops, p, 'theta_log')), ops.exp(of(ops, p, 'gamma_log'))
    re, im = rotated(ops, decay, angle, s['h_re'], s['h_im'])
    re = ops.new('h_re', re + scale * affine(ops, p['B_re.weight'], x))
    im = ops.new('h_im', im + scale * affine(ops, p['B_im.weight'], x))
    y = affine(ops, p['C_re.weight'], re) - affine(ops, p['C_im.weight'], im)
    return y + of(ops, p, 'D') * x, {'h_re': re, 'h_im': im}


def s5(ops, p, s, x):
    """``h + u`` turns, and ``u = (x B) / lambda`` is taken away again."""
    a, omega = -ops.exp(of(ops, p, 'A_log')), of(ops, p, 'A_im')
    step = ops.exp(of(ops, p, 'step_log'))
    u, v = ops.split(affine(ops, p['B.weight'], x), 2)
    size = a * a + omega * omega
    u, v = (u * a + v * omega) / size, (v * a - u * omega) / size
    turn = ops.exp(step * a), step * omega
    re, im = rotated(ops, *turn, s['h_re'] + u, s['h_im'] + v)
    re, im = ops.new('h_re', re - u), ops.new('h_im', im - v)
    y = affine(ops, p['C.weight'], re, im) + of(ops, p, 'D') * x
    return y, {'h_re': re, 'h_im': im}


def rtu(ops, p, s, x):
    decay = ops.exp(-ops.exp(of(ops, p, 'nu_log')))
    scale = ops.sqrt(1 - decay * decay)
    u, v = ops.split(affine(ops, p['W.weight'], x), 2)
    angle = ops.exp(of(ops, p, 'theta_log'))
    re, im = rotated(ops, decay, angle, s['p'], s['q'])
    re = ops.new('p', ops.tanh(re + scale * u))
    im = ops.new('q', ops.tanh(im + scale * v))
    return ops.concatenate([re, im]), {'p': re, 'q': im}


ROWS = [
    Row('min_gru', lambda: nn.MinGRUCell(3, 5, **DRAWN), min_gru, exact=True),
    Row('min_lstm', lambda: nn.MinLSTMCell(3, 5, **DRAWN), min_lstm, exact=True),
    Row(
        'elstm',
        lambda: nn.ELSTMCell(3, 5, **DRAWN, r_init=brainstate.nn.init.Normal()),
        elstm,
        exact=True,
    ),
    Row('lru', lambda: nn.LRUCell(3, 5, 0.2, 0.9, 3.0, **STATE), lru, exact=True),
    Row('s5', lambda: nn.S5Cell(3, 5, 0.05, 0.5, **STATE), s5, exact=True),
    Row('rtu', lambda: nn.RTUCell(3, 5, 'tanh', **STATE), rtu, exact=True),
]
