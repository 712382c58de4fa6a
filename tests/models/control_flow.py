"""Control flow inside the step, one construct a row: calls and branches around leaky cells
(``loops`` and ``maps`` hold the others).

State passes as ``(h, r)``: ops and mixing equations read ``r``. New states are made from the values
that a construct returns.
"""

import jax
import numpy as np

from tests.models import model
from tests.models.model import B, I, M, Model, N, O, alone, states
from tests.models.recurrent import GATE, READOUT, W

SMALL = {'w': (1 + N, N), 'b': (N,)}  # a turn of an inner loop sees one input
OUT = {'out': READOUT}


def drive(ops, p, r, x):
    return ops.matmul(ops.concatenate([x, r]), p['w'], p.get('b'))


def leaky(ops, p, h, r, x):
    return 0.8 * h + ops.tanh(drive(ops, p, r, x))


def reset(ops, p, h, r, x):
    """No op, and a dead position."""
    return ops.put(0.3 * h, np.index_exp[..., 0], 0.0)


def turns(x):
    """The inputs of one step, one for each turn of an inner loop."""
    return x.T[..., None]


def flag(x):
    return x[0, 0] > 0.0


def row(name, transition, params=GATE, **options) -> Model:
    return model.row(transition, dict(params) | OUT, name=name, **options)


# -- calls -----------------------------------------------------------------------------------------


def in_call(*wrap):
    """A leaky update inside these calls, the first one innermost; parameters are arguments."""

    def transition(ops, p, h, r, x):
        def fn(p, h, r, x):
            return leaky(ops, p, h, r, x)

        for call in wrap:
            fn = call(ops, fn)
        return fn(p, h, r, x)

    return transition


jit = lambda ops, fn: ops.jit(fn)
checkpoint = lambda ops, fn: ops.checkpoint(fn)
with_policy = lambda ops, fn: ops.checkpoint(fn, policy=jax.checkpoint_policies.dots_saveable)
shard = lambda ops, fn: ops.shard(fn)


def lstm_update(ops, p, h, r, x):
    """``h`` and ``r`` hold both states."""
    i, f, g, o = ops.split(drive(ops, p, r['h'], x), 4)
    c = ops.sigmoid(f) * h['c'] + ops.sigmoid(i) * ops.tanh(g)
    return {'c': c, 'h': ops.sigmoid(o) * ops.tanh(c)}


def states_cell(transition):
    """A cell of several states that one transition makes together; the output reads the last by
    name.
    """

    def cell(ops, p, c, x):
        new = transition(ops, p, c, {k: ops.cut(v) for k, v in c.items()}, x)
        new = {k: ops.new(k, v) for k, v in new.items()}
        return ops.dot(new[max(c)], p['out']), new

    return cell


def lstm_row(name, transition, inputs=I, **options):
    params = {'w': (inputs + N, 4 * N), 'b': (4 * N,)} | OUT
    return Model(name, states_cell(transition), params, states('ch'), **options)


def closing_over(ops, p, h, r, x):
    """Calls that close over parameters, states and input instead of taking them."""
    y = ops.jit(lambda: ops.checkpoint(lambda: drive(ops, p, r, x))())()
    return ops.jit(lambda y: 0.8 * h + ops.tanh(y))(y)


def custom_rules(ops, p, h, r, x):
    """Derivative rules of the user's own, true ones and others, inside calls."""
    tail = ops.custom(lambda h, y: 0.8 * h + ops.tanh(y))
    return ops.checkpoint(
        lambda h, y: ops.eased_by_vjp(ops.custom_by_vjp(ops.sin)(tail(h, ops.eased(y))))
    )(h, drive(ops, p, r, x))


def weights_in_calls(ops, p, h, r, x):
    """The weight passes a loop and a call on its way to the op."""
    w, _ = ops.loop(
        lambda w, _, k: (ops.tanh(w) + k * w, None), p['w'], p['w'], np.array([0.3, -0.2])
    )
    return 0.8 * h + ops.tanh(
        ops.matmul(ops.concatenate([x, r]), ops.jit(ops.checkpoint(ops.tanh))(w), p['b'])
    )


CALLS = [
    row('calls_mixed', in_call(checkpoint, jit, with_policy, jit)),
    row('closing_over', closing_over),
    row('custom_rules', custom_rules, smooth=False),
    row('weights_in_calls', weights_in_calls),
    row('sharded', in_call(shard)),
    row('sharded_checkpoint', in_call(checkpoint, shard, jit)),
]


# -- branches --------------------------------------------------------------------------------------


def either(yes, no, pred=lambda h, x: flag(x)):
    """Two transitions as the branches of a ``cond``."""

    def transition(ops, p, h, r, x):
        branches = [lambda h, r, of=of: of(ops, p, h, r, x) for of in (yes, no)]
        return ops.cond(pred(h, x), *branches, h, r)

    return transition


first = lambda ops, p, h, r, x: leaky(ops, p['one'], h, r, x)
second = lambda ops, p, h, r, x: 0.6 * h + ops.sigmoid(drive(ops, p['two'], r, x))
growing = lambda ops, p, h, r, x: 1.1 * h - ops.sigmoid(drive(ops, p, r, x))
fading = lambda ops, p, h, r, x: 0.8 * h
half = lambda ops, p, h, r, x: 0.5 * h


