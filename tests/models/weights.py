"""How a weight reaches its op, and every kind of op: leaky cells that differ in their drive
only.
"""

import numpy as np

from tests.models import model
from tests.models.model import B, I, Model, N

MASK = np.random.default_rng(7).random((I + N, N)) < 0.6
L, C = 5, 2  # positions and channels of the convolutional cells


def row(name, drive, params, **options) -> Model:
    """A leaky cell around ``y = drive(ops, params, [x, h])``."""

    def leaky(ops, p, h, r, x):
        return 0.8 * h + ops.tanh(drive(ops, p, ops.concatenate([x, r])))

    return whole(leaky, params, name=name, **options)


def whole(transition, *args, **options) -> Model:
    """The output is the state."""
    return model.row(transition, *args, output=model.shown, **options)


doubled = lambda ops, p, x: ops.matmul(x, 2.0 * p['w'], ops.tanh(p['b']))
normalised = lambda ops, p, x: ops.matmul(x, p['g'] * p['v'] / ops.sqrt((p['v'] ** 2).sum(0)))
sparse = lambda ops, p, x: ops.sparse_matmul(x, p['data'], MASK, p['b'])
lora = lambda ops, p, x: ops.lora_matmul(x, p['B'], p['A'], 1.7, p['b'])


def shared(ops, p, h, r, x):
    """One weight, two ops."""
    return 0.8 * h + ops.tanh(ops.matmul(x, p['w']) * ops.sigmoid(ops.matmul(r, p['w'])))


def tied_readout(ops, p, h, r, x):
    """One weight, an op and a plain readout."""
    return 0.8 * h + ops.tanh(x + ops.matmul(r, p['w']))


def learned_decay(ops, p, h, r, x):
    """Element-wise weights: one for each position, and a scalar."""
    decay, gain = ops.element_wise(p['decay'], ops.sigmoid), ops.element_wise(p['gain'], ops.exp)
    return decay * h + ops.tanh(ops.matmul(ops.concatenate([x, r]), p['w'])) * gain


def conv_recurrent(ops, p, h, r, x):
    """Convolutional recurrence; a weight for each channel is beside states that also have
    positions in space.
    """
    y = ops.conv(ops.concatenate([x, r]), p['k'], p['b'])
    return ops.element_wise(p['decay'], ops.sigmoid) * h + ops.tanh(y)


def conv_input(ops, p, h, r, x):
    """A strided convolution of the input, no recurrence."""
    return 0.8 * h + ops.conv(x, p['k'], p['b'], strides=(2,), padding='VALID')


W = (I + N, N)
CHANNELS = {'b': (C,), 'decay': (C,)}

MODELS = [
    row('masked', lambda ops, p, x: ops.matmul(x, p['w'] * MASK), {'w': W}),
    row('transposed', lambda ops, p, x: ops.matmul(x, p['w'].T), {'w': W[::-1]}),
    row('absolute', lambda ops, p, x: ops.matmul(x, ops.abs(p['w'])), {'w': W}),
    row('doubled', doubled, {'w': W, 'b': (N,)}),
    row('reshaped', lambda ops, p, x: ops.matmul(x, p['w'].reshape(W)), {'w': ((I + N) * N,)}),
    row('normalised', normalised, {'v': W, 'g': (N,)}),
    row('added', lambda ops, p, x: ops.matmul(x, p['w1'] + p['w2']), {'w1': W, 'w2': W}),
    row('sparse', sparse, {'data': (int(MASK.sum()),), 'b': (N,)}),
    row('lora', lora, {'B': (I + N, 2), 'A': (2, N), 'b': (N,)}),
    whole(shared, {'w': (N, N)}, x=(B, N)),
    model.row(tied_readout, {'w': (N, N)}, x=(B, N), output=lambda ops, p, h: ops.dot(h, p['w'])),
    whole(learned_decay, {'w': W, 'decay': (N,), 'gain': ()}),
    whole(
        conv_recurrent, {'k': (3, I + C, C)} | CHANNELS, {'h': (B, L, C)}, (B, L, I), name='conv1d'
    ),
    whole(
        conv_recurrent,
        {'k': (3, 2, 1 + C, C)} | CHANNELS,
        {'h': (B, 3, 2, C)},
        (B, 3, 2, 1),
        name='conv2d',
    ),
    model.row(
        conv_input,
        {'k': (3, I, C), 'b': (C,)},
        {'h': (B, 3, C)},
        (B, 7, I),
        exact=True,
        output=lambda ops, p, h: h**2,
    ),
]
