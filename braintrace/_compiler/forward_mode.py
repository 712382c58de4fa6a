"""A ``while`` loop with the derivative of reverse mode, taken by forward mode where it works position by position."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._errors import NotSupportedError
from . import labels as lb
from .program import Equation, is_inexact

__all__ = ['forward_derivative']


def forward_derivative(eqn, where: str, learned: frozenset[int]) -> Callable:
    """A function of a ``while`` equation's operands whose reverse mode is the loop's forward derivative.

    Each element of a result may read one element of an operand. Where it reads several: an operand in ``learned`` (it depends on a
    state or a parameter) is an error, another one (it depends on inputs alone) gets a NaN cotangent.
    """
    loop = Equation(eqn.primitive, eqn.params, eqn.ctx, (), (), where)
    avals = [v.aval for v in eqn.invars]
    differentiated = range(_jax.while_parts(eqn).cond_nconsts, len(avals))
    sources = {}
    for k in differentiated:
        if is_inexact(avals[k]):
            sources[k] = _sources(loop, avals, k)
            if k in learned and any((s == lb.MANY).any() for s in sources[k].values()):
                raise NotSupportedError(
                    f'{where}: a while loop lies between a state or parameter and the result of the step, and positions meet in it, so '
                    'it has no derivative in reverse mode. Use lax.fori_loop with a static number of steps, or lax.scan.')

    def run(*args):
        still = [jax.lax.stop_gradient(a) for a in args]
        outs = loop.evaluate(still)
        for k, found in sources.items():
            if any((s == lb.MANY).any() for s in found.values()):
                outs = [o + _poison(args[k]).astype(o.dtype) if j in found else o for j, o in enumerate(outs)]
                continue
            slopes = _along_ones(loop, still, k) if found else []
            for j, source in found.items():
                moved = args[k] - still[k]
                if moved.shape != outs[j].shape or (source != lb.identity(source.shape)).any():
                    moved = jnp.where(source == lb.NONE, 0, moved.reshape(-1)[np.maximum(source, 0)])
                outs[j] = outs[j] + jax.lax.stop_gradient(slopes[j]) * moved.astype(outs[j].dtype)
        return outs
    return run


def _pushed(loop: Equation, k: int) -> Callable:
    """``(args, tangent of operand k) -> tangents of the inexact results``."""
    def push(args, tangent):
        def of_one(x):
            return [o for o in loop.evaluate([*args[:k], x, *args[k + 1:]]) if is_inexact(o)]
        return jax.jvp(of_one, [args[k]], [tangent])[1]
    return push


def _along_ones(loop: Equation, args: list, k: int) -> dict[int, jax.Array]:
    shapes = jax.eval_shape(lambda *a: loop.evaluate(a), *args)
    return dict(zip([j for j, s in enumerate(shapes) if is_inexact(s)], _pushed(loop, k)(args, jnp.ones_like(args[k])), strict=True))


def _sources(loop: Equation, avals, k: int) -> dict[int, np.ndarray]:
    """For each inexact result that depends on operand ``k``: which element of it each element reads."""
    shapes = jax.eval_shape(lambda *a: loop.evaluate(a), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    primals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    found = lb.along(lambda *a: _pushed(loop, k)(list(a[:-1]), a[-1]), primals, primals[k])
    return {j: lab for j, lab in zip([j for j, s in enumerate(shapes) if is_inexact(s)], found, strict=True) if lb.has(lab)}


@jax.custom_vjp
def _poison(x):
    return jnp.zeros((), x.dtype)


_poison.defvjp(lambda x: (jnp.zeros((), x.dtype), x), lambda x, g: (jnp.full_like(x, jnp.nan),))
