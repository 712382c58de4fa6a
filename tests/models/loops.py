"""Loops inside the step: ``scan``, ``fori_loop`` and ``while`` around leaky cells and a few
others.
"""

import numpy as np

from tests.models.control_flow import (
    OUT,
    SMALL,
    drive,
    either,
    flag,
    half,
    leaky,
    lstm_row,
    lstm_update,
    row,
    states_cell,
    turns,
)
from tests.models.model import B, M, Model, N, O, alone, states
from tests.models.recurrent import GATE
from tests.models.spiking import THRESHOLD, fired

COSINES = np.cos(np.arange(16.0)).reshape(N, N)
INNER = 3  # turns of an inner loop
MASK = np.random.default_rng(3).random((1 + N, N)) < 0.7


def scan(body=leaky, **options):
    """An inner loop over the inputs of the step."""

    def transition(ops, p, h, r, x):
        turn = lambda h, r, x: (body(ops, p, h, r, x), None)
        return ops.loop(turn, h, r, turns(x), **options)[0]

    return transition


def settle(ops, p, h, r, x):
    """Turns without inputs, ``fori_loop``."""
    return ops.for_loop(
        INNER, lambda i, h, r: 0.7 * h + ops.tanh(drive(ops, p, r, x) - 0.3 * i), h, r
    )


def by_index(ops, p, h, r, x):
    return ops.for_loop(INNER, lambda i, h, r: leaky(ops, p, h, r, turns(x)[i]), h, r)


def by_length(ops, p, h, r, x):
    return ops.loop(lambda h, r, _: (leaky(ops, p, h, r, x), None), h, r, length=2)[0]


def from_zero(ops, p, h, r, x):
    """The loop's carry is no state: it starts at zero, reads the old state and drives the new
    one.
    """

    def body(z, read, _):
        (z, h), (rz, _) = z, read
        return (0.5 * z + 0.3 * h + ops.tanh(drive(ops, p, rz, x)), h), None

    (z, _), _ = ops.loop(body, (ops.zeros_like(h), h), (ops.zeros_like(r), r), length=INNER)
    return 0.8 * h + z


def integration(ops, p, h, r, x):
    """Plain integration; the op is outside."""
    y = ops.tanh(drive(ops, p, r, x))
    return ops.for_loop(4, lambda i, h, _: h + 0.1 * (y - ops.sin(h)), h, h)


def input_only(ops, p, h, r, x):
    """No op reads a state: the rule is exact."""
    return 0.8 * h + ops.tanh(ops.matmul(x, p['w'], p['b'])) * ops.sigmoid(h)


def inner_decay(ops, p, h, r, x):
    decay = ops.element_wise(p['decay'], ops.sigmoid)
    return decay * h + (1.0 - decay) * ops.matmul(x, p['w'])


def masked(ops, p, h, r, x):
    """The weight's function is inside the loop."""
    return 0.8 * h + ops.tanh(ops.matmul(ops.concatenate([x, r]), ops.sin(p['w']) * MASK))


def weight_slices(ops, p, h, r, x):
    """A weight of its own for every turn, sliced by the loop."""
    return ops.loop(
        lambda h, r, at: (leaky(ops, at[0], h, r, at[1]), None),
        h,
        r,
        ({'w': p['w'], 'b': p['b']}, turns(x)),
    )[0]


def nested(ops, p, h, r, x):
    """A loop in a loop, an op in both."""

    def outer(h, r, x):
        return 0.9 * ops.for_loop(
            2, lambda i, h, r: leaky(ops, p['one'], h, r, x), h, r
        ) + ops.tanh(drive(ops, p['two'], r, x)), None

    return ops.loop(outer, h, r, turns(x)[:2])[0]


slow = lambda ops, p, h, r, x: 0.6 * h + ops.tanh(drive(ops, p, r, x))


def mixed_turns(mix):
    """Something mixing between the turns."""
    return scan(lambda ops, p, h, r, x: 0.3 * mix(ops, r) + slow(ops, p, h, r, x))


