"""The state of an online learner, and what can be done with it without the learner."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from .._compiler import path_key, path_name
from .._errors import StructureError

__all__ = ['OnlineState', 'flatten_paths', 'fold_lane', 'merge', 'reset', 'unflatten_paths']


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OnlineState:
    """All that an online learner carries from step to step, but parameters.

    ``carry`` is the cell's carry; ``trace`` a dict relation -> group -> slot of arrays; ``t`` the int32 count of trace steps since
    the last reset, ``(B,)`` where an op is batched, else ``()``. Where ``t`` is 0 the trace counts as zero. ``laned`` (static): the paths
    of the arrays in ``trace`` whose axis 0 is the lanes.
    """
    carry: Any
    trace: dict
    t: jax.Array
    laned: frozenset[str] = field(default=frozenset(), metadata={'static': True})

    def replace(self, **changes) -> OnlineState:
        """A copy with some fields changed."""
        return replace(self, **changes)


def reset_leaf(flags: jax.Array, fresh: jax.Array, x: jax.Array) -> jax.Array:
    """``fresh`` where a lane (axis 0) is flagged, ``x`` elsewhere."""
    if flags.ndim and x.shape[:1] != flags.shape:
        raise StructureError(f'flags have shape {list(flags.shape)}, but a hidden leaf has shape {list(x.shape)}: its axis 0 is not the '
                         'lanes. Use one flag () for the whole state.')
    return jnp.where(flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim)), fresh, x)


def check_flags(flags, t) -> jax.Array:
    """Flags as a bool array of shape () or that of ``t``."""
    flags = jnp.asarray(flags)
    if flags.dtype != bool or flags.shape not in ((), t.shape):
        raise StructureError(f'reset flags are {flags.dtype}{list(flags.shape)}; give bool of shape [] or {list(t.shape)}.')
    return flags


def reset(state: OnlineState, flags, carry0, hidden=None) -> OnlineState:
    """Start flagged lanes anew: their hidden carry from ``carry0``, trace zero, ``t`` zero.

    ``flags``: bool ``()`` or ``(B,)``. ``hidden``: predicate ``(path, leaf) -> bool``; default the leaves of inexact dtype.

    >>> import jax.numpy as jnp
    >>> from braintrace.functional import OnlineState, reset
    >>> state = OnlineState({'h': jnp.ones((2, 3))}, {}, jnp.array([4, 4]))
    >>> reset(state, jnp.array([True, False]), {'h': jnp.zeros((2, 3))}).t.tolist()
    [0, 4]
    """
    flags = check_flags(flags, state.t)

    def leaf(path, x, fresh):
        is_hidden = jnp.issubdtype(jnp.result_type(x), jnp.inexact) and (hidden is None or hidden(path_key(path), x))
        return reset_leaf(flags, fresh, jnp.asarray(x)) if is_hidden else x

    carry = jax.tree_util.tree_map_with_path(leaf, state.carry, carry0)
    def entry(path, e):
        return reset_leaf(flags, jnp.zeros((), e.dtype), e) if not flags.ndim or path_name(path_key(path)) in state.laned else e
    return state.replace(carry=carry, trace=jax.tree_util.tree_map_with_path(entry, state.trace), t=jnp.where(flags, 0, state.t))


def flatten_paths(tree) -> dict[tuple[str, ...], Any]:
    """A pytree as a flat dict from path tuples to leaves.

    >>> from braintrace.functional import flatten_paths
    >>> flatten_paths({'a': {'w': 1}, 'b': 2})
    {('a', 'w'): 1, ('b',): 2}
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    flat = {path_key(p): leaf for p, leaf in leaves}
    if len(flat) != len(leaves):
        raise StructureError('two leaves have the same path once keys are written as strings. Give them different keys.')
    return flat


def unflatten_paths(paths: dict, like):
    """The inverse of :func:`flatten_paths`, in the structure of ``like``.

    >>> from braintrace.functional import unflatten_paths
    >>> unflatten_paths({('a', 'w'): 1, ('b',): 2}, {'a': {'w': 0}, 'b': 0})
    {'a': {'w': 1}, 'b': 2}
    """
    expected = flatten_paths(like)
    if set(expected) != set(paths):
        raise StructureError(f'paths differ: missing {sorted(set(expected) - set(paths))}, added {sorted(set(paths) - set(expected))}.')
    return jax.tree_util.tree_map_with_path(lambda p, _: paths[path_key(p)], like)


def merge(*parts):
    """One tree from parts of the same structure that hold None where a leaf is in another part (see ``split``).

    >>> from braintrace.functional import merge
    >>> merge({'a': 1, 'b': None}, {'a': None, 'b': 2})
    {'a': 1, 'b': 2}
    """
    def first(*leaves):
        return next((leaf for leaf in leaves if leaf is not None), None)
    return jax.tree.map(first, *parts, is_leaf=lambda x: x is None)


def fold_lane(state: OnlineState, axis_name: str) -> OnlineState:
    """Fold the index along a mapped axis into every PRNG key of the carry, so that lanes draw different numbers.

    >>> import jax, jax.numpy as jnp
    >>> from braintrace.functional import OnlineState, fold_lane
    >>> state = OnlineState({'key': jax.random.key(0)}, {}, jnp.array(0))
    >>> keys = jax.vmap(lambda _: fold_lane(state, 'i').carry['key'], axis_name='i')(jnp.arange(2))
    >>> bool((jax.random.key_data(keys)[0] != jax.random.key_data(keys)[1]).any())
    True
    """
    def fold(leaf):
        is_key = hasattr(leaf, 'dtype') and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(leaf, jax.lax.axis_index(axis_name)) if is_key else leaf
    return state.replace(carry=jax.tree.map(fold, state.carry))
