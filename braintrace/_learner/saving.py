"""A learner as one flat dict of arrays, and back: copies both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._compiler import path_key
from .._errors import StructureError
from .._jax import is_key
from .states import Path

States: TypeAlias = dict[Path, brainstate.State]

RULE = 'rule'  # the entry that holds the rule: the bytes of its text


def _is_quantity(value) -> bool:
    return isinstance(value, u.Quantity)


def _name(path, value) -> str:
    """The name of an entry; a unit, or the kind of a random key, stands behind it in brackets."""
    kind = ''
    if _is_quantity(value):
        kind = f' [{u.get_unit(value)}]'
    elif is_key(value):
        kind = f' [{jax.random.key_impl(value)}]'
    return '/'.join(path_key(path)) + kind


def _numbers(value):
    """A leaf without its unit; a random key as integers."""
    return jax.random.key_data(value) if is_key(value) else u.get_magnitude(value)


def _like(numbers, old):
    """Numbers as the leaf ``old`` holds its own: the inverse of :func:`_numbers`."""
    if is_key(old):
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(old))
    return u.Quantity(numbers, unit=u.get_unit(old)) if _is_quantity(old) else numbers


def _leaves(states: States) -> tuple[dict[str, Any], Any]:
    """Name -> leaf of all values, in the order of the tree, and the structure of the tree."""
    values = {path: state.value for path, state in states.items()}
    leaves, treedef = jax.tree_util.tree_flatten_with_path(values, is_leaf=_is_quantity)
    found = {_name(path, leaf): leaf for path, leaf in leaves}
    if len(found) != len(leaves):
        raise StructureError(
            'two arrays of the learner have the same path once its keys are joined by '
            '"/". Give them different keys.'
        )
    return found, treedef


def save(states: States, rule) -> dict[str, jax.Array]:
    """Copies of all arrays that ``states`` hold, by name, and the rule."""
    tree = {name: jnp.array(_numbers(leaf)) for name, leaf in _leaves(states)[0].items()}
    return {**tree, RULE: jnp.array(np.frombuffer(repr(rule).encode(), np.uint8))}


def restore(states: States, rule, tree: Mapping[str, Any]) -> None:
    """Copy a result of :func:`save` into ``states``; nothing changes where it does not fit."""
    if not isinstance(tree, Mapping):
        raise StructureError(
            f'the tree is {type(tree).__name__}; give the dict that `learner.save()` returned.'
        )
    leaves, treedef = _leaves(states)
    _check(
        {RULE: repr(rule), **{k: _describe(_numbers(x)) for k, x in leaves.items()}},
        {k: _rule_text(x) if k == RULE else _describe(x) for k, x in tree.items()},
    )
    new = [_like(jnp.array(tree[name]), leaf) for name, leaf in leaves.items()]
    for path, value in jax.tree.unflatten(treedef, new).items():
        states[path].value = value


def _check(here: dict[str, str], saved: dict[str, str]) -> None:
    wrong = [
        f'  {k}: {saved.get(k, "absent")} when saved, {here.get(k, "absent")} here'
        for k in {**here, **saved}
        if saved.get(k) != here.get(k)
    ]
    if wrong:
        raise StructureError(
            'this tree does not fit the learner, which is as it was:\n'
            + '\n'.join(wrong)
            + '\nRestore into a learner of the same model, rule, '
            'batch size and precision. For another batch size, make the states so '
            'first: `brainstate.nn.init_all_states(model, batch_size=...)` and '
            '`learner.compile_graph(x)`.'
        )


def _rule_text(entry) -> str:
    return bytes(np.asarray(entry, np.uint8)).decode(errors='replace')


def _describe(x) -> str:
    if not hasattr(x, 'dtype') and isinstance(x, bool | int | float | complex):
        x = jnp.asarray(x)
    return f'{x.dtype}{list(x.shape)}' if hasattr(x, 'shape') else type(x).__name__