def scan_readout(ops, p, c, x):
    """The states of all turns are read; the last is the new state."""

    def body(h, r, x):
        h = leaky(ops, p, h, r, x)
        return h, h

    h, hs = ops.loop(body, c['h'], ops.cut(c['h']), turns(x))
    h = ops.new('h', h)
    return ops.dot(ops.last(hs, h).sum(0), p['out']), {'h': h}


def scan_spikes(ops, p, c, x):
    """Inner steps of a spiking neuron; the output counts spikes, which are read before the
    reset.
    """

    def body(v, r, x):
        v = 0.9 * v + ops.matmul(ops.concatenate([x, fired(ops, r)]), p['w'])
        z = fired(ops, v)
        return v - z, z

    v, zs = ops.loop(body, c['v'], ops.cut(c['v']), turns(x))
    return ops.dot(zs.sum(0), p['out']), {'v': ops.new('v', v)}


def accumulated(ops, p, c, x):
    """The loop carries an accumulator beside the state."""

    def body(live, read, x):
        (h, total), (r, _) = live, read
        before = 0.8 * h + ops.tanh(drive(ops, p, r, x))
        return (before - 0.4 * ops.sigmoid(before), total + before**2), None

    h, r = c['h'], ops.cut(c['h'])
    (h, total), _ = ops.loop(body, (h, ops.zeros_like(h)), (r, ops.zeros_like(r)), turns(x))
    return ops.dot(total, p['out']), {'h': ops.new('h', h)}


def adaptive_update(ops, p, h, r, x):
    """Potential and adaptation."""
    old = ops.spike(r['v'] - THRESHOLD - 0.2 * r['a'])
    v = 0.8 * h['v'] + ops.matmul(ops.concatenate([x, old]), p['w'])
    z = ops.spike(v - THRESHOLD - 0.2 * h['a'])
    return {'v': v - z, 'a': 0.9 * h['a'] + z}


def two_in_scan(ops, p, c, x):
    """Two layers in one loop; the second reads the first before its reset."""

    def body(h, r, x):
        before = leaky(ops, p['one'], h['a'], r['a'], x)
        return {
            'a': before - 0.5 * ops.sigmoid(before),
            'b': leaky(ops, p['two'], h['b'], r['b'], before),
        }, None

    new, _ = ops.loop(
        body, dict(c), {k: ops.cut(v) for k, v in c.items()}, turns(x), groups=('a', 'b')
    )
    new = {k: ops.new(k, v) for k, v in new.items()}
    return ops.dot(new['b'], p['out']), new


LOOPED = {'cut_bptt': False}  # the ops of one turn read those of the turn before

LOOPS = [
    row('scan', scan(), SMALL, **LOOPED),
    row('scan_reverse', scan(reverse=True), SMALL, **LOOPED),
    row('scan_unrolled_in_part', by_length, **LOOPED),
    row('scan_masked', scan(masked), {'w': (1 + N, N)}, **LOOPED),
    row('scan_weight_slices', weight_slices, {'w': (INNER, 1 + N, N), 'b': (INNER, N)}, **LOOPED),
    row('scan_nested', nested, {'one': SMALL, 'two': SMALL}, **LOOPED),
    row('scan_from_zero', from_zero, **LOOPED),
    row('scan_integration', integration),
    row('scan_input_only', scan(input_only), {'w': (1, N), 'b': (N,)}, exact=True),
    row('scan_decay', scan(inner_decay), {'w': (1, N), 'decay': (N,)}, exact=True),
    row('scan_mean', mixed_turns(lambda ops, r: ops.mean(r)), SMALL, **LOOPED),
    row('scan_dot', mixed_turns(lambda ops, r: ops.dot(r, COSINES)), SMALL, **LOOPED),
    row('scan_roll', mixed_turns(lambda ops, r: ops.roll(r, 1)), SMALL, **LOOPED),
    row('fori_loop', settle, **LOOPED),
    row('fori_of_inputs', by_index, SMALL, **LOOPED),
    row('cond_in_scan', scan(either(leaky, half, lambda h, x: x[0, 0] > 0.0)), SMALL, **LOOPED),
    Model('scan_readout', scan_readout, SMALL | OUT, **LOOPED),
    Model(
        'scan_spikes', scan_spikes, {'w': (1 + N, N)} | OUT, {'v': (B, N)}, smooth=False, **LOOPED
    ),
    Model('scan_accumulated', accumulated, SMALL | OUT, **LOOPED),
    lstm_row('scan_lstm', scan(lstm_update), 1, **LOOPED),
    Model(
        'scan_adaptive',
        states_cell(scan(adaptive_update)),
        {'w': (1 + N, N)} | OUT,
        states('va'),
        smooth=False,
        **LOOPED,
    ),
    Model(
        'scan_two_layers',
        two_in_scan,
        {'one': SMALL, 'two': {'w': (N + M, M), 'b': (M,)}, 'out': (M, O)},
        {'a': (B, N), 'b': (B, M)},
        groups=alone('a', 'b'),
        owner={'two': 1},
        **LOOPED,
    ),
]


