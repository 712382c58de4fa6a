"""Gated cells whose gates read the state."""

import brainstate
import numpy as np
import saiunit as u

from braintrace import compat, nn
from tests.nn.rows.row import BATCH, Row

TAUS = np.array([2.0, 3.0, 4.0, 5.0, 6.0])

DRAWN = {
    'b_init': brainstate.nn.init.Normal(scale=0.3),
    'state_init': brainstate.nn.init.Normal(scale=0.5),
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


def gru_after(ops, p, s, x):
    h = s['h']
    z = ops.sigmoid(affine(ops, p['Wz.weight'], x, ops.cut(h)))
    r = ops.sigmoid(affine(ops, p['Wr.weight'], x, ops.cut(h)))
    recurrent = affine(ops, p['Uh.weight'], ops.cut(h))
    h = ops.new('h', h + z * (ops.tanh(affine(ops, p['Wh.weight'], x) + r * recurrent) - h))
    return h, {'h': h}


def lstm(ops, p, s, x):
    i, g, f, o = ops.split(affine(ops, p['W.weight'], x, ops.cut(s['h'])), 4)
    c = ops.new('c', ops.sigmoid(f + 1) * s['c'] + ops.sigmoid(i) * ops.tanh(g))
    h = ops.new('h', ops.sigmoid(o) * ops.tanh(ops.within('c', c)))
    return h, {'h': h, 'c': c}


def ur_lstm(ops, p, s, x):
    b = ops.element_wise(p['bias'], lambda b: b)
    f, r, u, o = (affine(ops, p[f'W{k}.weight'], x, ops.cut(s['h'])) for k in 'fruo')
    f, r = ops.sigmoid(f + b), ops.sigmoid(r - b)
    g = 2 * r * f + (1 - 2 * r) * f * f
    c = ops.new('c', g * s['c'] + (1 - g) * ops.tanh(u))
    h = ops.new('h', ops.sigmoid(o) * ops.tanh(ops.within('c', c)))
    return h, {'h': h, 'c': c}


def mgu(ops, p, s, x):
    h = s['h']
    f = ops.sigmoid(affine(ops, p['Wf.weight'], x, ops.cut(h)))
    candidate = ops.tanh(affine(ops, p['Wh.weight'], x, f * ops.cut(h)))
    h = ops.new('h', (1 - f) * h + f * candidate)
    return h, {'h': h}


def cfn(ops, p, s, x):
    h = s['h']
    f = ops.sigmoid(affine(ops, p['Wf.weight'], x, ops.cut(h)))
    i = ops.sigmoid(affine(ops, p['Wi.weight'], x, ops.cut(h)))
    h = ops.new('h', f * ops.tanh(h) + i * ops.tanh(affine(ops, p['Wh.weight'], x)))
    return h, {'h': h}


def minimal_rnn(ops, p, s, x):
    h, z = s['h'], affine(ops, p['phi.weight'], x)
    u = ops.sigmoid(affine(ops, p['W_u.weight'], z, ops.cut(h)))
    h = ops.new('h', u * h + (1 - u) * z)
    return h, {'h': h}


def mini_gru(ops, p, s, x):
    h = s['h']
    z = ops.sigmoid(affine(ops, p['W_z.weight'], x, ops.cut(h)))
    h = ops.new('h', (1 - z) * h + z * affine(ops, p['W_x.weight'], x))
    return h, {'h': h}


def mini_lstm(ops, p, s, x):
    h = s['h']
    f = ops.sigmoid(affine(ops, p['W_f.weight'], x, ops.cut(h)))
    i = ops.sigmoid(affine(ops, p['W_i.weight'], x, ops.cut(h)))
    h = ops.new('h', f * h + i * affine(ops, p['W_x.weight'], x))
    return h, {'h': h}


def ctrnn(rate):
    """Each unit with a decay of its own."""

    def step(ops, p, s, x):
        goal = ops.tanh(affine(ops, p['W.weight'], x, ops.cut(s['h'])))
        h = ops.new('h', s['h'] + (1 - np.exp(-rate)) * (goal - s['h']))
        return h, {'h': h}

    return step


def ltc(ops, p, s, x):
    f = ops.sigmoid(affine(ops, p['W.weight'], x, ops.cut(s['h'])))
    tau = ops.element_wise(p['tau_log'], ops.exp)
    h = (s['h'] + f * ops.element_wise(p['A'])) * tau / (tau + 1 + f * tau)
    h = ops.new('h', h)
    return h, {'h': h}


STATE = {'state_init': DRAWN['state_init']}

ROWS = [
    Row('vanilla', lambda: nn.VanillaRNNCell(3, 5, **DRAWN), vanilla),
    Row('gru', lambda: nn.GRUCell(3, 5, **DRAWN), gru, owner={'Wr.weight': None}),
    Row('gru_after', lambda: nn.GRUCell(3, 5, **DRAWN, reset_after=True), gru_after),
    Row('mgu', lambda: nn.MGUCell(3, 5, **DRAWN), mgu, cut_bptt=False),
    Row('cfn', lambda: nn.CFNCell(3, 5, **DRAWN), cfn),
    Row('minimal_rnn', lambda: nn.MinimalRNNCell(3, 5, **DRAWN), minimal_rnn, cut_bptt=False),
    Row('mini_gru', lambda: compat.MiniGRU(3, 5, **DRAWN), mini_gru),
    Row('mini_lstm', lambda: compat.MiniLSTM(3, 5, **DRAWN), mini_lstm),
    Row('ctrnn', lambda: nn.CTRNNCell(3, 5, TAUS, **DRAWN), ctrnn(1 / TAUS)),
    Row(
        'ctrnn_ms',
        lambda: nn.CTRNNCell(3, 5, 2 * u.ms, **DRAWN),
        ctrnn(0.25),
        batches=(BATCH,),
        context={'dt': 0.5 * u.ms},
    ),
    Row('ltc', lambda: nn.LTCCell(3, 5, TAUS, **DRAWN), ltc),
    Row('lstm', lambda: nn.LSTMCell(3, 5, **DRAWN), lstm),
    Row('ur_lstm', lambda: nn.URLSTMCell(3, 5, **STATE), ur_lstm),
]
