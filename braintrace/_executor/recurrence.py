"""Linear recurrences ``h -> A h + b`` at each position, all steps at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from .transition import Transition, Vector, add, apply, closure, filled

MOST_COUPLED = 3  # states of a recurrence: to join two steps costs the cube of their number


def linear_scan(
    a: Transition, b: Vector, first: Vector, reverse: bool = False
) -> tuple[Transition, Vector]:
    """``(A_k ... A_1, h_k)`` after each step, of ``h_k = A_k h_{k-1} + b_k`` from ``h_0 = first``;
    with ``reverse`` from the last step to the first.

    ``a`` and ``b`` have time in front. Where ``b`` is None its state stays zero, which no structure
    of ``a`` may contradict.
    """
    start = -1 if reverse else 0
    begun = apply(_at(a, start), first, _times)
    b = tuple(
        x if x is None or more is None else x.at[start].add(more)
        for x, more in zip(b, begun, strict=True)
    )
    some = next(iter(jax.tree.leaves((b, a))), None)
    moves = closure(a)
    like = tuple(tuple(some if there else None for there in row) for row in moves)
    if some is None:
        return a, b
    return jax.lax.associative_scan(_joined, (filled(a, like), b), reverse=reverse)


def affine(step: Callable, like: Sequence[jax.Array]) -> tuple[Transition, Vector]:
    """``A`` and ``b`` of a step ``h -> A h + b`` at each position, on states like these."""
    none = [jnp.zeros_like(h) for h in like]
    b, columns = step(none), []
    for r in range(len(none)):
        one = [jnp.ones_like(h) if r == s else h for s, h in enumerate(none)]
        columns.append(jax.jvp(step, (none,), (one,))[1])
    return tuple(zip(*columns, strict=True)), tuple(b)


def _at(a: Transition, k: int) -> Transition:
    return jax.tree.map(lambda x: x[k], a)


def _joined(one: tuple[Transition, Vector], two: tuple[Transition, Vector]):
    """Two steps, or many, as one."""
    (a, b), (later_a, later_b) = one, two
    columns = [apply(later_a, column, _times) for column in zip(*a, strict=True)]
    return tuple(zip(*columns, strict=True)), tuple(map(add, apply(later_a, b, _times), later_b))


def _times(a: jax.Array, x: jax.Array) -> jax.Array:
    """``a x``, where x need not be a number if a is zero, as at a reset."""
    return a * jnp.where((a != 0) | jnp.isfinite(x), x, 0)
