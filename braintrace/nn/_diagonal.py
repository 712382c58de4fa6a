"""Gated cells in which no position of a state reads another one, so D_RTRL gives the gradient of
backpropagation through time exactly. One step reads x of shape (I,) or (B, I).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid

from .._etrace_op import element_wise
from ._arguments import XAVIER, ZERO, Init, Size, first_value
from ._base import GatedCell, Gates
from ._cells import identity, join


class OfInput(GatedCell):
    """A cell of one map, of x alone; its candidate is linear unless a function is given."""

    shared_docs = r"""
    Parameters
    ----------
    activation : function or name in ``brainstate.nn``
        :math:`\phi`; the paper's cell has the identity.
    """

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
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weight of shape (I, 2 O) and bias of shape (2 O,); an initializer is called for the gate and
        the candidate by itself.
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
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weight of shape (I, 3 O) and bias of shape (3 O,); an initializer is called for each gate
        and the candidate by itself.
    """

    maps = {'W': Gates((1, -1, 0), reads='x')}

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        (h,) = states
        f, i, g = jnp.split(self.W(x), 3, axis=-1)
        keep = sigmoid(log_sigmoid(f) - log_sigmoid(i))
        h = keep * h + (1 - keep) * self.activation(g)
        return h, (h,)


class ELSTMCell(GatedCell):
    r"""Long short-term memory whose gates read the state position by position (eLSTM; Irie et al.,
    2024, arXiv:2305.19044, section 3).

    .. math::
        [f_t, z_t] &= x_t\,W + b + [w_f \odot c_{t-1},\; w_z \odot c_{t-1}] \\
        c_t &= \sigma(f_t) \odot c_{t-1} + (1 - \sigma(f_t)) \odot \phi(z_t) \\
        h_t &= \sigma([x_t, c_t]\,W_o + b_o) \odot c_t

    The output :math:`h_t` is no state, so the output gate may read all of :math:`c_t`.

    Parameters
    ----------
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weights of shape (I, 2 O) of ``W`` and (I + O, O) of ``Wo``, and their biases; an
        initializer is called for the gate and the candidate of W by itself.
    r_init : initializer, array or number
        ``w_f`` and ``w_z``, of shape (O,).
    """

    state_names = ('c',)
    maps = {'W': Gates((1, 0), reads='x'), 'Wo': Gates()}

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = XAVIER,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: str | Callable = 'tanh',
        name: str | None = None,
        *,
        r_init: Init = ZERO,
        timescale: tuple[float, float] | None = None,
    ):
        super().__init__(
            in_size, out_size, w_init, b_init, state_init, activation, name, timescale=timescale
        )
        self.w_f, self.w_z = (
            brainstate.ParamState(first_value('ELSTMCell', 'r_init', r_init, self.out_size))
            for _ in range(2)
        )

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        (c,) = states
        f, z = jnp.split(self.W(x), 2, axis=-1)
        f = sigmoid(f + element_wise(self.w_f.value) * c)
        z = self.activation(z + element_wise(self.w_z.value) * c)
        c = f * c + (1 - f) * z
        return sigmoid(self.Wo(join(x, c))) * c, (c,)
