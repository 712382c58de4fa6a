"""A step function around a learner as a pure function of weights and the world."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp

from .._compiler import abstract, depends, describe_aval, is_inexact
from .._errors import BraintraceError, OptionError, StepFunctionError
from .._windows import Observer, Penalised, check_loss, task_loss, total_loss
from .calls import Bound, ObservedCall, substituted
from .states import CARRY, Path, Role, World, discover


class Touched:
    """States that a function touches.

    They are held weakly: where one was replaced by a new object since, the program that knew it is
    made anew.
    """

    def __init__(self, touched: list[tuple[brainstate.State, bool]]):
        paths: list[Path] = [('~touched', str(i)) for i in range(len(touched))]
        found = dict(zip(paths, touched, strict=True))
        self._states = {path: weakref.ref(state) for path, (state, _) in found.items()}
        self.roles = {
            path: Role.THREADED if written else Role.CONSTANT
            for path, (_, written) in found.items()
        }

    def now(self) -> World:
        return World({path: ref() for path, ref in self._states.items()}, self.roles)

    def stale(self) -> bool:
        return any(ref() is None for ref in self._states.values())


class Values(NamedTuple):
    """The values of a world when a call begins, by path and role; ``initial`` are the hidden states
    that a reset puts back, ``held`` constants that the step takes as arguments.
    """

    constants: dict[Path, Any]
    carry: dict[Path, Any]
    threaded: dict[Path, Any]
    initial: dict[Path, Any]
    held: list


class StepFunction:
    """``step_fn(*slices)``, which calls a learner once, as a pure step.

    ``weights``: a dict name -> ``ParamState``, for which the gradient is taken. ``penalised``:
    whether a penalty stands beside its loss. ``shown``: the shapes of its loss and ``aux``.
    """

    def __init__(self, bound: Bound, step_fn: Callable, weights: dict, slices, has_aux: bool):
        self.bound, self.step_fn, self.has_aux = bound, step_fn, has_aux
        self.compiled = bound.core.first
        self._place(weights)
        self.touched = self._touched(slices)
        self.roles.update(self.touched.roles)
        self.direct = self._direct({k: s.value for k, s in weights.items()}, slices)

    # states by role -------------------------------------------------------------------------------

    def _place(self, weights: dict) -> None:
        """Give each weight a role, a path and places (see ``ObservedStep``): the places of a
        parameter of the model, or further places for a weight of the step alone.
        """
        model, count = self.bound.states.now(), len(self.compiled.program.params)
        of_model = jax.tree.unflatten(self.compiled.program.trees['params'], range(count))
        further = itertools.count(count)
        self.paths: dict[Any, Path] = {}
        self.others: dict[Path, brainstate.State] = {}
        placed: dict[Any, Any] = {}
        for i, (name, state) in enumerate(weights.items()):
            path = self.paths[name] = model.path_of(state) or ('~weights', str(i))
            if path in of_model:
                placed[name] = of_model[path]
            else:
                self.others[path] = state
                placed[name] = jax.tree.map(lambda _: next(further), state.value)
        self.places, self.parameters = tuple(jax.tree.leaves(placed)), list(of_model)
        self.roles = {
            **model.roles,
            **dict.fromkeys(of_model, Role.CONSTANT),
            **dict.fromkeys(self.paths.values(), Role.WEIGHT),
        }

    def _touched(self, slices) -> Touched:
        """The states that the step function touches beside the model's and the weights."""

        def probe(*slices):
            loss, aux = self._call(self.compiled.run, slices)
            self.penalised = isinstance(loss, Penalised)
            self.shown = jax.tree.map(abstract, (task_loss(loss), aux))
            return loss, aux

        touched = discover(probe, *slices)
        if spoiled := [s for s, w in touched if w and isinstance(s, brainstate.ParamState)]:
            raise StepFunctionError(
                f'step_fn writes {len(spoiled)} ParamState(s), but weights are constant during '
                'etrace_grad. Update parameters with the gradients that it returns.'
            )
        own = {*self.bound.states.now().states.values(), *self.others.values()}
        return Touched([(s, w) for s, w in touched if s not in own])

    def world(self) -> World:
        """All states of the step, as they are now."""
        model, touched = self.bound.states.now(), self.touched.now()
        return World({**model.states, **self.others, **touched.states}, self.roles)

    def _by_path(self, weights: dict[Any, Any]) -> dict[Path, Any]:
        return {self.paths[name]: value for name, value in weights.items()}

    # the step -------------------------------------------------------------------------------------

    def _call(self, cell: Callable, slices) -> tuple[Any, Any]:
        """``(loss, aux)`` of the step function, where the learner's call goes through ``cell``."""
        call = ObservedCall(self.bound, cell)
        try:
            with substituted(self.bound.owner, call):
                result = self.step_fn(*slices)
        except (TypeError, ValueError) as error:
            if call.made or isinstance(error, BraintraceError):
                raise
            raise StepFunctionError(
                f'step_fn failed before it called the learner: {error}\n{_expected(slices)}'
            ) from error
        if not call.made:
            raise StepFunctionError(f'step_fn did not call the learner. {_expected(slices)}')
        return _loss_of(result, self.has_aux)

    def _step(self, constants: dict[Path, Any], cell: Callable, weights, world, *slices):
        """The step as ``ObservedStep`` takes it."""
        (carry, threaded), now = world, self.world()
        carried = jax.tree.unflatten(self.compiled.program.trees['carry'], carry)
        with now.running({**constants, **self._by_path(weights), **carried, **threaded}):
            shown = self._call(cell, slices)
            return shown, (jax.tree.leaves(now.read(*CARRY)), now.read(Role.THREADED))

    def _params(self, weights, constants: dict[Path, Any]) -> list:
        """The leaves of the model's parameters."""
        values = {**constants, **self._by_path(weights)}
        return jax.tree.leaves({path: values[path] for path in self.parameters})

    def observed(self, weights, values: Values) -> Observer:
        """The step under observation, from these values on."""
        fresh = jax.tree.leaves({**values.carry, **values.initial})
        return self.compiled.around(
            partial(self._step, values.constants),
            params=self._params(weights, values.constants),
            places=self.places,
            direct=self.direct,
            restart=partial(self.compiled.restarted, fresh, self.bound.core.hidden),
            held=values.held,
        )

    def _direct(self, weights: dict, slices) -> frozenset[int]:
        """Places of the weights that reach the loss inside the cell or around it, but not through
        an op.
        """
        world = self.world()
        constants = world.read(Role.CONSTANT)
        start = jax.tree.leaves(world.read(*CARRY)), world.read(Role.THREADED)
        params, (leaves, treedef) = self._params(weights, constants), jax.tree.flatten(weights)

        def loss(leaves, slices):
            def cell(_, carry, inputs):  # with constant parameters: the cell's use is known
                return self.compiled.run(params, carry, inputs)

            given = jax.tree.unflatten(treedef, leaves)
            return total_loss(self._step(constants, cell, given, start, *slices)[0][0])

        live = depends(loss, leaves, slices)
        by_name = jax.tree.unflatten(treedef, live)
        idle = [
            name
            for name, path in self.paths.items()
            if path in self.others and not any(jax.tree.leaves(by_name[name]))
        ]
        if idle:
            raise OptionError(
                f'weights {idle} are no parameters of the model and do not reach the loss of '
                'step_fn. Name the states that it reads; the model has '
                f'{list(self.bound.owner.param_states)}.'
            )
        each = zip(self.places, leaves, live, strict=True)
        around = {place for place, leaf, used in each if used and is_inexact(abstract(leaf))}
        return frozenset(around.union(self.compiled.graph.direct))


