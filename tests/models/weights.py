"""How a weight reaches its op, and every kind of op: leaky cells that differ in their drive
only.
"""

import numpy as np

from tests.models.model import B, I, Model, N

MASK = np.random.default_rng(7).random((I + N, N)) < 0.6
L, C = 5, 2  # positions and channels of the convolutional cells


def cell_with(drive):
    """A leaky cell around ``y = drive(ops, params, [x, h], x)``."""

    def cell(ops, p, c, x):
        y = drive(ops, p, ops.concatenate([x, ops.cut(c['h'])]))
        h = ops.new('h', 0.8 * c['h'] + ops.tanh(y))
        return h, {'h': h}

    return cell


def row(name, drive, params, **options) -> Model:
    return Model(name, cell_with(drive), params, **options)


def shared(ops, p, c, x):
    """One weight, two ops."""
    h = ops.new(
        'h',
        0.8 * c['h']
        + ops.tanh(ops.matmul(x, p['w']) * ops.sigmoid(ops.matmul(ops.cut(c['h']), p['w']))),
    )
    return h, {'h': h}


def tied_readout(ops, p, c, x):
    """One weight, an op and a plain readout."""
    h = ops.new('h', 0.8 * c['h'] + ops.tanh(x + ops.matmul(ops.cut(c['h']), p['w'])))
    return ops.dot(h, p['w']), {'h': h}


def learned_decay(ops, p, c, x):
    """Element-wise weights: one for each position, and a scalar."""
    decay = ops.element_wise(p['decay'], ops.sigmoid)
    y = ops.matmul(ops.concatenate([x, ops.cut(c['h'])]), p['w'])
    h = ops.new('h', decay * c['h'] + ops.tanh(y) * ops.element_wise(p['gain'], ops.exp))
    return h, {'h': h}


def conv_recurrent(ops, p, c, x):
    """Convolutional recurrence; a weight for each channel stands beside states that also have
    positions in space.
    """
    y = ops.conv(ops.concatenate([x, ops.cut(c['h'])]), p['k'], p['b'])
    h = ops.new('h', ops.element_wise(p['decay'], ops.sigmoid) * c['h'] + ops.tanh(y))
    return h, {'h': h}


def conv_input(ops, p, c, x):
    """A strided convolution of the input, no recurrence."""
    h = ops.new('h', 0.8 * c['h'] + ops.conv(x, p['k'], p['b'], strides=(2,), padding='VALID'))
    return h**2, {'h': h}


W = (I + N, N)

MODELS = [
    row('masked', lambda ops, p, x: ops.matmul(x, p['w'] * MASK), {'w': W}),
    row('transposed', lambda ops, p, x: ops.matmul(x, p['w'].T), {'w': W[::-1]}),
    row('absolute', lambda ops, p, x: ops.matmul(x, ops.abs(p['w'])), {'w': W}),
    row(
        'doubled',
        lambda ops, p, x: ops.matmul(x, 2.0 * p['w'], ops.tanh(p['b'])),
        {'w': W, 'b': (N,)},
    ),
    row('reshaped', lambda ops, p, x: ops.matmul(x, p['w'].reshape(W)), {'w': ((I + N) * N,)}),
    row(
        'normalised',
        lambda ops, p, x: ops.matmul(x, p['g'] * p['v'] / ops.sqrt((p['v'] ** 2).sum(0))),
        {'v': W, 'g': (N,)},
    ),
    row('added', lambda ops, p, x: ops.matmul(x, p['w1'] + p['w2']), {'w1': W, 'w2': W}),
    row(
        'sparse',
        lambda ops, p, x: ops.sparse_matmul(x, p['data'], MASK, p['b']),
        {'data': (int(MASK.sum()),), 'b': (N,)},
    ),
    row(
        'lora',
        lambda ops, p, x: ops.lora_matmul(x, p['B'], p['A'], 1.7, p['b']),
        {'B': (I + N, 2), 'A': (2, N), 'b': (N,)},
    ),
    Model('shared', shared, {'w': (N, N)}, x=(B, N)),
    Model('tied_readout', tied_readout, {'w': (N, N)}, x=(B, N)),
    Model('learned_decay', learned_decay, {'w': W, 'decay': (N,), 'gain': ()}),
    Model(
        'conv1d',
        conv_recurrent,
        {'k': (3, I + C, C), 'b': (C,), 'decay': (C,)},
        {'h': (B, L, C)},
        (B, L, I),
    ),
    Model(
        'conv2d',
        conv_recurrent,
        {'k': (3, 2, 1 + C, C), 'b': (C,), 'decay': (C,)},
        {'h': (B, 3, 2, C)},
        (B, 3, 2, 1),
    ),
    Model(
        'conv_input',
        conv_input,
        {'k': (3, I, C), 'b': (C,)},
        {'h': (B, 3, C)},
        (B, 7, I),
        exact=True,
    ),
]
