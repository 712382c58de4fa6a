"""Every tail: data movement between y and h and inside the recurrence, which is followed, and
mixing, which is cut.
"""

import numpy as np

from tests.models import model
from tests.models.model import B, I, Model, N, alone, of, shown, untraced
from tests.models.recurrent import GATE, READOUT

K = 3  # copies
ORDER, BACK = np.array([2, 0, 3, 1]), np.array([1, 3, 0, 2])
UNTRACED, OUT = untraced('w', 'b'), {'out': READOUT}
COSINES = np.cos(np.arange(16.0)).reshape(N, N)


drive = lambda ops, p, r, x: ops.matmul(ops.concatenate([x, r]), p['w'], p['b'])
tanh = lambda ops, y: ops.tanh(y)


def row(name, tail=tanh, keep=lambda ops, h, r: 0.8 * h, wide=N, **options) -> Model:
    """``h = keep(h', what mixing reads of h') + tail(y)`` with ``wide`` outputs of the op."""

    def transition(ops, p, h, r, x):
        return keep(ops, h, r) + tail(ops, drive(ops, p, r, x))

    params = {'w': (I + N, wide), 'b': (wide,)}
    return model.row(transition, params, name=name, output=shown, **options)


def there(name, move, **options) -> Model:
    """A tail that moves each element of y to one position."""
    return row(f'move_{name}', lambda ops, y: ops.tanh(move(ops, y)), **options)


def zeros(ops, y, size):
    return ops.zeros_like(ops.concatenate([y] * size)[..., :size])


TAILS = [
    there('reshape', lambda ops, y: y.reshape(B, 2, 2).swapaxes(1, 2).reshape(B, N)),
    there('slice', lambda ops, y: y[..., 2 : 2 + N], wide=N + 3),
    there('slice_strided', lambda ops, y: y[:, ::2], wide=2 * N),
    there('slice_reversed', lambda ops, y: y[:, ::-1]),
    there('pieces', lambda ops, y: ops.concatenate([y[..., 3:], y[..., 1:3], y[..., :1]])),
    there('squeeze', lambda ops, y: y[:, None, :, None].squeeze((1, 3))),
    there('gather', lambda ops, y: y[:, ORDER]),
    there('gather_negative', lambda ops, y: y[..., np.array([-1, -4, 1, -2])]),
    there('gather_some', lambda ops, y: y[:, np.array([5, 0, 3, 2])], wide=N + 2),
    there('gather_2d', lambda ops, y: y[:, np.array([[0, 1], [3, 2]])].reshape(B, N)),
    there('put', lambda ops, y: ops.put(y, np.index_exp[:, 1], 0.0)),
    there(
        'put_on_zeros',
        lambda ops, y: ops.put(zeros(ops, y, N), np.index_exp[..., np.array([3, 0])], y),
        wide=2,
    ),
    there('pad', lambda ops, y: ops.pad(y, ((0, 0), (1, 1))), wide=2),
    there('stack', lambda ops, y: ops.stack([y[:, :2], y[:, 2:]], -1).reshape(B, N)),
    there('part', lambda ops, y: ops.part(y, 1, N), wide=N + 2),
    there('shift', lambda ops, y: ops.shift(y, 1)),
    there('masked', lambda ops, y: ops.where(np.array([True, False, True, True]), y, 0.5)),
]


def transposed(ops, p, h, r, x):
    """The state lies the other way round."""
    return 0.8 * h + ops.tanh(ops.matmul(ops.concatenate([x, r.T]), p['w'], p['b']).T)


def two_parts(ops, p, c, x):
    """Two populations, each driven by an op of its own that reads both."""
    of_one = ops.concatenate([x, ops.cut(c['a']), c['b']])
    of_two = ops.concatenate([x, c['a'], ops.cut(c['b'])])
    a = ops.new('a', 0.8 * c['a'] + ops.tanh(ops.matmul(of_one, p['one'])))
    b = ops.new('b', 0.8 * c['b'] + ops.tanh(ops.matmul(of_two, p['two'])))
    return ops.dot(ops.concatenate([a, b]), p['out']), {'a': a, 'b': b}


