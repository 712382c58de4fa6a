"""Every tail: data movement between y and h and inside the recurrence, which is followed, and
mixing, which is cut.
"""

import numpy as np

from tests.models.model import B, I, Model, N, O
from tests.models.recurrent import GATE, READOUT, W

K = 3  # copies
ORDER, BACK = np.array([2, 0, 3, 1]), np.array([1, 3, 0, 2])
UNTRACED = {'w': None, 'b': None}


def drive(ops, p, c, x):
    return ops.matmul(ops.concatenate([x, ops.cut(c['h'])]), p['w'], p['b'])


def row(
    name, tail=lambda ops, y: ops.tanh(y), keep=lambda ops, h, r: 0.8 * h, wide=N, **options
) -> Model:
    """``h = keep(h', what mixing reads of h') + tail(y)`` with ``wide`` outputs of the op."""

    def cell(ops, p, c, x):
        h = ops.new('h', keep(ops, c['h'], ops.cut(c['h'])) + tail(ops, drive(ops, p, c, x)))
        return h, {'h': h}

    return Model(name, cell, {'w': (I + N, wide), 'b': (wide,)}, **options)


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


def transposed(ops, p, c, x):
    """The state lies the other way round."""
    h = ops.new(
        'h',
        0.8 * c['h']
        + ops.tanh(ops.matmul(ops.concatenate([x, ops.cut(c['h']).T]), p['w'], p['b']).T),
    )
    return ops.dot(h.T, p['out']), {'h': h}


def two_parts(ops, p, c, x):
    """Two populations, each driven by an op of its own that reads both."""
    of_one = ops.concatenate([x, ops.cut(c['a']), c['b']])
    of_two = ops.concatenate([x, c['a'], ops.cut(c['b'])])
    a = ops.new('a', 0.8 * c['a'] + ops.tanh(ops.matmul(of_one, p['one'])))
    b = ops.new('b', 0.8 * c['b'] + ops.tanh(ops.matmul(of_two, p['two'])))
    return ops.dot(ops.concatenate([a, b]), p['out']), {'a': a, 'b': b}


def unstacked(ops, p, c, x):
    """A state is taken apart and put together again, each part with a decay of its own."""
    y = drive(ops, p, c, x)
    parts = [(0.9 - 0.1 * k) * c['h'][:, k] + ops.tanh(y[:, k]) for k in range(N)]
    h = ops.new('h', ops.stack(parts, 1))
    return ops.dot(h, p['out']), {'h': h}


def copies(ops, p, c, x):
    """Every y drives K positions, along an axis of its own."""
    y = ops.matmul(ops.concatenate([x, ops.cut(c['h']).sum(0)]), p['w'], p['b'])
    h = ops.new(
        'h',
        np.array([0.9, 0.7, 0.5])[:, None, None] * c['h']
        + ops.broadcast_to(ops.tanh(y), (K, B, N)),
    )
    return ops.dot(h[0] - h[1] ** 2 + h[2], p['out']), {'h': h}


def spread(to_state, wide):
    """Every y drives several positions of one lane."""

    def cell(ops, p, c, x):
        y = ops.matmul(ops.concatenate([x, ops.cut(c['h'])]), p['w'], p['b'])
        h = ops.new('h', np.array([0.9, 0.7, 0.5, 0.8]) * c['h'] + ops.tanh(to_state(ops, y)))
        return ops.dot(h, p['out']), {'h': h}

    return cell, {'w': (I + N, wide), 'b': (wide,), 'out': READOUT}


def reversed_decay(ops, p, c, x):
    """A weight for each position, which every lane reads in another order."""
    decay = ops.flip(ops.element_wise(p['decay'], ops.sigmoid))
    h = ops.new('h', decay * c['h'] + ops.tanh(drive(ops, p, c, x)))
    return ops.dot(h, p['out']), {'h': h}


