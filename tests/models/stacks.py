"""More than one layer: an op is recurrent for every group that its result reaches within the step,
and cut for those only.
"""

from tests.models.model import B, I, M, N, O, alone, of, states
from tests.models.recurrent import GATE, gate, gru_state, lstm_states
from tests.models.spiking import THRESHOLD, fired


def leaky_layer(ops, p, h, x, decay):
    return decay * h + ops.tanh(gate(ops, p, x, ops.cut(h)))


def two_layers(ops, p, c, x):
    h1 = ops.new('h1', leaky_layer(ops, p['one'], c['h1'], x, 0.8))
    h2 = ops.new('h2', leaky_layer(ops, p['two'], c['h2'], h1, 0.7))
    return ops.dot(h2, p['out']), {'h1': h1, 'h2': h2}


def three_layers(ops, p, c, x):
    """The third layer also reads the first, and the output reads the old state of the second."""
    h1 = ops.new('h1', leaky_layer(ops, p['one'], c['h1'], x, 0.8))
    h2 = ops.new('h2', leaky_layer(ops, p['two'], c['h2'], h1, 0.7))
    h3 = ops.new('h3', leaky_layer(ops, p['three'], c['h3'], ops.concatenate([h2, h1]), 0.6))
    return ops.dot(h3, p['out']) + ops.dot(c['h2'], p['skip']), {'h1': h1, 'h2': h2, 'h3': h3}


def lstm_gru(ops, p, c, x):
    """An LSTM below a GRU."""
    gates = ops.split(gate(ops, p['lstm'], x, ops.cut(c['h1'])), 4)
    lower = lstm_states(ops, c['c1'], *gates, names=('c1', 'h1'))
    h2 = gru_state(ops, p, c['h2'], lower['h1'], 'h2')
    return ops.dot(h2, p['out']), lower | {'h2': h2}


def spiking_two(ops, p, c, x):
    """Layer 2 reads layer 1's spike from before the reset: the old v1 inside that spike is live."""
    v1 = 0.8 * c['v1'] + ops.matmul(ops.concatenate([x, fired(ops, ops.cut(c['v1']))]), p['one'])
    z1 = fired(ops, v1)
    v2 = 0.7 * c['v2'] + ops.matmul(ops.concatenate([z1, fired(ops, ops.cut(c['v2']))]), p['two'])
    z2 = fired(ops, v2)
    return ops.dot(z2, p['out']), {'v1': ops.new('v1', v1 - z1), 'v2': ops.new('v2', v2 - z2)}


def spiking_three(ops, p, c, x):
    """Three layers, each reading the spike below from before the reset; adaptation in the second;
    old spikes recur.
    """
    own2 = ops.spike(ops.cut(c['v2']) - THRESHOLD - 0.2 * ops.cut(c['a2']))
    v1 = 0.8 * c['v1'] + ops.matmul(ops.concatenate([x, fired(ops, ops.cut(c['v1']))]), p['one'])
    z1 = fired(ops, v1)
    v2 = 0.7 * c['v2'] + ops.matmul(ops.concatenate([z1, own2]), p['two'])
    z2 = ops.spike(v2 - THRESHOLD - 0.2 * c['a2'])
    v3 = 0.9 * c['v3'] + ops.matmul(ops.concatenate([z2, fired(ops, ops.cut(c['v3']))]), p['three'])
    z3 = fired(ops, v3)
    new = {'v1': v1 - z1, 'v2': v2 - z2, 'a2': 0.9 * c['a2'] + z2, 'v3': v3 - z3}
    return ops.dot(z3, p['out']), {k: ops.new(k, v) for k, v in new.items()}


def populations(ops, p, c, x):
    """Two populations read each other's old state: each op is recurrent for the population that it
    drives.
    """
    a, b = c['a'], c['b']
    drive_a = ops.matmul(ops.concatenate([x, ops.cut(a), b]), p['to_a'])
    drive_b = ops.matmul(ops.concatenate([x, a, ops.cut(b)]), p['to_b'])
    a, b = ops.new('a', 0.8 * a + ops.tanh(drive_a)), ops.new('b', 0.6 * b + ops.tanh(drive_b))
    return ops.dot(ops.concatenate([a, b]), p['out']), {'a': a, 'b': b}


