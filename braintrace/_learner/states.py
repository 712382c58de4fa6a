"""The door between a brainstate model and pure functions: the states that a step of it touches."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import brainstate
import jax

from .._compiler import path_name
from .._errors import CompileError, OptionError, StructureError
from .._jax import hide_from_locations
from .world import CARRY, Path, Role, World, as_path, discover

hide_from_locations(os.path.dirname(os.path.abspath(brainstate.__file__)) + os.sep)


def check_model(model) -> None:
    """Refuse what is no module."""
    if not isinstance(model, brainstate.nn.Module):
        raise OptionError(f'model is {type(model).__name__}; pass a brainstate.nn.Module.')


def _role(state: brainstate.State) -> Role:
    if isinstance(state, brainstate.ParamState):
        return Role.WEIGHT
    return Role.HIDDEN if isinstance(state, brainstate.HiddenState) else Role.CARRIED


class ModelStates:
    """The states of a model by path: parameters, and the carry (hidden states, other states, states
    outside the model).
    """

    def __init__(self, model: brainstate.nn.Module, inputs: tuple):
        self.model, self.dt = model, brainstate.environ.get('dt', default=None)
        found = self.lookup()
        _check_initialised(found)
        try:
            touched = discover(lambda *x: model(*x), *inputs)
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
        self.roles = {path: _role(state) for path, state in everything.items()}
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

    @property
    def hidden(self) -> list[Path]:
        """The paths of the hidden states."""
        return [path for path, role in self.roles.items() if role is Role.HIDDEN]

    def is_hidden(self, key: Path, leaf) -> bool:
        """Whether a leaf of the carry belongs to a hidden state."""
        return any(key[: len(path)] == path for path in self.hidden)

    def lookup(self) -> dict[Path, brainstate.State]:
        """Path -> state, as the model holds them now."""
        return {as_path(k): s for k, s in self.model.states().items()}

    def now(self) -> World:
        """The states as the model holds them now, all its parameters as weights."""
        found = {**self.lookup(), **self.outside}
        missing = [path_name(path) for path in self.roles if path not in found]
        if missing:
            raise StructureError(
                f'states {missing} were there when the graph was compiled and are missing now. '
                'Restore them, or compile the graph again.'
            )
        return World({path: found[path] for path in self.roles}, self.roles)

    def values(self) -> tuple[dict, dict]:
        """``(params, carry)``: dicts path -> value."""
        world = self.now()
        return world.read(Role.WEIGHT), world.read(*CARRY)

    def cell(self) -> Callable:
        """The model's update as ``(params, carry, *inputs) -> (outputs, carry)``; its states are
        left as they were.
        """

        def run(params, carry, *inputs):
            world = self.now()
            with world.running({**params, **carry}):
                outputs = self.model(*inputs)
                new = world.read(*CARRY)
            _check_trees(carry, new)
            return outputs, new

        return run


def _check_initialised(found: dict[Path, brainstate.State]) -> None:
    for path, state in found.items():
        if state.value is None:
            raise CompileError(
                f'state {path_name(path)} is not initialised. Call '
                'brainstate.nn.init_all_states(model) first.'
            )


def _check_trees(old: dict, new: dict) -> None:
    """Refuse a step that changes the tree, or a physical unit, of a state's value."""
    trees: dict[Path, tuple[Any, Any]] = {
        path: (jax.tree.structure(value), jax.tree.structure(new[path]))
        for path, value in old.items()
    }
    changed = [
        f'  {path_name(path)}: {was} before the step, {now} after it'
        for path, (was, now) in trees.items()
        if was != now
    ]
    if changed:
        raise StructureError(
            'a step must leave every state with the tree and the units that it had:\n'
            + '\n'.join(changed)
            + '\nConvert the value in the step, or initialise the state with what the step writes.'
        )
