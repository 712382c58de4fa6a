"""``vmap`` inside the step: ensembles of cells with shared and with separate weights, and cells of
one lane.
"""

import numpy as np

from tests.models.control_flow import SMALL, TWO, drive, flag, leaky, turns
from tests.models.loops import LOOPED, halved
from tests.models.model import B, I, N, O, read_out, row
from tests.models.recurrent import GATE, W

E = 2  # members of an ensemble


def ensemble(update=leaky, weights=None, axis=0):
    """``E`` copies of a cell on one input; ``weights``: the axis of the parameters, None where they
    are shared.
    """

    def transition(ops, p, h, r, x):
        fn = lambda p, h, r: update(ops, p, h, r, x)
        return ops.vmap(fn, (weights, axis, axis), axis)(without_readout(p), h, r)

    return transition


def without_readout(p):
    return {k: v for k, v in p.items() if k != 'out'}


def mapped(name, transition, params=GATE, shape=(E, B, N), axis=0, **options):
    """``axis``: that of the members, which the output sums."""

    def output(ops, p, h):
        y = read_out(ops, p, h)
        return y if len(shape) == 2 else y.sum(axis)

    params = dict(params) | {'out': (shape[-1], O)}
    return row(transition, params, {'h': shape}, name=name, output=output, **options)


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


def lanes(ops, p, h, r, x):
    """A cell for one lane, mapped over the batch."""
    return ops.vmap(lambda h, r, x: leaky(ops, p, h, r, x))(h, r, x)


def lanes_with_branches(ops, p, h, r, x):
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

    return ops.vmap(one)(h, r, x)


def scan_of_ensemble(ops, p, h, r, x):
    def body(h, r, x):
        return ops.vmap(lambda p, h, r: leaky(ops, p, h, r, x))(without_readout(p), h, r), None

    return ops.loop(body, h, r, turns(x))[0]


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
    mapped('vmap_axis', ensemble(weights=1, axis=1), separate(GATE, 1), (B, E, N), axis=1),
    mapped('vmap_lanes', lanes, shape=(B, N)),
    mapped('vmap_cond', lanes_with_branches, TWO, (B, N)),
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
]

MODELS = VMAPS
