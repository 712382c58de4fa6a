"""Checks on the cell, the sequence and the loss of every oracle, and one step of the cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import Penalised
from .._signatures import takes_several
from ..errors import OptionError, StepFunctionError, StructureError


class Leaves(NamedTuple):
    """Chosen leaves of a tree, and their places among all; ``rebuild(values, others)`` makes the
    tree again, with its own other leaves or the given ones.
    """

    values: list
    places: list[int]
    rebuild: Callable[..., Any]


def is_float(leaf) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def split(tree, chosen: Callable) -> Leaves:
    """The leaves that are ``chosen``, of their number and value."""
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if chosen(i, leaf)]

    def rebuild(values, others=leaves):
        full = list(others)
        for i, value in zip(places, values, strict=True):
            full[i] = value
        return jax.tree.unflatten(structure, full)

    return Leaves([leaves[i] for i in places], places, rebuild)


def split_floats(tree) -> Leaves:
    """The leaves of inexact dtype."""
    return split(tree, lambda _, leaf: is_float(leaf))


def checked(cell, params, carry, xs, ys, loss) -> tuple:
    """``(params, carry, xs, ys)`` as arrays, ``xs`` as the tuple of all inputs: a plain tuple holds
    several, unless the cell takes one input alone; any other tree is one. Raises for a cell or
    loss that is no function, a leaf that is no array, and sequences of different lengths.
    """
    for name, value in (('cell', cell), ('loss_fn', loss)):
        if not callable(value):
            raise OptionError(f'{name} is {value!r}; give a function.')
    trees = {'params': params, 'carry': carry, 'xs': xs, 'ys': ys}
    for name, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not hasattr(leaf, 'dtype') and not isinstance(leaf, bool | int | float | complex):
                raise StructureError(
                    f'{name}{jax.tree_util.keystr(path)} is {type(leaf).__name__}; every leaf is '
                    'an array.'
                )
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves((xs, ys))}
    if len(lengths) != 1 or () in lengths or (0,) in lengths:
        found = [jnp.shape(leaf) for leaf in jax.tree.leaves((xs, ys))]
        raise StructureError(
            f'xs and ys have leaves of shapes {found}; stack the steps on axis 0, one at least, as '
            'many in each.'
        )
    trees['xs'] = xs if takes_several(cell, xs) else (xs,)
    return tuple(jax.tree.map(jnp.asarray, tree) for tree in trees.values())


def one_step(cell, params, carry, x):
    """``(outputs, carry)`` of the cell."""
    result = cell(params, carry, *x)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise StructureError(
            f'the cell returned {type(result).__name__}; return a pair (outputs, new_carry).'
        )
    old, new = (jax.tree.flatten(c) for c in (carry, result[1]))
    if old[1] != new[1] or any(
        jnp.shape(a) != jnp.shape(b) or jnp.result_type(a) != jnp.result_type(b)
        for a, b in zip(old[0], new[0])
    ):
        before, after = (
            [f'{jnp.result_type(a)}{list(jnp.shape(a))}' for a in leaves]
            for leaves, _ in (old, new)
        )
        raise StructureError(
            f'the cell returned a carry of another structure, shape or dtype: {old[1]} of {before} '
            f'before the step, {new[1]} of {after} after it.'
        )
    return result


def first_values(program, params, carry: list, x) -> dict[int, Any]:
    """The values that a step of a compiled graph starts with, by number; ``carry`` holds a leaf
    for each state.
    """
    return {
        **program.constants,
        **dict(zip(program.params, jax.tree.leaves(params), strict=True)),
        **dict(zip(program.carry, carry, strict=True)),
        **dict(zip(program.inputs, jax.tree.leaves(x), strict=True)),
    }


def scalar(loss):
    """The loss of a step, which must be a real scalar, with its penalty, if it has one."""
    if isinstance(loss, Penalised):
        return scalar(loss.loss) + scalar(loss.penalty)
    if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise StepFunctionError(
            f'loss_fn returned {jnp.result_type(loss)}{list(jnp.shape(loss))}; return one real '
            'scalar, such as a mean.'
        )
    return loss
