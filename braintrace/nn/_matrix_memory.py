"""Cells whose state is a matrix for each sample. D_RTRL is exact for those that move it on element
by element.
"""

from __future__ import annotations

from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np
from jax.nn import sigmoid, softplus

from .._etrace_op import element_wise
from .._signatures import is_int
from ..errors import OptionError
from ._arguments import KAIMING, ZERO, Init, Size, features, initial_value
from ._base import RecurrentLayer
from ._linear import Linear


class GLACell(RecurrentLayer):
    r"""Gated linear attention, as a recurrence (Yang et al., 2024, arXiv:2312.06635).

    .. math::
        S_t = \mathrm{diag}(\alpha_t)\, S_{t-1} + k_t v_t^\top \qquad o_t = S_t^\top q_t

    with :math:`q_t = x_t W_q`, :math:`k_t = x_t W_k`, :math:`v_t = x_t W_v` and
    :math:`\alpha_t = \sigma(x_t W_\alpha + b)^{1/16}`, in each head by itself. With a constant
    ``decay`` instead of the gate it is the retention of RetNet (Sun et al., 2023,
    arXiv:2307.08621), and with ``decay=1`` linear attention (Katharopoulos et al., 2020,
    arXiv:2006.16236).

    An element of k or of the gate feeds a row of S, an element of v a column. So the trace of a
    weight has as many numbers for each of its entries; within a window it needs none.

    Parameters
    ----------
    in_size, out_size : int
        Number of input features I, and of outputs O: the values of all heads.
    key_size : int, optional
        Number of keys of all heads; O by default.
    heads : int
        Number of heads H, a divisor of both.
    decay : float or array of shape (H,), optional
        A constant decay in (0, 1] in place of the gate.
    w_init, b_init : initializer or array
        Weights of shape (I, keys) or (I, O), and the bias of the gate of shape (keys,).
    state_init : initializer, array or float
        First value of the state ``S`` of shape (H, keys / H, O / H).

    Raises
    ------
    OptionError
        ``heads`` does not divide the sizes, or ``decay`` is not in (0, 1] or of another shape.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import GLACell
    >>> cell = GLACell(3, 8, key_size=4, heads=2)
    >>> cell.init_state(batch_size=5)
    >>> cell(jnp.ones((5, 3))).shape, cell.S.value.shape
    ((5, 8), (5, 2, 2, 4))
    >>> retention = GLACell(3, 8, heads=2, decay=[0.97, 0.98])
    """

    state_names = ('S',)
    plain_input = True

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        key_size: Size | None = None,
        heads: int = 1,
        decay: Any = None,
        w_init: Init = KAIMING,
        b_init: Init = ZERO,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, name)
        keys = keys_of('GLACell', key_size, self.num_out, heads)
        self.heads, self.decay = heads, None if decay is None else _constant(decay, heads)
        self.first_values = {'S': (state_init, (heads, keys // heads, self.num_out // heads))}
        self.Wq, self.Wk = (Linear(in_size, keys, w_init=w_init, b_init=None) for _ in range(2))
        self.Wv = Linear(in_size, out_size, w_init=w_init, b_init=None)
        if decay is None:
            self.Wa = Linear(in_size, keys, w_init=w_init, b_init=b_init)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        q, k, v = (in_heads(of_x(x), self.heads) for of_x in (self.Wq, self.Wk, self.Wv))
        if self.decay is None:
            decay = sigmoid(in_heads(self.Wa(x), self.heads)) ** (1 / 16)
        else:
            decay = jnp.asarray(self.decay, k.dtype)[:, None]
        S = decay[..., None] * states[0] + k[..., :, None] * v[..., None, :]
        return (q[..., None] * S).sum(-2).reshape(*x.shape[:-1], self.num_out), (S,)


def in_heads(y: Any, heads: int) -> Any:
    return y.reshape(*y.shape[:-1], heads, -1)


def keys_of(owner: str, key_size: Size | None, num_out: int, heads: int) -> int:
    """The number of keys of all heads."""
    keys = num_out if key_size is None else features(key_size, f'{owner}: key_size')
    if not is_int(heads, 1) or keys % heads or num_out % heads:
        raise OptionError(
            f'{owner}: heads is {heads!r}; give a divisor of key_size={keys} and of '
            f'out_size={num_out}.'
        )
    return keys


def _constant(decay: Any, heads: int) -> np.ndarray:
    found = np.asarray(decay, float)
    if found.shape not in ((), (heads,)) or not ((found > 0) & (found <= 1)).all():
        raise OptionError(
            f'GLACell: decay is {decay!r}; give a number in (0, 1], or one for each of the {heads} '
            'heads. Leave it out for a gate that the input opens.'
        )
    return np.broadcast_to(found, (heads,))


class DeltaNetCell(RecurrentLayer):
    r"""Linear attention that writes by the delta rule (Schlag et al., 2021, arXiv:2102.11174; with
    keys of length 1, Yang et al., 2024, arXiv:2406.06484).

    .. math::
        S_t = S_{t-1} + \beta_t\, k_t\, (v_t - S_{t-1}^\top k_t)^\top \qquad o_t = S_t^\top q_t

    with :math:`q_t = x_t W_q` and :math:`k_t = x_t W_k`, each divided by its length,
    :math:`v_t = x_t W_v` and :math:`\beta_t = \sigma(x_t W_\beta + b)`, in each head by itself.
    What the memory has for a key is taken away, so far as the new value is written.

    Rows of S meet where the key reads it, and keys meet in their length. What runs through these
    two is left out of the traces, and ``learner.report`` lists both; an exact window holds it.

    Parameters
    ----------
    in_size, out_size : int
        Number of input features I, and of outputs O: the values of all heads.
    key_size : int, optional
        Number of keys of all heads; O by default.
    heads : int
        Number of heads H, a divisor of both.
    w_init, b_init : initializer or array
        Weights of shape (I, keys), (I, O) or (I, H), and the bias of :math:`\beta` of shape (H,).
    state_init : initializer, array or float
        First value of the state ``S`` of shape (H, keys / H, O / H).

    Raises
    ------
    OptionError
        ``heads`` does not divide the sizes.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import DeltaNetCell
    >>> cell = DeltaNetCell(3, 8, key_size=4, heads=2)
    >>> cell.init_state(batch_size=5)
    >>> cell(jnp.ones((5, 3))).shape, cell.S.value.shape
    ((5, 8), (5, 2, 2, 4))
    """

    state_names = ('S',)
    plain_input = True

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        key_size: Size | None = None,
        heads: int = 1,
        w_init: Init = KAIMING,
        b_init: Init = ZERO,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, name)
        keys = keys_of('DeltaNetCell', key_size, self.num_out, heads)
        self.heads = heads
        self.first_values = {'S': (state_init, (heads, keys // heads, self.num_out // heads))}
        self.Wq, self.Wk = (Linear(in_size, keys, w_init=w_init, b_init=None) for _ in range(2))
        self.Wv = Linear(in_size, out_size, w_init=w_init, b_init=None)
        self.Wb = Linear(in_size, heads, w_init=w_init, b_init=b_init)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        (S,) = states
        q, k, v = (in_heads(of_x(x), self.heads) for of_x in (self.Wq, self.Wk, self.Wv))
        q, k = (y / jnp.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        told = (k[..., None] * S).sum(-2)
        key = (sigmoid(self.Wb(x))[..., None] * k)[..., None]
        S = S + key * v[..., None, :] - key * told[..., None, :]  # apart: v has a trace of its own
        return (q[..., None] * S).sum(-2).reshape(*x.shape[:-1], self.num_out), (S,)


class MambaCell(RecurrentLayer):
    r"""The selective state space S6 of Mamba (Gu and Dao, 2023, arXiv:2312.00752, algorithm 2).

    Each of the I channels of x has N states:

    .. math::
        h_t = e^{\Delta_t A}\, h_{t-1} + \Delta_t\, x_t\, B_t^\top \qquad
        y_t = h_t C_t + D\, x_t

    with :math:`\Delta_t = \mathrm{softplus}(x_t W_\Delta + b)` for each channel,
    :math:`B_t = x_t W_B` and :math:`C_t = x_t W_C` for each state, and
    :math:`A = -e^{A_{\log}}`. The step before it (a projection, a short convolution) and the
    gate after it are modules of their own; with a weight before it, gradients of that weight
    leave out the way through :math:`\Delta` and B.

    Parameters
    ----------
    in_size : int
        Number of channels I, of the input and the output.
    state_size : int
        Number of states N of each channel.
    w_init : initializer or array
        Weights of shape (I, I) and (I, N).
    b_init : initializer or array, optional
        Bias of :math:`\Delta`, of shape (I,). By default softplus(b) is between 0.001 and 0.1,
        uniform on a logarithmic scale.
    a_init : initializer or array, optional
        :math:`A_{\log}` of shape (I, N); the logarithm of 1, 2, ... N for each channel by default.
    d_init : initializer, array or float
        D of shape (I,).
    state_init : initializer, array or float
        First value of the state ``h`` of shape (I, N).

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import MambaCell
    >>> cell = MambaCell(8, state_size=4)
    >>> cell.init_state(batch_size=5)
    >>> cell(jnp.ones((5, 8))).shape, cell.h.value.shape
    ((5, 8), (5, 8, 4))
    """

    plain_input = True

    def __init__(
        self,
        in_size: Size,
        state_size: int = 16,
        w_init: Init = KAIMING,
        b_init: Init | None = None,
        a_init: Init | None = None,
        d_init: Init = 1.0,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        super().__init__(in_size, in_size, state_init, name)
        channels, states = self.num_in, features(state_size, 'MambaCell: state_size')
        b_init = _small_steps if b_init is None else b_init
        a_init = _counted if a_init is None else a_init
        self.first_values = {'h': (state_init, (channels, states))}
        self.Wd = Linear(channels, channels, w_init=w_init, b_init=b_init)
        self.WB, self.WC = (Linear(channels, states, w_init=w_init, b_init=None) for _ in range(2))
        self.A_log = brainstate.ParamState(
            initial_value(a_init, (channels, states), None, 'MambaCell')
        )
        self.D = brainstate.ParamState(initial_value(d_init, (channels,), None, 'MambaCell'))

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        delta, into, out = softplus(self.Wd(x)), self.WB(x), self.WC(x)
        rate = element_wise(self.A_log.value, lambda a: -jnp.exp(a))
        h = jnp.exp(delta[..., None] * rate) * states[0]
        h = h + (delta * x)[..., None] * into[..., None, :]
        return (h * out[..., None, :]).sum(-1) + element_wise(self.D.value) * x, (h,)


def _small_steps(shape: tuple[int, ...], **kwargs: Any) -> Any:
    exponent = brainstate.random.uniform(np.log(1e-3), np.log(1e-1), shape)
    return jnp.log(jnp.expm1(jnp.exp(exponent)))


def _counted(shape: tuple[int, ...], **kwargs: Any) -> Any:
    return jnp.broadcast_to(jnp.log(1.0 + jnp.arange(shape[-1])), shape)
