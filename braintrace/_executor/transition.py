"""The algebra of D, the derivative of a group's S new states by its old ones at each position.

A *vector* has one entry for each state: arrays of the group's shape, or trees of arrays. A
*transition* is a tuple of S rows, each a vector: ``D[s][r] = dh_s/dh'_r``. None stands for a zero
that the structure of the cell gives: it makes no array, and products with it are left out.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Vector = tuple[Any, ...]
Transition = tuple[Vector, ...]


def add(*terms):
    """``a + b + ...``, leaf by leaf; None where every term is zero."""
    there = [term for term in terms if term is not None]
    plus = functools.partial(jax.tree.map, operator.add)
    return functools.reduce(plus, there) if there else None


def dot(a: Vector, b: Vector, times: Callable = operator.mul):
    """``sum_s a_s b_s``: with a signal and D_f the credit that y gets."""
    pairs = zip(a, b, strict=True)
    return add(*(times(x, y) for x, y in pairs if x is not None and y is not None))


def apply(d: Transition, v: Vector, times: Callable = operator.mul) -> Vector:
    """``(D v)_s = sum_r D_sr v_r``: a vector at the old states, moved to the new ones."""
    return tuple(dot(row, v, times) for row in d)


def pull(lam: Vector, d: Transition) -> Vector:
    """``(lam D)_r = sum_s lam_s D_sr``: a signal at the new states, pulled back to the old ones."""
    return tuple(dot(lam, column) for column in zip(*d, strict=True))


def compose(later: Transition, earlier: Transition) -> Transition:
    """``(D2 D1)_sr = sum_k D2_sk D1_kr``: two steps, or many, as one transition."""
    return tuple(pull(row, earlier) for row in later)


def identity(states: int, one: jax.Array, zero: jax.Array | None = None) -> Transition:
    """The transition over no step, with ``zero`` beside its diagonal."""
    return tuple(tuple(one if s == r else zero for r in range(states)) for s in range(states))


def closure(d: Transition) -> list[list[bool]]:
    """Which entries of ``D``, ``D D``, ``D D D``, ... are not all zero by structure."""
    states = range(len(d))
    found = [[x is not None for x in row] for row in d]
    for via in states:
        found = [[found[s][r] or (found[s][via] and found[via][r]) for r in states] for s in states]
    return found


def reaches(d: Transition, steps: int) -> np.ndarray:
    """Which entries of the product of so many D are not zero by structure."""
    there = np.array([[x is not None for x in row] for row in d])
    found = np.eye(len(d), dtype=bool)
    for _ in range(steps):
        before, found = found, there @ found
        if np.array_equal(found, before):
            break
    return found


def is_read(d: Transition) -> list[bool]:
    """Whether any new state reads each old one: whether its column is not zero by structure."""
    return [any(x is not None for x in column) for column in zip(*d, strict=True)]


def filled(tree, like):
    """A vector or transition with None exactly where ``like`` has it, and zeros for other None.
    Arrays take the dtype of ``like``.
    """
    if isinstance(like, tuple):
        return tuple(filled(x, y) for x, y in zip(tree, like, strict=True))
    if like is None:
        if tree is not None:
            raise ValueError('A derivative that counts as zero by structure is none.')
        return None
    return jnp.zeros_like(like) if tree is None else tree.astype(like.dtype)


def dense(tree, shape: Sequence[int], dtype) -> jax.Array:
    """A vector or transition as one array, its states in the last axes."""
    if isinstance(tree, tuple):
        return jnp.stack([dense(x, shape, dtype) for x in tree], len(shape))
    return jnp.zeros(shape, dtype) if tree is None else jnp.broadcast_to(tree, shape)
