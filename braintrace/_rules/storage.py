"""How the numbers of a trace are stored, and how they are read again."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .lanes import where_lanes

Entry = dict[str, jax.Array]  # by trainable name
States = dict[str, tuple[jax.Array | None, ...]]  # one array for each state; None: zero


def by_state(entry: States) -> tuple[Entry, ...]:
    """An entry as a vector: for each state its arrays by trainable name."""
    return tuple(
        dict(zip(entry, arrays, strict=True)) for arrays in zip(*entry.values(), strict=True)
    )


def by_name(vector: tuple[Entry | None, ...], names) -> States:
    """The inverse of :func:`by_state`."""
    return {n: tuple(None if e is None else e[n] for e in vector) for n in names}


def entry_dtype(dtype, group) -> jnp.dtype:
    """The dtype of an entry for weights of some dtype: complex where the group's states are."""
    complex_group = jnp.issubdtype(group, jnp.complexfloating)
    return _jax.promoted(dtype, jnp.complex64) if complex_group else jnp.dtype(dtype)


def stored_dtype(dtype) -> jnp.dtype:
    """The dtype in which a trace of some dtype is stored: bfloat16 as its bits, since XLA reads
    bfloat16 arrays on a CPU ten times slower.
    """
    return jnp.dtype(jnp.uint16 if dtype == jnp.bfloat16 else dtype)


def held_dtype(dtype) -> jnp.dtype:
    """The dtype of the numbers in an array that is stored in some dtype."""
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.uint16 else dtype)


def stored(x: jax.Array, dtype) -> jax.Array:
    """``x`` as a trace of that stored dtype holds it."""
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), dtype)
    return x.astype(dtype)


def read(e: jax.Array, dtype=None) -> jax.Array:
    """A stored array as numbers, in its own dtype or in ``dtype`` if that is wider; real numbers
    stay real.
    """
    own = held_dtype(e.dtype)
    if e.dtype == jnp.uint16:
        e = jax.lax.bitcast_convert_type(e.astype(jnp.uint32) << 16, jnp.float32)
    if dtype is None:
        return e.astype(own)
    if not jnp.issubdtype(own, jnp.complexfloating):
        dtype = jnp.finfo(dtype).dtype  # of the real parts, where it is complex
    return e.astype(_jax.promoted(own, dtype))


class Stored(NamedTuple):
    """A stored entry, the flags of its lanes that have a past (or one flag for all), and the dtype
    in which sums of it are made.
    """

    entry: States
    alive: jax.Array
    dtype: Any

    @property
    def numbers(self) -> States:
        """The entry, zero in lanes without a past."""
        return jax.tree.map(
            lambda e: where_lanes(self.alive, True, read(e, self.dtype)), self.entry
        )

    def alive_in(self, b) -> jax.Array:
        """The flag of one lane, with an axis of size 1."""
        return one_lane(self.alive, b) if self.alive.ndim else self.alive

    def lane(self, b) -> Stored:
        return Stored(one_lane(self.entry, b), self.alive_in(b), self.dtype)


def one_lane(tree, b, axis: int = 0):
    """Lane ``b`` of every array; its axis stays, with size 1."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, b, 1, axis), tree)


def after(read, t: jax.Array, values):
    """``values`` unchanged, but computed after ``read``.

    Where XLA does not know that a trace is read before it is written, it writes into a copy. The
    step count is never negative, which XLA does not know either.
    """
    # a slice, since devices would send each other all that a reshape reads
    first = [
        jnp.real(jax.lax.slice(leaf, (0,) * leaf.ndim, (1,) * leaf.ndim)).sum()
        for leaf in jax.tree.leaves(read)
        if leaf.size
    ]
    if not first:
        return values

    def guarded(values):
        return jax.tree.map(
            lambda v: v + sum(x.astype(v.dtype) for x in first) if v.size else v, values
        )

    # a branch, since an expression would be made again for each number of the trace; a GPU makes it
    # while it waits for the trace, and would wait longer for the flag of a branch
    def branch(never, values):
        return jax.lax.cond(never, guarded, lambda v: v, values)

    def selected(never, values):
        return jax.tree.map(lambda a, b: jnp.where(never, a, b), guarded(values), values)

    return _jax.platform_dependent(jnp.any(t < 0), values, cpu=branch, default=selected)
