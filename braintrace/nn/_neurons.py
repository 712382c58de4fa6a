"""Spiking neurons: each unit by itself, with units of measurement if they are given them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import saiunit as u

from .._signatures import refuses
from ..errors import OptionError
from ._arguments import ZERO, Init, Size
from ._constants import POSITIVE, REAL, Constants, Learn, above, part_of
from ._neuron import Neuron, filled
from ._time import decay, in_unit, known, one_clock, steps_of

BRAINPY = {'V_initializer': 'It is called V_init.', 'size': 'It is called in_size.'}


def leaked(value: Any, goal: Any, left: Any) -> Any:
    """One step of exponential Euler towards ``goal``."""
    return goal + (value - goal) * left


class IF(Neuron):
    r"""Integrate-and-fire units (Lapicque, 1907; Gerstner et al., *Neuronal Dynamics*, 2014,
    section 1.3, without a leak).

    .. math:: V_t = \hat V_{t-1} + \frac{\Delta t}{\tau} R\,x_t \qquad
        s_t = \Theta\left(\frac{V_t - V_{th}}{V_{th} - V_{reset}}\right)

    :math:`\hat V` is V after the reset of :class:`LIF`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import IF
    >>> units = IF(4)
    >>> units.init_state()
    >>> [float(units(0.6 * jnp.ones(4))[0]) for _ in range(4)]
    [0.0, 1.0, 0.0, 1.0]
    """

    constants = Constants({'tau': POSITIVE, 'R': REAL, 'V_reset': REAL, 'V_th': above('V_reset')})

    @refuses('IF', **BRAINPY)
    def __init__(
        self,
        in_size: Size,
        tau: Any = 1.0,
        *,
        R: Any = 1.0,
        V_th: Any = 1.0,
        V_reset: Any = 0.0,
        tau_ref: Any = None,
        spk_fun: str | Callable = 'triangle',
        spk_reset: Literal['soft', 'hard'] = 'soft',
        V_init: Init | None = None,
        learn: Learn = (),
        name: str | None = None,
    ):
        super().__init__(in_size, V_th, V_reset, R, tau_ref, spk_fun, spk_reset, name)
        self.tau = self._time('tau', tau)
        one_clock(self._owner, tau=self.tau, tau_ref=self.tau_ref)
        first = self.V_reset if V_init is None else V_init
        self._set_states(learn, V=self._first('V_init', first))

    def _threshold(self, states: tuple) -> Any:
        return self.V_th

    def moved(self, x: Any, spikes: Any, states: tuple) -> tuple:
        return (states[0] + steps_of('IF', 'tau', self.tau) * self._driven(x),)


class LIF(Neuron):
    r"""Leaky integrate-and-fire units (Gerstner et al., *Neuronal Dynamics*, 2014),
    integrated exactly over a step with constant input.

    .. math::
        \hat V_{t-1} = V_{t-1} - (V_{th} - V_{reset})\, s_{t-1} \quad\text{(soft reset), or}\quad
        V_{t-1} - (V_{t-1} - V_{reset})\, s_{t-1} \quad\text{(hard)}

    .. math::
        V_t = V_{rest} + (\hat V_{t-1} - V_{rest})\, e^{-\Delta t / \tau}
        + (1 - e^{-\Delta t / \tau})\, R\,x_t \qquad
        s_t = \Theta\left(\frac{V_t - V_{th}}{V_{th} - V_{reset}}\right)

    So V holds the value before the reset, and the spikes are always made of it: :meth:`get_spike`
    gives those of the last step, for recurrent weights and losses. The derivative is that of these
    formulas, with the slope of ``spk_fun`` for that of :math:`\Theta`; no factor of a reset is held
    constant.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp, saiunit as u
    >>> from braintrace.nn import LIF
    >>> units = LIF(100)
    >>> units.init_state(batch_size=2)
    >>> units(jnp.ones((2, 100))).shape, units.get_spike().shape
    ((2, 100), (2, 100))
    >>> volts = {'V_th': -50 * u.mV, 'V_rest': -65 * u.mV, 'V_reset': -60 * u.mV}
    >>> cells = LIF(4, 10 * u.ms, R=20 * u.Mohm, tau_ref=2 * u.ms, **volts)
    >>> cells.init_state()
    >>> with brainstate.environ.context(dt=1 * u.ms):
    ...     spikes = cells(8 * u.nA * jnp.ones(4))
    >>> [float(spike) for spike in spikes], cells.V.value.unit
    ([1.0, 1.0, 1.0, 1.0], Unit("mV"))
    """

    constants = Constants({**IF.constants, 'V_rest': REAL})

    @refuses('LIF', **BRAINPY)
    def __init__(
        self,
        in_size: Size,
        tau: Any = 20.0,
        *,
        R: Any = 1.0,
        V_th: Any = 1.0,
        V_rest: Any = 0.0,
        V_reset: Any = 0.0,
        tau_ref: Any = None,
        spk_fun: str | Callable = 'triangle',
        spk_reset: Literal['soft', 'hard'] = 'soft',
        V_init: Init | None = None,
        learn: Learn = (),
        name: str | None = None,
    ):
        super().__init__(in_size, V_th, V_reset, R, tau_ref, spk_fun, spk_reset, name)
        self.tau = self._time('tau', tau)
        one_clock(self._owner, tau=self.tau, tau_ref=self.tau_ref)
        self.V_rest = self._potential('V_rest', V_rest)
        first = self.V_rest if V_init is None else V_init
        self._set_states(learn, V=self._first('V_init', first))

    def _threshold(self, states: tuple) -> Any:
        return self.V_th

    def moved(self, x: Any, spikes: Any, states: tuple) -> tuple:
        goal = self.V_rest + self._driven(x)
        return (leaked(states[0], goal, decay('LIF', 'tau', self.tau)),)


class ALIF(Neuron):
    r"""Leaky integrate-and-fire units with an adaptive threshold (Bellec et al., 2020, Nature
    Communications 11:3625, eqs. 6 to 8).

    .. math::
        a_t = e^{-\Delta t / \tau_a}\, a_{t-1} + s_{t-1} \qquad
        s_t = \Theta\left(\frac{V_t - (V_{th} + \beta\, a_t)}{V_{th} - V_{reset}}\right)

    V moves, and is reset, as in :class:`LIF`; the soft reset takes off :math:`V_{th} - V_{reset}`,
    without the adaptation. V and a are one group of states.

    Parameters
    ----------
    tau_a : float, Quantity or array
        Time constant of the adaptation.
    beta : float, Quantity or array
        What one spike adds to the threshold, in the unit of V.

    Attributes
    ----------
    V, a : brainstate.HiddenState
        The potential, and the adaptation, a plain number that starts at 0.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import ALIF
    >>> units = ALIF(4, tau=1.0, beta=1.0)
    >>> units.init_state()
    >>> [float(units(3 * jnp.ones(4))[0]) for _ in range(6)]
    [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    """

    constants = Constants({**LIF.constants, 'tau_a': POSITIVE, 'beta': REAL})

    @refuses('ALIF', **BRAINPY)
    def __init__(
        self,
        in_size: Size,
        tau: Any = 20.0,
        tau_a: Any = 200.0,
        beta: Any = 0.1,
        *,
        R: Any = 1.0,
        V_th: Any = 1.0,
        V_rest: Any = 0.0,
        V_reset: Any = 0.0,
        tau_ref: Any = None,
        spk_fun: str | Callable = 'triangle',
        spk_reset: Literal['soft', 'hard'] = 'soft',
        V_init: Init | None = None,
        learn: Learn = (),
        name: str | None = None,
    ):
        super().__init__(in_size, V_th, V_reset, R, tau_ref, spk_fun, spk_reset, name)
        self.tau, self.tau_a = self._time('tau', tau), self._time('tau_a', tau_a)
        one_clock('ALIF', tau=self.tau, tau_a=self.tau_a, tau_ref=self.tau_ref)
        self.V_rest = self._potential('V_rest', V_rest)
        self.beta = self._potential('beta', beta)
        first = self.V_rest if V_init is None else V_init
        self._set_states(learn, V=self._first('V_init', first), a=ZERO)

    def _threshold(self, states: tuple) -> Any:
        return self.V_th + self.beta * states[1]

    def moved(self, x: Any, spikes: Any, states: tuple) -> tuple:
        V, a = states[:2]
        goal = self.V_rest + self._driven(x)
        left = decay('ALIF', 'tau_a', self.tau_a)
        return leaked(V, goal, decay('ALIF', 'tau', self.tau)), left * a + spikes


class AdLIF(Neuron):
    r"""Leaky integrate-and-fire units with an adaptation current that reads the potential and the
    spikes (adLIF; Bittar and Garner, 2022, Frontiers in Neuroscience 16:865897), by the symplectic
    Euler method (SE-adLIF; Baronig et al., 2025, arXiv:2408.07517).

    .. math::
        w_{t-1} &= e^{-\Delta t / \tau_w}\, w_{t-2} + (1 - e^{-\Delta t / \tau_w})\,
            \bigl(a\,(\hat V_{t-1} - V_{rest}) + b\, s_{t-1}\bigr) \\
        V_t &= V_{rest} + (\hat V_{t-1} - V_{rest})\, e^{-\Delta t / \tau}
            + (1 - e^{-\Delta t / \tau})\, (R\,x_t - w_{t-1}) \qquad
        s_t = \Theta\left(\frac{V_t - V_{th}}{V_{th} - V_{reset}}\right)

    :math:`\hat V` is V after the reset of :class:`LIF`, which is hard in the paper. The adaptation
    reads the potential of its own step, not that of the step before, which is stable for more
    values of a. Each step begins with it, so the state w holds the value of one step before V. V
    and w are one group of states.

    Parameters
    ----------
    tau_w : float, Quantity or array
        Time constant of the adaptation.
    a : float or array
        What the potential adds to the current: without spikes V goes to :math:`V_{rest} + R x / (1
        + a)`.
    b : float, Quantity or array
        What a spike adds to it, times :math:`1 - e^{-\Delta t / \tau_w}`, in the unit of V.

    Attributes
    ----------
    V, w : brainstate.HiddenState
        The potential, and R times the adaptation current, which starts at 0, in the unit of V.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import AdLIF
    >>> units = AdLIF(4, tau=1.0, tau_w=5.0, b=8.0)
    >>> units.init_state()
    >>> [float(units(3 * jnp.ones(4))[0]) for _ in range(6)]
    [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    """

    constants = Constants({**LIF.constants, 'tau_w': POSITIVE, 'a': REAL, 'b': REAL})

    @refuses('AdLIF', **BRAINPY)
    def __init__(
        self,
        in_size: Size,
        tau: Any = 20.0,
        tau_w: Any = 200.0,
        a: Any = 1.0,
        b: Any = 20.0,
        *,
        R: Any = 1.0,
        V_th: Any = 1.0,
        V_rest: Any = 0.0,
        V_reset: Any = 0.0,
        tau_ref: Any = None,
        spk_fun: str | Callable = 'triangle',
        spk_reset: Literal['soft', 'hard'] = 'hard',
        V_init: Init | None = None,
        learn: Learn = (),
        name: str | None = None,
    ):
        super().__init__(in_size, V_th, V_reset, R, tau_ref, spk_fun, spk_reset, name)
        self.tau, self.tau_w = self._time('tau', tau), self._time('tau_w', tau_w)
        one_clock('AdLIF', tau=self.tau, tau_w=self.tau_w, tau_ref=self.tau_ref)
        self.V_rest = self._potential('V_rest', V_rest)
        self.a, self.b = self._unitless('a', a), self._potential('b', b)
        first = self.V_rest if V_init is None else V_init
        self._set_states(learn, V=self._first('V_init', first), w=filled(0 * self.b))

    def _threshold(self, states: tuple) -> Any:
        return self.V_th

    def moved(self, x: Any, spikes: Any, states: tuple) -> tuple:
        V, w = states[:2]
        goal = self.a * (V - self.V_rest) + self.b * spikes
        w = leaked(w, goal, decay('AdLIF', 'tau_w', self.tau_w))
        goal = self.V_rest + self._driven(x) - w
        return leaked(V, goal, decay('AdLIF', 'tau', self.tau)), w


class BRF(Neuron):
    r"""Balanced resonate-and-fire units (Higuchi et al., 2024, ICML, arXiv:2402.14603).

    .. math::
        q_t &= e^{-\Delta t / \tau_q}\, q_{t-1} + s_{t-1} \qquad
        b_t = p(\omega) - b - q_t \qquad
        p(\omega) = \frac{\sqrt{1 - (\delta\omega)^2} - 1}{\delta} \\
        z_t &= z_{t-1} + \delta\, \bigl((b_t + i\,\omega)\, z_{t-1} + R\,x_t\bigr) \qquad
        \delta = \frac{\Delta t}{\tau} \\
        s_t &= \Theta\left(\frac{\mathrm{Re}(z_t)}{V_{th}} - 1 - q_t\right)

    The damping :math:`p(\omega)` is that with which an Euler step neither grows nor shrinks, so the
    units are stable for each b above 0. A spike raises the threshold and the damping for a while
    (q) and resets nothing. The complex z is the two real states ``V`` and ``V_im``; all three are
    one group.

    Parameters
    ----------
    omega : float or array
        Angle by which z turns in the time ``tau``; :math:`\delta\omega` is below 1, and stays so
        where it learns.
    b : float or array
        Damping in the time ``tau``, above what keeps the size of z.
    tau : float, Quantity or array
        The unit of time of the equations; the paper's step :math:`\delta = 0.01` is ``tau=100``.
    tau_q : float, Quantity or array
        Time constant of q; the paper's decay of 0.9 a step is 9.5 steps.
    V_th : float, Quantity or array
        The threshold at q = 0, above 0, plain or in volts.

    Attributes
    ----------
    V, V_im, q : brainstate.HiddenState
        Real and imaginary part of z, and the plain number q, which starts at 0 as V_im does.

    Raises
    ------
    OptionError
        A size, a shape of an argument or ``spk_fun`` is wrong, a number is not finite, the
        threshold is not above 0, or a step turns z too far.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import BRF
    >>> units = BRF(4, omega=jnp.array([2.0, 5.0, 8.0, 11.0]), b=0.1, tau=20.0)
    >>> units.init_state()
    >>> sum(units(jnp.full(4, jnp.cos(5 / 20 * t))) for t in range(100))
    Array([0., 3., 0., 0.], dtype=float32)
    """

    resets = False
    constants = Constants(
        {
            **dict.fromkeys(('tau', 'tau_q', 'b'), POSITIVE),
            'R': REAL,
            'V_th': above('V_reset'),
            'omega': part_of('_fastest'),
        }
    )

    @refuses('BRF', **BRAINPY)
    def __init__(
        self,
        in_size: Size,
        omega: Any = 10.0,
        b: Any = 1.0,
        tau: Any = 100.0,
        tau_q: Any = 9.5,
        *,
        R: Any = 1.0,
        V_th: Any = 1.0,
        spk_fun: str | Callable = 'triangle',
        V_init: Init | None = None,
        learn: Learn = (),
        name: str | None = None,
    ):
        super().__init__(in_size, V_th, 0 * u.get_unit(V_th), R, None, spk_fun, 'soft', name)
        self.tau, self.tau_q = self._time('tau', tau), self._time('tau_q', tau_q)
        one_clock('BRF', tau=self.tau, tau_q=self.tau_q)
        self.omega, self.b = self._unitless('omega', omega), self._unitless('b', b)
        first = self._first('V_init', self.V_reset if V_init is None else V_init)
        self._set_states(learn, V=first, V_im=filled(self.V_reset), q=ZERO)

    @property
    def _fastest(self) -> Any:
        """The omega of which one step turns z too far."""
        return 1 / steps_of('BRF', 'tau', self.tau)

    def _threshold(self, states: tuple) -> Any:
        return self.V_th * (1 + states[2])

    def moved(self, x: Any, spikes: Any, states: tuple) -> tuple:
        V, V_im, q = states
        q = decay('BRF', 'tau_q', self.tau_q) * q + spikes
        part = steps_of('BRF', 'tau', self.tau)
        turn = part * self.omega
        kept = balanced(turn) - part * (self.b + q)
        V, V_im = kept * V - turn * V_im + part * self._driven(x), turn * V + kept * V_im
        return V, V_im, q


def balanced(turn: Any) -> Any:
    """The real part of the factor of an Euler step that turns a complex number, and keeps its
    size.
    """
    values = known(turn)
    if values is not None and not np.all(np.abs(values) < 1):
        raise OptionError(
            f'BRF: omega * dt / tau is {turn}; no damping keeps the size of z where it is 1 or '
            'more. Give a smaller omega, or a longer tau.'
        )
    return u.math.sqrt(1 - turn**2)


class GIF(Neuron):
    r"""Generalised linear integrate-and-fire units (Mihalas and Niebur, 2009, Neural Computation
    21:704, eqs. 2.1 and 2.2).

    .. math::
        \frac{dI_j}{dt} = -k_j I_j \qquad
        \tau \frac{dV}{dt} = -(V - V_{rest}) + R\,(x + I_1 + I_2) \qquad
        \frac{d\theta}{dt} = a\,(V - V_{rest}) - b\,(\theta - \theta_\infty)

    .. math::
        s_{t-1} = 1:\quad I_j \leftarrow R_j I_j + A_j \qquad V \leftarrow V_{reset} \qquad
        \theta \leftarrow \max(\theta_{reset}, \theta)

    Each step first applies the jumps of the last step's spikes, then moves each state on by
    exponential Euler, the others held at their values after the jumps. A unit fires where V is
    above :math:`\theta`; its distance is measured in :math:`\theta_\infty - V_{reset}`. All four
    states are one group.

    Parameters
    ----------
    V_th_inf, V_th_reset : float, Quantity or array
        :math:`\theta_\infty` and :math:`\theta_{reset}`.
    a, b, k1, k2 : float, Quantity or array
        Rates, for each step or for each time (``0.2 / saiunit.ms``); b, k1 and k2 are above 0. The
        defaults of b, k1 and k2 are those of the paper for steps of 1 ms.
    R1, R2 : float or array
        What a spike leaves of a current.
    A1, A2 : float, Quantity or array
        What a spike adds to it, in the unit of x; a plain 0 takes that of V over that of R.

    Attributes
    ----------
    V, V_th, I1, I2 : brainstate.HiddenState
        The potential, the threshold :math:`\theta`, which starts at ``V_th_inf``, and the currents,
        which start at 0, in the unit of A1.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import GIF
    >>> units = GIF(4, tau=1.0, A2=-2.0)
    >>> units.init_state()
    >>> [float(units(2 * jnp.ones(4))[0]) for _ in range(6)]
    [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """

    top = 'V_th_inf'
    constants = Constants(
        {
            **dict.fromkeys(('tau', 'b', 'k1', 'k2'), POSITIVE),
            **dict.fromkeys(('R', 'V_rest', 'V_reset', 'V_th_reset'), REAL),
            **dict.fromkeys(('a', 'R1', 'R2', 'A1', 'A2'), REAL),
            'V_th_inf': above('V_reset'),
        }
    )

    @refuses('GIF', **BRAINPY)
    def __init__(
        self,
        in_size: Size,
        tau: Any = 20.0,
        *,
        R: Any = 1.0,
        V_th_inf: Any = 1.0,
        V_th_reset: Any = 0.5,
        V_rest: Any = 0.0,
        V_reset: Any = 0.0,
        a: Any = 0.0,
        b: Any = 0.01,
        k1: Any = 0.2,
        k2: Any = 0.02,
        R1: Any = 0.0,
        R2: Any = 1.0,
        A1: Any = 0.0,
        A2: Any = 0.0,
        tau_ref: Any = None,
        spk_fun: str | Callable = 'triangle',
        spk_reset: Literal['soft', 'hard'] = 'hard',
        V_init: Init | None = None,
        learn: Learn = (),
        name: str | None = None,
    ):
        super().__init__(in_size, V_th_inf, V_reset, R, tau_ref, spk_fun, spk_reset, name)
        self.tau, self.V_rest = self._time('tau', tau), self._potential('V_rest', V_rest)
        self.V_th_reset = self._potential('V_th_reset', V_th_reset)
        self.b, self.k1, self.k2 = self._rate('b', b), self._rate('k1', k1), self._rate('k2', k2)
        self.a = self._parameter('a', a)
        rates = {'1 / b': 1 / self.b, '1 / k1': 1 / self.k1, '1 / k2': 1 / self.k2}
        one_clock('GIF', tau=self.tau, tau_ref=self.tau_ref, **rates)
        self._unitless('a / b', self.a / self.b)
        self.R1, self.R2 = self._unitless('R1', R1), self._unitless('R2', R2)
        self.A1 = self._current('A1', A1)
        self.A2 = in_unit(self._current('A2', A2), u.get_unit(self.A1))
        first = self.V_rest if V_init is None else V_init
        self._set_states(
            learn,
            V=self._first('V_init', first),
            V_th=filled(self.V_th_inf),
            I1=filled(0 * self.A1),
            I2=filled(0 * self.A2),
        )

    def _threshold(self, states: tuple) -> Any:
        return states[1]

    def moved(self, x: Any, spikes: Any, states: tuple) -> tuple:
        V, V_th, *currents = states[:4]
        jumps = (self.R1, self.A1), (self.R2, self.A2)
        currents = [
            I + spikes * ((kept - 1) * I + added) for I, (kept, added) in zip(currents, jumps)
        ]
        V_th = V_th + spikes * (u.math.maximum(self.V_th_reset, V_th) - V_th)
        goal = self.V_rest + self._driven(x) + sum(self._driven(I) for I in currents)
        goal_th = self.V_th_inf + u.maybe_decimal(self.a / self.b) * (V - self.V_rest)
        th, *left = (
            decay('GIF', f'1/{name}', 1 / getattr(self, name)) for name in ('b', 'k1', 'k2')
        )
        return (
            leaked(V, goal, decay('GIF', 'tau', self.tau)),
            leaked(V_th, goal_th, th),
            left[0] * currents[0],
            left[1] * currents[1],
        )