SHAPES = [
    Model('move_transpose', transposed, GATE | {'out': READOUT}, {'h': (N, B)}, lanes=False),
    Model(
        'move_parts',
        two_parts,
        {'one': (I + N, 1), 'two': (I + N, N - 1), 'out': READOUT},
        {'a': (B, 1), 'b': (B, N - 1)},
        groups=(('a',), ('b',)),
        owner={'two': 1, 'out': None},
    ),
    Model('move_unstack', unstacked, GATE | {'out': READOUT}),
    Model('broadcast', copies, GATE | {'out': READOUT}, {'h': (K, B, N)}, lanes=False),
    Model('broadcast_reversed', reversed_decay, GATE | {'decay': (N,), 'out': READOUT}),
    Model('broadcast_inside', *spread(lambda ops, y: ops.broadcast_to(y, (B, N)), 1)),
    Model('broadcast_repeat', *spread(lambda ops, y: ops.repeat(y, 2, -1), 2)),
    Model('broadcast_tile', *spread(lambda ops, y: ops.tile(y, (1, 2)), 2)),
    Model('broadcast_gather', *spread(lambda ops, y: y[:, np.array([0, 2, 2, 1])], 3)),
]


def and_back(name, go, come) -> Model:
    """The old state is moved, changed position by position, and moved back; it is also read where
    it stands.
    """
    return row(
        f'back_{name}', keep=lambda ops, h, _: 0.5 * h + 0.3 * come(ops, ops.sin(go(ops, h)))
    )


BACKS = [
    and_back('flip', lambda ops, h: ops.flip(h), lambda ops, h: ops.flip(h)),
    and_back('reshape', lambda ops, h: h.reshape(2, B, 2), lambda ops, h: h.reshape(B, N)),
    and_back('transpose', lambda ops, h: h.T, lambda ops, h: h.T),
    and_back(
        'split',
        lambda ops, h: ops.concatenate(ops.split(h, 2)[::-1]),
        lambda ops, h: ops.concatenate(ops.split(h, 2)[::-1]),
    ),
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


def picked(ops, p, c, x):
    """A position that the input chooses is read by all."""
    h = ops.new(
        'h',
        0.6 * c['h']
        + ops.tanh(drive(ops, p, c, x))
        - 0.3 * ops.pick(ops.cut(c['h']), step_integer(ops, x)),
    )
    return h, {'h': h}


def picked_tail(ops, p, c, x):
    h = ops.new(
        'h',
        0.6 * c['h']
        + ops.tanh(ops.pick(drive(ops, p, c, x), step_integer(ops, x)))
        + 0.2 * x[:, :1],
    )
    return ops.dot(h, p['out']), {'h': h}


def plain_dot(ops, p, c, x):
    """A plain matrix in the recurrence."""
    h = ops.new(
        'h',
        0.6 * c['h']
        + ops.tanh(drive(ops, p, c, x))
        + 0.3 * ops.dot(ops.cut(c['h']), ops.plain(p['u'])),
    )
    return h, {'h': h}


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
    in_recurrence(
        'dot', lambda ops, h, r: ops.dot(ops.tanh(r), np.cos(np.arange(16.0)).reshape(N, N))
    ),
    Model('mix_plain_dot', plain_dot, GATE | {'u': (N, N)}, owner={'u': None}),
    Model('mix_pick', picked, GATE, lanes=False),
    in_tail('softmax', lambda ops, y: ops.softmax(y, y), cut_bptt=False),
    in_tail('length', lambda ops, y: y / (0.5 + ops.norm(y)), cut_bptt=False),
    in_tail('max', lambda ops, y: ops.tanh(y - ops.highest(y)), cut_bptt=False),
    in_tail(
        'dot',
        lambda ops, y: ops.tanh(ops.dot(y, np.cos(np.arange(16.0)).reshape(N, N))),
        owner=UNTRACED,
    ),
    Model(
        'tail_pick', picked_tail, {'w': W, 'b': (N,), 'out': (N, O)}, owner=UNTRACED, lanes=False
    ),
]

MODELS = [*TAILS, *SHAPES, *BACKS, *MIXING]
