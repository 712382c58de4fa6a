"""Rate cells of one layer: leaky and vanilla RNN, gated cells, diagonal recurrences, plain weights
and readouts.
"""

from tests.models.model import I, M, N, O, of, row, shown, states, untraced

W = (I + N, N)
GATE = {'w': W, 'b': (N,)}
READOUT = (N, O)


def gate(ops, p, x, h):
    """``[x, h] @ w + b``; the caller says whether ``h`` is cut."""
    return ops.matmul(ops.concatenate([x, h]), p['w'], p['b'])


def leaky(ops, p, h, r, x):
    return 0.8 * h + ops.tanh(gate(ops, p, x, r))


def vanilla(ops, p, h, r, x):
    return ops.tanh(gate(ops, p, x, r))


def vector(ops, p, h, r, x):
    """Unbatched: the op is a matrix times a vector."""
    return 0.7 * h + ops.tanh(gate(ops, p, x, r))


def gru_state(ops, p, h, x, name='h'):
    """The reset gate reaches h through the candidate's op only: its gradient is the same-step
    part.
    """
    z = ops.sigmoid(gate(ops, p['z'], x, ops.cut(h)))
    r = ops.sigmoid(gate(ops, p['r'], x, ops.cut(h)))
    n = ops.tanh(gate(ops, p['n'], x, r * ops.cut(h)))
    return ops.new(name, (1.0 - z) * h + z * n)


def gru(ops, p, c, x):
    h = gru_state(ops, p, c['h'], x)
    return ops.dot(h, p['out']), {'h': h}


def mgu(ops, p, h, r, x):
    """The forget gate reaches h both directly and through the candidate's op (fault J)."""
    f = ops.sigmoid(gate(ops, p['f'], x, r))
    return (1.0 - f) * h + f * ops.tanh(gate(ops, p['n'], x, f * r))


def minimal_rnn(ops, p, h, r, x):
    """``phi`` reaches h both directly and through the update gate's op (fault J)."""
    z = ops.tanh(ops.matmul(x, p['phi']))
    u = ops.sigmoid(ops.matmul(ops.concatenate([z, r]), p['u']))
    return u * h + (1.0 - u) * z


def lstm_states(ops, old, i, f, g, o, names=('c', 'h')):
    cell = ops.new(names[0], ops.sigmoid(f) * old + ops.sigmoid(i) * ops.tanh(g))
    h = ops.new(names[1], ops.sigmoid(o) * ops.tanh(ops.within(names[0], cell)))
    return dict(zip(names, (cell, h), strict=True))


def lstm(ops, p, c, x):
    new = lstm_states(ops, c['c'], *(gate(ops, p[k], x, ops.cut(c['h'])) for k in 'ifgo'))
    return ops.dot(new['h'], p['out']), new


def lstm_fused(ops, p, c, x):
    """One op for all four gates, then a split."""
    new = lstm_states(ops, c['c'], *ops.split(gate(ops, p, x, ops.cut(c['h'])), 4))
    return ops.dot(new['h'], p['out']), new


def lstm_reading_cell(ops, p, c, x):
    """The output reads the new cell state too, so that state has uses besides the position-wise
    one.
    """
    new = lstm_states(ops, c['c'], *(gate(ops, p[k], x, ops.cut(c['h'])) for k in 'ifgo'))
    return new['h'] + 0.5 * new['c'] ** 2, new


def min_gru(ops, p, h, r, x):
    z = ops.sigmoid(ops.matmul(x, p['z'], p['b']))
    return (1.0 - z) * h + z * ops.matmul(x, p['n'])


def lru(ops, p, c, x):
    """A rotation and a decay learned for each position; plain readouts ``c`` and ``d``."""
    decay = ops.element_wise(p['nu'], lambda v: ops.exp(-ops.exp(v)))
    angle = ops.element_wise(p['theta'], lambda v: v)
    a, b = decay * ops.cos(angle), decay * ops.sin(angle)
    re = ops.new('re', a * c['re'] - b * c['im'] + ops.matmul(x, p['b_re']))
    im = ops.new('im', b * c['re'] + a * c['im'] + ops.matmul(x, p['b_im']))
    return ops.dot(re, p['c']) + ops.dot(x, p['d']), {'re': re, 'im': im}


