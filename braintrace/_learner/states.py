"""The states of a model that a learner finds, and states of its own."""

from __future__ import annotations

import inspect
import operator
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._compiler import abstract, path_name
from .._jax import hide_from_locations
from ..errors import BraintraceError, CompileError, OptionError, StructureError
from .environment import ABSENT, Environment, reads

# own states ---------------------------------------------------------------------------------------
#
# The states that a learner has beside its model's.


class ETraceState(brainstate.ShortTermState):
    """The eligibility trace and the step count of a learner."""


class StructureState(brainstate.State):
    """The places of the entries of sparse matrices that a model holds as constants: a state, so
    that jitted functions take them as arguments instead of millions of literals.
    """


# states of the model ------------------------------------------------------------------------------
#
# The door between a brainstate model and pure functions: the states that a step touches, by path
# and role; values and states are joined here alone.


Path: TypeAlias = tuple[str, ...]


class Role(Enum):
    """The part of a state in a step."""

    WEIGHT = 'learned'
    HIDDEN = "in the cell's carry; a reset puts it back"
    CARRIED = "in the cell's carry; a reset lets it go on"
    THREADED = 'written by the step beside the cell'
    CONSTANT = 'only read'


CARRY = (Role.HIDDEN, Role.CARRIED)


def as_path(key) -> Path:
    """A brainstate path as a tuple of strings."""
    return tuple(map(str, key if isinstance(key, tuple) else (key,)))


@dataclass(frozen=True)
class World:
    """States by path, each in one role.

    The value of a hidden ``HiddenGroupState`` is a dict of the states that it holds side by side:
    to the compiler each is a hidden state of its own.
    """

    states: Mapping[Path, brainstate.State]
    roles: Mapping[Path, Role]

    def of(self, *roles: Role) -> list[Path]:
        """The paths of the states in these roles."""
        return [path for path in self.states if self.roles[path] in roles]

    def path_of(self, state: brainstate.State) -> Path | None:
        """The path of this state, None if it is none of the world's."""
        return next((path for path, s in self.states.items() if s is state), None)

    def read(self, *roles: Role) -> dict[Path, Any]:
        """The values of the states in these roles, by path."""
        return {path: self._value(path) for path in self.states if self.roles[path] in roles}

    def write(self, values: Mapping[Path, Any]) -> None:
        """Store values in their states."""
        for path, value in values.items():
            self.states[path].value = self._stored(path, value)

    @contextmanager
    def running(self, values: Mapping[Path, Any]) -> Iterator[None]:
        """Give states these values inside the block; afterwards, also on an error, they are as they
        were.
        """
        states = [self.states[path] for path in values]
        before = [state.value for state in states]
        try:
            with brainstate.StateTraceStack():
                for path, value in values.items():  # counts as a read only
                    self.states[path].restore_value(self._stored(path, value))
                yield
        finally:
            _put_back(states, before)

    def _group(self, path: Path) -> brainstate.HiddenGroupState | None:
        """The state at a path, if it holds several hidden states side by side."""
        state = self.states[path]
        grouped = self.roles[path] is Role.HIDDEN and isinstance(state, brainstate.HiddenGroupState)
        return state if grouped else None

    def _value(self, path: Path):
        """The value of a state; a group state gives a dict of its states."""
        value = self.states[path].value
        if (group := self._group(path)) is None:
            return value
        return OrderedDict(
            (name, jax.tree.map(lambda a, k=k: a[..., k], value))
            for k, name in enumerate(_names(path, group))
        )

    def _stored(self, path: Path, value):
        """The inverse of :meth:`_value`."""
        if self._group(path) is None:
            return value
        return jax.tree.map(
            lambda *parts: jnp.concatenate([p[..., None] for p in parts], -1), *value.values()
        )


def _names(path: Path, state: brainstate.HiddenGroupState) -> list[str]:
    """The names of the states that a group state holds side by side on its last axis."""
    width, tree = state.value.shape[-1], isinstance(state, brainstate.HiddenTreeState)
    names = [str(n) for n in (state.name2index if tree else range(width))]
    if not names or len(set(names)) != width:
        raise StructureError(
            f'state {path_name(path)}: {type(state).__name__} with the names {names}, but the last '
            f'axis of its value {list(state.value.shape)} holds {width} states. Give each of its '
            'states, one at least, a name of its own.'
        )
    return names


def _put_back(states: Sequence[brainstate.State], values: Sequence) -> None:
    """Give states the values that they had, also where one holds another tree now."""
    for state, value in zip(states, values, strict=True):
        try:
            state.restore_value(value)
        except ValueError:
            state.value = value


def innermost() -> brainstate.StateTraceStack | None:
    """The states that the function under the innermost transformation of brainstate has met so far;
    None outside of any.
    """
    stacks = brainstate._state.TRACE_CONTEXT.state_stack
    return stacks[-1] if stacks else None


