"""Numbers of a rule: fixed ones, and arrays that move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._compiler import describe_aval
from ..errors import OptionError


@dataclass(frozen=True, eq=False)
class Moving:
    """A number of a rule that is an array, which a transformation may trace.

    It is no part of the rule's structure: it is equal to itself alone, and has no digits in texts.
    """

    value: jax.Array

    def __repr__(self) -> str:
        return 'moving'


def in_text(value: Any) -> Any:
    """What stands for a value in the text of a rule: of an array that it moves."""
    return Moving(jnp.asarray(value)) if isinstance(value, jax.Array | np.ndarray) else value


def number_of(number: Any) -> Any:
    """A number of a rule, as what it is computed with."""
    return number.value if isinstance(number, Moving) else number


def times(number: Any, x: jax.Array) -> jax.Array:
    """A number of a rule times an array, in the dtype of the array."""
    if isinstance(number, jax.Array):
        number = number.astype(jnp.finfo(x.dtype).dtype)
    return number * x


def arrays_of(value: Any) -> Iterator[jax.Array]:
    """The arrays in the fields of a rule, and in the values that these hold."""
    if isinstance(value, jax.Array):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from arrays_of(each)
    elif is_dataclass(value):
        for each in fields(value):
            yield from arrays_of(getattr(value, each.name))


def in_unit(x: float) -> bool:
    """Whether a number is in [0, 1)."""
    return 0 <= x < 1


def checked(name: str, number: Any, fits: Callable = in_unit) -> float | Moving | None:
    """A number that fits, as a rule keeps it; None for another, and for what is no number. A traced
    one has no value that could be looked at.
    """
    if isinstance(number, Moving):
        return number
    if isinstance(number, jax.Array | np.ndarray):
        number = jnp.asarray(number)
        if number.shape or not jnp.issubdtype(number.dtype, jnp.floating):
            raise OptionError(
                f'{name} is {describe_aval(number)}; a number of a rule that is an array is a '
                'float of shape (). For several, make the rule in a function of one of them, and '
                'map over it: jax.vmap.'
            )
        known = not isinstance(number, _jax.Tracer)
        return None if known and not fits(float(number)) else Moving(number)
    real = isinstance(number, Real) and not isinstance(number, bool)
    return float(number) if real and fits(number) else None