def _expected(slices) -> str:
    """The part of a message that says how a step function is called, with these slices."""
    found = jax.tree.map(lambda x: describe_aval(abstract(x)), slices)
    shown = ', '.join(str(x).replace("'", '') for x in found)
    return (
        f'It is called as `step_fn({shown})`, with one step of each sequence; call `learner(x)` '
        'once in it and return the loss of its output, as in `lambda x, target: loss(learner(x), '
        'target)`. (A function `loss(output, target)` of the output is what '
        '`braintrace.functional` and `braintrace.verify` take.)'
    )


def _loss_of(result, has_aux: bool):
    if has_aux:
        if not (isinstance(result, tuple) and len(result) == 2):
            found = 'one array' if isinstance(result, jax.Array) else type(result).__name__
            raise StepFunctionError(
                f'has_aux=True, but step_fn returned {found}; return (loss, aux).'
            )
        loss, aux = result
    else:
        if isinstance(result, tuple):
            raise StepFunctionError(
                'step_fn returned a tuple; return one scalar loss, or pass has_aux=True for (loss, '
                'aux).'
            )
        loss, aux = result, None
    try:
        loss = check_loss(loss, 'step_fn')
        return loss if isinstance(loss, Penalised) else jnp.asarray(loss), aux
    except (ValueError, TypeError) as e:
        raise StepFunctionError(str(e)) from e
