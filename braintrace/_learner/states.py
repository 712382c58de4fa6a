"""The door between a brainstate model and pure functions: states by path, in and out."""
from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._compiler import path_name
from .._errors import CompileError, StructureError
from .._jax import hide_from_locations

__all__ = ['ModelStates', 'States', 'as_path', 'discover', 'innermost', 'put', 'running', 'stacked', 'unstacked']

hide_from_locations(os.path.dirname(os.path.abspath(brainstate.__file__)) + os.sep)

States = Sequence[brainstate.State]


def as_path(key) -> tuple[str, ...]:
    """A brainstate path as a tuple of strings."""
    return tuple(map(str, key if isinstance(key, tuple) else (key,)))


def put(states: States, values: Sequence) -> None:
    """Write values for the duration of a trace; counts as a read only."""
    for state, value in zip(states, values, strict=True):
        state.restore_value(value)


def _put_back(states: States, values: Sequence) -> None:
    """Give states the values that they had, also where one holds another tree now."""
    for state, value in zip(states, values, strict=True):
        try:
            state.restore_value(value)
        except ValueError:
            state.value = value


@contextmanager
def running(states: States, values: Sequence) -> Iterator[None]:
    """Give states these values inside the block; afterwards, also on an error, they are as they were."""
    before = [state.value for state in states]
    try:
        with brainstate.StateTraceStack():
            put(states, values)
            yield
    finally:
        _put_back(states, before)


def innermost() -> brainstate.StateTraceStack | None:
    """The states that the function under the innermost transformation of brainstate has met so far; None outside of any."""
    stacks = brainstate._state.TRACE_CONTEXT.state_stack
    return stacks[-1] if stacks else None


def discover(fn: Callable, *args) -> tuple[list[brainstate.State], list[bool], Any]:
    """Trace ``fn`` on shapes: the states that it touches, whether it writes them, and the shape of its result.

    Every state is left as it was, also on an error.
    """
    stack = brainstate.StateTraceStack()

    def run(*args):
        try:
            with stack:
                return fn(*args)
        finally:
            _put_back(stack.states, stack.original_state_values)

    shape = jax.eval_shape(run, *args)
    return list(stack.states), list(stack.been_writen), shape


def _names(path: tuple[str, ...], state: brainstate.HiddenGroupState) -> list[str]:
    """The names of the states that a group state holds side by side on its last axis."""
    width, tree = state.value.shape[-1], isinstance(state, brainstate.HiddenTreeState)
    names = [str(n) for n in (state.name2index if tree else range(width))]
    if not names or len(set(names)) != width:
        raise StructureError(f'state {path_name(path)}: {type(state).__name__} with the names {names}, but the last axis of its value '
                             f'{list(state.value.shape)} holds {width} states. Give each of its states, one at least, a name of its own.')
    return names


def unstacked(path: tuple[str, ...], state: brainstate.State):
    """A state's value, with the states of a ``HiddenGroupState`` one by one: to the compiler each is a hidden state of its own."""
    if not isinstance(state, brainstate.HiddenGroupState):
        return state.value
    value = state.value
    return OrderedDict((name, jax.tree.map(lambda a, k=k: a[..., k], value)) for k, name in enumerate(_names(path, state)))


def stacked(state: brainstate.State, value):
    """The inverse of :func:`unstacked`: a value as ``state`` stores it."""
    if not isinstance(state, brainstate.HiddenGroupState):
        return value
    return jax.tree.map(lambda *parts: jnp.concatenate([p[..., None] for p in parts], -1), *value.values())


class ModelStates:
    """The states of a model by path: parameters, and the carry (hidden states, other states, states outside the model)."""

    def __init__(self, model: brainstate.nn.Module, inputs: tuple):
        self.model = model
        found = self.lookup()
        self.keys = {as_path(k): k for k in found}
        self._check_initialised(found)
        known = set(map(id, found.values()))
        try:
            touched, written, _ = discover(lambda *x: model(*x), *inputs)
        except AttributeError as e:
            raise CompileError(f'the model failed on the example inputs: {e}. Initialise its states first: '
                               'brainstate.nn.init_all_states(model), or braintrace.compile(..., batch_size=...).') from e
        outside = [s for s in touched if id(s) not in known]
        self.outside: dict[tuple[str, ...], brainstate.State] = {
            ('~outside', f'{type(s).__name__}{i}'): s for i, s in enumerate(outside)}
        everything: dict = {**found, **self.outside}
        self.hidden = tuple(p for p, s in everything.items() if isinstance(s, brainstate.HiddenState))
        self.params = tuple(p for p, s in everything.items() if isinstance(s, brainstate.ParamState))
        changed = {id(s) for s, w in zip(touched, written, strict=True) if w}
        if spoiled := [path_name(p) for p in self.params if id(everything[p]) in changed]:
            raise CompileError(f'the step writes the parameters {spoiled}, but parameters are constant in a step. Keep what changes there '
                               'in a brainstate.ShortTermState, and update parameters with the gradient.')

    def lookup(self) -> dict[tuple[str, ...], brainstate.State]:
        """Path -> state, as the model holds them now."""
        return {as_path(k): s for k, s in self.model.states().items()}

    def _check_initialised(self, found) -> None:
        for path, state in found.items():
            if state.value is None:
                raise CompileError(f'state {path_name(path)} is not initialised. Call brainstate.nn.init_all_states(model) first.')

    def _now(self) -> dict[tuple[str, ...], brainstate.State]:
        found = self.lookup()
        missing = [path_name(p) for p in self.keys if p not in found]
        if missing:
            raise StructureError(f'states {missing} were there when the graph was compiled and are missing now. Restore them, or '
                                 'compile the graph again.')
        return found

    def split(self) -> tuple[dict, dict]:
        """``(params, carry)``: dicts path -> state."""
        found: dict = {**self._now(), **self.outside}
        params = {p: found[p] for p in self.params}
        return params, {p: s for p, s in found.items() if (p in self.keys or p in self.outside) and p not in params}

    def values(self) -> tuple[dict, dict]:
        """``(params, carry)``: dicts path -> value."""
        return tuple({p: unstacked(p, s) for p, s in part.items()} for part in self.split())  # type: ignore[return-value]

    def is_hidden(self, key: tuple[str, ...], leaf) -> bool:
        return any(key[:len(p)] == p for p in self.hidden)

    def write(self, carry: dict) -> None:
        """Store a new carry in the model's states."""
        _, states = self.split()
        for path, value in carry.items():
            states[path].value = stacked(states[path], value)

    def cell(self) -> Callable:
        """The model's update as ``(params, carry, *inputs) -> (outputs, carry)``; its states are left as they were."""
        def run(params, carry, *inputs):
            p, c = self.split()
            states = [*p.values(), *c.values()]
            with running(states, [*(params[k] for k in p), *(stacked(s, carry[k]) for k, s in c.items())]):
                outputs = self.model(*inputs)
                new = {k: unstacked(k, s) for k, s in c.items()}
            _check_trees(carry, new)
            return outputs, new
        return run


def _check_trees(old: dict, new: dict) -> None:
    """Refuse a step that changes the tree, or a physical unit, of a state's value."""
    trees: dict[tuple, tuple[Any, Any]] = {p: (jax.tree.structure(value), jax.tree.structure(new[p])) for p, value in old.items()}
    changed = [f'  {path_name(p)}: {was} before the step, {now} after it' for p, (was, now) in trees.items() if was != now]
    if changed:
        raise StructureError('a step must leave every state with the tree and the units that it had:\n' + '\n'.join(changed)
                             + '\nConvert the value in the step, or initialise the state with what the step writes.')
