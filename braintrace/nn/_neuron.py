"""The base of spiking neurons: reset, refractory time, spikes made of the state, units."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import brainstate
import jax.numpy as jnp
import numpy as np
import saiunit as u

from ..errors import EtpUnitError, OptionError
from ._arguments import Init, Size, axes
from ._base import StatefulLayer
from ._constants import Learn, below
from ._time import check_time, in_unit, in_words, numbers, plain, steps_of
from .surrogate import spike_function


class Neuron(StatefulLayer):
    """A population whose units fire where their potential is above a threshold.

    The first state is the potential V, which holds the value before the reset: the spikes are
    recomputed from it (:meth:`get_spike`), and the next step resets what fired before it moves on.
    ``top`` names the constant of the threshold; ``resets``: whether a spike resets V.
    """

    top: ClassVar[str] = 'V_th'
    resets: ClassVar[bool] = True

    shared_docs = r"""
    Parameters
    ----------
    in_size : int or sequence of int
        Number of units, or their shape N.
    tau : float, Quantity or array of shape N
        Time constant of the membrane. A plain number counts steps; a time is measured against
        ``brainstate.environ.get_dt()``.
    R : float, Quantity or array
        Resistance. ``R * x`` has the unit of the potentials.
    V_th, V_rest, V_reset : float, Quantity or array
        The potentials of the threshold, at rest, and after a hard reset, all plain or all in volts.
        The threshold lies above the reset.
    tau_ref : float, Quantity or None
        After a spike V is held and no spike is emitted for this time, rounded to whole steps, at
        least one.
    spk_fun : str or callable
        ``'triangle'``, ``'sigmoid'``, ``'multi_gaussian'``, ``'arctan'``, a function of
        :mod:`braintrace.nn.surrogate`, or any other spike function with a surrogate derivative.
    spk_reset : str
        ``'soft'`` or ``'hard'``.
    V_init : initializer, Quantity, float or None
        First value of V; None: ``V_rest``, where there is one, or ``V_reset``.

    Attributes
    ----------
    V : brainstate.HiddenState
        The potential, of shape N or (B, \*N).
    refractory : brainstate.HiddenState
        With ``tau_ref``: the number of steps for which a unit is still held, an int32 without a
        derivative, which a reset of the learner puts back too.

    Raises
    ------
    OptionError
        A size, a shape of an argument, ``spk_fun`` or ``spk_reset`` is wrong, a number is not
        finite, or the threshold is not above the reset.
    EtpUnitError
        Units do not fit each other, or a time meets an environment without ``dt``.
    EtpShapeError, EtpDtypeError, StructureError
        The input is not an array of shape N or (B, \*N), or does not fit the states.
    """

    def __init__(
        self,
        in_size: Size,
        V_top: Any,
        V_reset: Any,
        R: Any,
        tau_ref: Any,
        spk_fun: str | Callable,
        spk_reset: str,
        name: str | None,
    ):
        super().__init__(name=name)
        self.in_size = self.out_size = axes(in_size, f'{self._owner}: in_size')
        V_top = self._parameter(self.top, V_top)
        self.unit = u.get_unit(V_top)
        setattr(self, self.top, V_top)
        self.V_reset = self._potential('V_reset', V_reset)
        if not np.all(u.get_magnitude(self._height) > 0):
            raise OptionError(
                f'{self._owner}: {self.top} is {V_top} and V_reset {V_reset}; the threshold lies '
                'above the reset.'
            )
        if spk_reset not in ('soft', 'hard'):
            raise OptionError(f"{self._owner}: spk_reset is {spk_reset!r}; give 'soft' or 'hard'.")
        self.R, self.spk_reset = self._parameter('R', R), spk_reset
        self.spk_fun = spike_function(self._owner, spk_fun)
        self.tau_ref = None if tau_ref is None else self._time('tau_ref', tau_ref)

    # -- the step ----------------------------------------------------------------------------------

    @property
    def _height(self) -> Any:
        """The way from the reset to the threshold."""
        return getattr(self, self.top) - self.V_reset

    @abc.abstractmethod
    def moved(self, x: Any, spikes: Any, states: tuple) -> tuple:
        """New values of the states but the countdown: the potential is already reset, ``spikes``
        are those of the step before.
        """

    @abc.abstractmethod
    def _threshold(self, states: tuple) -> Any:
        """What the potential has to exceed."""

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        """Reset what fired, move on, and fire."""
        spikes = self._spikes(states)
        V, *others = states
        if self.resets:
            V = V - (self._height if self.spk_reset == 'soft' else V - self.V_reset) * spikes
        new = self.moved(x, spikes, (V, *others))
        if self.tau_ref is not None:
            count = jnp.where(spikes > 0.5, self._held_steps(), jnp.maximum(others[-1] - 1, 0))
            new = (u.math.where(count > 0, V, new[0]), *new[1:], count)
        return self._spikes(new), new

    def get_spike(self) -> Any:
        """The spikes of the last step, 0 or 1, made of the present states; before the first step
        those of the first values.
        """
        return self._spikes(tuple(state.value for state in self._states()))

    def _spikes(self, states: tuple) -> Any:
        distance = u.maybe_decimal((states[0] - self._threshold(states)) / self._height)
        spikes = self.spk_fun(distance)
        return spikes if self.tau_ref is None else jnp.where(states[-1] > 0, 0, spikes)

    def _held_steps(self) -> Any:
        steps = 1 / steps_of(self._owner, 'tau_ref', self.tau_ref)
        return jnp.maximum(jnp.rint(steps), 1).astype(jnp.int32)

    def _driven(self, current: Any) -> Any:
        """R times a current, in the unit of V."""
        product = self.R * current
        if u.get_dim(product) != u.get_dim(self.unit):
            raise EtpUnitError(
                f'{self._owner}: the current has the unit {u.get_unit(current)} and R '
                f'{u.get_unit(self.R)}, so R * x has {u.get_unit(product)}, but V has {self.unit}. '
                'Give the input, R or the potentials another unit.'
            )
        return in_unit(product, self.unit)

    # -- arguments ---------------------------------------------------------------------------------

    def _set_states(self, learn: Learn, **first: Any) -> None:
        """Name the states with their first values, a countdown last; then constants ``learn``."""
        self.first_values = {name: (value, self.in_size) for name, value in first.items()}
        if self.tau_ref is not None:
            self.first_values['refractory'] = (filled(0, jnp.int32), self.in_size)
        # the threshold is above the reset, whichever of them moves
        moves = {} if self.top in self.learning(learn) else {'V_reset': below(self.top)}
        self.let_learn(learn, self.in_size, **moves)

    def _parameter(self, name: str, value: Any) -> Any:
        """A number for all units, or an array of one for each, in the float type of the states."""
        return numbers(self._owner, name, value, self.in_size)

    def _in_volts(self, name: str, value: Any) -> Any:
        if u.get_dim(value) != u.get_dim(self.unit):
            raise EtpUnitError(
                f'{self._owner}: {name} has the unit {u.get_unit(value)}, but the threshold has '
                f'{self.unit}. Give all potentials in units of one kind.'
            )
        return in_unit(value, self.unit)

    def _potential(self, name: str, value: Any) -> Any:
        return self._in_volts(name, self._parameter(name, value))

    def _first(self, name: str, value: Init) -> Callable:
        """A first value of a state that has the unit of V."""
        if not callable(value):
            return filled(self._potential(name, value))
        return lambda shape, **kwargs: self._in_volts(name, value(shape, **kwargs))

    def _unitless(self, name: str, value: Any) -> Any:
        return plain(self._owner, name, value, self.in_size)

    def _current(self, name: str, value: Any) -> Any:
        """A current, which R turns to a potential; a plain 0 is one in any unit."""
        current, unit = self._parameter(name, value), self.unit / u.get_unit(self.R)
        if isinstance(current, float) and current == 0 and not unit.dim.is_dimensionless:
            current = current * unit
        self._driven(current)
        return current

    def _rate(self, name: str, value: Any) -> Any:
        """A rate, larger than 0."""
        rate = self._parameter(name, value)
        if not np.all(u.get_magnitude(rate) > 0):
            raise OptionError(
                f'{self._owner}: {name} is {in_words(value)}; a rate is larger than 0.'
            )
        if u.get_dim(rate) not in (u.get_dim(u.UNITLESS), u.get_dim(u.hertz)):
            raise EtpUnitError(
                f'{self._owner}: {name} has the unit {u.get_unit(rate)}; give a rate (0.2 / '
                'saiunit.ms), or a plain number for each step.'
            )
        return rate

    def _time(self, name: str, value: Any) -> Any:
        return check_time(self._owner, name, value, self.in_size, finite=True)


def filled(value: Any, dtype: Any = None) -> Callable:
    """An initialiser with one value, in the float type of the states."""

    def fill(shape, **kwargs):
        number = jnp.asarray(u.get_magnitude(value), dtype or brainstate.environ.dftype())
        number, unit = jnp.broadcast_to(number, shape), u.get_unit(value)
        return number if unit == u.UNITLESS else number * unit

    return fill
