"""Which carries move linearly: ``h' = A h + b`` at each position, where no carry of theirs makes
``A`` and ``b``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from .. import _jax
from .._compiler import is_complex, is_inexact, properties_of
from .recurrence import MOST_COUPLED


class Phase(NamedTuple):
    """Sets of carries that move together, one after the other in time; ``linear``: as one linear
    recurrence.
    """

    carries: tuple[int, ...]
    linear: bool


def phases(sets: Sequence[tuple[int, ...]], reads: Callable, linear: Sequence[bool]) -> list[Phase]:
    """Sets of carries that need each other, as phases in an order in which each finds what it
    reads; ``reads(a, b)``: whether set ``a`` reads set ``b``.

    Sets that are not linear share a phase where no linear one stands between them.
    """
    ranks: dict[int, int] = {}
    while len(ranks) < len(sets):
        for s in range(len(sets)):
            before = [t for t in range(len(sets)) if t != s and reads(sets[s], sets[t])]
            if s not in ranks and all(t in ranks for t in before):
                steps = (ranks[t] + (linear[s] or linear[t]) for t in before)
                ranks[s] = max(steps, default=0)
    found: list[Phase] = []
    for rank in range(max(ranks.values()) + 1):
        here = [s for s in range(len(sets)) if ranks[s] == rank]
        found += [Phase(sets[s], True) for s in here if linear[s]]
        others = [k for s in here if not linear[s] for k in sets[s]]
        found += [Phase(tuple(sorted(others)), False)] if others else []
    return found


def is_linear(olds: Sequence, news: Sequence, path: Sequence) -> bool:
    """Whether the new values of carries are linear in the old ones, position by position, by what
    is known of each equation on the ``path`` between them.

    Carries that read each other are few, and every value on the path has their shape and precision.
    An operation on complex numbers that has no complex derivative is linear in real states alone.
    """
    varying = set(olds)
    if not path and varying.isdisjoint(v for v in news if not isinstance(v, _jax.Literal)):
        return True  # no carry reads itself or another one
    whole = any(is_complex(v.aval) for v in olds)
    if len(olds) > MOST_COUPLED or not all(_alike(v, olds[0]) for v in olds):
        return False
    for eqn in path:
        inside = [not isinstance(v, _jax.Literal) and v in varying for v in eqn.invars]
        does = properties_of(eqn)
        linear = does.elementwise and does.linear is not None and does.linear(inside)
        if not linear or does.rounds or not all(_alike(v, olds[0]) for v in eqn.outvars):
            return False
        if whole and not (does.holomorphic and all(is_complex(v.aval) for v in eqn.outvars)):
            return False
        varying.update(eqn.outvars)
    return True


def _alike(v, other) -> bool:
    """Whether values have one shape, and numbers of one precision."""
    if not (is_inexact(v.aval) and is_inexact(other.aval)):
        return False
    precise = jnp.finfo(v.aval.dtype).dtype == jnp.finfo(other.aval.dtype).dtype
    return precise and v.aval.shape == other.aval.shape
