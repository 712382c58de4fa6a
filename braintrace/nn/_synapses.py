"""Synapses: what a presynaptic spike leaves at its target, and the current that it drives there."""

from __future__ import annotations

from typing import Any

import brainstate
import numpy as np
import saiunit as u

from .._signatures import refuses
from ..errors import EtpShapeError, EtpUnitError, OptionError, StructureError
from ._arguments import ZERO, Init, Size, axes
from ._base import StatefulLayer
from ._constants import POSITIVE, REAL, SHARE, Constants, HasConstants, Learn, part_of
from ._neuron import filled
from ._time import check_time, decay, in_words, numbers, one_clock, plain


class Synapse(StatefulLayer):
    """A population of synapses, each of which keeps its own states: no position reads another."""

    shared_docs = """
    Parameters
    ----------
    in_size : int or sequence of int
        Number of synapses, or the shape of the population.

    Raises
    ------
    EtpShapeError, EtpDtypeError, StructureError
        The input is no array of shape ``in_size`` or ``(B, *in_size)``, or does not fit the states.
    """

    def __init__(self, in_size: Size, name: str | None, **first: Init):
        super().__init__(name=name)
        self.in_size = self.out_size = axes(in_size, f'{self._owner}: in_size')
        self.first_values = {state: (value, self.in_size) for state, value in first.items()}

    def _time(self, name: str, tau: Any) -> Any:
        return check_time(self._owner, name, tau, self.in_size)

    def _left(self, name: str) -> Any:
        return decay(self._owner, name, getattr(self, name))

    def _check_unit(self, x: Any, g: Any) -> None:
        if u.get_dim(x) != u.get_dim(g):
            raise EtpUnitError(
                f'{self._owner}: the input has the unit {u.get_unit(x)} and the synapse '
                f'{u.get_unit(g)}. Give g_init the unit of the input (0 * saiunit.mS for a '
                'conductance, 0 * saiunit.mA for a current), or the weights before the '
                'synapse its unit.'
            )


class Expon(Synapse):
    r"""Synapses that decay exponentially (Gerstner et al., 2014, Neuronal Dynamics, chapter 3).

    .. math:: g_t = e^{-\Delta t / \tau}\, g_{t-1} + x_t

    After an op, g has the op's trace; D_RTRL is exact for the op if nothing before it reads
    the synapses' target.

    Parameters
    ----------
    tau : float, Quantity or array of one for each synapse
        Time constant. A plain number counts steps (:math:`\Delta t = 1`); a time, such as ``5 *
        saiunit.ms``, is measured against ``brainstate.environ.get_dt()`` at each update.
    g_init : initializer, array, float or Quantity
        First value of the state ``g``; its unit is that of x.

    Raises
    ------
    OptionError
        ``tau`` is not positive, or has another shape.
    EtpUnitError
        ``tau`` is no time, ``dt`` is not set, or x has another unit than g.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp, saiunit as u
    >>> from braintrace.nn import Expon
    >>> synapses = Expon(3, tau=5 * u.ms, g_init=0 * u.mS)
    >>> synapses.init_state(batch_size=2)
    >>> with brainstate.environ.context(dt=1 * u.ms):
    ...     g = synapses(jnp.ones((2, 3)) * u.mS)
    >>> g.shape, u.get_unit(g)
    ((2, 3), Unit("mS"))
    """

    constants = Constants({'tau': POSITIVE})

    @refuses('Expon', g_initializer='It is called g_init.')
    def __init__(
        self,
        in_size: Size,
        tau: Any = 8.0,
        g_init: Init = ZERO,
        name: str | None = None,
        *,
        learn: Learn = (),
    ):
        super().__init__(in_size, name, g=g_init)
        self.tau = self._time('tau', tau)
        self.let_learn(learn, self.in_size)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        self._check_unit(x, states[0])
        g = self._left('tau') * states[0] + x
        return g, (g,)


