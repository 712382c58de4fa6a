"""Layers without a state, each in front of a leaky one."""

import brainstate
import jax.numpy as jnp
import numpy as np
import saiunit as u

from braintrace import nn
from tests.nn.rows.row import Row

NORMAL = brainstate.nn.init.Normal(scale=0.5)
SIGNS = np.array([[1], [-1], [1]])
MASK = np.array([[1.0, 0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0, 1.0]])


class Leaky(brainstate.nn.Module):
    """``h = 0.8 h + tanh(layer(x))``; a ``recurrent`` layer reads x and h."""

    def __init__(self, layer, recurrent=False):
        super().__init__()
        self.layer, self.recurrent = layer, recurrent

    def init_state(self, batch_size=None, **_):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*lead, *self.layer.out_size)))

    def update(self, x):
        read = jnp.concatenate([x, self.h.value], -1) if self.recurrent else x
        self.h.value = 0.8 * self.h.value + jnp.tanh(self.layer(read))
        return self.h.value


def leaky(layer):
    """The formula of :class:`Leaky` with one of a layer, ``layer(ops, parameter, x)``."""

    def formula(ops, p, s, x):
        y = layer(ops, p['layer.weight'], x)
        h = ops.new('h', 0.8 * s['h'] + ops.tanh(y))
        return h, {'h': h}

    return formula


def row(name, make, layer, **options):
    return Row(name, lambda: Leaky(make()), leaky(layer), exact=True, **options)


def affine(ops, p, x):
    return x @ (p['weight'] * MASK) + p['bias']


def signed(ops, w, x):
    return x @ (ops.abs(w) * SIGNS * MASK)


DALE = np.repeat([1, 1, -1], [3, 4, 1])[:, None]


def recurrent(weight_and_bias):
    """The formula of a recurrent :class:`Leaky`."""

    def formula(ops, p, s, x):
        weight, bias = weight_and_bias(ops, p['layer.weight'])
        y = ops.matmul(ops.concatenate([x, ops.cut(s['h'])]), weight, bias)
        h = ops.new('h', 0.8 * s['h'] + ops.tanh(y))
        return h, {'h': h}

    return formula


def standardised(ops, p, x):
    w, n = p['weight'], len(p['weight'])
    mean = w.sum(0) / n
    variance = (w * w).sum(0) / n - mean * mean
    return x @ ((w - mean) / ops.sqrt(n * variance) * p['gain'] * MASK) + p['bias']


PLACES = np.array([0, 0, 1, 2, 2]), np.array([1, 4, 0, 1, 3])


def sparse_matrix():
    rows, columns = (np.asarray(place, np.int32) for place in PLACES)
    return u.sparse.COO((jnp.linspace(-1.0, 1.5, len(rows)), rows, columns), shape=(3, 5))


def sparse(ops, p, x):
    """Column by column, since no column has more than two entries."""
    columns = [[k for k in range(5) if PLACES[1][k] == j] for j in range(5)]
    products = [sum(x[..., PLACES[0][k]] * p['weight'][k] for k in ks) for ks in columns]
    zero = 0 * x[..., 0]
    return ops.stack([product + zero for product in products], -1) + p['bias']


def signed_matrix():
    matrix = sparse_matrix()
    signs = np.broadcast_to(SIGNS, (3, 5))[PLACES]
    return u.sparse.COO((jnp.abs(matrix.data) * signs, matrix.row, matrix.col), shape=(3, 5))


def sparse_signed(ops, p, x):
    signs = np.broadcast_to(SIGNS, (3, 5))[PLACES]
    return sparse(ops, {'weight': ops.abs(p['weight']) * signs, 'bias': 0.0}, x)


def make_lora():
    base = nn.Linear(3, 5, b_init=NORMAL)
    return nn.LoRA(3, 2, 5, base_module=base, lora_b_init=NORMAL)


def lora(ops, p, s, x):
    base, own = p['layer.base_module.weight'], p['layer.weight']
    y = x @ base['weight'] + base['bias'] + x @ own['lora_a'] @ own['lora_b'] / 2
    h = ops.new('h', 0.8 * s['h'] + ops.tanh(y))
    return h, {'h': h}


def grouped(ops, p, x):
    parts = [x[..., g, :] @ p['weight'][g] + p['bias'][g] for g in range(2)]
    return ops.stack(parts, -2)


