"""Readouts with states of their own."""

from __future__ import annotations

from typing import Any

from .._etrace_op import element_wise, matmul
from ._arguments import KAIMING, ZERO, Init, Size
from ._base import RecurrentLayer
from ._linear import Linear
from ._time import check_time, decay

__all__ = ['LeakyRateReadout']


class LeakyRateReadout(RecurrentLayer):
    r"""A readout that integrates its input and leaks (Bellec et al., 2020, Nature Communications
    11:3625).

    .. math:: r_t = \lambda\, r_{t-1} + x_t\,W + b \qquad \lambda = e^{-\Delta t / \tau}

    It filters before its weights, which gives the same :math:`r_t` while W and b are constant:

    .. math::
        r_t = f_t\,W + g_t\,b \qquad f_t = \lambda\, f_{t-1} + x_t \qquad
        g_t = \lambda\, g_{t-1} + 1

    So :math:`f_t` reads each unit in front of it at that unit's own position. If x is the state of
    a recurrent layer, or its spikes, then f is one more state of that layer's group: the recurrent
    weights keep their history through r, and their trace has one more state. W and b need no trace,
    since they reach no state. A filter behind the weights would be cut off from the layer in front
    of it.

    Parameters
    ----------
    in_size, out_size : int
        Number of input features I and of outputs O.
    tau : float or Quantity
        Time constant. A plain number counts steps (:math:`\Delta t = 1`); a time, such as ``5 *
        saiunit.ms``, is measured against ``brainstate.environ.get_dt()`` at each update.
    w_init : initializer or array
        Weight of shape (I, O).
    b_init : initializer, array or None
        Bias of shape (O,); left out by default.
    state_init : initializer, array or float
        First value of the state ``f`` of shape (I,), in the unit of x. The state ``g``, which a
        readout with a bias has, starts at 0.
    name : str, optional
        Name of the module.

    Raises
    ------
    OptionError
        ``tau`` is not positive.
    EtpUnitError
        ``tau`` has the unit of something other than time, or the environment's ``dt`` has none or
        is not set.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp, saiunit as u
    >>> from braintrace.nn import LeakyRateReadout
    >>> readout = LeakyRateReadout(8, 3, tau=10 * u.ms)
    >>> readout.init_state(batch_size=2)
    >>> with brainstate.environ.context(dt=1 * u.ms):
    ...     readout(jnp.ones((2, 8))).shape
    (2, 3)
    """

    state_names = ('f',)

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        tau: Any = 5.0,
        w_init: Init = KAIMING,
        b_init: Init | None = None,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, name)
        self.tau = check_time('LeakyRateReadout', 'tau', tau)
        self.W = Linear(in_size, out_size, w_init=w_init, b_init=b_init)
        self.first_values = {'f': (state_init, self.in_size)}
        if b_init is not None:
            self.first_values['g'] = (ZERO, (1,))

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        """The formula above."""
        left, weight = decay('LeakyRateReadout', 'tau', self.tau), self.W.weight.value
        f, *g = (left * state + new for state, new in zip(states, (x, 1)))
        r = matmul(f, weight['weight'])
        return r + g[0] * element_wise(weight['bias']) if g else r, (f, *g)