class DualExpon(Synapse):
    r"""Synapses that rise and decay: the difference of two exponentials (Roth & van Rossum, 2009,
    "Modeling synapses"; Gerstner et al., 2014, Neuronal Dynamics, chapter 3).

    .. math::
        d_t &= e^{-\Delta t / \tau_d}\, d_{t-1} + x_t \qquad
        r_t = e^{-\Delta t / \tau_r}\, r_{t-1} + x_t \\
        g_t &= (d_t - r_t)\, /\, (q^{q / (1 - q)} - q^{1 / (1 - q)}) \qquad q = \tau_r / \tau_d

    The divisor makes the highest conductance after one x of 1 equal to 1. In the step in which x
    arrives, it has no effect on g yet. The states ``g_decay`` (d) and ``g_rise`` (r) are traced.

    Parameters
    ----------
    tau_decay, tau_rise : float, Quantity or array of one for each synapse
        Time constants, both in steps or both in units of time (see :class:`Expon`); the rise is
        the faster one.
    g_init : initializer, array, float or Quantity
        First value of both states; its unit is that of x.

    Raises
    ------
    OptionError
        A time constant is not positive or has another shape, or the rise is not the faster one.
    EtpUnitError
        A time constant is no time, one counts steps and the other has a unit, ``dt`` is not set,
        or x has another unit than the states.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import DualExpon
    >>> synapses = DualExpon(1, tau_decay=10., tau_rise=5.)
    >>> synapses.init_state()
    >>> trace = [float(synapses(jnp.array([float(t == 0)]))[0]) for t in range(20)]
    >>> trace.index(max(trace)), round(max(trace), 3)
    (7, 1.0)
    """

    constants = Constants({'tau_decay': POSITIVE, 'tau_rise': part_of('tau_decay')})

    @refuses('DualExpon', g_initializer='It is called g_init.')
    def __init__(
        self,
        in_size: Size,
        tau_decay: Any = 10.0,
        tau_rise: Any = 1.0,
        g_init: Init = ZERO,
        name: str | None = None,
        *,
        learn: Learn = (),
    ):
        super().__init__(in_size, name, g_decay=g_init, g_rise=g_init)
        self.tau_decay = self._time('tau_decay', tau_decay)
        self.tau_rise = self._time('tau_rise', tau_rise)
        one_clock('DualExpon', tau_decay=self.tau_decay, tau_rise=self.tau_rise)
        if not np.all(u.maybe_decimal(self.tau_rise / self.tau_decay) < 1):
            raise OptionError(
                f'DualExpon: tau_rise is {in_words(tau_rise)} and tau_decay '
                f'{in_words(tau_decay)}; the rise is faster than the decay. Expon has one time '
                'constant.'
            )
        self.let_learn(learn, self.in_size)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        self._check_unit(x, states[0])
        d = self._left('tau_decay') * states[0] + x
        r = self._left('tau_rise') * states[1] + x
        q = u.maybe_decimal(self.tau_rise / self.tau_decay)
        return (d - r) / (q ** (q / (1 - q)) - q ** (1 / (1 - q))), (d, r)


class STP(Synapse):
    r"""Short-term plasticity: spikes facilitate and deplete their own synapses (Tsodyks, Pawelzik &
    Markram, 1998, Neural Computation 10:821).

    .. math::
        \hat u_t &= e^{-\Delta t / \tau_f}\, u_{t-1} \qquad
        \hat x_t = 1 - e^{-\Delta t / \tau_d}\, (1 - x_{t-1}) \\
        u_t &= \hat u_t + U\,(1 - \hat u_t)\, s_t \qquad
        x_t = \hat x_t\,(1 - u_t\, s_t) \qquad y_t = u_t\, \hat x_t\, s_t

    The spikes s become the weighted spikes y, which the next weights read. The states are at
    the presynaptic positions: what is trained before the spikes has its trace there, together
    with the neurons that fire; the next weights need no trace at u and x, which they do not move.

    Parameters
    ----------
    U : float or array of one for each unit
        Part of the resources that the first spike uses, between 0 and 1.
    tau_f : float, Quantity, array of one for each unit, or None
        Time constant of facilitation (see :class:`Expon`). ``None``: :math:`u_t = U`, so there is
        depression only, and no state ``u``.
    tau_d : float, Quantity or array of one for each unit
        Time constant of the recovery from depression.

    Raises
    ------
    OptionError
        A time constant is not positive or has another shape, or U is not in (0, 1].
    EtpUnitError
        A time constant is no time, ``dt`` is not set, or U or the spikes have a unit.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.nn import STP
    >>> plasticity = STP(1, U=0.5, tau_f=None, tau_d=100.)
    >>> plasticity.init_state()
    >>> [round(float(plasticity(jnp.ones(1))[0]), 3) for _ in range(3)]
    [0.5, 0.252, 0.13]
    """

    constants = Constants({'U': SHARE, 'tau_f': POSITIVE, 'tau_d': POSITIVE})

    def __init__(
        self,
        in_size: Size,
        U: Any = 0.15,
        tau_f: Any = 1500.0,
        tau_d: Any = 200.0,
        name: str | None = None,
        *,
        learn: Learn = (),
    ):
        use = {} if tau_f is None else {'u': ZERO}
        super().__init__(in_size, name, x=filled(1.0), **use)
        self.U = plain('STP', 'U', U, self.in_size)
        self.tau_d = self._time('tau_d', tau_d)
        if not (np.all(self.U > 0) and np.all(self.U <= 1)):
            raise OptionError(f'STP: U is {U}; it is a part of the resources, in (0, 1].')
        self.tau_f = None if tau_f is None else self._time('tau_f', tau_f)
        one_clock('STP', tau_f=self.tau_f, tau_d=self.tau_d)
        self.let_learn(learn, self.in_size)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        """The formula above; here ``x`` are the spikes."""
        if not u.get_dim(x).is_dimensionless:
            raise EtpUnitError(
                f'STP: the spikes have the unit {u.get_unit(x)}; it belongs before the '
                'weights and reads plain numbers.'
            )
        resources, *use = states
        resources = 1 - self._left('tau_d') * (1 - resources)
        use = [self._left('tau_f') * old for old in use]
        use = [left + self.U * (1 - left) * x for left in use]
        output = (use[0] if use else self.U) * resources * x
        return output, (resources - output, *use)


