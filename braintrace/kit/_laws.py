"""The laws that compare numbers: both sides of each equation, for one application."""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import MissingRuleError, functional, rules
from .._etrace_op import ETP_PRIMITIVE_SPECS, ETPPrimitive
from ._application import Application, Draw, compiled, is_inexact, plain, stack

__all__ = ['Finding', 'NUMERICAL', 'Part', 'deviation', 'evaluate', 'platform_parts']

Sides = tuple[Any, Any]
DECAY = 0.8


class Part(NamedTuple):
    """One equation of a law: ``sides(app, draw)`` gives what was got and what is expected; ``skip(app)`` a reason not to ask."""
    law: str
    name: str
    sides: Callable[[Application, Draw], Sides]
    skip: Callable[[Application], str | None] = lambda app: None


class Finding(NamedTuple):
    """What came of one part of a law."""
    law: str
    status: str
    text: str = ''
    worst: float | None = None
    tolerance: float | None = None


# comparing ---------------------------------------------------------------------------------------------------------------

def evaluate(app: Application, parts: Sequence[Part], draw: Draw, tolerances: dict[str, float]) -> list[Finding]:
    """The findings of these parts; one program for all of them, or one for each where that raises."""
    reasons = {part: part.skip(app) for part in parts}
    asked = [part for part, reason in reasons.items() if reason is None]
    found = [Finding(part.law, 'not_applicable', reason) for part, reason in reasons.items() if reason is not None]
    for part, sides in zip(asked, _both_sides(app, asked, draw), strict=True):
        if isinstance(sides, MissingRuleError):
            found.append(Finding(part.law, 'not_tested', str(sides)))
        elif isinstance(sides, Exception):
            found.append(Finding(part.law, 'fail', f'{part.name}: {type(sides).__name__}: {sides}'))
        else:
            (worst, where), tolerance = deviation(*sides), tolerances.get(part.name, tolerances['default'])
            failed = not worst <= tolerance
            found.append(Finding(part.law, 'fail' if failed else 'pass', f'{part.name}{where}' if failed else '', worst, tolerance))
    return found


def _both_sides(app: Application, parts: Sequence[Part], draw: Draw) -> list[Sides | Exception]:
    if not parts:
        return []
    try:
        return compiled(lambda draw: [part.sides(app, draw) for part in parts])(draw)
    except Exception as error:  # of any kind: it is the op's, and becomes a row
        return [error] if len(parts) == 1 else [_both_sides(app, [part], draw)[0] for part in parts]


def deviation(got, expected) -> tuple[float, str]:
    """The largest deviation of a leaf, relative to the largest number expected in it, and where; infinite for other structures."""
    found, wanted = str(jax.tree.structure(got)), str(jax.tree.structure(expected))
    if found != wanted:
        return np.inf, f': the structure {found} instead of {wanted}'
    worst, place = 0., ''
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(expected), strict=True):
        a, b, name = np.asarray(a), np.asarray(b), jax.tree_util.keystr(path)
        if a.shape != b.shape:
            return np.inf, f'{name}: shape {a.shape} instead of {b.shape}'
        off = float(np.max(np.abs(a - b), initial=0) / (np.max(np.abs(b), initial=0) or 1))
        if not off <= worst:
            worst, place = off if np.isfinite(off) else np.inf, name
    return worst, place


# L1: the function ---------------------------------------------------------------------------------------------------------

def _one_by_one(app: Application, many) -> jax.Array:
    return stack([app.bind([a[i] for a in many]) for i in range(3)])


def _vmap(app: Application, draw: Draw) -> Sides:
    return jax.vmap(lambda *operands: app.bind(operands))(*draw.many), _one_by_one(app, draw.many)


def _vmap_x(app: Application, draw: Draw) -> Sides:
    xs, call = app.x(draw.many), lambda x: app.bind(app.place(draw.operands, x=x))
    return jax.vmap(call)(xs), stack([call(x) for x in xs])


def _scan(app: Application, draw: Draw) -> Sides:
    return jax.lax.scan(lambda c, operands: (c, app.bind(operands)), None, draw.many)[1], _one_by_one(app, draw.many)


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


# L2 to L8, L10: the rules -------------------------------------------------------------------------------------------------

def _combine(a, b):
    return jax.tree.map(lambda a, b: 2 * a - 3 * b, a, b)


