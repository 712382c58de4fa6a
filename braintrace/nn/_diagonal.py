"""Gated cells in which no position of a state reads another one, so D_RTRL gives the gradient of
backpropagation through time exactly. One step reads x of shape (I,) or (B, I).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid

from ._arguments import XAVIER, ZERO, Init, Size
from ._base import GatedCell, Gates
from ._cells import identity


class OfInput(GatedCell):
    """A cell of one map, of x alone; its candidate is linear unless a function is given."""

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = XAVIER,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: str | Callable = identity,
        name: str | None = None,
        *,
        timescale: tuple[float, float] | None = None,
    ):
        super().__init__(
            in_size, out_size, w_init, b_init, state_init, activation, name, timescale=timescale
        )


class MinGRUCell(OfInput):
    r"""The minimal gated unit whose gate reads x alone (minGRU; Feng et al., 2024,
    arXiv:2410.01201).

    .. math::
        [z_t, g_t] = x_t\,W + b \qquad
        h_t = (1 - \sigma(z_t)) \odot h_{t-1} + \sigma(z_t) \odot \phi(g_t)

    Parameters
    ----------
    in_size, out_size : int
        Number of input features I and of units O.
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weight of shape (I, 2 O) and bias of shape (2 O,); an initializer is called for the gate and
        the candidate by itself.
    state_init : initializer, array or float
        First value of the state ``h``.
    activation : function or name in ``brainstate.nn``
        :math:`\phi`; the paper's cell has the identity.
    name : str, optional
        Name of the module.
    timescale : (float, float), optional
        Shortest and longest time of memory in steps, as (1, T): first biases of the gates are
        spread over it (chrono initialisation; Tallec & Ollivier, 2018, arXiv:1804.11188).

    Raises
    ------
    OptionError
        A size is no positive int, or another argument is refused.
    EtpShapeError, EtpDtypeError, EtpUnitError, StructureError
        The input is no plain array of shape (I,) or (B, I), or does not fit the states.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import MinGRUCell
    >>> cell = MinGRUCell(3, 8, timescale=(1, 200))
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 8)
    """

    maps = {'W': Gates((-1, 0), reads='x')}

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        (h,) = states
        z, g = jnp.split(self.W(x), 2, axis=-1)
        h = (1 - sigmoid(z)) * h + sigmoid(z) * self.activation(g)
        return h, (h,)


class MinLSTMCell(OfInput):
    r"""The minimal unit with a forget and an input gate that read x alone and sum to 1 (minLSTM;
    Feng et al., 2024, arXiv:2410.01201).

    .. math::
        [f_t, i_t, g_t] = x_t\,W + b \qquad
        k_t = \frac{\sigma(f_t)}{\sigma(f_t) + \sigma(i_t)} \qquad
        h_t = k_t \odot h_{t-1} + (1 - k_t) \odot \phi(g_t)

    Parameters
    ----------
    in_size, out_size : int
        Number of input features I and of units O.
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weight of shape (I, 3 O) and bias of shape (3 O,); an initializer is called for each gate
        and the candidate by itself.
    state_init : initializer, array or float
        First value of the state ``h``.
    activation : function or name in ``brainstate.nn``
        :math:`\phi`; the paper's cell has the identity.
    name : str, optional
        Name of the module.
    timescale : (float, float), optional
        Shortest and longest time of memory in steps, as (1, T): first biases of the gates are
        spread over it (chrono initialisation; Tallec & Ollivier, 2018, arXiv:1804.11188).

    Raises
    ------
    OptionError
        A size is no positive int, or another argument is refused.
    EtpShapeError, EtpDtypeError, EtpUnitError, StructureError
        The input is no plain array of shape (I,) or (B, I), or does not fit the states.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import MinLSTMCell
    >>> cell = MinLSTMCell(3, 8)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 8)
    """

    maps = {'W': Gates((1, -1, 0), reads='x')}

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        (h,) = states
        f, i, g = jnp.split(self.W(x), 3, axis=-1)
        keep = sigmoid(log_sigmoid(f) - log_sigmoid(i))
        h = keep * h + (1 - keep) * self.activation(g)
        return h, (h,)
