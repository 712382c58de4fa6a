"""Numbers for the units of a population, and time constants: a number of steps, or a time that is
measured against the step ``dt``.
"""

from __future__ import annotations

from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from ..errors import EtpUnitError, OptionError


def is_real(value: Any) -> bool:
    """Whether ``value`` is a real number, not a bool, or an array of real numbers."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.integer, jnp.floating))
    return isinstance(value, int | float) and not isinstance(value, bool)


def known(number: Any) -> np.ndarray | None:
    """Its values, or None where a transformation of JAX hides them."""
    try:
        return np.asarray(number, float)
    except jax.errors.TracerArrayConversionError:
        return None


def refuse_state(owner: str, name: str, value: Any) -> None:
    """Refuse a parameter, or another state, where a number is due."""
    if isinstance(value, brainstate.State):
        raise OptionError(
            f'{owner}: {name} is a {type(value).__name__}; give numbers. Those that learn are '
            "named by `learn`, such as learn='tau'."
        )


def in_unit(value: Any, unit: Any) -> Any:
    """The same in another unit of its kind."""
    number = u.maybe_decimal(value / (1.0 * unit))
    return number if unit == u.UNITLESS else number * unit


def in_words(value: Any) -> str:
    """A number as it is; of an array of many its shape and range."""
    number, unit = u.get_magnitude(value), u.get_unit(value)
    of = '' if unit == u.UNITLESS else f' {unit}'
    if np.size(number) <= 4 or known(number) is None:
        return f'{number}{of}'
    low, high = np.nanmin(number), np.nanmax(number)
    return f'an array of shape {np.shape(number)} from {low:.4g} to {high:.4g}{of}'


def numbers(
    owner: str, name: str, value: Any, shape: tuple[int, ...] | None = (), *, finite: bool = True
) -> Any:
    """One number, or an array that broadcasts to ``shape`` (None: any), in the float type of the
    states and with its unit; an initialiser draws one of ``shape``.
    """
    refuse_state(owner, name, value)
    if callable(value) and shape:
        value = value(shape)
    unit, number = u.get_unit(value), u.get_magnitude(value)
    wanted = f', or an array of shape {shape}' if shape else ', or an array' * (shape is None)
    if not is_real(number):
        raise OptionError(f'{owner}: {name} is {value!r}; give one number{wanted}.')
    found, values = np.shape(number), known(number)
    if shape is not None:
        lacking = len(shape) - len(found)
        if lacking < 0 or any(a not in (1, b) for a, b in zip(found, shape[lacking:])):
            raise OptionError(f'{owner}: {name} has shape {found}; give one number{wanted}.')
    if finite and values is not None and not np.isfinite(values).all():
        raise OptionError(f'{owner}: {name} is {in_words(value)}; give finite numbers.')
    if values is None or found:
        number = jnp.asarray(number, brainstate.environ.dftype())
    else:
        number = float(values)
    return number if unit == u.UNITLESS else number * unit


def plain(owner: str, name: str, value: Any, shape: tuple[int, ...] = ()) -> Any:
    """The same without a unit."""
    number = numbers(owner, name, value, shape)
    if not u.get_dim(number).is_dimensionless:
        raise EtpUnitError(
            f'{owner}: {name} is {in_words(value)}; it has to be a number without a unit.'
        )
    return u.maybe_decimal(number)


def check_time(
    owner: str, name: str, value: Any, shape: tuple[int, ...] = (), *, finite: bool = False
) -> Any:
    """``numbers`` that are positive times or positive plain numbers; one may be infinite, which
    leaves everything, unless ``finite``.
    """
    tau = numbers(owner, name, value, shape, finite=finite)
    if not u.get_unit(tau).dim.is_dimensionless and u.get_unit(tau).dim != u.second.dim:
        raise EtpUnitError(
            f'{owner}: {name} is {in_words(value)}; give a time (5 * saiunit.ms) or a plain '
            'number of steps.'
        )
    if not np.all(u.get_magnitude(tau) > 0):
        raise OptionError(
            f'{owner}: {name} is {in_words(value)}; a time constant is larger than 0.'
        )
    return tau


def one_clock(owner: str, **times: Any) -> None:
    """Refuse times of which one counts steps and another has a unit; None is no time."""
    found = [(name, tau) for name, tau in times.items() if tau is not None]
    for name, tau in found[1:]:
        if u.get_dim(tau) != u.get_dim(found[0][1]):
            raise EtpUnitError(
                f'{owner}: {found[0][0]} is {in_words(found[0][1])} and {name} is '
                f'{in_words(tau)}; give both with a unit, or both in steps.'
            )


def steps_of(owner: str, name: str, tau: Any) -> Any:
    """``dt / tau``: the part of ``tau`` that one step takes; a plain number counts steps."""
    refuse_state(owner, name, tau)
    if u.get_unit(tau).dim.is_dimensionless:
        return 1 / u.maybe_decimal(tau)
    dt = brainstate.environ.get('dt', default=None)
    if u.get_unit(dt if dt is not None else 1.0).dim != u.second.dim:
        raise EtpUnitError(
            f'{owner}: {name} is {in_words(tau)}, but the '
            f"environment's dt is {dt}. Set it with "
            '`brainstate.environ.set(dt=1 * saiunit.ms)`, or give the time as a number of steps.'
        )
    dt = numbers(owner, 'dt', dt)
    values = known(u.get_magnitude(dt))
    if values is not None and not values > 0:
        raise OptionError(f"{owner}: the environment's dt is {dt}; a step is larger than 0.")
    return u.maybe_decimal(dt / tau)


def decay(owner: str, name: str, tau: Any) -> Any:
    """``exp(-dt / tau)``: what one step leaves of a value."""
    return u.math.exp(-steps_of(owner, name, tau))
