"""What stands between y and h, and recurrence by plain data movement: leaky cells again.

A permutation between y and h is followed exactly, since every element of y still meets one
position. A mixing equation is cut: it reads constants in the D pass, and old states without giving
anything back to them.
"""

from tests.models.model import B, I, Model, N, O

W = (I + N, N)


def op(ops, p, c, x):
    return ops.matmul(ops.concatenate([x, ops.cut(c['h'])]), p['w'], p['b'])


def cell_with(tail, keep=lambda ops, h: 0.8 * h):
    """``h = keep(h') + tail(y)``."""

    def cell(ops, p, c, x):
        h = ops.new('h', keep(ops, c['h']) + tail(ops, op(ops, p, c, x)))
        return h, {'h': h}

    return cell


def row(name, *cell, **options) -> Model:
    return Model(name, cell_with(*cell), {'w': W, 'b': (N,)}, **options)


def swap_halves(ops, y):
    return ops.concatenate(ops.split(y, 2)[::-1])


def layer_norm(ops, y):
    centred = y - ops.mean(y)
    return centred / ops.sqrt(ops.mean(centred**2) + 0.1)


def bypass(ops, p, c, x):
    """The output reads y and the state before its reset, never the new state."""
    y = op(ops, p, c, x)
    before = 0.8 * c['h'] + ops.tanh(y)
    h = ops.new('h', before - 0.5 * ops.sigmoid(4.0 * before))
    return ops.dot(ops.tanh(before), p['out']) + ops.dot(y, p['out']), {'h': h}


MODELS = [
    row('tail_flip', lambda ops, y: ops.tanh(ops.flip(y))),
    row('tail_swap', lambda ops, y: ops.tanh(swap_halves(ops, y))),
    row('tail_relu', lambda ops, y: ops.relu(y) + ops.where(y.real > 0.3, y**2, 0.2 * y)),
    row('tail_cumsum', lambda ops, y: ops.tanh(ops.cumsum(y)), owner={'w': None, 'b': None}),
    row('tail_norm', lambda ops, y: layer_norm(ops, y), cut_bptt=False),
    row('roll', lambda ops, y: ops.tanh(y), lambda ops, h: 0.5 * h + 0.4 * ops.roll(ops.cut(h), 1)),
    row('mean', lambda ops, y: ops.tanh(y), lambda ops, h: 0.5 * h - 0.4 * ops.mean(ops.cut(h))),
    Model('bypass', bypass, {'w': W, 'b': (N,), 'out': (N, O)}, {'h': (B, N)}),
]
