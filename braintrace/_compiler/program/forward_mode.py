"""Reverse mode for a ``while`` loop, taken by forward mode where the loop works position by
position.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ... import _jax
from ..._errors import NotSupportedError
from ..equations import labels as lb
from ..equations.equation import Equation, is_complex, is_inexact
from ..equations.labels import along


def forward_derivative(eqn, where: str, learned: frozenset[int]) -> Callable:
    """A ``while`` as a function whose reverse mode is the loop's forward derivative.

    Each element of a result may read one element of an operand. Several are an error if the operand
    is in ``learned``: it depends on a state or a parameter. Other operands depend on inputs alone;
    they get a NaN cotangent.
    """
    loop = Equation(eqn.primitive, eqn.params, eqn.ctx, (), (), where)
    avals = [v.aval for v in eqn.invars]
    sources = {
        k: _sources(loop, avals, k)
        for k in range(_jax.while_parts(eqn).cond_nconsts, len(avals))
        if is_inexact(avals[k])
    }
    mixed = {k for k, found in sources.items() if any(map(lb.meet, found.values()))}
    if mixed & learned:
        raise NotSupportedError(
            f'{where}: a while loop lies between a state or parameter and the result of '
            'the step, and positions meet in it, so it has no derivative in reverse mode. '
            'Use lax.fori_loop with a static number of steps, or lax.scan.'
        )

    def run(*args):
        still = [jax.lax.stop_gradient(a) for a in args]
        outs = loop.evaluate(still)
        for k, found in sources.items():
            if k in mixed:
                for j in found:
                    outs[j] = outs[j] + _poison(args[k]).astype(outs[j].dtype)
                continue
            for unit, moves in _directions(args[k] - still[k]) if found else ():
                slopes = _along(loop, still, k, unit)
                for j, source in found.items():
                    # a zero whose derivative is the slope at the element that is read
                    moved = _read_at(moves, source).astype(outs[j].dtype)
                    outs[j] = outs[j] + jax.lax.stop_gradient(slopes[j]) * moved
        return outs

    return run


def _read_at(x, source: np.ndarray):
    """The elements of an array at ``source``, zero at ``NONE``."""
    if x.shape == source.shape and (source == lb.identity(source.shape)).all():
        return x
    return jnp.where(source == lb.NONE, 0, x.reshape(-1)[np.maximum(source, 0)])


def _pushed(loop: Equation, k: int) -> Callable:
    """``(args, tangent of operand k) -> tangents of the inexact results``."""

    def push(args, tangent):
        def of_one(x):
            return [o for o in loop.evaluate([*args[:k], x, *args[k + 1 :]]) if is_inexact(o)]

        return jax.jvp(of_one, [args[k]], [tangent])[1]

    return push


def _directions(x) -> list[tuple[complex, jax.Array]]:
    """Tangents, and how far ``x`` is along each: a loop need not have a complex derivative."""
    return [(1, jnp.real(x)), (1j, jnp.imag(x))] if is_complex(x) else [(1, x)]


def _along(loop: Equation, args: list, k: int, unit: complex) -> dict[int, jax.Array]:
    slopes = _pushed(loop, k)(args, jnp.full_like(args[k], unit))
    return dict(zip(_inexact_results(loop, args), slopes, strict=True))


def _inexact_results(loop: Equation, args) -> list[int]:
    shapes = jax.eval_shape(lambda *a: loop.evaluate(a), *args)
    return [j for j, s in enumerate(shapes) if is_inexact(s)]


def _sources(loop: Equation, avals, k: int) -> dict[int, np.ndarray]:
    """For each inexact result, which element of operand ``k`` each of its elements reads."""
    primals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    found = along(lambda *a: _pushed(loop, k)(list(a[:-1]), a[-1]), primals, primals[k])
    results = _inexact_results(loop, primals)
    return {j: lab for j, lab in zip(results, found, strict=True) if lb.has(lab)}


@jax.custom_vjp
def _poison(x):
    """A zero that sends NaN back."""
    return jnp.zeros((), x.dtype)


_poison.defvjp(lambda x: (jnp.zeros((), x.dtype), x), lambda x, g: (jnp.full_like(x, jnp.nan),))
