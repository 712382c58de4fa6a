"""The leaves of parameters, carry and inputs: their paths, names, shapes and dtypes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from ... import _jax
from ..._errors import StructureError
from ..equations.equation import is_inexact


def describe_aval(aval) -> str:
    """Dtype and shape, as in messages."""
    return f'{aval.dtype}{list(aval.shape)}'


def _escape(part: str) -> str:
    return part.replace('~', '~0').replace('/', '~1')


def path_key(path) -> tuple[str, ...]:
    """A pytree key path as strings; a key that is itself a tuple counts as several."""
    parts: list[str] = []
    for key in path:
        value = next((getattr(key, n) for n in ('key', 'name', 'idx') if hasattr(key, n)), key)
        parts.extend(map(str, value if isinstance(value, tuple) else (value,)))
    return tuple(parts)


def path_name(key: tuple[str, ...], bare: str = '.') -> str:
    """The printed form of a path; ``bare`` where the tree is one array."""
    return '/'.join(_escape(p) for p in key) or bare


def param_name(path) -> str:
    return path_name(path_key(path), 'params')


def check_arrays(tree, what: str) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not hasattr(leaf, 'dtype') and not isinstance(leaf, bool | int | float | complex):
            raise StructureError(
                f'{what} leaf {path_name(path_key(path), what)!r} is {type(leaf).__name__}, not an '
                f'array. Keep Python objects out of {what}, or close over them.'
            )
        given_away = isinstance(leaf, jax.Array) and not isinstance(leaf, _jax.Tracer)
        if given_away and leaf.is_deleted():
            raise StructureError(
                f'{what} leaf {path_name(path_key(path), what)!r} was given away to a call before, '
                'which wrote into its memory (`donate_argnums`). Go on with what it returned.'
            )


def abstract(leaf):
    """Shape and dtype of a leaf, without the traces of an outer transformation."""
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct | _jax.ShapedArray) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, 'weak_type', False))


class Leaves(NamedTuple):
    """The leaves of a tree, with their paths."""

    keys: tuple[tuple[str, ...], ...]
    leaves: list
    tree: Any


def leaves_of(tree, what: str) -> Leaves:
    """Refuses two leaves of one path, and leaves that are no arrays."""
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    keys = tuple(path_key(p) for p, _ in with_paths)
    if len(set(keys)) != len(keys):
        twice = sorted({path_name(k, what) for k in keys if keys.count(k) > 1})
        raise StructureError(
            f'two leaves of {what} have the same path: {twice}. Give them different keys.'
        )
    check_arrays(tree, what)
    return Leaves(keys, [leaf for _, leaf in with_paths], treedef)


def select(predicate, names, avals) -> tuple[int, ...]:
    """Positions of the leaves of inexact dtype that ``predicate(path, leaf)`` chooses."""
    return tuple(
        i
        for i, (n, a) in enumerate(zip(names, avals, strict=True))
        if is_inexact(a) and predicate(n, a)
    )