def discover(fn: Callable, *args) -> list[tuple[brainstate.State, bool]]:
    """Trace ``fn`` on shapes: the states that it touches, each with whether it writes the state.

    Every state is left as it was, also on an error.
    """
    stack = brainstate.StateTraceStack()

    def run(*args):
        try:
            with stack:
                return fn(*args)
        finally:
            _put_back(stack.states, stack.original_state_values)

    jax.eval_shape(run, *args)
    return list(zip(stack.states, stack.been_writen, strict=True))


hide_from_locations(os.path.dirname(os.path.abspath(brainstate.__file__)) + os.sep)


def check_model(model) -> None:
    """Refuse what is no module."""
    if not isinstance(model, brainstate.nn.Module):
        module = type(model).__module__.split('.')[0]
        adapter = {'equinox': 'from_equinox', 'flax': 'from_nnx', 'blox': 'from_blox'}.get(module)
        more = f' `braintrace.adapters.{adapter}` makes a cell of it for' if adapter else ''
        more = more and f'{more} `braintrace.functional.online`.'
        kind = type(model).__name__
        if isinstance(model, type):
            kind, more = f'the class {model.__name__}', f' {model.__name__}(...) makes one.'
        raise OptionError(f'model is {kind}; pass a brainstate.nn.Module.{more}')


class Tree:
    """The states of a model, as ``model.states()`` finds them: walked again where an attribute of a
    module, or an item of a container, is another object. The walk takes as long as a small step.
    """

    def __init__(self, model: brainstate.nn.Module):
        self.model = model
        self._containers: list[tuple[Any, tuple]] | None = None
        self._states: dict = {}

    def states(self) -> dict:
        """The states by key."""
        seen = self._containers
        if type(self.model).states is not brainstate.nn.Module.states:
            return dict(self.model.states())  # which may ask for what no attribute tells
        if seen is None or not all(_alike(_items(each), items) for each, items in seen):
            self._states = dict(self.model.states())
            self._containers = _containers(self.model)
        return self._states


# what is no container: it holds no state, or is one
LEAVES = brainstate.State, u.Quantity, jax.Array, np.ndarray, str, type(None), Number


def _containers(model: brainstate.nn.Module) -> list[tuple[Any, tuple]] | None:
    """The modules, lists and dicts of a model, each with what it holds; None where another
    container is among them, whose items are not known.
    """
    found: list[tuple[Any, tuple]] = []
    modules, todo = set(), [model]
    while todo:
        each = todo.pop()
        if isinstance(each, LEAVES):
            continue
        if isinstance(each, brainstate.graph.Node):
            if each in modules:
                continue
            modules.add(each)
            each = vars(each)
        elif not isinstance(each, list | tuple | dict):
            if jax.tree_util.all_leaves([each]):
                continue
            return None
        if not isinstance(each, tuple):  # which stays as it is
            found.append((each, _items(each)))
        todo += _items(each)
    return found


def _items(container) -> tuple:
    return (*container, *container.values()) if isinstance(container, dict) else tuple(container)


