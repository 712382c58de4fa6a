"""The bases of layers with hidden states. A subclass names its states and says how they move on."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from ..errors import EtpUnitError, OptionError, StructureError
from ._arguments import (
    ORTHOGONAL,
    ZERO,
    Init,
    Size,
    activation_of,
    check_input,
    features,
    initial_value,
)
from ._constants import HasConstants
from ._linear import Linear
from ._time import is_real


class StatefulLayer(HasConstants, brainstate.nn.Module):
    """A layer with hidden states, whose samples have the shape ``in_size``.

    :meth:`transition` maps an input and the states' old values to the output and their new values.
    ``first_values`` has a pair for each state: its first value and the shape of one sample.
    """

    first_values: dict[str, tuple[Init, tuple[int, ...]]]
    kinds: ClassVar[Mapping[str, type[brainstate.HiddenState]]] = {}  # that are no plain states
    plain_input: ClassVar[bool] = False  # whether an input with a unit is refused

    @property
    def _owner(self) -> str:
        return type(self).__name__

    @abc.abstractmethod
    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        """The output, and new values of the states in the order of ``first_values``."""

    def init_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Make the states, with a leading axis of ``batch_size`` if that is given."""
        for name in self.first_values:
            kind = self.kinds.get(name, brainstate.HiddenState)
            setattr(self, name, kind(self._initial(name, batch_size)))

    def reset_state(self, batch_size: int | None = None, **kwargs: Any) -> None:
        """Set the states back to their first values, for ``batch_size`` samples."""
        for name, state in zip(self.first_values, self._states()):
            state.value = self._initial(name, batch_size)

    def update(self, x: Any) -> Any:
        """Move on by one step: ``x`` is one sample, or a batch of them along the first axis."""
        states = self._states()
        self._check_step(x, states)
        # a formula uses numbers of a unit in each sample
        with jax.numpy_rank_promotion('allow'), self._reading_once():
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
        owner = self._owner
        if self.plain_input and not u.get_dim(x).is_dimensionless:
            unit = u.get_unit(x)
            raise EtpUnitError(
                f'{owner}: the input has the unit {unit}, and its equations take plain numbers. '
                f'Give it in a unit of your choice: x.to_decimal(saiunit.{unit}).'
            )
        check_input(owner, x, self.in_size)
        lead = x.shape[: x.ndim - len(self.in_size)]
        for (name, (_, shape)), state in zip(self.first_values.items(), states):
            if state.value.shape != (*lead, *shape):
                batch_size = lead[0] if lead else None
                sequence = bool(lead) and state.value.shape == shape
                raise StructureError(
                    f'{owner}: an input of shape {x.shape} meets state {name} of shape '
                    f'{state.value.shape}. Call `brainstate.nn.init_all_states(model, '
                    f'batch_size={batch_size})` (of this layer alone: '
                    f'`init_state(batch_size={batch_size})`; with `braintrace.compile`, pass it '
                    f"`batch_size={batch_size}`), or give inputs of the states' batch size."
                    + (' Of a whole sequence, give one step: `xs[0]`.' if sequence else '')
                )


class RecurrentLayer(StatefulLayer):
    """A layer with hidden states and an output of shape (O,) or (B, O).

    ``state_names`` names the states, h unless a subclass has others. A state has the shape (O,) and
    the first value ``state_init`` unless the constructor writes another pair into ``first_values``.
    """

    state_names: ClassVar[tuple[str, ...]] = ('h',)
    shared_docs = """
    Parameters
    ----------
    in_size, out_size : int
        Number of input features I and of units O.
    state_init : initializer, array or float
        First value of the {states}.

    Raises
    ------
    OptionError
        A size is no positive int, or another argument is refused.
    EtpShapeError, EtpDtypeError, EtpUnitError, StructureError
        The input is no array of shape (I,) or (B, I), has a unit that does not fit, or does not fit
        the states.
    """

    def __init__(self, in_size: Size, out_size: Size, state_init: Init, name: str | None):
        super().__init__(name=name)
        self.num_in = features(in_size, f'{type(self).__name__}: in_size')
        self.num_out = features(out_size, f'{type(self).__name__}: out_size')
        self.in_size, self.out_size = (self.num_in,), (self.num_out,)
        self.first_values = {state: (state_init, self.out_size) for state in self.state_names}


