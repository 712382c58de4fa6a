"""Models of several seeds as one pure cell, with the parameters and the carry of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._compiler import abstract, is_inexact
from .._learner import ModelStates
from .._learner import compile as compile_model
from .._rules import Rule
from .._windows import signature
from ..errors import OptionError, StructureError
from ..functional import OnlineLearner, online

# what works for a mask of an op's weight too, whose trace a state would take away
KEPT_BY_SEED = (
    'Keep it in a brainstate.ParamState (of a triple, in the params) that the step reads through '
    'jax.lax.stop_gradient, with an optimizer without weight decay on it'
)


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
    known = _code(cell, params, carry, first) if len(seeds) > 1 else None
    for seed in seeds[1:]:
        cell, params, carry = _pure(_of(model, seed), first)
        if signature((params, carry)) != signature(each[0]):
            raise StructureError(
                f'model({seed}) has other parameters or states than model({seeds[0]}), of other '
                'shapes perhaps; all seeds run in one program.'
            )
        if known is not None:
            _check_code(known, _code(cell, params, carry, first), seeds[0], seed)
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
            f'carry) is made for one batch: make it for {len(first)}, or say batch_size= to run.'
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


class Code(NamedTuple):
    """What a cell computes besides its arguments: a program, and the arrays that it holds."""

    program: str
    constants: list


def _code(cell: Callable, params, carry, first: jax.Array) -> Code:
    """The program of a cell and of its derivative, which has every rule and number."""

    def total(*args):
        out = cell(*args)
        return sum(x.real.sum() for x in jax.tree.leaves(out) if is_inexact(abstract(x))), out

    def both(*args):
        value, pull, out = jax.vjp(total, *args, has_aux=True)
        return out, pull(jnp.ones_like(value))

    args = params, carry, first
    try:
        jaxpr, constants = _jax.trace(both, *args)
    except ValueError:  # of a loop that reverse mode does not pass
        jaxpr, constants = _jax.trace(cell, *args)
    run = partial(_jax.evaluate, jaxpr)
    return Code(jax.jit(run).lower(constants, jax.tree.leaves(args)).as_text(), constants)


def _check_code(known: Code, other: Code, first: int, seed: int) -> None:
    """Refuse a model that computes something else than the first one."""
    for one, two in zip(known.constants, other.constants):
        if one is not two and not np.array_equal(one, two):
            raise StructureError(
                f'model({first}) and model({seed}) hold different constants {one.dtype}'
                f'{list(np.shape(one))}, and all seeds run in one program. {KEPT_BY_SEED}, or draw '
                'it from a seed that is the same for all.'
            )
    if known.program != other.program:
        raise StructureError(
            f'model({first}) and model({seed}) do not compute the same, and all seeds run in one '
            'program: a number or a choice in the code of the model follows the seed. '
            f'{KEPT_BY_SEED}, or call run once for each of the seeds.'
        )
