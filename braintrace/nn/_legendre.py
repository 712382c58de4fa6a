"""A cell with a window of the past as Legendre polynomials. One step reads x of shape (I,) or
(B, I) and returns h of shape (O,) or (B, O).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np

from ._arguments import (
    LECUN_UNIFORM,
    XAVIER,
    ZERO,
    Init,
    Size,
    activation_of,
    counted,
)
from ._base import RecurrentLayer
from ._linear import Linear
from ._time import check_time, plain


class LMUCell(RecurrentLayer):
    r"""The Legendre memory unit (Voelker et al., 2019, NeurIPS, eqs. 1, 2, 4, 6 and 7).

    .. math::
        u_t &= x_t\,E_x + h_{t-1}\,E_h + m_{t-1}\,E_m \qquad
        m_t = m_{t-1}\,\bar A^\top + u_t\,\bar B^\top \\
        h_t &= \phi([x_t, h_{t-1}, m_t]\,W + b)

    with, for a step of a window of ``theta`` steps whose input is held (zero-order hold),

    .. math::
        \bar A = e^{A / \theta} \qquad \bar B = A^{-1} (\bar A - 1)\, B \qquad
        A_{ij} = (2 i + 1) \begin{cases} -1 & i < j \\ (-1)^{i - j + 1} & i \geq j \end{cases}
        \qquad B_i = (2 i + 1) (-1)^i

    Each of the C memories holds the last ``theta`` values of its u as a polynomial of degree
    ``order`` - 1. Its numbers are one group of states at one position, so their traces hold the
    window whole. ``Eh``, ``Em`` and what W reads of h are recurrent weights: what runs through them
    is left out. Without them (``recurrent=False``; Chilkuri and Eliasmith, 2021, arXiv:2102.11417)
    h is no state, and D_RTRL is exact.

    Parameters
    ----------
    order : int
        Number of polynomials d of a memory.
    theta : float
        Length of the window in steps.
    memories : int
        Number of memories C; the paper has one.
    recurrent : bool
        Whether ``Eh`` and ``Em`` are there, and W reads h.
    e_init : initializer or array
        Weights of shape (I, C) and (O, C) of ``Ex`` and ``Eh``; ``Em``, of shape (C d, C), is 0 at
        first.
    w_init, b_init : initializer or array; ``b_init`` may be None
        Weight of shape (I + O + C d, O) of W, or (I + C d, O), and bias of shape (O,).
    activation : function or name in ``brainstate.nn``
        :math:`\phi`.

    Attributes
    ----------
    m : brainstate.HiddenGroupState
        The memories, of shape (C, d) or (B, C, d).
    h : brainstate.HiddenState
        The output of the last step, where it is recurrent.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import LMUCell
    >>> cell = LMUCell(3, 8, order=6, theta=50)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape, cell.m.value.shape
    ((2, 8), (2, 1, 6))
    """

    state_names = ('h', 'm')
    kinds = {'m': brainstate.HiddenGroupState}
    plain_input = True

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        order: int,
        theta: float,
        memories: int = 1,
        recurrent: bool = True,
        e_init: Init = LECUN_UNIFORM,
        w_init: Init = XAVIER,
        b_init: Init | None = ZERO,
        state_init: Init = ZERO,
        activation: str | Callable = 'tanh',
        name: str | None = None,
    ):
        super().__init__(in_size, out_size, state_init, name)
        self.order, self.memories = counted('LMUCell', order=order, memories=memories)
        self.activation = activation_of(activation, 'LMUCell')
        self.theta = plain('LMUCell', 'theta', check_time('LMUCell', 'theta', theta, finite=True))
        self.A, self.B = held(*legendre(self.order), 1 / self.theta)
        window = self.memories * self.order
        self.first_values['m'] = (state_init, (self.memories, self.order))
        self.recurrent = bool(recurrent)
        self.Ex = Linear(self.num_in, self.memories, w_init=e_init, b_init=None)
        if self.recurrent:
            self.Eh = Linear(self.num_out, self.memories, w_init=e_init, b_init=None)
            self.Em = Linear(window, self.memories, w_init=ZERO, b_init=None)
        else:
            del self.first_values['h']
        read = self.num_in + window + self.num_out * self.recurrent
        self.W = Linear(read, self.num_out, w_init=w_init, b_init=b_init)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        *h, m = states
        u = self.Ex(x)
        if self.recurrent:
            u = u + self.Eh(*h) + self.Em(flat(m))
        A, B = (jnp.asarray(matrix, m.dtype) for matrix in (self.A, self.B))
        m = (m[..., None, :] * A).sum(-1) + u[..., None] * B
        new = self.activation(self.W(jnp.concatenate([x, *h, flat(m)], axis=-1)))
        return new, (*([new] if self.recurrent else []), m)


def flat(m: Any) -> Any:
    return m.reshape(*m.shape[:-2], -1)


def legendre(order: int) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a window of length 1 as ``order`` Legendre polynomials."""
    i, j = np.mgrid[:order, :order]
    A = (2 * i + 1) * np.where(i < j, -1.0, (-1.0) ** (i - j + 1))
    k = np.arange(order)
    return A, (2 * k + 1) * (-1.0) ** k


def held(A: np.ndarray, B: np.ndarray, time: float) -> tuple[np.ndarray, np.ndarray]:
    """What becomes of a state and of an input that is constant for ``time``."""
    both = np.zeros((len(A) + 1, len(A) + 1))
    both[:-1] = np.column_stack([A, B])
    both = exponential(both * time)
    return both[:-1, :-1], both[:-1, -1]


def exponential(matrix: np.ndarray) -> np.ndarray:
    """The exponential of a matrix by its series, of a part of it that is small enough."""
    halvings = max(int(np.ceil(np.log2(np.abs(matrix).sum(1).max()))) + 1, 0)
    term = result = np.eye(len(matrix))
    for k in range(1, 20):
        term = term @ matrix / (2.0**halvings * k)
        result = result + term
    return np.linalg.matrix_power(result, 2**halvings)
