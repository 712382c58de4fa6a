"""Recurrent cells of one state. One step reads x of shape (I,) or (B, I) and returns
the new h of shape (O,) or (B, O).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.nn import sigmoid

from ..errors import EtpShapeError, OptionError
from ._arguments import ORTHOGONAL, XAVIER, ZERO, Init, Size
from ._base import GatedCell, Gates
from ._linear import Linear


def identity(x: Any) -> Any:
    """Return ``x``."""
    return x


def join(x: Any, h: Any) -> Any:
    """``[x, h]``."""
    return jnp.concatenate([x, h], axis=-1)


class VanillaRNNCell(GatedCell):
    r"""The plain recurrent cell (Elman, 1990, "Finding structure in time").

    .. math:: h_t = \phi([x_t, h_{t-1}]\,W + b)

    No unit remembers by itself, so D_RTRL keeps nothing of its past, and warns of it; exact windows
    and :func:`braintrace.rules.rtrl` do. What follows the sizes is given by name.

    Parameters
    ----------
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weight of shape (I + O, O) and bias of shape (O,).
    """

    maps = {'W': Gates()}

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        w_init: Init = XAVIER,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: str | Callable = 'relu',
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, w_init, b_init, state_init, activation, name)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        h = self.activation(self.W(join(x, states[0])))
        return h, (h,)


class GRUCell(GatedCell):
    r"""The gated recurrent unit (Cho et al., 2014, arXiv:1406.1078).

    .. math::
        z_t &= \sigma([x_t, h_{t-1}]\,W_z + b_z) \qquad r_t = \sigma([x_t, h_{t-1}]\,W_r + b_r) \\
        h_t &= (1 - z_t) \odot h_{t-1} + z_t \odot \phi([x_t, r_t \odot h_{t-1}]\,W_h + b_h)

    An open :math:`z_t` writes (in PyTorch, Keras and Flax it keeps), and the reset gate
    :math:`r_t` comes before the product, as in the paper. With ``reset_after=True`` it comes after
    it, as in cuDNN, PyTorch, Flax, and Keras unless told otherwise, and the candidate is

    .. math:: \phi(x_t\,W_h + b_h + r_t \odot (h_{t-1}\,U_h + b_u))

    :func:`load_weights` takes weights of these three.

    A reset gate before the product reaches :math:`h_t` only through the product, which mixes
    positions. So ``Wr`` carries no trace and learns from its same-step gradient, while ``Wz`` and
    ``Wh`` are traced. The three maps are separate for that reason: one map for both gates would
    keep a trace of zeros for the reset gate. After the product, all are traced.

    Parameters
    ----------
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weights of shape (I + O, O) and biases of shape (O,) of ``Wz``, ``Wr`` and ``Wh``. With
        ``reset_after``, ``Wh`` has (I, O) and ``Uh`` (O, O).
    reset_after : bool
        Whether the reset gate multiplies the product.
    """

    maps = {'Wz': Gates((-1,)), 'Wr': Gates(), 'Wh': Gates()}

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
        reset_after: bool = False,
        timescale: tuple[float, float] | None = None,
    ):
        if not isinstance(reset_after, bool | np.bool_):
            raise OptionError(f'GRUCell: reset_after is {reset_after!r}; give True or False.')
        self.reset_after = bool(reset_after)
        if reset_after:
            self.maps = {**self.maps, 'Wh': Gates(reads='x'), 'Uh': Gates(reads='h')}
        super().__init__(
            in_size, out_size, w_init, b_init, state_init, activation, name, timescale=timescale
        )

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        (h,) = states
        z, r = sigmoid(self.Wz(join(x, h))), sigmoid(self.Wr(join(x, h)))
        if self.reset_after:
            candidate = self.Wh(x) + r * self.Uh(h)
        else:
            candidate = self.Wh(join(x, r * h))
        h = (1 - z) * h + z * self.activation(candidate)
        return h, (h,)


class MGUCell(GatedCell):
    r"""The minimal gated unit (Zhou et al., 2016, arXiv:1603.09420).

    .. math::
        f_t &= \sigma([x_t, h_{t-1}]\,W_f + b_f) \\
        h_t &= (1 - f_t) \odot h_{t-1} + f_t \odot \phi([x_t, f_t \odot h_{t-1}]\,W_h + b_h)

    ``Wf`` has a trace for its direct way to :math:`h_t`; its way through the candidate's matrix
    product counts within the step.

    Parameters
    ----------
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weights of shape (I + O, O) and biases of shape (O,) of ``Wf`` and ``Wh``.
    """

    maps = {'Wf': Gates((-1,)), 'Wh': Gates()}

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        (h,) = states
        f = sigmoid(self.Wf(join(x, h)))
        h = (1 - f) * h + f * self.activation(self.Wh(join(x, f * h)))
        return h, (h,)


class CFNCell(GatedCell):
    r"""The chaos-free network (Laurent & von Brecht, 2016, arXiv:1612.06212).

    .. math::
        f_t &= \sigma([x_t, h_{t-1}]\,W_f + b_f) \qquad i_t = \sigma([x_t, h_{t-1}]\,W_i + b_i) \\
        h_t &= f_t \odot \phi(h_{t-1}) + i_t \odot \phi(x_t\,W_h + b_h)

    Parameters
    ----------
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weights of shape (I + O, O) of ``Wf`` and ``Wi`` and (I, O) of ``Wh``; biases of shape (O,).
    """

    maps = {'Wf': Gates((1,)), 'Wi': Gates((-1,)), 'Wh': Gates(reads='x')}

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        (h,) = states
        f, i = sigmoid(self.Wf(join(x, h))), sigmoid(self.Wi(join(x, h)))
        h = f * self.activation(h) + i * self.activation(self.Wh(x))
        return h, (h,)


class MinimalRNNCell(GatedCell):
    r"""The minimal recurrent network (Chen, 2017, arXiv:1711.06788).

    .. math::
        z_t = \Phi(x_t) \qquad u_t = \sigma([z_t, h_{t-1}]\,W_u + b_u) \qquad
        h_t = u_t \odot h_{t-1} + (1 - u_t) \odot z_t

    Parameters
    ----------
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weight of shape (2 O, O) and bias of shape (O,) of ``W_u``; the same initializers for
        the map ``phi``.
    phi : function, optional
        :math:`\Phi`, of (..., I) to (..., O); a module's parameters learn too. By default a
        :class:`Linear` map of shape (I, O); the paper adds a tanh.

    Raises
    ------
    EtpShapeError, EtpDtypeError, EtpUnitError, StructureError
        The input is no plain array of shape (I,) or (B, I), or does not fit the states, or
        ``phi`` makes another shape than (O,) or (B, O).
    """

    maps = {'W_u': Gates((1,), reads='zh')}

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        w_init: Init = ORTHOGONAL,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        phi: Callable | None = None,
        name: str | None = None,
        *,
        timescale: tuple[float, float] | None = None,
    ):
        super().__init__(
            in_size, out_size, w_init, b_init, state_init, identity, name, timescale=timescale
        )
        if phi is not None and not callable(phi):
            raise OptionError(f'MinimalRNNCell: phi is {phi!r}; give a function or a module.')
        self.phi = phi or Linear(self.num_in, self.num_out, w_init=w_init, b_init=b_init)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        (h,) = states
        z = self.phi(x)
        if jnp.shape(z) != h.shape:
            raise EtpShapeError(
                f'MinimalRNNCell: phi made {jnp.shape(z)} of an input of shape {x.shape}; expected '
                f'the shape of the state, {h.shape}.'
            )
        u = sigmoid(self.W_u(join(z, h)))
        h = u * h + (1 - u) * z
        return h, (h,)