def embedded(ops, w, x):
    """Row 1 does not learn."""
    where = (np.arange(6) == 1)[:, None, None]
    return ops.where(where, ops.constant(w), w)[x]


def convolved(ops, x, kernel, pads, stride=1, dilation=1):
    """Channels last: the sum over the places of the window."""
    window = kernel.shape[:-2]
    rank = len(window)
    x = ops.pad(x, [(0, 0)] * (x.ndim - 1 - rank) + [*pads, (0, 0)])
    y = 0.0
    for offset in np.ndindex(*window):
        taken = []
        for o, k, n in zip(offset, window, x.shape[-1 - rank : -1]):
            size = (n - dilation * (k - 1) - 1) // stride + 1
            taken.append(slice(dilation * o, dilation * o + stride * (size - 1) + 1, stride))
        y = y + x[(..., *taken, slice(None))] @ kernel[offset]
    return y


def conv1d(ops, p, x):
    return convolved(ops, x, p['weight'], [(1, 2)], stride=2, dilation=2) + p['bias'][0]


def conv2d(ops, p, x):
    """Channels first, in two groups, with a mask that silences the first place of the window."""
    x, kernel = ops.xp.moveaxis(x, -3, -1), p['weight'] * WINDOW
    halves = zip(ops.split(x, 2), ops.split(kernel, 2))
    y = ops.concatenate([convolved(ops, half, k, [(0, 1), (0, 0)]) for half, k in halves])
    return ops.xp.moveaxis(y + p['bias'][0, :, 0, 0], -1, -3)


def conv3d(ops, p, x):
    return convolved(ops, x, p['weight'], [(0, 0)] * 3) + p['bias'][0, 0, 0]


WINDOW = np.ones((2, 1, 1, 1))
WINDOW[0] = 0.0


ROWS = [
    row('linear', lambda: nn.Linear(3, 5, b_init=NORMAL, w_mask=MASK), affine),
    row(
        'linear_axes',
        lambda: nn.Linear((4, 3), (4, 5), b_init=NORMAL, w_mask=MASK),
        affine,
        x=(4, 3),
    ),
    row('signed', lambda: nn.SignedWLinear(3, 5, w_sign=SIGNS, w_mask=MASK), signed),
    Row(
        'signed_recurrent',
        lambda: Leaky(nn.SignedWLinear(8, 5, w_sign=DALE), True),
        recurrent(lambda ops, w: (ops.abs(w) * DALE, None)),
    ),
    Row(
        'linear_axes_recurrent',
        lambda: Leaky(nn.Linear((4, 8), (4, 5), b_init=NORMAL), True),
        recurrent(lambda ops, p: (p['weight'], p['bias'])),
        x=(4, 3),
    ),
    row('scaled_ws', lambda: nn.ScaledWSLinear(3, 5, b_init=NORMAL, w_mask=MASK), standardised),
    row('sparse', lambda: nn.SparseLinear(sparse_matrix(), NORMAL), sparse),
    row('sparse_signed', lambda: nn.SparseLinear(signed_matrix(), w_sign=SIGNS), sparse_signed),
    Row('lora', lambda: Leaky(make_lora()), lora, exact=True),
    row('grouped', lambda: nn.GroupedLinear(2, 3, 4, b_init=NORMAL), grouped, x=(2, 3)),
    row(
        'embedding',
        lambda: nn.Embedding(6, (2, 3), NORMAL, padding_idx=1),
        embedded,
        x=(),
        draw=lambda rng, shape: rng.integers(0, 6, shape),
    ),
    row(
        'conv1d',
        lambda: nn.Conv1d((6, 3), 4, 2, 2, padding=(1, 2), rhs_dilation=2, b_init=NORMAL),
        conv1d,
        x=(6, 3),
    ),
    row(
        'conv2d',
        lambda: nn.Conv2d(
            (2, 3, 2),
            4,
            (2, 1),
            padding=[(0, 1), 0],
            groups=2,
            b_init=NORMAL,
            w_mask=WINDOW,
            channel_first=True,
        ),
        conv2d,
        x=(2, 3, 2),
    ),
    row(
        'conv3d',
        lambda: nn.Conv3d((2, 3, 2, 2), 2, (1, 2, 2), padding='VALID', b_init=NORMAL),
        conv3d,
        x=(2, 3, 2, 2),
    ),
]
