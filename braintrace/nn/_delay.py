"""A delay line."""

from __future__ import annotations

import math
from functools import reduce
from operator import add
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from ..errors import EtpUnitError, OptionError
from ._arguments import ZERO, Init, Size, axes, counted
from ._base import StatefulLayer
from ._constants import Constants, Learn, part_of
from ._time import is_real, known, numbers, one_clock, steps_of


class Delay(StatefulLayer):
    r"""A line that gives each input back after a time, which may learn.

    .. math:: y_t[n] = x_{t - d[n]}[n]

    Its state ``line`` holds the last K + 1 inputs, the newest first, and moves on at each step; the
    last row, read by nothing, lets rules credit what left the line in this step. The
    compiler takes it apart: each row is a hidden state, in one group with what made the input. So
    D_RTRL is exact for the layer before as far as it is without the line, at the price of K more
    traces of that layer's weights; the report says the bytes. A line of raw inputs costs none, nor
    does it cost the weights behind it one: where the delays do not differ between targets, a line
    in front of weights gives what a line behind them does.

    Delays that learn read the line by a Gaussian of width :math:`\sigma` around them (Hammouamri,
    Khalfaoui-Hassani & Masquelier, 2024, ICLR, arXiv:2306.17670):

    .. math::
        y_t[n] = \sum_{k=0}^{K} w_k\, x_{t-k}[n] \qquad
        w_k = \frac{e^{-(k - d[n])^2 / 2 \sigma^2}}{\sum_j e^{-(j - d[n])^2 / 2 \sigma^2}}

    A wide Gaussian tells a delay of inputs that are far from it, a narrow one reads a single step.
    The paper starts with K / 2 and shrinks it to 0.5 along the training: set ``line.width.value``
    between two updates. With 0.01 the nearest step is read, as on a device.

    Parameters
    ----------
    in_size : int or sequence of int
        Number of units, or their shape N.
    delay : int, Quantity, array or initialiser
        How long each input stays: a number of steps, or a time that is a whole number of the
        environment's ``dt``; one for all units, or one for each. Those that learn need not be
        whole; they lie between 0 and ``longest``.
    longest : float or Quantity, optional
        How long the line is, K steps: the longest delay by default. A delay that learns needs it.
    classes : int, optional
        Read each unit at so many delays: ``delay`` has the shape (C, \*N), or one that broadcasts
        to it as (C, 1), and so has the output.
    width : float
        First value of :math:`\sigma` in steps, for delays that learn.
    line_init : initializer, array, float or Quantity
        First value of the state ``line``, of shape (K + 1, \*N), with the unit of x.

    Attributes
    ----------
    line : brainstate.HiddenState
        The last inputs, of shape (K + 1, \*N) or (B, K + 1, \*N); none where K is 0.
    width : brainstate.State
        :math:`\sigma`; there if the delay learns.

    Raises
    ------
    OptionError
        A delay is negative, longer than the line, or not whole and does not learn; a learnt one has
        no ``longest``.
    EtpUnitError
        A delay is no time, or the environment's ``dt`` is not set, or x has another unit than the
        line.
    EtpShapeError, EtpDtypeError, StructureError
        The input is no array of shape N or (B, \*N), or does not fit the states.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp, saiunit as u
    >>> from braintrace.nn import Delay
    >>> line = Delay(3, jnp.array([0, 1, 2]))
    >>> line.init_state()
    >>> [line(jnp.full(3, x)).tolist() for x in (1.0, 2.0, 3.0)]
    [[1.0, 0.0, 0.0], [2.0, 1.0, 0.0], [3.0, 2.0, 1.0]]

    Two delays of each unit, drawn between 0 and 10 ms, that learn:

    >>> draw = brainstate.nn.init.Uniform(0.0, 10.0, unit=u.ms)
    >>> line = Delay(3, draw, 20 * u.ms, classes=2, learn=True)
    >>> with brainstate.environ.context(dt=1 * u.ms):
    ...     line.init_state(batch_size=4)
    ...     line(jnp.ones((4, 3))).shape
    (4, 2, 3)
    """

    constants = Constants({'delay': part_of('longest')})

    def __init__(
        self,
        in_size: Size,
        delay: Any,
        longest: Any = None,
        classes: int | None = None,
        width: float = 1.0,
        line_init: Init = ZERO,
        name: str | None = None,
        *,
        learn: Learn = (),
    ):
        super().__init__(name=name)
        self.in_size = axes(in_size, 'Delay: in_size')
        lead = () if classes is None else counted('Delay', classes=classes)
        self.out_size = *lead, *self.in_size
        self.delay = self._duration('delay', delay, self.out_size)
        self._line_init, self._learns = line_init, bool(self.learning(learn))
        values = known(u.get_magnitude(self.delay))
        if longest is None and (self._learns or values is None):
            raise OptionError(
                'Delay: give longest, how far a delay may grow: it is the length of the line.'
            )
        whole = u.math.max(self.delay) if longest is None else longest
        self.longest = self._duration('longest', whole, ())
        one_clock('Delay', delay=self.delay, longest=self.longest)
        if values is None and not self._learns:
            raise OptionError(
                'Delay: a transformation of JAX hides the delays, which decide what is read of the '
                'line. Draw them outside of it, or let them learn.'
            )
        if values is not None:
            top = float(u.maybe_decimal(self.longest / (1.0 * u.get_unit(self.delay))))
            if not (values.min() >= 0 and values.max() <= top * (1 + 1e-6)):
                raise OptionError(
                    f'Delay: delay is {self.delay}; give delays from 0 to the longest that the '
                    f'line holds, {self.longest}.'
                )
            self._share = values / (top or 1.0)  # of the longest
        if self._learns:
            if not is_real(width) or np.ndim(width) or not 0 < width < np.inf:
                raise OptionError(f'Delay: width is {width!r}; give a positive number of steps.')
            self.width = brainstate.ShortTermState(jnp.asarray(width, brainstate.environ.dftype()))
            self.let_learn(learn, self.out_size)

    def _duration(self, name: str, value: Any, shape: tuple[int, ...]) -> Any:
        found = numbers('Delay', name, value, shape)
        if u.get_dim(found) not in (u.get_dim(u.UNITLESS), u.get_dim(u.second)):
            raise EtpUnitError(
                f'Delay: {name} is {value}; give a time (5 * saiunit.ms) or a number of steps.'
            )
        return found

    @property
    def _span(self) -> Any:
        """The longest delay in steps."""
        plain = u.get_magnitude(self.longest)
        return 1 / steps_of('Delay', 'longest', self.longest) if plain > 0 else 0.0

    @property
    def first_values(self) -> dict[str, tuple[Init, tuple[int, ...]]]:  # type: ignore[override]
        """The line, as long as ``longest`` is with the environment's ``dt``."""
        rows = math.ceil(float(self._span) - 1e-3)
        return {'line': (self._line_init, (rows + 1, *self.in_size))} if rows else {}

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        """What arrived a delay ago, and the line with x in front."""
        if not states:
            return self._spread(x), ()
        (line,) = states
        if u.get_dim(line) != u.get_dim(x):
            raise EtpUnitError(
                f'Delay: the line has the unit {u.get_unit(line)} and the input {u.get_unit(x)}. '
                'Give line_init the unit of the input (0 * saiunit.mA).'
            )
        axis = x.ndim - len(self.in_size)
        front = (slice(None),) * axis
        rows = u.math.concatenate([u.math.expand_dims(x, axis), line], axis)
        y = self._blurred(rows, front) if self._learns else self._picked(rows, front)
        return y, (rows[(*front, slice(0, -1))],)

    def _picked(self, rows: Any, front: tuple) -> Any:
        """The row of each unit's delay."""
        exact = self._share * float(self._span)
        steps = np.rint(exact).astype(int)
        if (abs(exact - steps) > 1e-3).any():
            raise OptionError(
                f'Delay: delay is {self.delay}, which is {np.ravel(exact)[:4]} steps; give whole '
                'numbers of steps, or let it learn.'
            )
        lags = np.unique(steps)
        at = {lag: self._spread(rows[(*front, int(lag))]) for lag in lags}
        if len(lags) == 1:
            return at[lags[0]]
        return reduce(add, (u.math.where(steps == lag, at[lag], 0 * at[lag]) for lag in lags))

    def _blurred(self, rows: Any, front: tuple) -> Any:
        """All rows, by a Gaussian around each unit's delay. They are summed one by one: a reduction
        over the rows would merge what one delay sends to all lanes.
        """
        steps = u.maybe_decimal(self.delay / self.longest) * self._span
        lags = np.arange(rows.shape[len(front)] - 1)
        away = (lags.reshape(-1, *[1] * len(self.out_size)) - steps) / self.width.value
        nearest = jax.lax.stop_gradient((jnp.rint(steps) - steps) / self.width.value)
        bell = jnp.exp((nearest**2 - away**2) / 2)
        weights = bell / reduce(add, bell)
        return reduce(add, (weights[k] * self._spread(rows[(*front, k)]) for k in lags))

    def _spread(self, x: Any) -> Any:
        """An input, or a row, with an axis of classes in front of the units."""
        if len(self.out_size) == len(self.in_size):
            return x
        axis = x.ndim - len(self.in_size)
        wide = (*x.shape[:axis], *self.out_size)
        return u.math.broadcast_to(u.math.expand_dims(x, axis), wide)