def _alike(some: tuple, others: tuple) -> bool:
    """Whether both hold the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


# what JAX raises where Python asks for the value of an array
HIDDEN_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def remedy(key: str) -> str:
    """What to do where the environment has no value for what a step reads of it."""
    return (
        f'Compile inside of `with brainstate.environ.context({key}=...):`, with a value like those '
        'of a step.'
    )


def called(model, *inputs):
    """``model(*inputs)``. An error of this package comes as it is: brainstate's Sequential prints
    all of a layer around it.
    """
    try:
        return model(*inputs)
    except Exception as error:
        own: BaseException | None = error
        while own is not None and not isinstance(own, BraintraceError):
            own = own.__cause__
        if own is None or own is error:
            raise
    raise own


class ModelStates:
    """The states of a model by path: parameters, and the carry (hidden states, other states, states
    outside the model).
    """

    def __init__(
        self, model: brainstate.nn.Module, inputs: tuple, remedy: Callable[[str], str] = remedy
    ):
        self.model, self.example = model, jax.tree.map(abstract, inputs)
        self._tree = Tree(model)
        self._known: tuple[dict, World] | None = None  # the states that were found last
        found = self.lookup()
        for path, state in found.items():
            if state.value is None:
                raise CompileError(
                    f'state {path_name(path)} is not initialised. Call '
                    'brainstate.nn.init_all_states(model) first.'
                )
        try:
            with reads() as read:
                touched = discover(lambda *x: called(model, *x), *inputs)
            self.environment = self._environment(read)
        except KeyError as e:
            if unset := [
                key for key, value in read.items() if value is ABSENT and key in e.args[0]
            ]:
                raise CompileError(
                    f'the step reads {unset[0]!r} of brainstate.environ, which is not set. '
                    f'{remedy(unset[0])}'
                ) from e
            raise
        except AttributeError as e:
            raise CompileError(
                f'the model failed on the example inputs: {e}. Initialise its states first: '
                'brainstate.nn.init_all_states(model), or braintrace.compile(..., batch_size=...).'
            ) from e
        known = set(found.values())
        outside = [s for s, _ in touched if s not in known]
        self.outside: dict[Path, brainstate.State] = {
            ('~outside', f'{type(s).__name__}{i}'): s for i, s in enumerate(outside)
        }
        everything = {**found, **self.outside}
        self.roles: dict[Path, Role] = {}
        for path, state in everything.items():
            hidden = isinstance(state, brainstate.HiddenState)
            of_others = Role.HIDDEN if hidden else Role.CARRIED
            learned = isinstance(state, brainstate.ParamState)
            self.roles[path] = Role.WEIGHT if learned else of_others
        self.hidden = [path for path, role in self.roles.items() if role is Role.HIDDEN]
        changed = {s for s, written in touched if written}
        if spoiled := [
            path_name(path)
            for path, role in self.roles.items()
            if role is Role.WEIGHT and everything[path] in changed
        ]:
            raise CompileError(
                f'the step writes the parameters {spoiled}, but parameters are constant in a step. '
                'Keep what changes there in a brainstate.ShortTermState, and update parameters '
                'with the gradient.'
            )

    def _environment(self, read: dict) -> Environment:
        """What the step reads of the environment; where Python asks for the value of an array,
        nothing varies.
        """
        found = Environment(read)

        def step(values, *inputs):
            with brainstate.environ.context(**values):
                return called(self.model, *inputs)

        try:
            if found.inputs:
                discover(step, found.inputs, *self.example)
        except HIDDEN_VALUES:
            return Environment(read, may_vary=False)
        return found

    def is_hidden(self, key: Path, leaf) -> bool:
        """Whether a leaf of the carry belongs to a hidden state."""
        return any(key[: len(path)] == path for path in self.hidden)

    def lookup(self) -> dict[Path, brainstate.State]:
        """Path -> state, as the model holds them now."""
        return {as_path(k): s for k, s in self._tree.states().items()}

    def parameters(self) -> dict[Any, brainstate.ParamState]:
        """Key -> parameter, as the model holds them now."""
        found = self._tree.states().items()
        return {k: s for k, s in found if isinstance(s, brainstate.ParamState)}

    def now(self) -> World:
        """The states as the model holds them now, all its parameters as weights."""
        keys = self._tree.states()
        if self._known is None or self._known[0] is not keys:
            found = {**self.lookup(), **self.outside}
            missing = [path_name(path) for path in self.roles if path not in found]
            if missing:
                raise StructureError(
                    f'states {missing} were there when the graph was compiled and are missing now. '
                    'Restore them, or compile the graph again.'
                )
            world = World({path: found[path] for path in self.roles}, self.roles)
            self._known = keys, world
        return self._known[1]

    def values(self) -> tuple[dict, dict]:
        """``(params, carry)``: dicts path -> value."""
        world = self.now()
        return world.read(Role.WEIGHT), world.read(*CARRY)

    def taken(self, xs) -> tuple:
        """The inputs that ``xs`` holds: a tuple has several, unless the example is it as one."""
        example: Any = jax.tree.structure(self.example)
        return xs if type(xs) is tuple and jax.tree.structure((xs,)) != example else (xs,)

    def cell(self) -> Callable:
        """The model's update as ``(params, carry, *inputs) -> (outputs, carry)``; its states are
        left as they were. What it reads of the environment and varies is a dict, its last input.
        """
        tree, environment = jax.tree.structure, self.environment

        def run(params, carry, *inputs):
            world, own = self.now(), inputs[: len(self.example)]
            if environment.inputs and len(inputs) == len(own):
                raise StructureError(
                    f'the step reads {[*environment.inputs]} of brainstate.environ: give a dict of '
                    'them as its last input, of a sequence with time in axis 0: '
                    '`learner.with_environment(xs, len(xs))` puts it there.'
                )
            read = inputs[-1] if environment.inputs else {}
            with environment.completed(**read), world.running({**params, **carry}):
                outputs = called(self.model, *own)
                new = world.read(*CARRY)
            changed = [
                f'  {path_name(path)}: {tree(value)} before the step, {tree(new[path])} after it'
                for path, value in carry.items()
                if tree(value) != tree(new[path])
            ]
            if changed:
                raise StructureError(
                    'a step must leave every state with the tree and the units that it had:\n'
                    + '\n'.join(changed)
                    + '\nConvert the value in the step, or initialise the state with what the step '
                    'writes.'
                )
            return outputs, new

        names = 'params', 'carry', *(f'input{k}' for k in range(len(self.example)))
        names += ('environment',) if environment.inputs else ()
        own = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in names]
        run.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        return run