def _gradient(app: Application, draw: Draw) -> Sides:
    return app.gradient(draw.operands, draw.d), app.vjp(draw.operands, draw.d)


def _commutes(app: Application, draw: Draw) -> Sides:
    return app.carried(draw.d, app.entry(draw.operands, draw.e)), app.entry(draw.operands, draw.d * draw.e)


def _linear_in_trace(app: Application, draw: Draw) -> Sides:
    a, b = app.entry(draw.operands, draw.d), app.entry(draw.operands, draw.e)
    return app.carried(draw.d, _combine(a, b)), _combine(app.carried(draw.d, a), app.carried(draw.d, b))


def _linear_in_factor(app: Application, draw: Draw) -> Sides:
    trace = app.entry(draw.operands, draw.e)
    return app.carried(_combine(draw.d, draw.e), trace), _combine(app.carried(draw.d, trace), app.carried(draw.e, trace))


def _solved(app: Application, draw: Draw) -> Sides:
    return app.solved(draw.d, app.entry(draw.operands, draw.e), draw.operands), app.vjp(draw.operands, draw.d * draw.e)


def _solved_states(app: Application, draw: Draw) -> Sides:
    factors = jnp.stack([draw.d, draw.e], -1)
    trace = jax.vmap(lambda e: app.entry(draw.operands, e), in_axes=-1, out_axes=-1)(factors)
    got = jax.vmap(lambda s, t: app.solved(s, t, draw.operands), in_axes=-1)(draw.signals, trace)
    return jax.tree.map(lambda g: g.sum(0), got), app.vjp(draw.operands, (draw.signals * factors).sum(-1))


def _batch_of_samples(app: Application, draw: Draw) -> Sides:
    x, one = app.x(draw.operands), app.single
    if one is None:
        return app.bind(draw.operands), jnp.concatenate([app.bind(app.place(draw.operands, x=x[i:i + 1])) for i in range(len(x))])
    rows = [app.place(draw.operands, x=xi) for xi in x]
    return ((app.bind(draw.operands), app.entry(draw.operands, draw.d)),
            (stack([one.bind(row) for row in rows]), stack([one.entry(row, d) for row, d in zip(rows, draw.d, strict=True)])))


def _carried_alone(app: Application, draw: Draw) -> Sides:
    trace = app.entry(draw.operands, draw.e)
    last = functools.partial(jax.tree.map, lambda a: a[-1])
    return app.carried(draw.d[-1], last(trace)), last(app.carried(draw.d, trace))


def _samples_of_batch(app: Application, draw: Draw) -> Sides:
    xs, together = app.x(draw.many), app.several
    return together.bind(app.place(draw.operands, x=xs)), stack([app.bind(app.place(draw.operands, x=x)) for x in xs])


def _linear_in_x(app: Application, draw: Draw) -> Sides:
    x, z, represent = app.x(draw.operands), draw.other_x, app.primitive.root.represent
    if not is_inexact(x):
        weights = app.weights(draw.operands)
        x, z = represent(x, weights), 0.5 + represent(z, weights)     # indices alone may be equal
    at, a, b = (app.gradient(draw.operands, draw.d, x=v) for v in (_combine(x, z), x, z))
    return at, {n: jnp.where((a[n] == b[n]).all(), a[n], _combine(a[n], b[n])) for n in a}


def _represented(app: Application, draw: Draw) -> Sides:
    x = app.primitive.root.represent(app.x(draw.operands), app.weights(draw.operands))
    placed = app.place(draw.operands, x=x)
    return (app.impl(placed), app.gradient(placed, draw.d)), (app.impl(draw.operands), app.gradient(draw.operands, draw.d))


def _passes_through(app: Application, draw: Draw) -> Sides:
    return app.gradient(draw.operands, draw.d), {name: draw.d for name in app.invars}


def _diagonal(app: Application, draw: Draw) -> Sides:
    jacobian = jax.jacrev(lambda w: app.of_weights(draw.operands)(w).ravel())(app.weights(draw.operands))
    flat = {name: j.reshape(app.y_aval.size, app.weights(draw.operands)[name].size) for name, j in jacobian.items()}
    return flat, {name: j * jnp.eye(j.shape[0], j.shape[1], dtype=j.dtype) for name, j in flat.items()}


# L9: end to end -----------------------------------------------------------------------------------------------------------

