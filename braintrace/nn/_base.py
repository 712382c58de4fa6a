"""The bases of layers with hidden states. A subclass names its states and says how they move on."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import brainstate
import jax.numpy as jnp

from .._errors import StructureError
from .._signatures import ShowsArguments
from ._arguments import Init, Size, activation_of, check_input, features, initial_value
from ._linear import Linear

__all__ = ['GatedCell', 'RecurrentLayer']


class RecurrentLayer(ShowsArguments, brainstate.nn.Module):
    """A layer with hidden states and an output of shape (O,) or (B, O).

    ``state_names`` names the states; :meth:`transition` maps an input and their old values to the
    output and their new values. A state has the shape (O,) and the first value ``state_init``
    unless the constructor writes another pair into ``first_values``.
    """

    state_names: ClassVar[tuple[str, ...]]

    def __init__(self, in_size: Size, out_size: Size, state_init: Init, name: str | None):
        super().__init__(name=name)
        self.num_in = features(in_size, f'{type(self).__name__}: in_size')
        self.num_out = features(out_size, f'{type(self).__name__}: out_size')
        self.in_size, self.out_size = (self.num_in,), (self.num_out,)
        self.first_values: dict[str, tuple[Init, tuple[int, ...]]] = {
            state: (state_init, self.out_size) for state in self.state_names
        }

    @abc.abstractmethod
    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        """The output, and new values of the states in the order of ``first_values``."""

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Make the states, with a leading axis of ``batch_size`` if that is given."""
        for name in self.first_values:
            setattr(self, name, brainstate.HiddenState(self._initial(name, batch_size)))

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Set the states back to their first values, for ``batch_size`` samples."""
        for name, state in zip(self.first_values, self._states()):
            state.value = self._initial(name, batch_size)

    def update(self, x: Any) -> Any:
        """Move on by one step: ``x`` of shape (I,) or (B, I) gives (O,) or (B, O)."""
        states = self._states()
        self._check_step(x, states)
        output, new = self.transition(x, tuple(state.value for state in states))
        for state, value in zip(states, new):
            state.value = value
        return output

    def _initial(self, name: str, batch_size: int | None) -> Any:
        state_init, shape = self.first_values[name]
        return initial_value(state_init, shape, batch_size, type(self).__name__)

    def _states(self) -> list:
        missing = [name for name in self.first_values if not hasattr(self, name)]
        if missing:
            raise StructureError(
                f'{type(self).__name__} has no state {", ".join(missing)} yet. Call '
                '`init_state(batch_size)`, or `brainstate.nn.init_all_states(model, '
                'batch_size=...)` for a whole model.'
            )
        return [getattr(self, name) for name in self.first_values]

    def _check_step(self, x: Any, states: list) -> None:
        owner = type(self).__name__
        check_input(owner, x, self.num_in)
        for (name, (_, shape)), state in zip(self.first_values.items(), states):
            if state.value.shape != (*x.shape[:-1], *shape):
                batch_size = x.shape[0] if x.ndim == 2 else None
                raise StructureError(
                    f'{owner}: an input of shape {x.shape} meets state {name} of shape '
                    f'{state.value.shape}. Call `brainstate.nn.init_all_states(model, '
                    f'batch_size={batch_size})` (of this layer alone: '
                    f'`init_state(batch_size={batch_size})`; with `braintrace.compile`, pass it '
                    f"`batch_size={batch_size}`), or give inputs of the states' batch size."
                )


class GatedCell(RecurrentLayer):
    """A recurrent cell with an activation and gates, each gate one :class:`Linear` map."""

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init,
        b_init: Init | None,
        state_init: Init,
        activation: str | Callable,
        name: str | None,
    ):
        super().__init__(in_size, out_size, state_init, name)
        self.activation = activation_of(activation, type(self).__name__)
        self._w_init, self._b_init = w_init, b_init

    def _gate(self, *, reads_state: bool, blocks: int = 1) -> Linear:
        """A map to ``blocks`` gates side by side, from x, or from x and a state; each block is
        initialised by itself.
        """
        num_in = self.num_in + (self.num_out if reads_state else 0)
        w_init, b_init = side_by_side(self._w_init, blocks), side_by_side(self._b_init, blocks)
        return Linear(num_in, blocks * self.num_out, w_init=w_init, b_init=b_init)


def side_by_side(initializer: Any, blocks: int) -> Any:
    """Draw the last axis in equal blocks, each by the initializer; values other than functions stay
    as they are.
    """
    if blocks == 1 or not callable(initializer):
        return initializer

    def draw(shape, **kwargs):
        block = (*shape[:-1], shape[-1] // blocks)
        return jnp.concatenate([initializer(block, **kwargs) for _ in range(blocks)], axis=-1)

    return draw
