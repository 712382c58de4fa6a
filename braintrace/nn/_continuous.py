"""Cells that are differential equations of rates, one step of which is a step in time. One step
reads x of shape (I,) or (B, I) and returns the new h of shape (O,) or (B, O).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax.numpy as jnp

from .._etrace_op import element_wise
from ._arguments import XAVIER, ZERO, Default, Init, Size, first_value
from ._base import GatedCell, Gates
from ._cells import join
from ._constants import POSITIVE, Constants, Learn
from ._time import check_time, decay, plain

NORMAL = Default('Normal')


class CTRNNCell(GatedCell):
    r"""The continuous-time recurrent network (Funahashi & Nakamura, 1993, Neural Networks 6:801;
    Song et al., 2016, PLoS Computational Biology 12:e1004792).

    .. math::
        \tau\,\frac{dh}{dt} = -h + \phi([x, h]\,W + b) \qquad
        h_t = e^{-\Delta t / \tau}\, h_{t-1}
        + (1 - e^{-\Delta t / \tau})\, \phi([x_t, h_{t-1}]\,W + b)

    Each unit forgets by itself, which its trace holds; what the weights carry from one unit to
    another one is left out. An Euler step with :math:`\alpha = \Delta t / \tau` is
    ``tau=-1 / log(1 - alpha)``.

    Parameters
    ----------
    tau : float, Quantity or array of shape (O,)
        Time constant. A plain number counts steps; a time is measured against
        ``brainstate.environ.get_dt()``.
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weight of shape (I + O, O) and bias of shape (O,).
    """

    maps = {'W': Gates()}
    constants = Constants({'tau': POSITIVE})

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        tau: Any = 10.0,
        w_init: Init = XAVIER,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: str | Callable = 'tanh',
        name: str | None = None,
        *,
        learn: Learn = (),
    ):
        super().__init__(in_size, out_size, w_init, b_init, state_init, activation, name)
        self.tau = check_time('CTRNNCell', 'tau', tau, self.out_size, finite=True)
        self.let_learn(learn, self.out_size)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        (h,) = states
        left = decay('CTRNNCell', 'tau', self.tau)
        h = left * h + (1 - left) * self.activation(self.W(join(x, h)))
        return h, (h,)


class LTCCell(GatedCell):
    r"""The liquid time-constant network (Hasani et al., 2021, arXiv:2006.04439, eqs. 1 and 3).

    .. math::
        \frac{dh}{dt} = -\Bigl(\frac{1}{\tau} + f\Bigr) \odot h + f \odot A \qquad
        f_t = \phi([x_t, h_{t-1}]\,W + b) \qquad
        h_t = \frac{h_{t-1} + f_t \odot A}{1 + 1 / \tau + f_t}

    A step is one step of the paper's fused solver, with the step as the unit of time. The gate f
    makes the time constant of a unit depend on what it reads; where :math:`\phi` is not negative,
    h stays between 0 and A.

    Parameters
    ----------
    tau : float or array of shape (O,)
        First value of the time constant in steps; the parameter ``tau_log`` is its logarithm.
    a_init : initializer, array or number
        ``A``, of shape (O,).
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weight of shape (I + O, O) and bias of shape (O,).
    """

    maps = {'W': Gates()}

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        tau: Any = 10.0,
        w_init: Init = XAVIER,
        b_init: Init | None = ZERO,
        a_init: Init = NORMAL,
        state_init: Init = ZERO,
        activation: str | Callable = 'sigmoid',
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, w_init, b_init, state_init, activation, name)
        tau = plain('LTCCell', 'tau', tau, self.out_size)
        check_time('LTCCell', 'tau', tau, self.out_size, finite=True)
        log = jnp.broadcast_to(jnp.log(tau), self.out_size).astype(brainstate.environ.dftype())
        self.tau_log = brainstate.ParamState(log)
        self.A = brainstate.ParamState(first_value('LTCCell', 'a_init', a_init, self.out_size))

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        (h,) = states
        f = self.activation(self.W(join(x, h)))
        rate = element_wise(self.tau_log.value, lambda log: jnp.exp(-log))
        h = (h + f * element_wise(self.A.value)) / (1 + rate + f)
        return h, (h,)
