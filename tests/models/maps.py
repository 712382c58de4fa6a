"""``vmap`` inside the step: ensembles of cells with shared and with separate weights, and cells of
one lane.
"""

import numpy as np

from tests.models.control_flow import SMALL, TWO, checkpoint, drive, flag, jit, leaky, turns
from tests.models.loops import LOOPED, halved, scan
from tests.models.model import B, I, Model, N, O
from tests.models.recurrent import GATE, W

E = 2  # members of an ensemble


def ensemble(update=leaky, weights=None, wrap=lambda ops, fn: fn, axis=0):
    """``E`` copies of a cell on one input; ``weights``: the axis of the parameters, None where they
    are shared.
    """

    def cell(ops, p, c, x):
        fn = ops.vmap(
            wrap(ops, lambda p, h, r: update(ops, p, h, r, x)), (weights, axis, axis), axis
        )
        h = ops.new('h', fn({k: v for k, v in p.items() if k != 'out'}, c['h'], ops.cut(c['h'])))
        return ops.dot(h, p['out']).sum(axis), {'h': h}

    return cell


def mapped(name, cell, params=GATE, shape=(E, B, N), **options):
    options = {'lanes': False} | options
    return Model(name, cell, dict(params) | {'out': (shape[-1], O)}, {'h': shape}, **options)


def separate(params, axis=0):
    return {k: (*v[:axis], E, *v[axis:]) for k, v in params.items()}


def lora(ops, p, h, r, x):
    return 0.8 * h + ops.tanh(ops.lora_matmul(ops.concatenate([x, r]), p['B'], p['A'], 1.3))


def sparse(ops, p, h, r, x):
    return 0.8 * h + ops.tanh(ops.sparse_matmul(ops.concatenate([x, r]), p['data'], SPARSE))


def convolved(ops, p, h, r, x):
    return 0.8 * h + ops.tanh(ops.conv(ops.concatenate([x, r]), p['k']))


def decayed(ops, p, h, r, x):
    return ops.element_wise(p['decay'], ops.sigmoid) * h + ops.tanh(
        ops.matmul(ops.concatenate([x, r]), p['w'])
    )


def lanes(ops, p, c, x):
    """A cell for one lane, mapped over the batch."""
    h = ops.new('h', ops.vmap(lambda h, r, x: leaky(ops, p, h, r, x))(c['h'], ops.cut(c['h']), x))
    return ops.dot(h, p['out']), {'h': h}


def lanes_with_branches(ops, p, c, x):
    """Every lane takes its own branch: JAX makes a select of it."""

    def one(h, r, x):
        return ops.cond(
            x[0] > 0.0,
            lambda h, r: leaky(ops, p['one'], h, r, x),
            lambda h, r: 0.5 * h + ops.sin(drive(ops, p['two'], r, x)),
            h,
            r,
            per_lane=True,
        )

    h = ops.new('h', ops.vmap(one)(c['h'], ops.cut(c['h']), x))
    return ops.dot(h, p['out']), {'h': h}


def ensemble_of_lanes(ops, p, c, x):
    def member(p, h, r):
        return ops.vmap(lambda h, r, x: leaky(ops, p, h, r, x))(h, r, x)

    h = ops.new('h', ops.vmap(member)({'w': p['w'], 'b': p['b']}, c['h'], ops.cut(c['h'])))
    return ops.dot(h, p['out']).sum(0), {'h': h}


def scan_of_ensemble(ops, p, c, x):
    def body(h, r, x):
        return ops.vmap(lambda p, h, r: leaky(ops, p, h, r, x))(
            {'w': p['w'], 'b': p['b']}, h, r
        ), None

    h = ops.new('h', ops.loop(body, c['h'], ops.cut(c['h']), turns(x))[0])
    return ops.dot(h, p['out']).sum(0), {'h': h}


def ensemble_of_scans(ops, p, c, x):
    h = ops.new(
        'h',
        ops.vmap(lambda p, h, r: scan()(ops, p, h, r, x))(
            {'w': p['w'], 'b': p['b']}, c['h'], ops.cut(c['h'])
        ),
    )
    return ops.dot(h, p['out']).sum(0), {'h': h}


def relaxing(ops, p, h, r, x):
    """The number of turns is another one for every member."""
    return halved(ops, h) + ops.tanh(drive(ops, p, r, x))


def relaxing_at_times(ops, p, h, r, x):
    return ops.cond(flag(x), lambda h: halved(ops, h), lambda h: 0.9 * h, h) + ops.tanh(
        drive(ops, p, r, x)
    )


SPARSE = np.random.default_rng(4).random(W) < 0.5

VMAPS = [
    mapped('vmap', ensemble()),
    mapped('vmap_weights', ensemble(weights=0), separate(GATE)),
    mapped(
        'vmap_axis',
        ensemble(weights=1, axis=1),
        {'w': (I + N, E, N), 'b': (N, E)},
        (B, E, N),
        lanes=True,
    ),
    mapped('vmap_lanes', lanes, shape=(B, N), lanes=True),
    mapped('vmap_ensemble_of_lanes', ensemble_of_lanes, separate(GATE)),
    mapped('vmap_cond', lanes_with_branches, TWO, (B, N), lanes=True),
    mapped('vmap_jit', ensemble(weights=0, wrap=jit), separate(GATE)),
    mapped('vmap_checkpoint', ensemble(wrap=checkpoint)),
    mapped('vmap_element_wise', ensemble(decayed, 0), separate({'w': W, 'decay': (N,)})),
    mapped('vmap_element_wise_shared', ensemble(decayed), {'w': W, 'decay': (N,)}),
    mapped('vmap_element_wise_lanes', ensemble(decayed, 0), separate({'w': W, 'decay': (B, N)})),
    mapped('vmap_lora', ensemble(lora, 0), separate({'B': (I + N, 2), 'A': (2, N)})),
    mapped('vmap_lora_shared', ensemble(lora), {'B': (I + N, 2), 'A': (2, N)}),
    mapped('vmap_sparse', ensemble(sparse, 0), separate({'data': (int(SPARSE.sum()),)})),
    mapped('vmap_sparse_shared', ensemble(sparse), {'data': (int(SPARSE.sum()),)}),
    mapped(
        'vmap_conv',
        ensemble(convolved, 0),
        separate({'k': (3, I + 2, 2)}),
        (E, B, 3, 2),
        x=(B, 3, I),
    ),
    mapped(
        'vmap_conv_shared', ensemble(convolved), {'k': (3, I + 2, 2)}, (E, B, 3, 2), x=(B, 3, I)
    ),
    mapped('vmap_while', ensemble(relaxing, 0), separate(GATE)),
    mapped('vmap_while_in_cond', ensemble(relaxing_at_times)),
    mapped('scan_of_vmap', scan_of_ensemble, separate(SMALL), **LOOPED),
    mapped('vmap_of_scan', ensemble_of_scans, separate(SMALL), **LOOPED),
]

MODELS = VMAPS