@dataclass(frozen=True)
class Gates:
    """One map to gates side by side.

    ``reads`` has a letter for each array that the map reads: x has the input's size, h and any
    other the state's.
    ``keeps`` has a number for each gate: 1 if it keeps the state when it is open, -1 if it lets the
    state go, 0 if neither. ``added`` is what the cell's formula adds to a gate that keeps.
    """

    keeps: tuple[int, ...] = (0,)
    reads: str = 'xh'
    added: float = 0.0


class GatedCell(RecurrentLayer):
    """A recurrent cell with an activation and gates.

    ``maps`` names the maps, each a :class:`Linear`. With ``timescale=(low, high)`` the first bias
    of a gate that keeps is log t, and -log t of one that lets go, where each unit has its own t
    from U(low, high - 1): a unit then forgets by about 1 / t a step (chrono initialisation; Tallec
    & Ollivier, 2018, arXiv:1804.11188).
    """

    shared_docs = r"""
    Parameters
    ----------
    activation : function or name in ``brainstate.nn``
        :math:`\phi`.
    timescale : (float, float), optional
        Shortest and longest time of memory in steps, as (1, T): first biases of the gates are
        spread over it (chrono initialisation; Tallec & Ollivier, 2018, arXiv:1804.11188).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import {name}
    >>> cell = {name}(3, 8)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 8)
    """
    maps: Mapping[str, Gates]
    plain_input = True

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = ORTHOGONAL,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: str | Callable = 'tanh',
        name: str | None = None,
        *,
        timescale: tuple[float, float] | None = None,
    ):
        super().__init__(in_size, out_size, state_init, name)
        self.activation = activation_of(activation, type(self).__name__)
        log_times = None
        if timescale is not None:
            log_times = self._log_times(timescale, b_init)
        for key, gates in self.maps.items():
            setattr(self, key, self._map(gates, w_init, b_init, log_times))

    def _log_times(self, timescale: tuple[float, float], b_init: Init | None) -> Any:
        owner = type(self).__name__
        if b_init is None:
            raise OptionError(
                f'{owner}: timescale={timescale!r} is a first value of biases, but b_init is None. '
                'Leave one of them out.'
            )
        low, high = time_range(owner, timescale)
        times = brainstate.random.uniform(low, high - 1, self.out_size)
        return jnp.log(times).astype(brainstate.environ.dftype())

    def _map(self, gates: Gates, w_init: Init, b_init: Init | None, log_times: Any) -> Linear:
        """Each gate's weight and bias are drawn by themselves."""
        num_in = sum(self.num_in if array == 'x' else self.num_out for array in gates.reads)
        blocks = len(gates.keeps)
        w_init, b_init = side_by_side(w_init, blocks), side_by_side(b_init, blocks)
        layer = Linear(num_in, blocks * self.num_out, w_init=w_init, b_init=b_init)
        if log_times is not None:
            value = layer.weight.value
            biases = [
                keeps * log_times - max(keeps, 0) * gates.added if keeps else bias
                for keeps, bias in zip(gates.keeps, jnp.split(value['bias'], blocks))
            ]
            layer.weight.value = {**value, 'bias': jnp.concatenate(biases)}
        return layer


def time_range(owner: str, timescale: Any) -> tuple[float, float]:
    """``timescale`` as two numbers ``0 < low <= high - 1``, both finite."""
    pair = tuple(timescale) if isinstance(timescale, tuple | list) else ()
    real = len(pair) == 2 and all(is_real(time) and not np.ndim(time) for time in pair)
    if not real or not 0 < pair[0] <= pair[1] - 1 < np.inf:
        raise OptionError(
            f'{owner}: timescale is {timescale!r}; give the shortest and the longest time in '
            'steps, two finite numbers, for example (1, 200), with 0 < shortest <= longest - 1.'
        )
    return float(pair[0]), float(pair[1])


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