def three_branches(ops, p, h, r, x):
    index = 1 * (x[0, 0] > -0.6) + 1 * (x[0, 0] > 0.6)
    third = lambda h, r: 0.5 * h + ops.sin(drive(ops, p['two'], r, x))
    branches = [lambda h, r, of=of: of(ops, p, h, r, x) for of in (first, reset)]
    return ops.switch(index, [*branches, third], h, r)


def on_other_inputs(ops, p, h, r, x):
    """The same weight as that of the other branch."""
    return 0.5 * h + ops.tanh(drive(ops, p, 2.0 * r, x**2))


def refractory(ops, p, h, r, x):
    return ops.cond(
        flag(x), lambda h: 0.2 * h - 0.1, lambda h: 0.9 * h + 0.1 * ops.sin(h), h
    ) + ops.tanh(drive(ops, p, r, x))


def drive_of_branches(ops, p, h, r, x):
    """The ops are in branches, the state outside."""
    one, two = lambda z: ops.matmul(z, p['w']), lambda z: ops.matmul(ops.tanh(z), p['v'])
    return 0.8 * h + ops.tanh(ops.cond(flag(x), one, two, ops.concatenate([x, r])))


def root_at_zero(ops, p, h, r, x):
    """Where it is not taken, the first branch has derivatives 0 * inf."""
    level = ops.where(flag(x), x[0, 0], 0.0)
    root = lambda h, r: ops.sqrt(level * (h**2 + 1.0)) - 0.5 * leaky(ops, p, h, r, x)
    return ops.cond(flag(x), root, lambda h, r: 0.7 * h + ops.tanh(drive(ops, p, r, x)), h, r)


def log_of_negative(ops, p, h, r, x):
    """Where it is not taken, this branch, its op's input and its op's result are nan."""
    scale = ops.log(x[0, 0])
    return 0.3 * h * scale + ops.log(x[0, 0] + h**2) + ops.tanh(drive(ops, p, r, x * scale))


def nan_in_switch(ops, p, h, r, x):
    """Each branch is nan or infinite where it is not taken."""
    level, index = x[0, 0], 1 * (x[0, 0] > 0.0) + 1 * (x[0, 0] > 1.0)
    return ops.switch(
        index,
        [
            lambda h, r: (
                h * ops.sqrt(-level) * 0.3 + ops.tanh(drive(ops, p['one'], r, x * ops.log(-level)))
            ),
            lambda h, r: (
                0.5 * h + ops.tanh(ops.sqrt(level) * drive(ops, p['two'], r, x / (level > 0.0)))
            ),
            lambda h, r: ops.log(level) * h + drive(ops, p['two'], r, ops.sqrt(level - 1.0) * x),
        ],
        h,
        r,
    )


def branch_readout(ops, p, c, x):
    """Readouts in branches, a plain one and an op, beside a state that no branch makes."""
    h = ops.new('h', leaky(ops, p, c['h'], ops.cut(c['h']), x))
    plain, op = lambda h: ops.dot(h, p['out']), lambda h: ops.matmul(ops.tanh(h), p['out_op'])
    return ops.cond(flag(x), plain, op, h), {'h': h}


def state_and_output(ops, p, c, x):
    """One ``cond`` returns the new state and the output, which reads the state before its reset."""

    def update(ops, p, h, r, decay):
        before = decay * h + ops.tanh(drive(ops, p, r, x))
        return before - 0.5 * ops.sigmoid(before), ops.tanh(before)

    h, z = ops.cond(
        flag(x),
        lambda h, r: update(ops, p['one'], h, r, 0.8),
        lambda h, r: update(ops, p['two'], h, r, 0.5),
        c['h'],
        ops.cut(c['h']),
    )
    return ops.dot(z, p['out']), {'h': ops.new('h', h)}


def clockwork(ops, p, c, x):
    """Two layers; the slow one moves at some steps only, and reads the fast one's old state."""
    a, b = ops.cond(
        flag(x),
        lambda a, ra, b, rb: (leaky(ops, p['one'], a, ra, x), leaky(ops, p['two'], b, rb, a)),
        lambda a, ra, b, rb: (leaky(ops, p['one'], a, ra, x), b),
        c['a'],
        ops.cut(c['a']),
        c['b'],
        ops.cut(c['b']),
    )
    a, b = ops.new('a', a), ops.new('b', b)
    return ops.dot(a, p['out_a']) + ops.dot(b, p['out_b']), {'a': a, 'b': b}


TWO = {'one': GATE, 'two': GATE}

BRANCHES = [
    row('cond', either(first, second), TWO),
    row('cond_constant', either(leaky, reset, lambda h, x: True)),
    row('cond_same_weight', either(leaky, on_other_inputs)),
    row('switch', three_branches, TWO),
    row('refractory', refractory),
    row('cond_on_state', either(leaky, growing, lambda h, x: h.real.sum() > 0.0)),
    row('cond_drive', drive_of_branches, {'w': W, 'v': W}),
    row('cond_root_at_zero', root_at_zero),
    row('cond_log_of_negative', either(log_of_negative, fading)),
    row('switch_nan', nan_in_switch, TWO),
    Model('cond_readout', branch_readout, GATE | OUT | {'out_op': READOUT}),
    Model('cond_output', state_and_output, TWO | OUT),
    Model(
        'clockwork',
        clockwork,
        {'one': GATE, 'two': {'w': (N + M, M), 'b': (M,)}, 'out_a': READOUT, 'out_b': (M, O)},
        {'a': (B, N), 'b': (B, M)},
        groups=alone('a', 'b'),
        owner={'two': 1},
    ),
]

MODELS = [*CALLS, *BRANCHES]