def _online(app: Application, draw: Draw, rule, steps: int, h=None) -> dict[str, jax.Array]:
    def cell(weights, h, x):
        h = jnp.tanh(DECAY * h + app.bind(app.place(draw.operands, x, weights)))
        return h, h
    weights, xs, targets, h = app.weights(draw.operands), draw.xs[:steps], draw.targets[:steps], draw.h if h is None else h
    learner = functional.online(cell, rule)
    run = learner.sequence_grad(lambda out, c: jnp.sum(out * c), window=2, reduction='sum')
    return run(weights, learner.init(weights, h, xs[0]), xs, targets)[0]


def _through_time(app: Application, draw: Draw, steps: int, h=None) -> dict[str, jax.Array]:
    def total(weights):
        def step(h, at):
            h = jnp.tanh(DECAY * h + app.impl(app.place(draw.operands, at[0], weights)))
            return h, jnp.sum(h * at[1])
        return jax.lax.scan(step, draw.h if h is None else h, (draw.xs[:steps], draw.targets[:steps]))[1].sum()
    return jax.grad(total)(app.weights(draw.operands))


def _d_rtrl(app: Application, draw: Draw) -> Sides:
    return _online(app, draw, rules.d_rtrl(), len(draw.xs)), _through_time(app, draw, len(draw.xs))


def _broadcast(app: Application, draw: Draw) -> Sides:
    h = jnp.stack([draw.h, draw.d])
    return _online(app, draw, rules.d_rtrl(), len(draw.xs), h), _through_time(app, draw, len(draw.xs), h)


def _es_d_rtrl(app: Application, draw: Draw) -> Sides:
    return _online(app, draw, rules.es_d_rtrl(0.5), 1), _through_time(app, draw, 1)


# L13, L14: rules for a platform, a reverse rule of its own ----------------------------------------------------------------

def platform_parts(platform: str, primitive: ETPPrimitive) -> list[Part]:
    """L13 for one platform, named as the tables of a primitive name it."""
    lowering, kernel = primitive.lowering.get(platform), primitive.trace_kernel.get(platform)
    absent = lambda given: _unless(lambda app: given is not None, f'none of its own for {platform}')

    def lowered(app: Application, draw: Draw) -> Sides:
        return lowering(*draw.operands, **app.params), plain(primitive)(*draw.operands, **app.params)

    def updated(states: int, app: Application, draw: Draw) -> Sides:
        factors, d = jnp.stack([draw.d, draw.e][:states], -1), jnp.stack([draw.signals, draw.signals[..., ::-1]], -1)
        old, new = ([app.entry(draw.operands, f[..., s]) for s in range(states)] for f in (draw.signals, factors))
        carried = [[app.carried(d[..., s, r], old[r]) for r in range(states)] for s in range(states)]
        summed = [jax.tree.map(lambda *terms: sum(terms), n, *row) for n, row in zip(new, carried, strict=True)]
        trace, expected = (jax.tree.map(lambda *leaves: jnp.stack(leaves, -1), *each) for each in (old, summed))
        d = d[..., :states, :states]
        return kernel(d, trace, factors, app.x(draw.operands), app.weights(draw.operands), **app.params), expected

    def of_one_state(app: Application) -> str | None:
        """A kernel may refuse several states, as long as that is seen: by an error, or another shape."""
        try:
            got, expected = jax.eval_shape(lambda: updated(2, app, app.draw(0)))
        except Exception:  # of any kind: that the kernel works at all is asked with one state
            return 'for one state'
        return None if jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, expected) else 'for one state'
    return [Part('L13', f'lowering for {platform}', lowered, absent(lowering)),
            Part('L13', f'trace kernel for {platform}', functools.partial(updated, 1), absent(kernel)),
            Part('L13', f'trace kernel for {platform}, two states', functools.partial(updated, 2),
                 lambda app: absent(kernel)(app) or of_one_state(app))]


def has_reverse(app: Application) -> bool:
    """Whether the op brings its own reverse rule."""
    spec = ETP_PRIMITIVE_SPECS.get(app.primitive.root)
    return spec is not None and spec.reverse is not None


def _masks(app: Application) -> Iterable[tuple[int, ...]]:
    live = [i for i, a in enumerate(app.avals) if is_inexact(a)]
    return itertools.chain.from_iterable(itertools.combinations(live, n) for n in range(1, len(live) + 1))


