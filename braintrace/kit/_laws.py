"""The laws that compare numbers: both sides of each equation, for one application."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from .. import functional, rules, verify
from ..errors import RuleContractError
from ._application import STEPS, Application, Draw, is_inexact, stack
from ._evaluate import Part, Sides, unless
from ._own_rules import has_reverse, reverse

DECAY = 0.8

# L1: the function ---------------------------------------------------------------------------------


def _one_by_one(app: Application, many) -> jax.Array:
    return stack([app.bind([a[i] for a in many]) for i in range(3)])


def _vmap(app: Application, draw: Draw) -> Sides:
    return jax.vmap(lambda *operands: app.bind(operands))(*draw.many), _one_by_one(app, draw.many)


def _vmap_x(app: Application, draw: Draw) -> Sides:
    xs, call = app.x(draw.many), lambda x: app.bind(app.place(draw.operands, x=x))
    return jax.vmap(call)(xs), stack([call(x) for x in xs])


def _scan(app: Application, draw: Draw) -> Sides:
    step = lambda carry, operands: (carry, app.bind(operands))
    return jax.lax.scan(step, None, draw.many)[1], _one_by_one(app, draw.many)


def _differences(app: Application, draw: Draw) -> Sides:
    step = 1e-6 if jnp.finfo(app.y_aval.dtype).bits == 64 else 1e-2
    live = [i for i, a in enumerate(app.avals) if is_inexact(a)]

    def of_live(*moved):
        operands = list(draw.operands)
        for i, value in zip(live, moved, strict=True):
            operands[i] = value
        return app.bind(operands)

    at, along = ([values[i] for i in live] for values in (draw.operands, draw.tangents))
    moved = lambda sign: of_live(*(a + sign * step * t for a, t in zip(at, along, strict=True)))
    return jax.jvp(of_live, at, along)[1], (moved(1) - moved(-1)) / (2 * step)


# L2 to L8, L10: the rules -------------------------------------------------------------------------


def _combine(a, b):
    return jax.tree.map(lambda a, b: 2 * a - 3 * b, a, b)


def _gradient(app: Application, draw: Draw) -> Sides:
    return app.gradient(draw.operands, draw.d), app.vjp(draw.operands, draw.d)


def _commutes(app: Application, draw: Draw) -> Sides:
    carried = app.carried(draw.d, app.entry(draw.operands, draw.e))
    return carried, app.entry(draw.operands, draw.d * draw.e)


def _linear_in_trace(app: Application, draw: Draw) -> Sides:
    a, b = app.entry(draw.operands, draw.d), app.entry(draw.operands, draw.e)
    apart = _combine(app.carried(draw.d, a), app.carried(draw.d, b))
    return app.carried(draw.d, _combine(a, b)), apart


def _linear_in_factor(app: Application, draw: Draw) -> Sides:
    trace = app.entry(draw.operands, draw.e)
    apart = _combine(app.carried(draw.d, trace), app.carried(draw.e, trace))
    return app.carried(_combine(draw.d, draw.e), trace), apart


def _solved(app: Application, draw: Draw) -> Sides:
    solved = app.solved(draw.d, app.entry(draw.operands, draw.e), draw.operands)
    return solved, app.vjp(draw.operands, draw.d * draw.e)


def _solved_states(app: Application, draw: Draw) -> Sides:
    factors = jnp.stack([draw.d, draw.e], -1)
    trace = jax.vmap(lambda e: app.entry(draw.operands, e), in_axes=-1, out_axes=-1)(factors)
    got = jax.vmap(lambda s, t: app.solved(s, t, draw.operands), in_axes=-1)(draw.signals, trace)
    expected = app.vjp(draw.operands, (draw.signals * factors).sum(-1))
    return jax.tree.map(lambda g: g.sum(0), got), expected


def _batch_of_samples(app: Application, draw: Draw) -> Sides:
    x, one = app.x(draw.operands), app.single
    y = app.bind(draw.operands)
    if one is None:
        batches = [app.place(draw.operands, x=x[i : i + 1]) for i in range(len(x))]
        return y, jnp.concatenate([app.bind(batch) for batch in batches])
    rows = [app.place(draw.operands, x=xi) for xi in x]
    entries = [one.entry(row, d) for row, d in zip(rows, draw.d, strict=True)]
    expected = stack([one.bind(row) for row in rows]), stack(entries)
    return (y, app.entry(draw.operands, draw.d)), expected


def _carried_alone(app: Application, draw: Draw) -> Sides:
    trace = app.entry(draw.operands, draw.e)
    last = partial(jax.tree.map, lambda a: a[-1])
    return app.carried(draw.d[-1], last(trace)), last(app.carried(draw.d, trace))


def _samples_of_batch(app: Application, draw: Draw) -> Sides:
    xs = app.x(draw.many)
    apart = stack([app.bind(app.place(draw.operands, x=x)) for x in xs])
    if (several := app.several) is None:
        raise RuleContractError(f'{app.primitive.name!r} has no batched form.')
    return several.bind(app.place(draw.operands, x=xs)), apart


def _linear_in_x(app: Application, draw: Draw) -> Sides:
    x, z, represent = app.x(draw.operands), draw.other_x, app.primitive.root.represent
    if not is_inexact(x) and represent is not None:
        weights = app.weights(draw.operands)
        # Both draws of indices may be equal, so one of them is moved.
        x, z = represent(x, weights), 0.5 + represent(z, weights)
    at, a, b = (app.gradient(draw.operands, draw.d, x=v) for v in (_combine(x, z), x, z))
    return at, {n: jnp.where((a[n] == b[n]).all(), a[n], _combine(a[n], b[n])) for n in a}


def _represented(app: Application, draw: Draw) -> Sides:
    x, represent = app.x(draw.operands), app.primitive.root.represent
    x = x if represent is None else represent(x, app.weights(draw.operands))
    both = lambda operands: (app.impl(operands), app.gradient(operands, draw.d))
    return both(app.place(draw.operands, x=x)), both(draw.operands)


def _passes_through(app: Application, draw: Draw) -> Sides:
    return app.gradient(draw.operands, draw.d), {name: draw.d for name in app.invars}


def _diagonal(app: Application, draw: Draw) -> Sides:
    weights = app.weights(draw.operands)
    jacobian = jax.jacrev(lambda w: app.of_weights(draw.operands)(w).ravel())(weights)
    flat = {name: j.reshape(app.y_aval.size, weights[name].size) for name, j in jacobian.items()}
    of_own_entry = lambda j: j * jnp.eye(j.shape[0], j.shape[1], dtype=j.dtype)
    return flat, {name: of_own_entry(j) for name, j in flat.items()}


# L9: end to end -----------------------------------------------------------------------------------


def _learned(app: Application, draw: Draw, rule, steps: int = STEPS, wide=False) -> Sides:
    """The gradient of a sum along a sequence, online and by backpropagation through time; with
    ``wide`` states that have an axis more than y.
    """
    weights, h = app.weights(draw.operands), jnp.stack([draw.h, draw.d]) if wide else draw.h
    xs, targets = draw.xs[:steps], draw.targets[:steps]

    def cell(y_of):
        def step(weights, h, x):
            h = jnp.tanh(DECAY * h + y_of(app.place(draw.operands, x, weights)))
            return h, h

        return step

    def loss(out, target):
        return jnp.sum(out * target)

    learner = functional.online(cell(app.bind), rule)
    run = learner.sequence_grad(loss, window=2, reduction='sum')
    online = run(weights, learner.init(weights, h, xs[0]), xs, targets)[0]
    return online, verify.bptt_gradients(cell(app.impl), weights, h, xs, targets, loss)


_d_rtrl = partial(_learned, rule=rules.d_rtrl())
_broadcast = partial(_d_rtrl, wide=True)
_es_d_rtrl = partial(_learned, rule=rules.es_d_rtrl(0.5), steps=1)

# L15: empty batches -------------------------------------------------------------------------------


def _empty_batch(app: Application, draw: Draw) -> Sides:
    none, weights = partial(jax.tree.map, lambda a: a[:0]), app.weights(draw.operands)
    placed = app.place(draw.operands, x=app.x(draw.operands)[:0])
    trace, zeros = app.entry(placed, draw.e[:0]), jax.tree.map(jnp.zeros_like, weights)
    whole = app.entry(draw.operands, draw.e)
    got = (
        app.bind(placed),
        trace,
        app.carried(draw.d[:0], trace),
        app.solved(draw.d[:0], trace, placed),
        app.gradient(placed, draw.d[:0]),
    )
    of_samples = none((app.bind(draw.operands), whole, app.carried(draw.d, whole)))
    return got, (*of_samples, zeros, zeros)


# the table of parts, and where each applies -------------------------------------------------------


def _is_index(app: Application) -> bool:
    """Whether x holds integers that stand for numbers."""
    represent = app.primitive.root.represent
    return app.x_aval is not None and not is_inexact(app.x_aval) and represent is not None


def _can_learn(app: Application) -> bool:
    operands = app.avals[: len(app.avals) - len(app.structure)]
    return all(a.size for a in (*operands, app.y_aval)) and jnp.issubdtype(
        app.y_aval.dtype, jnp.floating
    )


_has_x = unless(lambda app: app.x_aval is not None, 'no x')
_numbers = unless(
    lambda app: app.x_aval is not None and (is_inexact(app.x_aval) or _is_index(app)), 'no x'
)
_indices = unless(_is_index, 'x is no integer')
_batch = unless(lambda app: app.batched and app.y_aval.shape[0] > 0, 'no batch')
_plain_batch = unless(
    lambda app: _batch(app) is None and app.primitive.original is None, 'no batch'
)
_batched_form = unless(lambda app: app.several is not None, 'no batched form')
_identity_like = unless(lambda app: app.primitive.gradient_enabled, 'not gradient_enabled')
_derived_reverse = unless(lambda app: not has_reverse(app), 'L14')
_own_reverse = unless(has_reverse, 'no reverse rule')
_learns = unless(_can_learn, 'empty or complex')


def _learns_alone(app: Application) -> str | None:
    return _learns(app) or ('an x' if app.x_aval is not None else None)


NUMERICAL = [
    Part('L1', 'vmap', _vmap),
    Part('L1', 'vmap over x', _vmap_x, _has_x),
    Part('L1', 'scan', _scan),
    Part('L1', 'jvp and finite differences', _differences, _derived_reverse),
    Part('L2', 'xy_to_dw and the VJP', _gradient),
    Part('L3', 'carrying an entry and making it', _commutes),
    Part('L4', 'linear in the trace', _linear_in_trace),
    Part('L4', 'linear in d', _linear_in_factor),
    Part('L6', 'solving and the VJP', _solved),
    Part('L6', 'solving two states and the VJP', _solved_states),
    Part('L7', 'a batch and its samples', _batch_of_samples, _batch),
    Part('L7', 'a sample carried alone and in a batch', _carried_alone, _plain_batch),
    Part('L7', 'samples and their batch', _samples_of_batch, _batched_form),
    Part('L8', 'linear in x, or independent of it', _linear_in_x, _numbers),
    Part('L8', 'integers and what they stand for', _represented, _indices),
    Part('L9', 'D_RTRL and BPTT', _d_rtrl, _learns),
    Part('L9', 'D_RTRL and BPTT, y broadcast', _broadcast, _learns_alone),
    Part('L9', 'ES_D_RTRL and BPTT at one step', _es_d_rtrl, _learns),
    Part('L10', 'xy_to_dw passes d through', _passes_through, _identity_like),
    Part('L10', 'dy/dw is diagonal', _diagonal, _identity_like),
    Part('L14', 'values and gradients of what is required', reverse, _own_reverse),
    Part('L15', 'an empty batch', _empty_batch, _batch),
]
