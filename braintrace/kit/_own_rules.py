"""The laws about rules that an op may bring: lowerings and trace kernels for a platform, a reverse
rule.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from .._etrace_op import ETP_PRIMITIVE_SPECS, ETPPrimitive
from ._application import Application, Draw, is_inexact, plain
from ._evaluate import Part, Sides, unless

# L13: lowerings and trace kernels -----------------------------------------------------------------


def platform_parts(platform: str, primitive: ETPPrimitive) -> list[Part]:
    """The parts of L13 for one platform, in the name that a primitive's tables use."""
    absent = f'none of its own for {platform}'
    lowers = unless(lambda app: platform in primitive.lowering, absent)
    updates = unless(lambda app: platform in primitive.trace_kernel, absent)

    def takes_two_states(app: Application) -> bool:
        """A kernel may refuse several states, if that shows: by an error, or by another shape."""
        try:
            got, expected = jax.eval_shape(lambda: _updated(platform, 2, app, app.draw(0)))
        except Exception:  # a kernel may refuse by any error; the part with one state asks the rest
            return False
        return jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, expected)

    one_state = unless(takes_two_states, 'for one state')
    lowered, updated = (functools.partial(f, platform) for f in (_lowered, _updated))
    name = f'trace kernel for {platform}'
    return [
        Part('L13', f'lowering for {platform}', lowered, lowers),
        Part('L13', name, functools.partial(updated, 1), updates),
        Part(
            'L13',
            f'{name}, two states',
            functools.partial(updated, 2),
            lambda app: updates(app) or one_state(app),
        ),
    ]


def _lowered(platform: str, app: Application, draw: Draw) -> Sides:
    """The lowering and the plain implementation."""
    lowering = app.primitive.lowering[platform]
    expected = plain(app.primitive)(*draw.operands, **app.params)
    return lowering(*draw.operands, **app.params), expected


def _updated(platform: str, states: int, app: Application, draw: Draw) -> Sides:
    """One update of a trace, ``e_s <- sum_r D_sr e_r + entry(D_f_s)``: by the kernel, and by the
    rules state by state.
    """
    count = range(states)
    d_f = jnp.stack([draw.d, draw.e][:states], -1)
    d = jnp.stack([draw.signals, draw.signals[..., ::-1]], -1)[..., :states, :states]
    old = [app.entry(draw.operands, draw.signals[..., s]) for s in count]
    entries = [app.entry(draw.operands, d_f[..., s]) for s in count]
    updated = [
        jax.tree.map(
            lambda *terms: sum(terms),
            entries[s],
            *(app.carried(d[..., s, r], old[r]) for r in count),
        )
        for s in count
    ]
    trace, expected = (
        jax.tree.map(lambda *leaves: jnp.stack(leaves, -1), *each) for each in (old, updated)
    )
    kernel, x = app.primitive.trace_kernel[platform], app.x(draw.operands)
    return kernel(d, trace, d_f, x, app.weights(draw.operands), **app.params), expected


# L14: reverse rules -------------------------------------------------------------------------------


def has_reverse(app: Application) -> bool:
    """Whether the op brings its own reverse rule."""
    spec = ETP_PRIMITIVE_SPECS.get(app.primitive.root)
    return spec is not None and spec.reverse is not None


def reverse(app: Application, draw: Draw) -> Sides:
    """Values and gradients for every choice of required operands: by the op and by its rule, and by
    the plain implementation.
    """

    def results(fn: Callable) -> dict:
        return {str(mask): _of_required(fn, app, draw, mask) for mask in _masks(app)}

    expected = results(plain(app.primitive))
    got = {'op': results(app.primitive.bind), 'rule': results(app.primitive.impl_fn)}
    return got, {'op': expected, 'rule': expected}


def _masks(app: Application) -> Iterable[tuple[int, ...]]:
    """Every choice of operands that have a gradient."""
    live = [i for i, a in enumerate(app.avals) if is_inexact(a)]
    return itertools.chain.from_iterable(
        itertools.combinations(live, n) for n in range(1, len(live) + 1)
    )


def _of_required(fn: Callable, app: Application, draw: Draw, mask: tuple[int, ...]) -> tuple:
    """The outputs, and the gradients of the operands in ``mask``."""

    def of_required(*required):
        operands = list(draw.operands)
        for i, value in zip(mask, required, strict=True):
            operands[i] = value
        return [out for out in jax.tree.leaves(fn(*operands, **app.params)) if is_inexact(out)]

    outs, pull = jax.vjp(of_required, *(draw.operands[i] for i in mask))
    cotangents = [
        jnp.sin(1.0 + jnp.arange(out.size)).reshape(out.shape).astype(out.dtype) for out in outs
    ]
    return outs, pull(cotangents)