def unstacked(ops, p, h, r, x):
    """A state is taken apart and put together again, each part with a decay of its own."""
    y = drive(ops, p, r, x)
    return ops.stack([(0.9 - 0.1 * k) * h[:, k] + ops.tanh(y[:, k]) for k in range(N)], 1)


def copies(ops, p, h, r, x):
    """Every y drives K positions, along an axis of its own."""
    y = ops.tanh(drive(ops, p, r.sum(0), x))
    return np.array([0.9, 0.7, 0.5])[:, None, None] * h + ops.broadcast_to(y, (K, B, N))


def spread(name, to_state, wide) -> Model:
    """Every y drives several positions of one lane."""

    def transition(ops, p, h, r, x):
        y = drive(ops, p, r, x)
        return np.array([0.9, 0.7, 0.5, 0.8]) * h + ops.tanh(to_state(ops, y))

    return model.row(transition, {'w': (I + N, wide), 'b': (wide,)} | OUT, name=f'broadcast_{name}')


def reversed_decay(ops, p, h, r, x):
    """A weight for each position, which every lane reads in another order."""
    decay = ops.flip(ops.element_wise(p['decay'], ops.sigmoid))
    return decay * h + ops.tanh(drive(ops, p, r, x))


SHAPES = [
    model.row(
        transposed,
        GATE | OUT,
        {'h': (N, B)},
        output=lambda ops, p, h: ops.dot(h.T, p['out']),
        name='move_transpose',
    ),
    of(
        two_parts,
        {'one': (I + N, 1), 'two': (I + N, N - 1)} | OUT,
        {'a': (B, 1), 'b': (B, N - 1)},
        name='move_parts',
        groups=alone('a', 'b'),
        owner={'two': 1, 'out': None},
    ),
    model.row(unstacked, GATE | OUT, name='move_unstack'),
    model.row(
        copies,
        GATE | OUT,
        {'h': (K, B, N)},
        output=lambda ops, p, h: ops.dot(h[0] - h[1] ** 2 + h[2], p['out']),
        name='broadcast',
    ),
    model.row(reversed_decay, GATE | {'decay': (N,)} | OUT, name='broadcast_reversed'),
    spread('inside', lambda ops, y: ops.broadcast_to(y, (B, N)), 1),
    spread('repeat', lambda ops, y: ops.repeat(y, 2, -1), 2),
    spread('tile', lambda ops, y: ops.tile(y, (1, 2)), 2),
    spread('gather', lambda ops, y: y[:, np.array([0, 2, 2, 1])], 3),
]


def and_back(name, go, come) -> Model:
    """The old state is moved, changed position by position, and moved back; it is also read where
    it stands.
    """
    return row(
        f'back_{name}', keep=lambda ops, h, _: 0.5 * h + 0.3 * come(ops, ops.sin(go(ops, h)))
    )


def swap_halves(ops, y):
    return ops.concatenate(ops.split(y, 2)[::-1])


BACKS = [
    and_back('flip', lambda ops, h: ops.flip(h), lambda ops, h: ops.flip(h)),
    and_back('reshape', lambda ops, h: h.reshape(2, B, 2), lambda ops, h: h.reshape(B, N)),
    and_back('transpose', lambda ops, h: h.T, lambda ops, h: h.T),
    and_back('split', swap_halves, swap_halves),
    and_back('shift', lambda ops, h: ops.shift(h, 1), lambda ops, h: ops.shift(h, -1)),
    and_back('gather', lambda ops, h: h[:, ORDER], lambda ops, h: h[:, BACK]),
    and_back('gather_negative', lambda ops, h: h[..., ORDER - N], lambda ops, h: h[..., BACK - N]),
    and_back('pad', lambda ops, h: ops.pad(h, ((0, 0), (2, 1))), lambda ops, h: h[:, 2:-1]),
    and_back('stack', lambda ops, h: ops.stack([h, 0.5 * h], 1), lambda ops, h: h[:, 0] + h[:, 1]),
    and_back('squeeze', lambda ops, h: h[:, None], lambda ops, h: h.squeeze(1)),
    and_back(
        'put',
        lambda ops, h: ops.put(zeros(ops, h, N + 2), np.index_exp[:, ORDER + 1], h),
        lambda ops, h: h[:, ORDER + 1],
    ),
    and_back(
        'part', lambda ops, h: ops.concatenate([h, h[:, :2]]), lambda ops, h: ops.part(h, 0, N)
    ),
    and_back('broadcast', lambda ops, h: ops.broadcast_to(h, (K, B, N)), lambda ops, h: h[1]),
]


