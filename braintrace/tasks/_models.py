"""Models of several seeds as one pure cell, with the parameters and the carry of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._compiler import abstract, is_inexact
from .._learner import ModelStates
from .._rules import Rule
from .._windows import signature
from ..errors import OptionError, StructureError
from ..functional import OnlineLearner, online

REMEDY = (
    'Keep it in a brainstate.LongTermState that the step reads, or, of a triple, in the params, '
    'read through jax.lax.stop_gradient'
)
HELD = '~by_seed'  # the first part of the path of a constant


class Pure(NamedTuple):
    """A model as pure functions of one input; ``hidden``: as for :func:`online`, of a module.
    ``kept``: the paths in the params of what no step and no update changes.
    """

    cell: Callable
    params: Any
    carry: Any
    hidden: Callable | None = None
    kept: frozenset = frozenset()

    def holding(self, paths: Iterable, cell: Callable) -> Pure:
        """This model with another cell, whose params have what is kept at these paths, too."""
        return self._replace(cell=cell, kept=self.kept | {*paths})


def made(
    model: Callable, seeds: tuple[int, ...], rule: Rule | str | None, first: jax.Array
) -> tuple[OnlineLearner, Any, Any]:
    """``(learner, params, carry)`` of ``model(seed)``, for inputs like ``first``; the learner is
    that of the first seed, params and carry have the seeds in axis 0.
    """
    if not callable(model) or isinstance(model, brainstate.nn.Module):
        shown = model if not hasattr(model, '__dict__') else type(model).__name__
        raise OptionError(f'model is {shown!r}; give a function of a seed, such as a class.')
    one = _pure(_of(model, seeds[0]), first)
    each, codes = [one], [_code(one, first)] if len(seeds) > 1 else []
    for seed in seeds[1:]:
        other = _pure(_of(model, seed), first)
        if signature((other.params, other.carry)) != signature((one.params, one.carry)):
            raise StructureError(
                f'model({seed}) has other parameters or states than model({seeds[0]}), of other '
                'shapes perhaps; all seeds run in one program.'
            )
        each.append(other)
        codes.append(_code(other, first))
        if codes[0].program != codes[-1].program:
            raise StructureError(
                f'model({seeds[0]}) and model({seed}) do not compute the same, and all seeds run '
                'in one program: a number or a choice in the code of the model follows the seed. '
                f'{REMEDY}, or call run once for each of the seeds.'
            )
    one, held = _by_seed(one, codes, first)
    params, carry = jax.tree.map(lambda *x: jnp.stack(x), *((m.params, m.carry) for m in each))
    params = params | held if held else params
    trainable = lambda path, leaf: not any(path[: len(k)] == k for k in one.kept)
    options = {'hidden': one.hidden} if one.hidden else {'mark': 'auto'}
    learner = online(one.cell, rule, trainable=trainable, **options)
    jax.eval_shape(learner.init, *jax.tree.map(lambda x: x[0], (params, carry)), first)
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


def _pure(found, first: jax.Array) -> Pure:
    """A model as pure functions. Of a module the states that no step writes are params."""
    if isinstance(found, tuple):
        cell, params, carry = found
        _check_cell(cell, params, carry, first)
        return Pure(cell, params, carry)
    brainstate.nn.init_all_states(found, batch_size=len(first))
    states = ModelStates(found, (first,))
    cell, (params, carry) = states.cell(), states.values()
    unwritten = _unwritten(found, cell, params, carry, first)

    def step(params, carry, x):
        held = {path: params[path] for path in unwritten}
        own = {path: p for path, p in params.items() if path not in held}
        outputs, carry = cell(own, carry | held, x)
        return outputs, {path: h for path, h in carry.items() if path not in held}

    params |= {path: carry.pop(path) for path in unwritten}
    return Pure(step if unwritten else cell, params, carry, states.is_hidden, unwritten)


def long_term_states(module) -> dict[tuple[str, ...], brainstate.State]:
    """The LongTermStates of a module by path."""
    return {
        tuple(map(str, path if isinstance(path, tuple) else (path,))): state
        for path, state in module.states(brainstate.LongTermState).items()
    }


def _unwritten(module, cell: Callable, params, carry, first: jax.Array) -> frozenset:
    """The paths of a module's LongTermStates; refuse those that a step writes, since each sequence
    begins from the initial states here.
    """
    kept = long_term_states(module).keys()
    jaxpr, shapes = jax.make_jaxpr(lambda c: cell(params, c, first)[1], return_shape=True)(carry)
    places = jax.tree_util.tree_flatten_with_path(shapes)[0]
    for (path, _), old, new in zip(places, jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars):
        if old is not new and path[0].key in kept:
            raise StructureError(
                f'the step writes the state {"/".join(path[0].key)}, a brainstate.LongTermState '
                'such as the statistics of a batch, and each sequence of a run begins from the '
                'initial states: leave it out of the model, or write the loop by hand.'
            )
    return frozenset(kept & carry.keys())


class Code(NamedTuple):
    """What a cell computes besides its arguments: a program, and the arrays that it holds."""

    program: str
    constants: list


def _code(model: Pure, first: jax.Array) -> Code:
    """The program of a cell and of its derivative, which has every rule and number."""

    def total(*args):
        out = model.cell(*args)
        return sum(x.real.sum() for x in jax.tree.leaves(out) if is_inexact(abstract(x))), out

    def both(*args):
        value, pull, out = jax.vjp(total, *args, has_aux=True)
        return out, pull(jnp.ones_like(value))

    args = model.params, model.carry, first
    try:
        jaxpr, constants = _jax.trace(both, *args)
    except ValueError:  # of a loop that reverse mode does not pass
        jaxpr, constants = _jax.trace(model.cell, *args)
    run = partial(_jax.evaluate, jaxpr)
    return Code(jax.jit(run).lower(constants, jax.tree.leaves(args)).as_text(), constants)


def _by_seed(model: Pure, codes: list[Code], first: jax.Array) -> tuple[Pure, dict]:
    """The model of the first seed, in which each constant that follows the seed is one of the
    params, and these with the seeds in axis 0.
    """
    each = list(zip(*(code.constants for code in codes), strict=True))
    differ = [row for row in each if not all(np.array_equal(row[0], x) for x in row[1:])]
    held = {(HELD, str(i)): jnp.stack(row) for i, row in enumerate(differ)}
    found: set[tuple] = set()

    def step(params, carry, x):
        own = {path: p for path, p in params.items() if path not in held}
        jaxpr, constants, shapes = _jax.opened(model.cell, (own, carry, x))
        for i, constant in enumerate(constants):
            for path, row in zip(held, differ, strict=True):
                if constant is row[0]:
                    constants[i] = params[path]
                    found.add(path)
        leaves = _jax.evaluate(jaxpr, constants, jax.tree.leaves((own, carry, x)))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    if not held:
        return model, {}
    if isinstance(model.params, dict):
        values = {path: stacked[0] for path, stacked in held.items()}
        jax.eval_shape(step, model.params | values, model.carry, first)
    if left := [row[0] for path, row in zip(held, differ, strict=True) if path not in found]:
        raise StructureError(
            f'the models of two seeds hold different constants {left[0].dtype}'
            f'{list(np.shape(left[0]))}, and all seeds run in one program. {REMEDY}, or draw it '
            'from a seed that is the same for all.'
        )
    return model.holding(held, step), held