def plain_input(ops, p, h, r, x):
    """Only the recurrent weight is marked; the input weight, the leak and the readout are plain."""
    drive = ops.dot(x, p['w_in']) + ops.matmul(r, p['w'])
    return ops.sigmoid(ops.plain(p['leak'])) * h + ops.tanh(drive)


def encoder(ops, p, h, r, x):
    """A plain layer in front of the op."""
    return 0.8 * h + ops.tanh(gate(ops, p, ops.tanh(ops.dot(x, p['enc'])), r))


def old_output(ops, p, c, x):
    """The output is computed from the old state, by a plain weight and by an op."""
    h = ops.new('h', 0.8 * c['h'] + ops.tanh(gate(ops, p, x, ops.cut(c['h']))))
    return ops.dot(c['h'], p['out']) + ops.matmul(ops.tanh(c['h']), p['out_op']), {'h': h}


def op_readout(ops, p, h):
    """The readout is an op too: it reaches no state."""
    return ops.matmul(h, p['out'], p['out_b'])


def state_sum(ops, p, c, x):
    """Two old states added directly (fault G)."""
    total = c['h'] + c['a']
    y = gate(ops, p, x, ops.cut(c['h']) + ops.cut(c['a']))
    h = ops.new('h', 0.6 * total + ops.tanh(y))
    a = ops.new('a', 0.9 * c['a'] - 0.3 * ops.within('h', h))
    return h * a, {'h': h, 'a': a}


def op_between_states(ops, p, c, x):
    """A second op reads one new state of the group and feeds the other: live in the signals,
    constant in the D pass.
    """
    v = ops.new('v', 0.8 * c['v'] - 0.2 * c['a'] + ops.tanh(gate(ops, p, x, ops.cut(c['v']))))
    a = ops.new('a', 0.7 * c['a'] + 0.1 * ops.within('v', v) + ops.tanh(ops.matmul(v, p['w2'])))
    return a, {'v': v, 'a': a}


def context(ops, p, h, r, x):
    """A matrix times a vector whose result is shared by all lanes of a batched state."""
    return 0.8 * h + ops.tanh(gate(ops, p, x, r) + ops.matmul(ops.tanh(x[0]), p['v']))


GATES = {k: GATE for k in 'ifgo'}
LSTM = states('ch')
OUT = {'out': READOUT}
LRU = {'nu': (N,), 'theta': (N,), 'b_re': (I, N), 'b_im': (I, N), 'c': READOUT, 'd': (I, O)}

MODELS = [
    row(leaky, GATE | OUT),
    row(vanilla, GATE, output=shown),
    row(vector, GATE | OUT, {'h': (N,)}, (I,)),
    of(gru, {'z': GATE, 'r': GATE, 'n': GATE} | OUT, owner=untraced('r')),
    row(mgu, {'f': GATE, 'n': GATE}, output=shown, cut_bptt=False),
    row(minimal_rnn, {'phi': (I, N), 'u': (N + N, N)}, output=shown, cut_bptt=False),
    of(lstm, GATES | OUT, LSTM),
    of(lstm_fused, {'w': (I + N, 4 * N), 'b': (4 * N,)} | OUT, LSTM),
    of(lstm_reading_cell, GATES, LSTM),
    row(min_gru, {'z': (I, N), 'b': (N,), 'n': (I, N)} | OUT, exact=True),
    of(lru, LRU, states(['re', 'im']), exact=True),
    row(
        plain_input,
        {'w_in': (I, N), 'w': (N, N), 'leak': (N,)} | OUT,
        owner=untraced('w_in', 'leak'),
    ),
    row(encoder, {'enc': (I, M), 'w': (M + N, N), 'b': (N,)}, output=shown, owner=untraced('enc')),
    of(old_output, GATE | OUT | {'out_op': READOUT}),
    row(leaky, GATE | OUT | {'out_b': (O,)}, output=op_readout, name='op_readout'),
    of(state_sum, GATE, states('ha')),
    of(op_between_states, GATE | {'w2': (N, N)}, states('va'), cut_bptt=False),
    row(context, GATE | {'v': (I, N)}, output=shown),
]