def _reverse(app: Application, draw: Draw) -> Sides:
    def results(fn):
        found = {}
        for mask in _masks(app):
            def of_required(*required, mask=mask):
                operands = list(draw.operands)
                for i, value in zip(mask, required, strict=True):
                    operands[i] = value
                return [out for out in jax.tree.leaves(fn(*operands, **app.params)) if is_inexact(out)]
            outs, pull = jax.vjp(of_required, *(draw.operands[i] for i in mask))
            found[str(mask)] = outs, pull([jnp.sin(1. + jnp.arange(out.size)).reshape(out.shape).astype(out.dtype) for out in outs])
        return found
    expected = results(plain(app.primitive))
    return {'op': results(app.primitive.bind), 'rule': results(app.primitive.impl_fn)}, {'op': expected, 'rule': expected}


# L15: empty batches -------------------------------------------------------------------------------------------------------

def _empty_batch(app: Application, draw: Draw) -> Sides:
    none, weights = functools.partial(jax.tree.map, lambda a: a[:0]), app.weights(draw.operands)
    placed = app.place(draw.operands, x=app.x(draw.operands)[:0])
    trace, zeros = app.entry(placed, draw.e[:0]), jax.tree.map(jnp.zeros_like, weights)
    whole = app.entry(draw.operands, draw.e)
    got = app.bind(placed), trace, app.carried(draw.d[:0], trace), app.solved(draw.d[:0], trace, placed), app.gradient(placed, draw.d[:0])
    return got, (none(app.bind(draw.operands)), none(whole), none(app.carried(draw.d, whole)), zeros, zeros)


# which is asked where -----------------------------------------------------------------------------------------------------

def _unless(condition: Callable[[Application], bool], reason: str) -> Callable[[Application], str | None]:
    return lambda app: None if condition(app) else reason


_has_x = _unless(lambda app: app.x_aval is not None, 'no x')
_batch = _unless(lambda app: app.batched and app.y_aval.shape[0] > 0, 'no batch')
_plain_batch = _unless(lambda app: _batch(app) is None and app.primitive.original is None, 'no batch')
_identity_like = _unless(lambda app: app.primitive.gradient_enabled, 'not gradient_enabled')
_learns = _unless(lambda app: all(a.size for a in (*app.avals, app.y_aval)) and jnp.issubdtype(app.y_aval.dtype, jnp.floating),
                  'empty or complex')
_linear_x = _unless(lambda app: app.x_aval is not None and (is_inexact(app.x_aval) or app.primitive.root.represent is not None), 'no x')
_integers = _unless(lambda app: app.x_aval is not None and not is_inexact(app.x_aval) and app.primitive.root.represent is not None,
                    'x is no integer')

NUMERICAL = [
    Part('L1', 'vmap', _vmap),
    Part('L1', 'vmap over x', _vmap_x, _has_x),
    Part('L1', 'scan', _scan),
    Part('L1', 'jvp and finite differences', _differences, _unless(lambda app: not has_reverse(app), 'L14')),
    Part('L2', 'xy_to_dw and the VJP', _gradient),
    Part('L3', 'carrying an entry and making it', _commutes),
    Part('L4', 'linear in the trace', _linear_in_trace),
    Part('L4', 'linear in d', _linear_in_factor),
    Part('L6', 'solving and the VJP', _solved),
    Part('L6', 'solving two states and the VJP', _solved_states),
    Part('L7', 'a batch and its samples', _batch_of_samples, _batch),
    Part('L7', 'a sample carried alone and in a batch', _carried_alone, _plain_batch),
    Part('L7', 'samples and their batch', _samples_of_batch, _unless(lambda app: app.several is not None, 'no batched form')),
    Part('L8', 'linear in x, or independent of it', _linear_in_x, _linear_x),
    Part('L8', 'integers and what they stand for', _represented, _integers),
    Part('L9', 'D_RTRL and BPTT', _d_rtrl, _learns),
    Part('L9', 'D_RTRL and BPTT, y broadcast', _broadcast, lambda app: _learns(app) or ('an x' if app.x_aval is not None else None)),
    Part('L9', 'ES_D_RTRL and BPTT at one step', _es_d_rtrl, _learns),
    Part('L10', 'xy_to_dw passes d through', _passes_through, _identity_like),
    Part('L10', 'dy/dw is diagonal', _diagonal, _identity_like),
    Part('L14', 'values and gradients of what is required', _reverse, _unless(has_reverse, 'no reverse rule')),
    Part('L15', 'an empty batch', _empty_batch, _batch),
]