# -- while -----------------------------------------------------------------------------------------

MOST = 12


def halved(ops, h):
    """Halved until below a bound; how often depends on the numbers."""
    return ops.while_loop(lambda h: (ops.abs(h.real) > 0.4).any(), lambda h: 0.5 * h, h, MOST)


def shrunk(ops, h):
    """Each position until it is below the bound."""
    return ops.while_loop(
        lambda h: (ops.abs(h.real) > 0.7).any(),
        lambda h: ops.where(ops.abs(h.real) > 0.7, 0.6 * h + 0.05 * ops.sin(h), h),
        h,
        MOST,
    )


def counted(ops, p, h, r, x):
    """The number of turns comes with the input."""
    many = 1 + 1 * flag(x)
    h, _ = ops.while_loop(
        lambda at: at[1] < many,
        lambda at: (0.8 * at[0] + 0.1 * at[0] ** 2, at[1] + 1),
        (h, 0),
        MOST,
    )
    return h + ops.tanh(drive(ops, p, r, x))


def while_pair(ops, p, h, r, x):
    """Two states meet in the loop."""
    h = ops.while_loop(
        lambda h: (ops.abs(h['v'].real) > 0.5).any(),
        lambda h: {'v': 0.6 * h['v'] - 0.1 * h['a'], 'a': 0.9 * h['a'] + 0.1 * h['v']},
        h,
        MOST,
    )
    return {'v': h['v'] + ops.tanh(drive(ops, p, r['v'], x)), 'a': h['a']}


def relaxed(ops, v):
    """Every turn mixes positions."""
    return ops.while_loop(
        lambda v: (ops.abs(v.real) > 0.5).any(), lambda v: 0.4 * v + 0.2 * ops.shift(v, 1), v, MOST
    )


def while_input(ops, p, h, r, x):
    """Only the input passes the loop."""
    return leaky(ops, p, h, r, halved(ops, x))


def while_in_scan(ops, p, h, r, x):
    return ops.loop(lambda h, r, x: (leaky(ops, p, halved(ops, h), r, x), None), h, r, turns(x))[0]


def whiled(ops, p, h, r, x):
    return halved(ops, h) + ops.tanh(drive(ops, p, r, x))


WHILES = [
    row('while', whiled),
    row('while_each', lambda ops, p, h, r, x: shrunk(ops, 0.9 * h + drive(ops, p, r, x))),
    row('while_counted', counted),
    row(
        'while_mixing',
        lambda ops, p, h, r, x: (
            0.5 * h + 0.4 * ops.mixing(lambda h: relaxed(ops, h), r) + ops.tanh(drive(ops, p, r, x))
        ),
    ),
    row(
        'while_mixing_tail',
        lambda ops, p, h, r, x: (
            0.8 * h + ops.mixing(lambda y: relaxed(ops, y), drive(ops, p, r, x))
        ),
        owner={'w': None, 'b': None},
    ),
    row('while_input', while_input),
    row('while_in_scan', while_in_scan, SMALL, **LOOPED),
    row(
        'while_in_cond',
        lambda ops, p, h, r, x: (
            ops.cond(flag(x), lambda h: halved(ops, h), lambda h: 0.9 * h, h)
            + ops.tanh(drive(ops, p, r, x))
        ),
    ),
    Model('while_pair', states_cell(while_pair), GATE | OUT, states('av')),
]


MODELS = [*LOOPS, *WHILES]
