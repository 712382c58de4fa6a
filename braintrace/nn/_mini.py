"""Two cells of the public package that no paper has; `braintrace.compat` has their names."""

from __future__ import annotations

from typing import Any

from jax.nn import sigmoid

from ._arguments import ORTHOGONAL, ZERO, Init, Size
from ._base import GatedCell, Gates
from ._cells import identity, join


class Mini(GatedCell):
    """A cell whose candidate is linear."""

    shared_docs = """
    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.compat import {name}
    >>> cell = {name}(3, 8)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape
    (2, 8)
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = ORTHOGONAL,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        name: str | None = None,
        *,
        timescale: tuple[float, float] | None = None,
    ):
        super().__init__(
            in_size, out_size, w_init, b_init, state_init, identity, name, timescale=timescale
        )


class MiniGRU(Mini):
    r"""A gated recurrent unit without reset gate, whose candidate is linear and reads x alone.

    .. math::
        z_t = \sigma([x_t, h_{t-1}]\,W_z + b_z) \qquad
        h_t = (1 - z_t) \odot h_{t-1} + z_t \odot (x_t\,W_x + b_x)

    The gate reads the state, so D_RTRL is not exact. minGRU of Feng et al. (2024), whose gate reads
    x alone, is :class:`braintrace.nn.MinGRUCell`.

    Parameters
    ----------
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weights of shape (I + O, O) of ``W_z`` and (I, O) of ``W_x``; biases of shape (O,).
    """

    maps = {'W_z': Gates((-1,)), 'W_x': Gates(reads='x')}

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        (h,) = states
        z = sigmoid(self.W_z(join(x, h)))
        h = (1 - z) * h + z * self.W_x(x)
        return h, (h,)


class MiniLSTM(Mini):
    r"""A recurrent unit with a forget and an input gate, whose candidate is linear and reads x
    alone.

    .. math::
        f_t &= \sigma([x_t, h_{t-1}]\,W_f + b_f) \qquad i_t = \sigma([x_t, h_{t-1}]\,W_i + b_i) \\
        h_t &= f_t \odot h_{t-1} + i_t \odot (x_t\,W_x + b_x)

    The gates read the state, so D_RTRL is not exact. minLSTM of Feng et al. (2024), whose gates
    read x alone and sum to 1, is :class:`braintrace.nn.MinLSTMCell`.

    Parameters
    ----------
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weights of shape (I + O, O) of ``W_f`` and ``W_i`` and (I, O) of ``W_x``; biases of shape
        (O,).
    """

    maps = {'W_f': Gates((1,)), 'W_i': Gates((-1,)), 'W_x': Gates(reads='x')}

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        (h,) = states
        f, i = sigmoid(self.W_f(join(x, h))), sigmoid(self.W_i(join(x, h)))
        h = f * h + i * self.W_x(x)
        return h, (h,)
