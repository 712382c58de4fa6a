"""Recurrent cells. One step reads x of shape (I,) or (B, I) and returns the new h of shape (O,) or
(B, O).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.nn import sigmoid

from ._arguments import ORTHOGONAL, XAVIER, ZERO, Init, Size
from ._base import GatedCell

__all__ = ['GRUCell', 'LSTMCell', 'MiniGRU', 'VanillaRNNCell']


def identity(x: Any) -> Any:
    """Return ``x``."""
    return x


def join(x: Any, h: Any) -> Any:
    return jnp.concatenate([x, h], axis=-1)


class VanillaRNNCell(GatedCell):
    r"""The plain recurrent cell (Elman, 1990, "Finding structure in time").

    .. math:: h_t = \phi([x_t, h_{t-1}]\,W + b)

    Parameters
    ----------
    in_size, out_size : int
        Number of input features I and of units O.
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weight of shape (I + O, O) and bias of shape (O,).
    state_init : initializer, array or float
        First value of the state ``h``.
    activation : function or name in ``brainstate.nn``
        :math:`\phi`.
    name : str, optional
        Name of the module.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import VanillaRNNCell
    >>> cell = VanillaRNNCell(3, 8, activation='tanh')
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 8)
    """

    state_names = ('h',)

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = XAVIER,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: str | Callable = 'relu',
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, w_init, b_init, state_init, activation, name)
        self.W = self._gate(reads_state=True)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        """The formula above."""
        h = self.activation(self.W(join(x, states[0])))
        return h, (h,)


class GRUCell(GatedCell):
    r"""The gated recurrent unit (Cho et al., 2014, arXiv:1406.1078).

    .. math::
        z_t &= \sigma([x_t, h_{t-1}]\,W_z + b_z) \qquad r_t = \sigma([x_t, h_{t-1}]\,W_r + b_r) \\
        h_t &= (1 - z_t) \odot h_{t-1} + z_t \odot \phi([x_t, r_t \odot h_{t-1}]\,W_h + b_h)

    The reset gate :math:`r_t` reaches :math:`h_t` only through the matrix product of the candidate,
    which mixes positions. So ``Wr`` carries no trace and learns from its same-step gradient, while
    ``Wz`` and ``Wh`` are traced. The three maps are separate for that reason: one map for both
    gates would keep a trace of zeros for the reset gate.

    Parameters
    ----------
    in_size, out_size : int
        Number of input features I and of units O.
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weights of shape (I + O, O) and biases of shape (O,) of ``Wz``, ``Wr`` and ``Wh``.
    state_init : initializer, array or float
        First value of the state ``h``.
    activation : function or name in ``brainstate.nn``
        :math:`\phi`.
    name : str, optional
        Name of the module.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import GRUCell
    >>> cell = GRUCell(3, 8)
    >>> cell.init_state()
    >>> cell(jnp.ones(3)).shape
    (8,)
    """

    state_names = ('h',)

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = ORTHOGONAL,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: str | Callable = 'tanh',
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, w_init, b_init, state_init, activation, name)
        self.Wz = self._gate(reads_state=True)
        self.Wr = self._gate(reads_state=True)
        self.Wh = self._gate(reads_state=True)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        """The formula above."""
        (h,) = states
        z, r = sigmoid(self.Wz(join(x, h))), sigmoid(self.Wr(join(x, h)))
        h = (1 - z) * h + z * self.activation(self.Wh(join(x, r * h)))
        return h, (h,)


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
    in_size, out_size : int
        Number of input features I and of units O.
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weight of shape (I + O, 4 O) and bias of shape (4 O,); an initializer is called for each
        gate's (I + O, O) by itself.
    state_init : initializer, array or float
        First value of the states ``h`` and ``c``.
    activation : function or name in ``brainstate.nn``
        :math:`\phi`.
    name : str, optional
        Name of the module.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import LSTMCell
    >>> cell = LSTMCell(3, 8)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape, cell.c.value.shape
    ((2, 8), (2, 8))
    """

    state_names = ('h', 'c')

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = XAVIER,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: str | Callable = 'tanh',
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, w_init, b_init, state_init, activation, name)
        self.W = self._gate(reads_state=True, blocks=4)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        """The formula above."""
        h, c = states
        i, g, f, o = jnp.split(self.W(join(x, h)), 4, axis=-1)
        c = sigmoid(f + 1) * c + sigmoid(i) * self.activation(g)
        h = sigmoid(o) * self.activation(c)
        return h, (h, c)


class MiniGRU(GatedCell):
    r"""The minimal gated unit whose gates read x alone (minGRU; Feng et al., 2024,
    arXiv:2410.01201).

    .. math::
        [z_t, g_t] = x_t\,W + b \qquad
        h_t = (1 - \sigma(z_t)) \odot h_{t-1} + \sigma(z_t) \odot \phi(g_t)

    No position of ``h`` reads another one, so the recurrence is diagonal and D_RTRL gives the
    gradient of backpropagation through time exactly.

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

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import MiniGRU
    >>> cell = MiniGRU(3, 8)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 8)
    """

    state_names = ('h',)

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = XAVIER,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: str | Callable = identity,
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, w_init, b_init, state_init, activation, name)
        self.W = self._gate(reads_state=False, blocks=2)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        """The formula above."""
        (h,) = states
        z, g = jnp.split(self.W(x), 2, axis=-1)
        h = (1 - sigmoid(z)) * h + sigmoid(z) * self.activation(g)
        return h, (h,)
