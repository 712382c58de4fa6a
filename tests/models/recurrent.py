"""Rate cells of one layer: leaky and vanilla RNN, gated cells, diagonal recurrences, plain weights
and readouts.
"""

from tests.models.model import B, I, M, Model, N, O

W = (I + N, N)
GATE = {'w': W, 'b': (N,)}
READOUT = (N, O)


def gate(ops, p, x, h):
    """``[x, h] @ w + b``; the caller says whether ``h`` is cut."""
    return ops.matmul(ops.concatenate([x, h]), p['w'], p['b'])


def leaky(ops, p, c, x):
    h = ops.new('h', 0.8 * c['h'] + ops.tanh(gate(ops, p, x, ops.cut(c['h']))))
    return ops.dot(h, p['out']), {'h': h}


def leaky_jitted(ops, p, c, x):
    """The same with the element-wise part inside a user's ``jit``."""
    tail = ops.jit(lambda h, y: 0.8 * h + ops.tanh(y))
    h = ops.new('h', tail(c['h'], gate(ops, p, x, ops.cut(c['h']))))
    return ops.dot(h, p['out']), {'h': h}


def vanilla(ops, p, c, x):
    h = ops.new('h', ops.tanh(gate(ops, p, x, ops.cut(c['h']))))
    return h, {'h': h}


def vector(ops, p, c, x):
    """Unbatched: the op is a matrix times a vector."""
    h = ops.new('h', 0.7 * c['h'] + ops.tanh(gate(ops, p, x, ops.cut(c['h']))))
    return ops.dot(h, p['out']), {'h': h}


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


def mgu(ops, p, c, x):
    """The forget gate reaches h both directly and through the candidate's op (fault J)."""
    h = c['h']
    f = ops.sigmoid(gate(ops, p['f'], x, ops.cut(h)))
    n = ops.tanh(gate(ops, p['n'], x, f * ops.cut(h)))
    h = ops.new('h', (1.0 - f) * h + f * n)
    return h, {'h': h}


def minimal_rnn(ops, p, c, x):
    """``phi`` reaches h both directly and through the update gate's op (fault J)."""
    h = c['h']
    z = ops.tanh(ops.matmul(x, p['phi']))
    u = ops.sigmoid(ops.matmul(ops.concatenate([z, ops.cut(h)]), p['u']))
    h = ops.new('h', u * h + (1.0 - u) * z)
    return h, {'h': h}


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


def min_gru(ops, p, c, x):
    z = ops.sigmoid(ops.matmul(x, p['z'], p['b']))
    h = ops.new('h', (1.0 - z) * c['h'] + z * ops.matmul(x, p['n']))
    return ops.dot(h, p['out']), {'h': h}


def lru(ops, p, c, x):
    """A rotation and a decay learned for each position; plain readouts ``c`` and ``d``."""
    decay = ops.element_wise(p['nu'], lambda v: ops.exp(-ops.exp(v)))
    angle = ops.element_wise(p['theta'], lambda v: v)
    a, b = decay * ops.cos(angle), decay * ops.sin(angle)
    re = ops.new('re', a * c['re'] - b * c['im'] + ops.matmul(x, p['b_re']))
    im = ops.new('im', b * c['re'] + a * c['im'] + ops.matmul(x, p['b_im']))
    return ops.dot(re, p['c']) + ops.dot(x, p['d']), {'re': re, 'im': im}


def plain_input(ops, p, c, x):
    """Only the recurrent weight is marked; the input weight, the leak and the readout are plain."""
    drive = ops.dot(x, p['w_in']) + ops.matmul(ops.cut(c['h']), p['w'])
    h = ops.new('h', ops.sigmoid(ops.plain(p['leak'])) * c['h'] + ops.tanh(drive))
    return ops.dot(h, p['out']), {'h': h}


def encoder(ops, p, c, x):
    """A plain layer in front of the op."""
    h = ops.new(
        'h', 0.8 * c['h'] + ops.tanh(gate(ops, p, ops.tanh(ops.dot(x, p['enc'])), ops.cut(c['h'])))
    )
    return h, {'h': h}


def old_output(ops, p, c, x):
    """The output is computed from the old state, by a plain weight and by an op."""
    h = ops.new('h', 0.8 * c['h'] + ops.tanh(gate(ops, p, x, ops.cut(c['h']))))
    return ops.dot(c['h'], p['out']) + ops.matmul(ops.tanh(c['h']), p['out_op']), {'h': h}


def op_readout(ops, p, c, x):
    """The readout is an op too: it reaches no state."""
    h = ops.new('h', 0.8 * c['h'] + ops.tanh(gate(ops, p, x, ops.cut(c['h']))))
    return ops.matmul(h, p['out'], p['out_b']), {'h': h}


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


def context(ops, p, c, x):
    """A matrix times a vector whose result is shared by all lanes of a batched state."""
    y = gate(ops, p, x, ops.cut(c['h'])) + ops.matmul(ops.tanh(x[0]), p['v'])
    h = ops.new('h', 0.8 * c['h'] + ops.tanh(y))
    return h, {'h': h}


GATES = {k: GATE for k in 'ifgo'}
LSTM = {'c': (B, N), 'h': (B, N)}

MODELS = [
    Model('leaky', leaky, GATE | {'out': READOUT}),
    Model('leaky_jitted', leaky_jitted, GATE | {'out': READOUT}),
    Model('vanilla', vanilla, GATE),
    Model('vector', vector, GATE | {'out': READOUT}, {'h': (N,)}, (I,), lanes=False),
    Model('gru', gru, {'z': GATE, 'r': GATE, 'n': GATE, 'out': READOUT}, owner={'r': None}),
    Model('mgu', mgu, {'f': GATE, 'n': GATE}, cut_bptt=False),
    Model('minimal_rnn', minimal_rnn, {'phi': (I, N), 'u': (N + N, N)}, cut_bptt=False),
    Model('lstm', lstm, GATES | {'out': READOUT}, LSTM),
    Model('lstm_fused', lstm_fused, {'w': (I + N, 4 * N), 'b': (4 * N,), 'out': READOUT}, LSTM),
    Model('lstm_reading_cell', lstm_reading_cell, GATES, LSTM),
    Model('min_gru', min_gru, {'z': (I, N), 'b': (N,), 'n': (I, N), 'out': READOUT}, exact=True),
    Model(
        'lru',
        lru,
        {'nu': (N,), 'theta': (N,), 'b_re': (I, N), 'b_im': (I, N), 'c': READOUT, 'd': (I, O)},
        {'re': (B, N), 'im': (B, N)},
        exact=True,
    ),
    Model(
        'plain_input',
        plain_input,
        {'w_in': (I, N), 'w': (N, N), 'leak': (N,), 'out': READOUT},
        owner={'w_in': None, 'leak': None},
    ),
    Model('encoder', encoder, {'enc': (I, M), 'w': (M + N, N), 'b': (N,)}, owner={'enc': None}),
    Model('old_output', old_output, GATE | {'out': READOUT, 'out_op': READOUT}),
    Model('op_readout', op_readout, GATE | {'out': READOUT, 'out_b': (O,)}),
    Model('state_sum', state_sum, GATE, {'h': (B, N), 'a': (B, N)}),
    Model(
        'op_between_states',
        op_between_states,
        GATE | {'w2': (N, N)},
        {'v': (B, N), 'a': (B, N)},
        cut_bptt=False,
    ),
    Model('context', context, GATE | {'v': (I, N)}, lanes=False),
]