class Output(HasConstants, brainstate.nn.Module):
    """What makes a current of the state g of a synapse; it has no states."""

    def _let_learn(self, learn: Learn) -> None:
        """Let the number learn, one for each target."""
        for name in self.learning(learn):
            if not np.shape(value := getattr(self, name)):
                raise OptionError(
                    f'{type(self).__name__}: {name} is {value} and learns; give an array of one '
                    'for each target, whose number this module does not know.'
                )
            self.let_learn((name,), np.shape(value))

    def _of_targets(self, name: str, g: Any) -> Any:
        """A number of this module, if it is one for all targets or one for each."""
        value = getattr(self, name)
        if np.shape(value) not in ((), np.shape(g), np.shape(g)[1:]):
            raise EtpShapeError(
                f'{type(self).__name__}: {name} has shape {np.shape(value)} and the conductance '
                f'{np.shape(g)}; give one number, or an array of one for each target.'
            )
        return value if np.shape(value) in ((), np.shape(g)) else value[None]


class CUBA(Output):
    r"""The current of synapses that do not read the potential of their target.

    .. math:: I_t = s\, g_t

    Parameters
    ----------
    scale : float, Quantity, unit, or array of one for each target
        s; its unit times that of g is a current's (``saiunit.volt`` for a conductance).

    Raises
    ------
    OptionError
        ``scale`` is no finite number.
    EtpShapeError
        ``scale`` has another shape than the targets.

    Examples
    --------
    >>> import jax.numpy as jnp, saiunit as u
    >>> from braintrace.nn import CUBA
    >>> CUBA(2.0 * u.mV)(jnp.ones(3) * u.mS).to(u.uA).mantissa.tolist()
    [2.0, 2.0, 2.0]
    """

    constants = Constants({'scale': REAL})

    def __init__(self, scale: Any = 1.0, name: str | None = None, *, learn: Learn = ()):
        super().__init__(name=name)
        self.scale = scale if isinstance(scale, u.Unit) else numbers('CUBA', 'scale', scale, None)
        self._let_learn(learn)

    def update(self, g: Any, V: Any = None) -> Any:
        """The current, of the shape of ``g``; ``V`` is not read."""
        return g * (self.scale if isinstance(self.scale, u.Unit) else self._of_targets('scale', g))


class COBA(Output):
    r"""The current of conductance-based synapses (Gerstner et al., 2014, Neuronal Dynamics, chapter
    3).

    .. math:: I_t = g_t\,(E - V_{t-1})

    Parameters
    ----------
    E : float, Quantity, or array of one for each target
        Reversal potential, in the unit of V.

    Raises
    ------
    OptionError
        E is no finite number.
    StructureError
        No potential is given.
    EtpShapeError
        V and g have different shapes, or E has another one than the targets.
    EtpUnitError
        V and E have units of different kinds.

    Examples
    --------
    >>> import jax.numpy as jnp, saiunit as u
    >>> from braintrace.nn import COBA
    >>> I = COBA(E=0 * u.mV)(jnp.array([2.0]) * u.nS, jnp.array([-60.0]) * u.mV)
    >>> I.to(u.pA).mantissa.tolist()
    [120.0]
    """

    constants = Constants({'E': REAL})

    def __init__(self, E: Any, name: str | None = None, *, learn: Learn = ()):
        super().__init__(name=name)
        self.E = numbers('COBA', 'E', E, None)
        self._let_learn(learn)

    def update(self, g: Any, V: Any = None) -> Any:
        """The current, of the shape of ``g`` and ``V``."""
        if V is None:
            raise StructureError(
                'COBA: no potential is given, but the current of a conductance reads it. Call the '
                'projection with spikes and potential: proj(spikes, neurons.V.value).'
            )
        if np.shape(V) != np.shape(g):
            raise EtpShapeError(
                f'COBA: the conductance has shape {np.shape(g)} and the potential {np.shape(V)}; '
                'give the potential of the units that the synapses lead to.'
            )
        if u.get_dim(V) != u.get_dim(self.E):
            raise EtpUnitError(
                f'COBA: E is {self.E} and the potential has the unit {u.get_unit(V)}. Give both in '
                'units of one kind.'
            )
        return g * (self._of_targets('E', g) - V)
