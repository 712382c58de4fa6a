"""Cells with an input and a forget gate of their own. One step reads x of shape (I,) or (B, I) and
returns the new h of shape (O,) or (B, O).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax.numpy as jnp
from jax.nn import sigmoid

from .._etrace_op import element_wise
from ._arguments import XAVIER, ZERO, Init, Size
from ._base import GatedCell, Gates
from ._cells import join


class LSTMCell(GatedCell):
    r"""Long short-term memory with a forget gate (Hochreiter & Schmidhuber, 1997; Gers et al.,
    2000).

    .. math::
        [i_t, g_t, f_t, o_t] &= [x_t, h_{t-1}]\,W + b \\
        c_t &= \sigma(f_t + 1) \odot c_{t-1} + \sigma(i_t) \odot \phi(g_t) \\
        h_t &= \sigma(o_t) \odot \phi(c_t)

    The 1 added to the forget gate keeps the memory open at first (Jozefowicz et al., 2015). ``h``
    and ``c`` are one hidden group of two states; the four gates are one matrix product.

    Parameters
    ----------
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weight of shape (I + O, 4 O) and bias of shape (4 O,); an initializer is called for each
        gate's (I + O, O) by itself.
    """

    state_names = ('h', 'c')
    maps = {'W': Gates((-1, 0, 1, 0), added=1.0)}

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
        timescale: tuple[float, float] | None = None,
    ):
        super().__init__(
            in_size, out_size, w_init, b_init, state_init, activation, name, timescale=timescale
        )

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        h, c = states
        i, g, f, o = jnp.split(self.W(join(x, h)), 4, axis=-1)
        c = sigmoid(f + 1) * c + sigmoid(i) * self.activation(g)
        h = sigmoid(o) * self.activation(c)
        return h, (h, c)


class URLSTMCell(GatedCell):
    r"""Long short-term memory with a refine gate and uniform gate initialisation (Gu et al., 2020,
    arXiv:1910.09890).

    .. math::
        [f_t, r_t, u_t, o_t] &= [x_t, h_{t-1}]\,[W_f, W_r, W_u, W_o] \\
        \hat f_t &= \sigma(f_t + b) \qquad \hat r_t = \sigma(r_t - b) \qquad
        g_t = 2 \hat r_t \odot \hat f_t + (1 - 2 \hat r_t) \odot \hat f_t^2 \\
        c_t &= g_t \odot c_{t-1} + (1 - g_t) \odot \phi(u_t) \qquad
        h_t = \sigma(o_t) \odot \phi(c_t)

    The first value of :math:`\sigma(b)` is uniform in (1 / O, 1 - 1 / O), which spreads the times
    of memory; ``timescale`` of other cells has no place here.

    Parameters
    ----------
    w_init : initializer or array
        Weights of shape (I + O, O) of ``Wf``, ``Wr``, ``Wu`` and ``Wo``; ``bias`` b has the shape
        (O,).
    """

    state_names = ('h', 'c')
    maps = {'Wf': Gates(), 'Wr': Gates(), 'Wu': Gates(), 'Wo': Gates()}

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = XAVIER,
        state_init: Init = ZERO,
        activation: str | Callable = 'tanh',
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, w_init, None, state_init, activation, name)
        edge = min(1 / self.num_out, 0.5)
        opened = brainstate.random.uniform(edge, 1 - edge, self.out_size)
        bias = jnp.log(opened / (1 - opened)).astype(brainstate.environ.dftype())
        self.bias = brainstate.ParamState(bias)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        h, c = states
        read, b = join(x, h), element_wise(self.bias.value)
        f, r = sigmoid(self.Wf(read) + b), sigmoid(self.Wr(read) - b)
        g = 2 * r * f + (1 - 2 * r) * f**2
        c = g * c + (1 - g) * self.activation(self.Wu(read))
        h = sigmoid(self.Wo(read)) * self.activation(c)
        return h, (h, c)
