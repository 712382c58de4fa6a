"""Readouts with states of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import brainstate
import saiunit as u

from .._etrace_op import element_wise, matmul
from .._signatures import ShowsArguments
from ..errors import EtpUnitError
from ._arguments import KAIMING, ZERO, Init, Size, check_input, features, first_value
from ._base import RecurrentLayer
from ._constants import POSITIVE, Constants, Learn
from ._docs import Documented
from ._linear import Linear
from ._neurons import LIF
from ._time import check_time, decay


class FilteredReadout(RecurrentLayer):
    r"""A readout that integrates its input and leaks (Bellec et al., 2020, Nature Communications
    11:3625).

    .. math:: r_t = \lambda\, r_{t-1} + x_t\,W + b \qquad \lambda = e^{-\Delta t / \tau}

    It filters before its weights, which gives the same :math:`r_t` while W and b are constant:

    .. math::
        r_t = f_t\,W + g_t\,b \qquad f_t = \lambda\, f_{t-1} + x_t \qquad
        g_t = \lambda\, g_{t-1} + 1

    So :math:`f_t` reads each unit before it at that unit's own position. If x is the state of
    a recurrent layer, or its spikes, then f is one more state of that layer's group: the recurrent
    weights keep their history through r, and their trace has one more state. W and b need no trace,
    since they reach no state. A filter after the weights, as that of :class:`LeakyRateReadout`, is
    cut off from the layer before it.

    Parameters
    ----------
    in_size, out_size : int
        Number of input features I and of outputs O.
    tau : float or Quantity
        Time constant. A plain number counts steps (:math:`\Delta t = 1`); a time, such as ``5 *
        saiunit.ms``, is measured against ``brainstate.environ.get_dt()`` at each update.
    w_init : initializer or array
        Weight of shape (I, O).
    b_init : initializer, array or None
        Bias of shape (O,); left out by default.
    state_init : initializer, array or float
        First value of the state ``f`` of shape (I,), in the unit of x. The state ``g``, which a
        readout with a bias has, starts at 0.

    Raises
    ------
    OptionError
        ``tau`` is not one positive number.
    EtpUnitError
        ``tau`` has the unit of something other than time, the environment's ``dt`` has none or is
        not set, or the state has another unit than what is added to it.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp, saiunit as u
    >>> from braintrace.nn import FilteredReadout
    >>> readout = FilteredReadout(8, 3, tau=10 * u.ms)
    >>> readout.init_state(batch_size=2)
    >>> with brainstate.environ.context(dt=1 * u.ms):
    ...     readout(jnp.ones((2, 8))).shape
    (2, 3)
    """

    state_names = ('f',)
    constants = Constants({'tau': POSITIVE})

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        tau: Any = 5.0,
        w_init: Init = KAIMING,
        b_init: Init | None = None,
        state_init: Init = ZERO,
        name: str | None = None,
        *,
        learn: Learn = (),
    ):
        super().__init__(in_size, out_size, state_init, name)
        self.tau = check_time('FilteredReadout', 'tau', tau)
        self.W = Linear(in_size, out_size, w_init=w_init, b_init=b_init)
        self.first_values = {'f': (state_init, self.in_size)}
        if b_init is not None:
            self.first_values['g'] = (ZERO, (1,))
        self.let_learn(learn, ())

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        left, weight = decay('FilteredReadout', 'tau', self.tau), self.W.weight.value
        check_unit('FilteredReadout', 'f', 'state_init', states[0], x)
        f, *g = (left * state + new for state, new in zip(states, (x, 1)))
        r = matmul(f, weight['weight'])
        return r + g[0] * element_wise(weight['bias']) if g else r, (f, *g)


class LeakyRateReadout(RecurrentLayer):
    r"""A readout whose outputs leak (Bellec et al., 2020, Nature Communications 11:3625).

    .. math:: r_t = e^{-\Delta t / \tau}\, r_{t-1} + x_t\,W

    Its filter is after its weights, so the layer before reaches later losses only through
    the step at hand: what r remembers of that layer is in no trace of the layer's parameters, and
    a warning says so. :class:`FilteredReadout` has the same outputs and keeps this history, and so
    does ``braintrace.rules.e_prop('auto')``. The gradient of W is exact.

    Parameters
    ----------
    in_size, out_size : int
        Number of input features I and of outputs O.
    tau : Quantity, float or array of one for each output
        Time constant: a time, measured against ``brainstate.environ.get_dt()``, or a plain number
        of steps.
    w_init : initializer, array or number
        Weight W, of shape (I, O).
    r_init : initializer, array or float
        First value of the state r, of shape (O,), in the unit of ``x @ W``.

    Attributes
    ----------
    W : brainstate.ParamState
        The weight.
    r : brainstate.HiddenState
        The output, of shape (O,) or (B, O).

    Raises
    ------
    OptionError
        A size is not one positive int, ``tau`` is not positive, or ``tau`` or ``w_init`` has
        another shape.
    EtpUnitError
        ``tau`` is no time, the environment's ``dt`` is none or is not set, or r has another unit
        than ``x @ W``.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp, saiunit as u
    >>> from braintrace.nn import LeakyRateReadout
    >>> readout = LeakyRateReadout(8, 3, tau=10 * u.ms)
    >>> readout.init_state(batch_size=2)
    >>> with brainstate.environ.context(dt=1 * u.ms):
    ...     readout(jnp.ones((2, 8))).shape
    (2, 3)
    """

    state_names = ('r',)
    constants = Constants({'tau': POSITIVE})

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        tau: Any = 5.0 * u.ms,
        w_init: Init = KAIMING,
        r_init: Init = ZERO,
        name: str | None = None,
        *,
        learn: Learn = (),
    ):
        super().__init__(in_size, out_size, r_init, name)
        self.tau = check_time('LeakyRateReadout', 'tau', tau, self.out_size)
        weight = first_value('LeakyRateReadout', 'w_init', w_init, (self.num_in, self.num_out))
        self.W = brainstate.ParamState(weight)
        self.let_learn(learn, self.out_size)

    def transition(self, x: Any, states: tuple) -> tuple[Any, tuple]:
        left, new = decay('LeakyRateReadout', 'tau', self.tau), matmul(x, self.W.value)
        check_unit('LeakyRateReadout', 'r', 'r_init', states[0], new)
        r = left * states[0] + new
        return r, (r,)


class LeakySpikeReadout(Documented, ShowsArguments, brainstate.nn.Module):
    r"""Output units that spike: :class:`LIF` after weights.

    .. math:: s_t = \mathrm{LIF}(x_t\,W)

    What their potentials remember of the layer before is cut from its history, as in
    :class:`LeakyRateReadout`; the gradient of W is exact. A loss reads the spikes, or the
    potentials ``neuron.V.value``.

    Parameters
    ----------
    in_size, out_size : int
        Number of input features I and of outputs O.
    tau : Quantity or float
        Time constant: a time, measured against ``brainstate.environ.get_dt()``, or a plain number
        of steps.
    w_init : initializer, array or number
        Weight W, of shape (I, O).
    R, V_th, V_rest, V_reset, spk_fun, spk_reset, V_init, learn
        As those of :class:`LIF`.

    Attributes
    ----------
    W : brainstate.ParamState
        The weight.
    neuron : LIF
        The output units.

    Raises
    ------
    OptionError, EtpUnitError
        A size is not one positive int, or an argument is refused by :class:`LIF`.
    EtpShapeError, EtpDtypeError, StructureError
        The input is no array of shape (I,) or (B, I), or does not fit the states.

    Examples
    --------
    >>> import brainstate, jax.numpy as jnp
    >>> from braintrace.nn import LeakySpikeReadout
    >>> readout = LeakySpikeReadout(8, 3, tau=5.0, w_init=0.25)
    >>> _ = brainstate.nn.init_all_states(readout, batch_size=2)
    >>> [float(readout(jnp.ones((2, 8)))[0, 0]) for _ in range(4)]  # V goes to 8 * 0.25 * R
    [0.0, 0.0, 0.0, 1.0]
    >>> round(float(readout.neuron.V.value[0, 0]), 2)
    1.1
    """

    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        tau: Any = 5.0 * u.ms,
        w_init: Init = KAIMING,
        R: Any = 1.0,
        V_th: Any = 1.0,
        V_rest: Any = 0.0,
        V_reset: Any = 0.0,
        spk_fun: str | Callable = 'triangle',
        spk_reset: Literal['soft', 'hard'] = 'soft',
        V_init: Init | None = None,
        name: str | None = None,
        *,
        learn: Learn = (),
    ):
        super().__init__(name=name)
        num_in, num_out = (
            features(size, f'LeakySpikeReadout: {what}')
            for what, size in {'in_size': in_size, 'out_size': out_size}.items()
        )
        self.in_size, self.out_size = (num_in,), (num_out,)
        weight = first_value('LeakySpikeReadout', 'w_init', w_init, (num_in, num_out))
        self.W = brainstate.ParamState(weight)
        self.neuron = LIF(
            num_out,
            tau,
            R=R,
            V_th=V_th,
            V_rest=V_rest,
            V_reset=V_reset,
            spk_fun=spk_fun,
            spk_reset=spk_reset,
            V_init=V_init,
            learn=learn,
        )

    def update(self, x: Any) -> Any:
        """The spikes, of shape (O,) or (B, O), for ``x`` of shape (I,) or (B, I)."""
        check_input('LeakySpikeReadout', x, self.in_size)
        return self.neuron(matmul(x, self.W.value))

    def get_spike(self) -> Any:
        """The spikes of the last step, made of the present potentials."""
        return self.neuron.get_spike()


def check_unit(owner: str, state: str, argument: str, value: Any, new: Any) -> None:
    """Refuse to add a value to a state of another unit."""
    if u.get_dim(value) != u.get_dim(new):
        raise EtpUnitError(
            f'{owner}: {state} has the unit {u.get_unit(value)}, but what a step adds to it has '
            f'{u.get_unit(new)}. Give {argument} with that unit (0 * saiunit.mA), or a plain input.'
        )
