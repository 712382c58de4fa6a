r"""Spikes with a surrogate derivative: 0 or 1 forwards, a smooth slope in reverse.

Each function here returns a spike function :math:`x \mapsto 1_{x > 0}` whose derivative is replaced
by the one in its docstring. A neuron gives it the distance of its potential to the threshold as a
share of the way from reset to threshold, so that ``x`` has no unit. Spike functions compare and
hash by their parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .._public_names import lacking as _lacking
from ..errors import EtpDtypeError, OptionError

__all__ = ['arctan', 'custom', 'multi_gaussian', 'sigmoid', 'triangle']


class Surrogate:
    """The spike function ``x > 0`` with the derivative ``slope(x, *parameters)``."""

    def __init__(self, slope: Callable, parameters: dict[str, float]):
        self._slope, self._parameters = slope, tuple(parameters.items())

    def __call__(self, x: Any) -> jax.Array:
        """1 where ``x > 0``, 0 elsewhere, in the dtype of ``x``."""
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise EtpDtypeError(
                f'{self}: x has dtype {jnp.result_type(x)}; a spike needs real floating numbers.'
            )
        return _spike(jnp.asarray(x), self)

    def slope(self, x: Any) -> Any:
        """The derivative that stands in for that of the step."""
        return self._slope(x, *(value for _, value in self._parameters))

    def __repr__(self) -> str:
        shown = ', '.join(f'{name}={value}' for name, value in self._parameters)
        return f'{self._slope.__name__.strip("_")}({shown})'

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Surrogate) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple:
        return self._slope, self._parameters


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _spike(x, surrogate):
    return jnp.where(x > 0, jnp.ones_like(x), jnp.zeros_like(x))


@_spike.defjvp
def _spike_jvp(surrogate, primals, tangents):
    (x,), (dx,) = primals, tangents
    return _spike(x, surrogate), surrogate.slope(x).astype(x.dtype) * dx


def _made(slope: Callable, /, **parameters: float) -> Surrogate:
    for name, value in parameters.items():
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise OptionError(
                f'{slope.__name__.strip("_")}: {name} is {value!r}; give a number above 0.'
            )
    return Surrogate(slope, {name: float(value) for name, value in parameters.items()})


def _triangle(x, width, height):
    return height * jnp.maximum(0.0, 1.0 - jnp.abs(x) / width)


def triangle(width: float = 1.0, height: float = 0.3) -> Surrogate:
    r"""The slope of Bellec et al. (2018, NeurIPS; 2020, Nature Communications 11:3625, Methods).

    .. math:: \psi(x) = \gamma\,\max(0,\ 1 - |x| / w)

    Parameters
    ----------
    width : float
        w: the slope is 0 from this distance on.
    height : float
        :math:`\gamma`, the slope at the threshold.

    Raises
    ------
    OptionError
        A parameter is not a number above 0.

    Examples
    --------
    >>> import jax
    >>> from braintrace.nn import surrogate
    >>> spike = surrogate.triangle()
    >>> spike, float(spike(0.5)), float(jax.grad(spike)(0.5))
    (triangle(width=1.0, height=0.3), 1.0, 0.15...)
    """
    return _made(_triangle, width=width, height=height)


def _sigmoid(x, slope):
    return slope * jax.nn.sigmoid(slope * x) * jax.nn.sigmoid(-slope * x)


def sigmoid(slope: float = 4.0) -> Surrogate:
    r"""The derivative of a logistic function (compared with others by Zenke and Vogels, 2021,
    Neural Computation 33:899).

    .. math:: \psi(x) = \beta\,\sigma(\beta x)\,(1 - \sigma(\beta x))

    Parameters
    ----------
    slope : float
        :math:`\beta`. The slope at the threshold is :math:`\beta / 4`.

    Raises
    ------
    OptionError
        ``slope`` is not a number above 0.

    Examples
    --------
    >>> import jax
    >>> from braintrace.nn import surrogate
    >>> float(jax.grad(surrogate.sigmoid(slope=4.0))(0.0))
    1.0
    """
    return _made(_sigmoid, slope=slope)


def _multi_gaussian(x, width, scale, height):
    def gauss(center, deviation):
        return jnp.exp(-0.5 * ((x - center) / deviation) ** 2) / (
            deviation * math.sqrt(2 * math.pi)
        )

    wide = gauss(width, scale * width) + gauss(-width, scale * width)
    return (1 + height) * gauss(0.0, width) - height * wide


def multi_gaussian(width: float = 0.5, scale: float = 6.0, height: float = 0.15) -> Surrogate:
    r"""The multi-Gaussian of Yin et al. (2021, Nature Machine Intelligence 3:905), which is
    below 0 at some distance.

    .. math::
        \psi(x) = (1 + h)\,N(x \mid 0, \sigma^2) - h\,N(x \mid \sigma, (s\sigma)^2)
        - h\,N(x \mid -\sigma, (s\sigma)^2)

    Parameters
    ----------
    width : float
        :math:`\sigma`, the deviation of the middle Gaussian.
    scale : float
        s: how much wider the two others are.
    height : float
        h, the weight of the two others.

    Raises
    ------
    OptionError
        A parameter is not a number above 0.

    Examples
    --------
    >>> import jax
    >>> from braintrace.nn import surrogate
    >>> slope = jax.grad(surrogate.multi_gaussian())
    >>> float(slope(0.0)) > 0 > float(slope(2.0))
    True
    """
    return _made(_multi_gaussian, width=width, scale=scale, height=height)


def _arctan(x, slope):
    return slope / 2 / (1 + (math.pi / 2 * slope * x) ** 2)


def arctan(slope: float = 2.0) -> Surrogate:
    r"""The derivative of an arc tangent (Fang et al., 2021, ICCV; their function is that of
    ``slope=2``).

    .. math:: \psi(x) = \frac{\alpha / 2}{1 + (\pi \alpha x / 2)^2}

    Parameters
    ----------
    slope : float
        :math:`\alpha`, twice the slope at the threshold.

    Raises
    ------
    OptionError
        ``slope`` is not a number above 0.

    Examples
    --------
    >>> import jax
    >>> from braintrace.nn import surrogate
    >>> float(jax.grad(surrogate.arctan())(0.0))
    1.0
    """
    return _made(_arctan, slope=slope)


def custom(slope: Callable[[Any], Any]) -> Surrogate:
    r"""A slope of your own.

    .. math:: \psi(x) = \mathrm{slope}(x)

    Parameters
    ----------
    slope : callable
        From the distances x to the derivative there, an array of the same shape.

    Raises
    ------
    OptionError
        ``slope`` cannot be called, fails on an array, or is zero everywhere.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from braintrace.nn import LIF, surrogate
    >>> spike = surrogate.custom(lambda x: jnp.exp(-jnp.abs(x)))
    >>> float(spike(0.5)), float(jax.grad(spike)(0.0))
    (1.0, 1.0)
    >>> units = LIF(10, spk_fun=spike)
    """
    if not callable(slope):
        raise OptionError(f'custom: slope is {slope!r}; give a function of the distance x.')
    made = Surrogate(slope, {})
    if fault := _fault_of(made):
        raise OptionError(f'custom: slope makes a spike {fault}.')
    return made


BUILT_IN = {spike.__name__: spike for spike in (triangle, sigmoid, multi_gaussian, arctan)}


def spike_function(owner: str, spk_fun: Any, name: str = 'spk_fun') -> Callable:
    """The spike function of that name, or ``spk_fun`` itself if it is one with a derivative.

    ``owner`` and ``name``: who asks for it, and by which argument, as errors tell it. Raises
    :class:`braintrace.errors.OptionError` for what is no spike function with a derivative.

    >>> from braintrace.nn import spike_function
    >>> spike_function('Neuron', 'sigmoid')
    sigmoid(slope=4.0)
    """
    if isinstance(spk_fun, str) and spk_fun in BUILT_IN:
        return BUILT_IN[spk_fun]()
    if isinstance(spk_fun, Surrogate):
        return spk_fun
    remedy = (
        f'Give {name} one of the names {", ".join(map(repr, BUILT_IN))}, a function of '
        'braintrace.nn.surrogate with your parameters (surrogate.triangle(width=0.5)) or your '
        'slope (surrogate.custom(slope)), or any function from x to 1 above the threshold (x > 0) '
        'and 0 below it, with a surrogate derivative of its own.'
    )
    if isinstance(spk_fun, type) or spk_fun in BUILT_IN.values():
        maker = spk_fun.__name__
        raise OptionError(f'{owner}: {name} is {maker}, which makes spike functions: {maker}().')
    if not callable(spk_fun):
        raise OptionError(f'{owner}: {name} is {spk_fun!r}, which is no spike function. {remedy}')
    fault = _fault_of(spk_fun)
    if fault:
        raise OptionError(f'{owner}: {name} is {spk_fun!r}, {fault}. {remedy}')
    return spk_fun


def _fault_of(spk_fun: Callable) -> str | None:
    """What a function lacks to be a spike with a derivative, tried on distances of every size."""
    with jax.ensure_compile_time_eval():
        half = np.concatenate([np.logspace(-5, -2, 7), np.linspace(0.02, 3.0, 150)])
        x = jnp.asarray(np.concatenate([-half[::-1], half]), jnp.result_type(float))
        try:
            y, pull = jax.vjp(spk_fun, x)
        except Exception as error:  # a user's function may raise anything
            said = f'{type(error).__name__}: {error}'.splitlines()[0][:200]
            return f'which fails on an array of floats ({said})'
        if getattr(y, 'shape', None) != x.shape or y.dtype != x.dtype:
            found = f'{y.dtype}{list(y.shape)}' if hasattr(y, 'dtype') else type(y).__name__
            return f'which makes {found} of {x.dtype}{list(x.shape)}, not an array like it'
        if not np.allclose(y, x > 0, rtol=0, atol=1e-3):  # sums may round
            return 'whose values are not 1 where x > 0 and 0 where x < 0'
        slope = np.asarray(pull(jnp.ones_like(y))[0])
    if not np.all(np.isfinite(slope)):
        return 'whose derivative is not finite'
    return None if np.any(slope) else 'whose derivative is zero everywhere, so nothing would learn'


if not TYPE_CHECKING:
    __getattr__ = _lacking(__name__, __all__)