def step_integer(ops, x):
    return 1 * (x[0, 0] > 0.0) + 2 * (x[0, 1] > 0.0)


def picked(ops, p, h, r, x):
    """A position that the input chooses is read by all."""
    y = ops.tanh(drive(ops, p, r, x))
    return 0.6 * h + y - 0.3 * ops.pick(r, step_integer(ops, x))


def picked_tail(ops, p, h, r, x):
    y = ops.tanh(ops.pick(drive(ops, p, r, x), step_integer(ops, x)))
    return 0.6 * h + y + 0.2 * x[:, :1]


def plain_dot(ops, p, h, r, x):
    """A plain matrix in the recurrence."""
    y = ops.tanh(drive(ops, p, r, x))
    return 0.6 * h + y + 0.3 * ops.dot(r, ops.plain(p['u']))


def in_recurrence(name, mix, **options) -> Model:
    return row(f'mix_{name}', keep=lambda ops, h, r: 0.5 * h - 0.4 * mix(ops, h, r), **options)


def in_tail(name, tail, **options) -> Model:
    return row(f'tail_{name}', tail, **options)


MIXING = [
    in_recurrence('norm', lambda ops, h, r: h / (1.0 + ops.norm(r))),
    in_recurrence('softmax', lambda ops, h, r: ops.softmax(h, r)),
    in_recurrence('logsumexp', lambda ops, h, r: ops.sin(h) * ops.logsumexp(r)),
    in_recurrence('max', lambda ops, h, r: h - ops.highest(r)),
    in_recurrence('cumsum', lambda ops, h, r: ops.cumsum(r)),
    in_recurrence('dot', lambda ops, h, r: ops.dot(ops.tanh(r), COSINES)),
    model.row(
        plain_dot, GATE | {'u': (N, N)}, output=shown, name='mix_plain_dot', owner=untraced('u')
    ),
    model.row(picked, GATE, output=shown, name='mix_pick'),
    in_tail('softmax', lambda ops, y: ops.softmax(y, y), cut_bptt=False),
    in_tail('length', lambda ops, y: y / (0.5 + ops.norm(y)), cut_bptt=False),
    in_tail('max', lambda ops, y: ops.tanh(y - ops.highest(y)), cut_bptt=False),
    in_tail('dot', lambda ops, y: ops.tanh(ops.dot(y, COSINES)), owner=UNTRACED),
    model.row(picked_tail, GATE | OUT, name='tail_pick', owner=UNTRACED),
]

MODELS = [*TAILS, *SHAPES, *BACKS, *MIXING]


# -- of the first table: a permutation is followed exactly, since every element of y still meets one
# position; a mixing equation reads constants in the D pass, and old states as constants


def layer_norm(ops, y):
    centred = y - ops.mean(y)
    return centred / ops.sqrt(ops.mean(centred**2) + 0.1)


def bypass(ops, p, c, x):
    """The output reads y and the state before its reset, never the new state."""
    y = drive(ops, p, ops.cut(c['h']), x)
    before = 0.8 * c['h'] + ops.tanh(y)
    h = ops.new('h', before - 0.5 * ops.sigmoid(4.0 * before))
    return ops.dot(ops.tanh(before), p['out']) + ops.dot(y, p['out']), {'h': h}


FIRST = [
    in_tail('flip', lambda ops, y: ops.tanh(ops.flip(y))),
    in_tail('swap', lambda ops, y: ops.tanh(swap_halves(ops, y))),
    in_tail('relu', lambda ops, y: ops.relu(y) + ops.where(y.real > 0.3, y**2, 0.2 * y)),
    in_tail('cumsum', lambda ops, y: ops.tanh(ops.cumsum(y)), owner=UNTRACED),
    in_tail('norm', layer_norm, cut_bptt=False),
    row('roll', keep=lambda ops, h, r: 0.5 * h + 0.4 * ops.roll(r, 1)),
    row('mean', keep=lambda ops, h, r: 0.5 * h - 0.4 * ops.mean(r)),
    of(bypass, GATE | OUT),
]
