"""Calls of a learner within a step function, and what a step function may do."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import abstract, depends, describe_aval, is_inexact, path_name
from .._warnings import tell
from .._windows import Observer, Penalised, check_loss, task_loss, total_loss
from ..errors import (
    BraintraceError,
    NotSupportedError,
    OptionError,
    StepFunctionError,
)
from ..functional import OnlineLearner
from .environment import ABSENT, STEP, reads, token
from .states import CARRY, ModelStates, Path, Role, World, called, discover, innermost

# calls --------------------------------------------------------------------------------------------
#
# What a call of a learner computes: its own step, or an observed one; what it warns of.


MANY = 3  # programs of functions that the same lines made
KEPT = 64  # programs of a learner, such as one for each length of its sequences


@dataclass(frozen=True, eq=False)
class Bound:
    """A learner (``owner``, with states ``etrace``, ``initial`` and ``structure``) and its compiled
    model.
    """

    owner: Any
    core: OnlineLearner
    states: ModelStates
    programs: OrderedDict[tuple[tuple, Hashable, tuple], Any] = field(default_factory=OrderedDict)
    read: set[str] = field(default_factory=set)  # keys of the environment that programs read
    begun: list = field(default_factory=list)  # the last optimizer that began; two once it is told

    def tell_anew(self, optimizer, fresh) -> None:
        """Tell once that a call begins with a ``fresh`` state of the same optimizer as the one
        before; None: it goes on.
        """
        if not jax.tree.leaves(fresh) or len(self.begun) > 1:
            return
        again = self.begun == [optimizer]
        self.begun[:] = [optimizer] * (1 + again)
        if again:
            tell(
                'etrace_train was called again with the same optimizer and without `opt_state`, so '
                'the optimizer starts again: its moments and its step count are those of the first '
                'update. To go on, pass `opt_state=found.opt_state` of the call before.'
            )

    def program(self, of: tuple, like: Hashable, make: Callable):
        """The compiled program of the user's functions, for what is ``like`` this beside them; made
        where there is none or its states are gone.
        """
        key = of, like, self._read_now()
        new = key not in self.programs
        if new or self.programs[key].touched.stale():
            with reads() as found:
                program = make()
            # what the step takes as inputs goes to the program as arguments
            self.read.update(found.keys() - self.states.environment.inputs.keys())
            key = of, like, self._read_now()
            self.programs[key] = program
            while len(self.programs) > KEPT:
                self.programs.popitem(last=False)
        self.programs.move_to_end(key)
        if new and of:
            # warn at the third program of functions that the same lines made
            alike = [functions for functions, *other in self.programs if other == [*key[1:]]]
            if len(alike) >= MANY and [*map(lines_of, alike)].count(lines_of(of)) == MANY:
                tell(
                    f'{type(self.owner).__name__} compiles for the third time for the same shapes '
                    'and options: step_fn or the optimizer is a new object at each call. Define '
                    'both once, outside of the loop.'
                )
        return self.programs[key]

    def _read_now(self) -> tuple:
        """The values of all keys of the environment that a program is known to read."""
        get = brainstate.environ.get
        return tuple((key, token(get(key, default=ABSENT))) for key in sorted(self.read))

    def given(self, inputs: tuple) -> tuple:
        """The inputs of the compiled step here: these, and what it reads of the environment."""
        self.states.environment.check()
        return *inputs, *self.states.environment.values()

    def alone(self, *inputs):
        """The model itself, without its trace, in the environment as it is."""
        environment = self.states.environment
        environment.check(STEP)
        read = environment.values()
        if jax.tree.structure(inputs) != jax.tree.structure(self.states.example):
            self.core.compiled(*self.states.values(), (*inputs, *read))  # which says how it differs
        with environment.completed():
            return called(self.states.model, *inputs)

    def held(self) -> list:
        """The constants that the compiled step takes as arguments."""
        return self.owner.structure.value

    def initial(self) -> dict[Path, Any]:
        """The hidden states that a reset puts back."""
        saved = self.owner.initial.value
        return {path: saved[path_name(path)] for path in self.states.hidden}

    def empty_trace(self) -> dict[str, Any]:
        """The value of an ``ETraceState`` before the first step."""
        trace, t = self.core.first.init()
        return {'trace': trace, 't': t}


def lines_of(function: Any, depth: int = 4):
    """The code of a function, or of several, and of functions that it closes over: equal where the
    same lines made both. An object of another kind is equal to itself alone.
    """
    if isinstance(function, tuple | list):
        return tuple(lines_of(each, depth) for each in function)
    if isinstance(function, partial):
        return lines_of(function.func, depth)
    if not isinstance(function, FunctionType):
        return function
    values = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    inner = [v for v in values if isinstance(v, tuple | list | partial | FunctionType)]
    return function.__code__, *(lines_of(v, depth - 1) for v in inner if depth)


# Pairs of a learner and the function that computes its call (None: it runs), the innermost last.
SUBSTITUTES: ContextVar[tuple[tuple[Any, Callable | None], ...]] = ContextVar(
    'functions in the place of learners', default=()
)


@contextmanager
def substituted(learner, call: Callable | None) -> Iterator[None]:
    """Compute calls of ``learner`` by ``call(*inputs)`` inside the block; None: run them."""
    token = SUBSTITUTES.set((*SUBSTITUTES.get(), (learner, call)))
    try:
        yield
    finally:
        SUBSTITUTES.reset(token)


def substitute(learner) -> Callable | None:
    """The function in the place of this learner here; None: it runs."""
    for of, call in reversed(SUBSTITUTES.get()):
        if of is learner:
            return call
    return None


class ObservedCall:
    """The one call of a learner in an observed step: the model's states go through ``cell(params,
    carry, inputs) -> (outputs, carry)``, on lists of leaves.
    """

    def __init__(self, bound: Bound, cell: Callable):
        self.bound, self.cell, self.made = bound, cell, False
        self.trace = _jax.current_trace()

    def __call__(self, *inputs):
        inputs = self.bound.given(inputs)
        if _jax.current_trace() is not self.trace:
            raise StepFunctionError(
                'step_fn calls the learner inside a transformation (jit, grad, vmap, cond, scan, '
                'checkpoint, ...) of its own, out of which the factors of the step can not be '
                'read. Call `y = learner(x)` in step_fn itself, and transform what is before '
                'and after it. (Samples are the batch of the model, several steps a longer '
                'sequence; `mask` leaves the loss of a step out.)'
            )
        if self.made:
            raise StepFunctionError(
                'step_fn called the learner twice in one step. Call it once, and use its output as '
                'often as you like.'
            )
        world = self.bound.states.now()
        params, carry = world.read(Role.WEIGHT), world.read(*CARRY)
        trees = self.bound.core.compiled(params, carry, inputs).program.trees
        outputs, new = self.cell(*map(jax.tree.leaves, (params, carry, inputs)))
        self.made = True
        world.write(jax.tree.unflatten(trees['carry'], new))
        return jax.tree.unflatten(trees['outputs'], outputs)


OLD = (
    'the loss reads hidden state {names} before it calls the learner, and to a gradient around '
    'single calls that old value is a constant: its history is missing. If the loss depends on it, '
    'take the gradient with etrace_grad, where it is whole.'
)
TWICE = (
    'the learner is called more than once in one gradient. Each call is a step of time, the '
    'gradient is the sum over these steps, and the trace of each is kept until it is taken. '
    'etrace_grad takes a sequence in constant memory.'
)


class Notices:
    """The notices of one learner; each is given once."""

    def __init__(self) -> None:
        self.given: set[str] = set()
        self.called_in: weakref.ref | None = None

    def __deepcopy__(self, memo: dict) -> Notices:
        return Notices()

    def __reduce__(self):
        raise NotSupportedError(
            'a learner of a module is not pickled, since the states of brainstate are not. Pickle '
            '`learner.save()`, a dict of arrays, and give it to `restore` of a learner that the '
            'same lines made.'
        )

    def of_call(self, states: ModelStates) -> Callable:
        """A function to pass the results of a call through, which warns where they are
        differentiated.

        Ask before the call reads any state.
        """
        function = innermost()
        if function is None:
            return lambda results: results
        again = self.called_in is not None and self.called_in() is function
        self.called_in = weakref.ref(function)
        # hidden states that the function has read, and not written, before this call
        touched = zip(function.states, function.been_writen, strict=True)
        old = {state for state, written in touched if not written}
        found = states.lookup() if old and not again else {}
        names = [path_name(p) for p in states.hidden if p in found and found[p] in old]
        text = TWICE if again else OLD.format(names=', '.join(names)) if names else ''
        return (
            partial(_told, self, text)
            if text and text not in self.given
            else lambda results: results
        )

    def give(self, text: str) -> None:
        if text not in self.given:
            self.given.add(text)
            tell(text)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _told(notices: Notices, text: str, results):
    return results


def _forward(notices: Notices, text: str, results):
    notices.give(text)
    return results, None


_told.defvjp(_forward, lambda notices, text, _, cotangents: (cotangents,))


# step functions -----------------------------------------------------------------------------------
#
# A step function around a learner as a pure function of weights and the world.


class Touched:
    """States that a function touches.

    They are held weakly: where one was replaced by a new object since, the program that knew it is
    made again.
    """

    def __init__(self, touched: list[tuple[brainstate.State, bool]]):
        self._states: dict[Path, weakref.ref] = {}
        self.roles: dict[Path, Role] = {}
        for i, (state, written) in enumerate(touched):
            path = '~touched', str(i)
            self._states[path] = weakref.ref(state)
            self.roles[path] = Role.THREADED if written else Role.CONSTANT

    def now(self) -> World:
        return World({path: ref() for path, ref in self._states.items()}, self.roles)

    def stale(self) -> bool:
        return any(ref() is None for ref in self._states.values())


class StepFunction:
    """``step_fn(*slices)``, which calls a learner once, as a pure step.

    ``weights``: a dict name -> ``ParamState``, for which the gradient is taken. ``penalised``:
    whether a penalty is beside its loss. ``shown``: the shapes of its loss and ``aux``.
    """

    def __init__(self, bound: Bound, step_fn: Callable, weights: dict, slices, has_aux: bool):
        self.bound, self.step_fn, self.has_aux = bound, step_fn, has_aux
        self.compiled = bound.core.first
        self._place(weights)

        # one run on shapes: the states that it touches beside the model's and the weights
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
        own = {*bound.states.now().states.values(), *self.others.values()}
        self.touched = Touched([(s, w) for s, w in touched if s not in own])
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
        loss, aux = result, None
        if self.has_aux:
            if not (isinstance(result, tuple) and len(result) == 2):
                found = 'one array' if isinstance(result, jax.Array) else type(result).__name__
                raise StepFunctionError(
                    f'has_aux=True, but step_fn returned {found}; return (loss, aux).'
                )
            loss, aux = result
        elif isinstance(result, tuple):
            raise StepFunctionError(
                'step_fn returned a tuple; return one scalar loss, or pass has_aux=True for (loss, '
                'aux).'
            )
        try:
            loss = check_loss(loss, 'step_fn')
            return loss if isinstance(loss, Penalised) else jnp.asarray(loss), aux
        except (ValueError, TypeError) as e:
            raise StepFunctionError(str(e)) from e

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

    def observed(self, weights, carry: list, constants, initial, held: list) -> Observer:
        """The step under observation, from these leaves of the carry on; ``initial`` are the hidden
        states that a reset puts back, ``held`` constants that the step takes as arguments.
        """
        carried = jax.tree.unflatten(self.compiled.program.trees['carry'], carry)
        fresh = jax.tree.leaves({**carried, **initial})
        return self.compiled.around(
            partial(self._step, constants),
            params=self._params(weights, constants),
            places=self.places,
            direct=self.direct,
            restart=partial(self.compiled.restarted, fresh, self.bound.core.hidden),
            held=held,
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