def feedback(ops, p, c, x):
    """Layer 1 reads layer 2's old state, and reaches layer 2's new state through its op: cut for
    both groups.
    """
    top_down = ops.concatenate([x, ops.cut(c['h2'])])
    h1 = ops.new('h1', leaky_layer(ops, p['one'], c['h1'], top_down, 0.8))
    h2 = ops.new('h2', leaky_layer(ops, p['two'], c['h2'], h1, 0.7))
    return h2, {'h1': h1, 'h2': h2}


def one_op_two_groups(ops, p, c, x):
    """One op drives two groups of different shapes; each keeps its own trace of the same weight."""
    y = ops.matmul(ops.concatenate([x, ops.cut(c['h']), ops.cut(c['m'])]), p['w'])
    h = ops.new('h', 0.8 * c['h'] + ops.tanh(y[..., :N]))
    m = ops.new('m', 0.6 * c['m'] + ops.sigmoid(y[..., N:]))
    return ops.concatenate([h, m]), {'h': h, 'm': m}


def weights(inputs, positions, gates=1):
    return {'w': (inputs + positions, gates * positions), 'b': (gates * positions,)}


GRU = {k: weights(N, M) for k in 'zrn'} | {'out': (M, O)}
H1, H2, A_B = {'h1': (B, N)}, {'h2': (B, M)}, {'a': (B, N), 'b': (B, M)}
V = {'v1': (B, N), 'v2': (B, M)}
LAYERS = {'owner': {'one': 0, 'two': 1, 'three': 2}}
TWO = {'groups': alone('h1', 'h2'), **LAYERS}
BOTH = {'groups': alone('a', 'b'), 'owner': {'to_b': 1}}
SPIKING = {'one': (I + N, N), 'two': (N + M, M)}
THREE = {'one': GATE, 'two': weights(N, M), 'three': weights(M + N, N), 'out': (N, O)}


def between(m):
    """Weights of two populations that read each other, the second one of ``m``."""
    return {'to_a': (I + N + m, N), 'to_b': (I + N + m, m), 'out': (N + m, O)}


MODELS = [
    of(two_layers, {'one': GATE, 'two': weights(N, M), 'out': (M, O)}, H1 | H2, **TWO),
    of(
        two_layers,
        {'one': GATE, 'two': weights(N, N), 'out': (N, O)},
        states(['h1', 'h2']),
        name='two_equal_layers',
        **TWO,
    ),
    of(
        three_layers,
        THREE | {'skip': (M, O)},
        H1 | H2 | {'h3': (B, N)},
        groups=alone('h1', 'h2', 'h3'),
        **LAYERS,
    ),
    of(
        lstm_gru,
        {'lstm': weights(I, N, 4)} | GRU,
        {'c1': (B, N)} | H1 | H2,
        groups=(('c1', 'h1'), ('h2',)),
        owner={'z': 1, 'n': 1, 'r': None},
    ),
    of(spiking_two, SPIKING | {'out': (M, O)}, V, groups=alone('v1', 'v2'), smooth=False, **LAYERS),
    of(
        spiking_three,
        SPIKING | {'three': (M + N, N), 'out': (N, O)},
        V | {'a2': (B, M), 'v3': (B, N)},
        groups=(('v1',), ('v2', 'a2'), ('v3',)),
        smooth=False,
        **LAYERS,
    ),
    of(populations, between(M), A_B, **BOTH),
    of(populations, between(N), states('ab'), name='equal_populations', **BOTH),
    of(feedback, {'one': weights(I + M, N), 'two': weights(N, M)}, H1 | H2, **TWO),
    of(
        one_op_two_groups,
        {'w': (I + N + M, N + M)},
        {'h': (B, N), 'm': (B, M)},
        groups=alone('h', 'm'),
        cut_bptt=False,
    ),
]
