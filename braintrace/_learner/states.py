"""The door between a brainstate model and pure functions: states by path, in and out."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import brainstate
import jax

from .._compiler import path_name
from .._errors import CompileError, StructureError
from .._jax import hide_from_locations

__all__ = ['ModelStates', 'States', 'as_path', 'discover', 'put', 'running']

hide_from_locations(os.path.dirname(os.path.abspath(brainstate.__file__)) + os.sep)

States = Sequence[brainstate.State]


def as_path(key) -> tuple[str, ...]:
    """A brainstate path as a tuple of strings."""
    return tuple(map(str, key if isinstance(key, tuple) else (key,)))


def put(states: States, values: Sequence) -> None:
    """Write values for the duration of a trace; counts as a read only."""
    for state, value in zip(states, values, strict=True):
        state.restore_value(value)


@contextmanager
def running(states: States, values: Sequence) -> Iterator[None]:
    """Give states these values inside the block; afterwards, also on an error, they are as they were."""
    before = [state.value for state in states]
    try:
        with brainstate.StateTraceStack():
            put(states, values)
            yield
    finally:
        put(states, before)


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
            put(stack.states, stack.original_state_values)

    shape = jax.eval_shape(run, *args)
    return list(stack.states), list(stack.been_writen), shape


class ModelStates:
    """The states of a model by path: parameters, and the carry (hidden states, other states, states outside the model)."""

    def __init__(self, model: brainstate.nn.Module, inputs: tuple):
        self.model = model
        found = self.lookup()
        self.keys = {as_path(k): k for k in found}
        self._check_initialised(found)
        self.hidden = tuple(p for p, s in found.items() if isinstance(s, brainstate.HiddenState))
        self.params = tuple(p for p, s in found.items() if isinstance(s, brainstate.ParamState))
        known = set(map(id, found.values()))
        try:
            touched, _, _ = discover(lambda *x: model(*x), *inputs)
        except AttributeError as e:
            raise CompileError(f'the model failed on the example inputs: {e}. Initialise its states first: '
                               'brainstate.nn.init_all_states(model), or braintrace.compile(..., batch_size=...).') from e
        self.outside = [s for s in touched if id(s) not in known]

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
        found = self._now()
        params = {p: found[p] for p in self.params}
        carry = {p: s for p, s in found.items() if p in self.keys and p not in params}
        carry.update({('~outside', f'{type(s).__name__}{i}'): s for i, s in enumerate(self.outside)})
        return params, carry

    def values(self) -> tuple[dict, dict]:
        """``(params, carry)``: dicts path -> value."""
        return tuple({p: s.value for p, s in part.items()} for part in self.split())  # type: ignore[return-value]

    def is_hidden(self, key: tuple[str, ...], leaf) -> bool:
        return any(key[:len(p)] == p for p in self.hidden)

    def write(self, carry: dict) -> None:
        """Store a new carry in the model's states."""
        _, states = self.split()
        for path, value in carry.items():
            states[path].value = value

    def cell(self) -> Callable:
        """The model's update as ``(params, carry, *inputs) -> (outputs, carry)``; its states are left as they were."""
        def run(params, carry, *inputs):
            p, c = self.split()
            states = [*p.values(), *c.values()]
            with running(states, [*(params[k] for k in p), *(carry[k] for k in c)]):
                outputs = self.model(*inputs)
                return outputs, {k: s.value for k, s in c.items()}
        return run
