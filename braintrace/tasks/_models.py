"""Models of several seeds as one pure cell, with the parameters and the carry of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .._errors import OptionError, StructureError
from .._learner import ModelStates
from .._learner import compile as compile_model
from .._rules import Rule
from .._windows import signature
from ..functional import OnlineLearner, online

__all__ = ['made']


def made(
    model: Callable, seeds: tuple[int, ...], rule: Rule | None, first: jax.Array
) -> tuple[OnlineLearner, Any, Any]:
    """``(learner, params, carry)`` of ``model(seed)``, for inputs like ``first``; the learner is
    that of the first seed, params and carry have the seeds in axis 0.
    """
    if not callable(model) or isinstance(model, brainstate.nn.Module):
        shown = model if not hasattr(model, '__dict__') else type(model).__name__
        raise OptionError(f'model is {shown!r}; give a function of a seed, such as a class.')
    learner, cell, params, carry = _learner(_of(model, seeds[0]), rule, first)
    each: list = [(params, carry)]
    known = _constants(cell, params, carry, first) if len(seeds) > 1 else []
    for seed in seeds[1:]:
        cell, params, carry = _pure(_of(model, seed), first)
        if signature((params, carry)) != signature(each[0]):
            raise StructureError(
                f'model({seed}) has other parameters or states than model({seeds[0]}), of other '
                'shapes perhaps; all seeds run in one program.'
            )
        _check_constants(known, _constants(cell, params, carry, first), seeds[0], seed)
        each.append((params, carry))
    params, carry = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    return learner, params, carry


def _of(model: Callable, seed: int):
    brainstate.random.seed(seed)
    found = model(seed)
    if isinstance(found, brainstate.nn.Module) or (isinstance(found, tuple) and len(found) == 3):
        return found
    raise OptionError(
        f'model({seed}) is {type(found).__name__}; return a brainstate.nn.Module, or a triple '
        '(cell, params, carry).'
    )


def _learner(
    found, rule: Rule | None, first: jax.Array
) -> tuple[OnlineLearner, Callable, Any, Any]:
    """The learner of a model, its cell, parameters and carry."""
    if isinstance(found, tuple):
        cell, params, carry = found
        _check_cell(cell, params, carry, first)
        learner = online(cell, rule, mark='auto')
        jax.eval_shape(learner.init, params, carry, first)
    else:
        learner, params, carry = compile_model(found, rule, first, batch_size=len(first)).pure()
        _check_statistics(found, learner.cell, params, carry, first)
    return learner, learner.cell, params, carry


def _check_cell(cell: Callable, params, carry, first: jax.Array) -> None:
    """Refuse a cell that does not take inputs like these."""
    if not callable(cell):
        raise OptionError(f'the cell of a triple is {cell!r}; give a function.')
    try:
        jax.eval_shape(cell, params, carry, first)
    except (TypeError, ValueError) as error:
        raise StructureError(
            f'the cell fails on inputs {list(first.shape)}: {error}\nA triple (cell, params, '
            f'carry) is made for one batch: make it for {len(first)}, or say batch= to run.'
        ) from error


def _pure(found, first: jax.Array) -> tuple[Callable, Any, Any]:
    """Cell, parameters and carry of a model."""
    if isinstance(found, tuple):
        return found
    brainstate.nn.init_all_states(found, batch_size=len(first))
    states = ModelStates(found, (first,))
    return states.cell(), *states.values()


def _check_statistics(module, cell: Callable, params, carry, first: jax.Array) -> None:
    """Refuse states that go on beyond a sequence: each begins from the initial states here."""
    kept = {
        tuple(map(str, path if isinstance(path, tuple) else (path,)))
        for path in module.states(brainstate.LongTermState)
    }
    jaxpr, shapes = jax.make_jaxpr(lambda c: cell(params, c, first)[1], return_shape=True)(carry)
    places = jax.tree_util.tree_flatten_with_path(shapes)[0]
    for (path, _), old, new in zip(places, jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars):
        if old is not new and path[0].key in kept:
            raise StructureError(
                f'the step writes the state {"/".join(path[0].key)}, a brainstate.LongTermState '
                'such as the statistics of a batch, and each sequence of a run begins from the '
                'initial states: leave it out of the model, or write the loop by hand.'
            )


def _constants(cell: Callable, params, carry, first: jax.Array) -> list:
    """The arrays that a cell holds beside its arguments."""
    return list(jax.make_jaxpr(cell)(params, carry, first).consts)


def _check_constants(known: list, other: list, first: int, seed: int) -> None:
    if len(known) != len(other):
        raise StructureError(f'model({first}) and model({seed}) do not compute the same.')
    for one, two in zip(known, other, strict=True):
        if one is not two and not np.array_equal(one, two):
            raise StructureError(
                f'model({first}) and model({seed}) hold different constants {one.dtype}'
                f'{list(np.shape(one))}, and all seeds run in one program. Keep the array in a '
                'brainstate.LongTermState (of a triple, in the carry), or draw it from a seed that '
                'is the same for all.'
            )
