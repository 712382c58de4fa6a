"""Time constants: a number of steps, or a time that is measured against the step ``dt``."""

from __future__ import annotations

from typing import Any

import brainstate
import numpy as np
import saiunit as u

from .._errors import EtpUnitError, OptionError

__all__ = ['check_time', 'decay', 'steps_of']


def check_time(owner: str, name: str, tau: Any) -> Any:
    """``tau`` itself, if it is a positive time or a positive plain number."""
    if not u.get_unit(tau).dim.is_dimensionless and u.get_unit(tau).dim != u.second.dim:
        raise EtpUnitError(
            f'{owner}: {name} is {tau}; give a time (5 * saiunit.ms) or a plain number of steps.'
        )
    if not np.all(u.get_magnitude(tau) > 0):
        raise OptionError(f'{owner}: {name} is {tau}; a time constant is larger than 0.')
    return tau


def steps_of(owner: str, name: str, tau: Any) -> Any:
    """``dt / tau``: the part of ``tau`` that one step takes; a plain number counts steps."""
    if u.get_unit(tau).dim.is_dimensionless:
        return 1 / tau
    dt = brainstate.environ.get('dt', default=None)
    if u.get_unit(dt if dt is not None else 1.0).dim != u.second.dim:
        raise EtpUnitError(
            f"{owner}: {name} is {tau}, but the environment's dt is {dt}. Set it with "
            '`brainstate.environ.set(dt=1 * saiunit.ms)`, or give the time as a number of steps.'
        )
    return u.maybe_decimal(dt / tau)


def decay(owner: str, name: str, tau: Any) -> Any:
    """``exp(-dt / tau)``: what one step leaves of a value."""
    return u.math.exp(-steps_of(owner, name, tau))
