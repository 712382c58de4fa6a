"""Spiking cells of one layer. ``z`` is a spike; a reset subtracts it."""

from tests.models.model import I, N, O, of, states

THRESHOLD = 0.5


def fired(ops, v):
    return ops.spike(v - THRESHOLD)


def lif(ops, p, c, x):
    """No recurrence: online equals BPTT. The output spike is read before the reset."""
    v = 0.8 * c['v'] + ops.matmul(x, p['w'])
    z = fired(ops, v)
    return ops.dot(z, p['out']), {'v': ops.new('v', v - z)}


def lif_by_vjp(ops, p, c, x):
    """The surrogate gradient given as a ``custom_vjp``."""
    v = 0.8 * c['v'] + ops.matmul(x, p['w'])
    z = ops.spike_by_vjp(v - THRESHOLD)
    return ops.dot(z, p['out']), {'v': ops.new('v', v - z)}


def lif_recurrent(ops, p, c, x):
    """The recurrent op and the reset read the spike of the old potential; the output that of the
    new one.
    """
    y = ops.matmul(ops.concatenate([x, fired(ops, ops.cut(c['v']))]), p['w'])
    v = ops.new('v', 0.8 * c['v'] - fired(ops, c['v']) + y)
    return ops.dot(fired(ops, v), p['out']), {'v': v}


def synapse(ops, p, c, x):
    """Synapse -> membrane: the new current is read by the new potential in the same step (fault
    C).
    """
    i = ops.new(
        'i',
        0.6 * c['i']
        + ops.matmul(ops.concatenate([x, fired(ops, ops.cut(c['v']))]), p['w'], p['b']),
    )
    v = ops.new('v', 0.8 * c['v'] - fired(ops, c['v']) + 0.5 * ops.within('i', i))
    return ops.dot(fired(ops, v), p['out']) + 0.1 * ops.dot(i, p['out']), {'i': i, 'v': v}


def adaptive_lif(ops, p, c, x):
    """Potential v and adaptation a; the spike is taken before the reset, the recurrent op reads the
    old spike.
    """
    old = ops.spike(ops.cut(c['v']) - THRESHOLD - 0.2 * ops.cut(c['a']))
    v = 0.8 * c['v'] + ops.matmul(ops.concatenate([x, old]), p['w'])
    z = ops.spike(v - THRESHOLD - 0.2 * c['a'])
    new = {'v': ops.new('v', v - z), 'a': ops.new('a', 0.9 * c['a'] + z)}
    return ops.dot(z, p['out']), new


def learned_leak(ops, p, c, x):
    """Leak and threshold learned for each neuron through ``element_wise``."""
    leak = ops.element_wise(p['leak'], ops.sigmoid)
    v = leak * c['v'] + ops.matmul(ops.concatenate([x, fired(ops, ops.cut(c['v']))]), p['w'])
    z = ops.spike(v - ops.element_wise(p['threshold'], ops.softplus))
    return ops.dot(z, p['out']), {'v': ops.new('v', v - z)}


def stored_spike(ops, p, c, x):
    """The spike is a state, a function of the new potential and adaptation; the op, the reset and
    the adaptation read the old one.
    """
    y = ops.matmul(ops.concatenate([x, ops.cut(c['z'])]), p['w'])
    v = ops.new('v', 0.8 * c['v'] - c['z'] + y)
    a = ops.new('a', 0.9 * c['a'] + c['z'])
    z = ops.spike(ops.within('v', v) - THRESHOLD - 0.2 * ops.within('a', a))
    z = ops.new('z', z)
    return ops.dot(z, p['out']), {'v': v, 'a': a, 'z': z}


RECURRENT, OUT = {'w': (I + N, N)}, {'out': (N, O)}
LEAK = {'leak': (N,), 'threshold': (N,)}

MODELS = [
    of(lif, {'w': (I, N)} | OUT, states('v'), exact=True, smooth=False),
    of(lif_by_vjp, {'w': (I, N)} | OUT, states('v'), exact=True, smooth=False),
    of(lif_recurrent, RECURRENT | OUT, states('v'), smooth=False),
    of(synapse, RECURRENT | {'b': (N,)} | OUT, states('iv'), smooth=False),
    of(adaptive_lif, RECURRENT | OUT, states('va'), smooth=False),
    of(learned_leak, RECURRENT | LEAK | OUT, states('v'), smooth=False),
    of(stored_spike, RECURRENT | OUT, states('vaz'), smooth=False),
]
