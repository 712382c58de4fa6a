"""Cells whose states are pairs that turn and shrink by themselves, the real and the imaginary part
of complex numbers. No pair reads another one, so D_RTRL gives the gradient of backpropagation
through time exactly. One step reads x of shape (I,) or (B, I).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import brainstate
import jax.numpy as jnp
import numpy as np

from .._etrace_op import element_wise
from ..errors import OptionError
from ._arguments import XAVIER, ZERO, Init, Size, activation_of, features
from ._base import RecurrentLayer, side_by_side
from ._linear import Linear


class Rotations(RecurrentLayer):
    """P pairs of states; each pair turns and shrinks by itself, as a complex number does."""

    shared_docs = """
    Raises
    ------
    OptionError
        A size is not a positive int, or the ring is empty.
    """

    def __init__(
        self,
        in_size: Size,
        d_hidden: Size,
        state_init: Init,
        name: str | None,
        *,
        out_size: Size | None = None,
    ):
        owner = type(self).__name__
        self.num_hidden = features(d_hidden, f'{owner}: d_hidden')
        out_size = 2 * self.num_hidden if out_size is None else out_size
        super().__init__(in_size, out_size, state_init, name)
        shape = (self.num_hidden,)
        self.first_values = {state: (state_init, shape) for state in self.state_names}

    def _ring(self, r_min: float, r_max: float, max_phase: float) -> tuple[Any, Any, Any]:
        """The logarithms of nu and of theta of lambda = exp(-nu + i theta), uniform in a ring of
        radii ``r_min`` to ``r_max``, and |lambda|^2.
        """
        owner = type(self).__name__
        if not 0 <= r_min < r_max <= 1:
            raise OptionError(
                f'{owner}: r_min is {r_min!r} and r_max {r_max!r}; give radii with 0 <= r_min < '
                'r_max <= 1.'
            )
        if not max_phase > 0:
            raise OptionError(f'{owner}: max_phase is {max_phase!r}; give an angle above 0.')
        area, turn = (brainstate.random.uniform(1e-4, 1 - 1e-4, self.num_hidden) for _ in range(2))
        square = r_min**2 + area * (r_max**2 - r_min**2)
        return jnp.log(-jnp.log(square) / 2), jnp.log(max_phase * turn), square


def parameter(value: Any) -> brainstate.ParamState:
    return brainstate.ParamState(jnp.asarray(value, brainstate.environ.dftype()))


def normal(num_in: int, variance: float = 1.0) -> Init:
    """Draw a weight whose products with inputs of size 1 have that variance."""
    return brainstate.nn.init.Normal(scale=float(np.sqrt(variance / num_in)))


def turned(decay: Any, angle: Any, states: tuple) -> tuple[Any, Any]:
    """The pair of states as a complex number times ``decay * exp(i angle)``."""
    a, b = decay * jnp.cos(angle), decay * jnp.sin(angle)
    re, im = states
    return a * re - b * im, b * re + a * im


class LRUCell(Rotations):
    r"""The linear recurrent unit (Orvieto et al., 2023, arXiv:2303.06349).

    .. math::
        h_t &= \lambda \odot h_{t-1} + e^\gamma \odot (x_t\,B) \qquad
        \lambda = \exp(-e^\nu + i\,e^\theta) \\
        y_t &= \mathrm{Re}(h_t\,C) + D \odot x_t

    The state is complex, as the two real states ``h_re`` and ``h_im``. At first :math:`\lambda` is
    uniform in a ring and :math:`e^\gamma = \sqrt{1 - |\lambda|^2}`; B, C and D are normal with the
    variances 1 / (2 I), 1 / P and 1.

    Parameters
    ----------
    d_model : int
        Number of features I of the input and of the output.
    d_hidden : int
        Number of units P; ``nu_log``, ``theta_log`` and ``gamma_log`` have the shape (P,), ``B_re``
        and ``B_im`` (I, P), ``C_re`` and ``C_im`` (P, I), ``D`` (I,).
    r_min, r_max : float
        Radii of the ring.
    max_phase : float
        Largest angle of :math:`\lambda`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import LRUCell
    >>> cell = LRUCell(3, 8, r_min=0.9, r_max=0.99)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape, cell.h_im.value.shape
    ((2, 3), (2, 8))
    """

    state_names = ('h_re', 'h_im')

    def __init__(
        self,
        d_model: Size,
        d_hidden: Size,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 6.28,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        d_model = features(d_model, f'{type(self).__name__}: d_model')
        super().__init__(d_model, d_hidden, state_init, name, out_size=d_model)
        nu_log, theta_log, square = self._ring(r_min, r_max, max_phase)
        self.nu_log, self.theta_log = parameter(nu_log), parameter(theta_log)
        self.gamma_log = parameter(jnp.log(1 - square) / 2)
        num_in, hidden = self.num_in, self.num_hidden
        for key in ('B_re', 'B_im'):
            setattr(self, key, Linear(num_in, hidden, w_init=normal(num_in, 0.5), b_init=None))
        for key in ('C_re', 'C_im'):
            setattr(self, key, Linear(hidden, num_in, w_init=normal(hidden), b_init=None))
        self.D = parameter(brainstate.random.normal(size=num_in))

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        decay = element_wise(self.nu_log.value, lambda nu: jnp.exp(-jnp.exp(nu)))
        angle = element_wise(self.theta_log.value, jnp.exp)
        scale = element_wise(self.gamma_log.value, jnp.exp)
        re, im = turned(decay, angle, states)
        re, im = re + scale * self.B_re(x), im + scale * self.B_im(x)
        y = self.C_re(re) - self.C_im(im) + element_wise(self.D.value) * x
        return y, (re, im)


class S5Cell(Rotations):
    r"""A diagonal state-space model with learned step sizes (S5; Smith et al., 2023,
    arXiv:2208.04933).

    .. math::
        h_t &= \bar\lambda \odot h_{t-1} + \frac{\bar\lambda - 1}{\lambda} \odot (x_t\,B) \qquad
        \lambda = -e^{a} + i\,\omega \qquad \bar\lambda = \exp(\lambda\, e^{s}) \\
        y_t &= \mathrm{Re}(h_t\,C) + D \odot x_t

    The state is complex, as the two real states ``h_re`` and ``h_im``; the step :math:`e^s` of each
    unit holds x constant in between (zero-order hold). At first :math:`\lambda` are the P
    eigenvalues with positive imaginary part of the normal part of the HiPPO-LegS matrix of size
    2 P, the steps are log-uniform in (dt_min, dt_max), and B, C and D are normal with the variances
    1 / (2 I), 2 / P and 1.

    Parameters
    ----------
    d_model : int
        Number of features I of the input and of the output.
    d_hidden : int
        Number of units P; ``A_log`` (a), ``A_im`` (omega) and ``step_log`` (s) have the shape (P,),
        ``B`` (I, 2 P), its real part and then its imaginary one, ``C`` (2 P, I), the real part and
        then the negative imaginary one, and ``D`` (I,).
    dt_min, dt_max : float
        Range of the first step sizes.

    Raises
    ------
    OptionError
        A size is not a positive int, or the range of step sizes is empty.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import S5Cell
    >>> cell = S5Cell(3, 8)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape, cell.h_im.value.shape
    ((2, 3), (2, 8))
    """

    state_names = ('h_re', 'h_im')
    plain_input = True

    def __init__(
        self,
        d_model: Size,
        d_hidden: Size,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        d_model = features(d_model, f'{type(self).__name__}: d_model')
        super().__init__(d_model, d_hidden, state_init, name, out_size=d_model)
        if not 0 < dt_min < dt_max:
            raise OptionError(
                f'S5Cell: dt_min is {dt_min!r} and dt_max {dt_max!r}; give step sizes with 0 < '
                'dt_min < dt_max.'
            )
        num_in, hidden = self.num_in, self.num_hidden
        self.A_log = parameter(np.full(hidden, np.log(0.5)))
        self.A_im = parameter(hippo_frequencies(hidden))
        steps = brainstate.random.uniform(np.log(dt_min), np.log(dt_max), hidden)
        self.step_log = parameter(steps)
        self.B = Linear(num_in, 2 * hidden, w_init=normal(num_in, 0.5), b_init=None)
        self.C = Linear(2 * hidden, num_in, w_init=normal(hidden, 2.0), b_init=None)
        self.D = parameter(brainstate.random.normal(size=num_in))

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        a = element_wise(self.A_log.value, lambda log: -jnp.exp(log))
        omega = element_wise(self.A_im.value)
        step = element_wise(self.step_log.value, jnp.exp)
        decay, angle = jnp.exp(step * a), step * omega
        u, v = decay * jnp.cos(angle) - 1, decay * jnp.sin(angle)
        size = a**2 + omega**2
        u, v = (u * a + v * omega) / size, (v * a - u * omega) / size
        b_re, b_im = jnp.split(self.B(x), 2, axis=-1)
        re, im = turned(decay, angle, states)
        re, im = re + u * b_re - v * b_im, im + u * b_im + v * b_re
        y = self.C(jnp.concatenate([re, im], axis=-1)) + element_wise(self.D.value) * x
        return y, (re, im)


def hippo_frequencies(num: int) -> np.ndarray:
    """Imaginary parts of the ``num`` pairs of eigenvalues of the normal part of HiPPO-LegS; the
    real parts are all -1/2.
    """
    root = np.sqrt(np.arange(2 * num) + 0.5)
    skew = np.triu(np.outer(root, root), 1)
    return np.linalg.eigvalsh(1j * (skew - skew.T))[num:]


class RTUCell(Rotations):
    r"""Recurrent trace units with the nonlinearity inside of the recurrence (Elelimy et al., 2024,
    arXiv:2409.01449).

    .. math::
        [u_t, v_t] &= x_t\,W \qquad r = \exp(-e^\nu) \qquad \gamma = \sqrt{1 - r^2} \\
        p_t &= \phi(r \cos(e^\theta) \odot p_{t-1} - r \sin(e^\theta) \odot q_{t-1}
               + \gamma \odot u_t) \\
        q_t &= \phi(r \sin(e^\theta) \odot p_{t-1} + r \cos(e^\theta) \odot q_{t-1}
               + \gamma \odot v_t)

    The output is :math:`[p_t, q_t]`, of shape (2 P,) or (B, 2 P). The paper's linear unit is
    ``activation=lambda x: x`` with a function of the output after it.

    Parameters
    ----------
    in_size : int
        Number of input features I.
    d_hidden : int
        Number of units P; ``nu_log`` and ``theta_log`` have the shape (P,), ``W`` has (I, 2 P).
    activation : function or name in ``brainstate.nn``
        :math:`\phi`.
    r_min, r_max, max_phase : float
        Radii of the ring in which :math:`r e^{i \exp(\theta)}` is uniform at first, and the largest
        angle.
    w_init : initializer or array
        Weight of W; an initializer is called for each half by itself.
    state_init : initializer, array or float
        First value of both states, ``p`` and ``q``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import RTUCell
    >>> cell = RTUCell(3, 8)
    >>> cell.init_state(batch_size=2)
    >>> cell(jnp.ones((2, 3))).shape, cell.p.value.shape
    ((2, 16), (2, 8))
    """

    state_names = ('p', 'q')
    plain_input = True

    def __init__(
        self,
        in_size: Size,
        d_hidden: Size,
        activation: str | Callable = 'relu',
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 6.28,
        w_init: Init = XAVIER,
        state_init: Init = ZERO,
        name: str | None = None,
    ):
        super().__init__(in_size, d_hidden, state_init, name)
        self.activation = activation_of(activation, 'RTUCell')
        nu_log, theta_log, _ = self._ring(r_min, r_max, max_phase)
        self.nu_log, self.theta_log = parameter(nu_log), parameter(theta_log)
        w_init = side_by_side(w_init, 2)
        self.W = Linear(self.num_in, self.num_out, w_init=w_init, b_init=None)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        rate = element_wise(self.nu_log.value, jnp.exp)
        angle = element_wise(self.theta_log.value, jnp.exp)
        decay, scale = jnp.exp(-rate), jnp.sqrt(-jnp.expm1(-2 * rate))
        u, v = jnp.split(self.W(x), 2, axis=-1)
        p, q = turned(decay, angle, states)
        p, q = self.activation(p + scale * u), self.activation(q + scale * v)
        return jnp.concatenate([p, q], axis=-1), (p, q)
