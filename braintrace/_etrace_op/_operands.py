"""Checks on the operands of user functions, and the units of operands and results."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._jax import hide_from_locations
from .._signatures import is_int
from ..errors import BraintraceError, EtpDtypeError, EtpShapeError, EtpUnitError, OptionError

hide_from_locations(os.path.dirname(os.path.abspath(u.__file__)) + os.sep)


def split(op: str, name: str, value: Any) -> tuple[jax.Array, u.Unit]:
    """Mantissa and unit of an array, a ``Quantity`` or an object with ``__jax_array__``."""
    if isinstance(value, u.Quantity):
        mantissa, unit = u.split_mantissa_unit(value)
        return jnp.asarray(mantissa), unit
    if not isinstance(value, jax.Array) and callable(getattr(value, '__jax_array__', None)):
        value = value.__jax_array__()
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        hint = f'convert it with `jax.numpy.asarray({name})`'
        if hasattr(value, 'value'):
            hint = f'pass `{name}.value`'
        raise EtpDtypeError(
            f'{op}: {name} is a {type(value).__name__}, expected an array or a saiunit.Quantity; '
            f'{hint}.'
        )
    if not (jnp.issubdtype(value.dtype, jnp.number) or value.dtype == bool):
        raise EtpDtypeError(f'{op}: {name} has dtype {value.dtype}, expected numbers.')
    return jnp.asarray(value), u.UNITLESS


def trainable_operand(op: str, name: str, value: Any) -> tuple[jax.Array, u.Unit]:
    """Mantissa and unit of a trained operand, which needs a floating or complex dtype."""
    mantissa, unit = split(op, name, value)
    if not jnp.issubdtype(mantissa.dtype, jnp.inexact):
        raise EtpDtypeError(
            f'{op}: {name} has dtype {mantissa.dtype}, which can not be trained; expected a '
            f'floating dtype. Convert it with `{name}.astype(jax.numpy.float32)`.'
        )
    return mantissa, unit


def input_operand(op: str, name: str, value: Any, dtype) -> tuple[jax.Array, u.Unit]:
    """Mantissa and unit of an untrained operand; booleans and integers (spikes) are cast to
    ``dtype``.
    """
    mantissa, unit = split(op, name, value)
    if not jnp.issubdtype(mantissa.dtype, jnp.inexact):
        mantissa = mantissa.astype(dtype)
    return mantissa, unit


def bias_operands(op: str, bias: Any, shape: tuple[int, ...], unit: u.Unit) -> list[jax.Array]:
    """The bias as a list of one operand in ``unit``, the product's unit, or an empty list."""
    if bias is None:
        return []
    mantissa, own = trainable_operand(op, 'bias', bias)
    check_shape(op, 'bias', mantissa.shape, shape, 'one number for each output')
    # a bias may come in another unit of the product's dimension, and is rescaled
    if not own.has_same_dim(unit):
        raise EtpUnitError(
            f'{op}: bias has unit {own}, expected a unit like {unit}, the unit of the product '
            'that it is added to.'
        )
    return [
        mantissa if own == unit else jnp.asarray(u.Quantity(mantissa, unit=own).to_decimal(unit))
    ]


# what to do about an x with more axes
SEQUENCE = (
    'Of a whole sequence, give one step: `xs[0]`. Map other axes with `jax.vmap`, or reshape x to '
    'two axes: `x.reshape(-1, x.shape[-1])`.'
)


def product_operands(
    op: str,
    x: Any,
    x_axes: Sequence[str],
    weights: Mapping[str, tuple[Any, str]],
    bias: Any,
    bias_axes: str,
    *,
    known: Mapping | None = None,
    hint: str = '',
) -> tuple[jax.Array, list[jax.Array], list[jax.Array], u.Unit]:
    """The mantissas of x, of the weights and of the bias, a list of one or none, and y's unit.

    Axes have names, apart by spaces, and axes of one name have one size: ``x_axes`` are the layouts
    that x may have, ``weights`` has (value, axes). ``known``: name of an axis -> (size, why).
    ``hint``: what to do about an operand of another rank.
    """
    values, units = zip(*(trainable_operand(op, name, w) for name, (w, _) in weights.items()))
    x, unit = input_operand(op, 'x', x, jnp.result_type(*values))
    sizes, arrays = dict(known or {}), {'x': x} | dict(zip(weights, values))
    for name, array in arrays.items():
        layouts = x_axes if name == 'x' else [weights[name][1]]
        by_rank = {len(axes): axes for axes in map(str.split, layouts)}
        shown = {n: f'({", ".join(axes)}{"," * (n == 1)})' for n, axes in by_rank.items()}
        reshape = 'Reshape it.' if name != 'x' or array.ndim < max(by_rank) else SEQUENCE
        check_rank(op, name, array.shape, shown, hint or reshape)
        why, expected = '', []
        for axis, size in zip(by_rank[array.ndim], array.shape, strict=True):
            here = size, f'{name} of shape {array.shape} has {size} entries along axis {axis!r}'
            wanted, who = sizes.setdefault(axis, here)
            expected, why = [*expected, wanted], why or who * (wanted != size)
        check_shape(op, name, array.shape, expected, why)
    unit = math.prod(units, start=unit)
    shape = tuple(sizes[axis][0] for axis in bias_axes.split())
    return x, list(values), bias_operands(op, bias, shape, unit), unit


def shape_of(op: str, fn: Callable, *operands) -> Any:
    """The shape and dtype of ``fn(*operands)``.

    Raises ``EtpShapeError`` with the op and the shapes where ``fn`` refuses them.
    """
    try:
        return jax.eval_shape(fn, *operands)
    except (TypeError, ValueError) as error:
        if isinstance(error, BraintraceError):
            raise
        shapes = ', '.join(
            f'{a.dtype}{list(a.shape)}' if hasattr(a, 'dtype') else type(a).__name__
            for a in operands
        )
        raise EtpShapeError(
            f'{op}: its function does not take operands {shapes}: {str(error).splitlines()[0]}'
        ) from error


def proportional_product(
    op: str,
    fn: Callable,
    values: Sequence,
    units: Sequence[u.Unit],
    params: dict,
    bias: int | None = None,
) -> Any:
    """The product of the units of all operands but the bias. It is y's unit if ``fn(*values,
    **params)`` is proportional to each operand.

    Raises ``EtpUnitError`` if ``fn`` is not proportional to an operand with a unit: y does not
    double where the operand does.
    """
    # an operand without a unit may enter in any way
    avals = tuple(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values)
    static = tuple(sorted(params.items()))
    for i, unit in enumerate(units):
        if i != bias and not (unit.is_unitless or _doubles(fn, avals, static, i, bias)):
            raise EtpUnitError(
                f'{op}: operand {i} has unit {unit}, and the op is not proportional to it, so its '
                'result has no unit that follows. Give it without one, such as '
                f'`x.to_decimal({unit})`, or an operand that has none.'
            )
    return math.prod((unit for i, unit in enumerate(units) if i != bias), start=u.UNITLESS)


@functools.lru_cache(maxsize=256)
def _doubles(fn: Callable, avals: tuple, params: tuple, operand: int, bias: int | None) -> bool:
    """Whether y doubles where an operand and the bias double."""
    # evaluated at random numbers in double precision, also while another function is traced
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        values = [drawn(rng, aval) for aval in avals]
        twice = [2 * value if i in (operand, bias) else value for i, value in enumerate(values)]
        y, doubled = (jax.tree.leaves(fn(*each, **dict(params))) for each in (values, twice))
        return all(
            np.allclose(2 * a, b, rtol=1e-6, atol=1e-9) for a, b in zip(y, doubled, strict=True)
        )


def drawn(rng: np.random.Generator, aval) -> jax.Array:
    """Draw numbers between 0.5 and 1.5 for an operand, in double precision."""
    dtype = aval.dtype
    if jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.promote_types(dtype, jnp.float64)
    return jnp.asarray(rng.uniform(0.5, 1.5, aval.shape), dtype)


def with_unit(y: jax.Array, unit: u.Unit) -> Any:
    """Give ``y`` its unit; without a dimension it stays a plain array."""
    return y if unit == u.UNITLESS else u.maybe_decimal(u.Quantity(y, unit=unit))


def check_shape(op: str, name: str, found, expected, why: str) -> None:
    """Refuse an operand of another shape than expected."""
    if tuple(found) != tuple(expected):
        raise EtpShapeError(
            f'{op}: {name} has shape {tuple(found)}, expected {tuple(expected)}: {why}.'
        )


def check_rank(op: str, name: str, found, layouts: dict[int, str], hint: str) -> None:
    """Refuse an operand whose rank is not among ``layouts``, rank -> axes."""
    if len(found) not in layouts:
        raise EtpShapeError(
            f'{op}: {name} has shape {tuple(found)} of rank {len(found)}, expected '
            f'{" or ".join(layouts.values())}. {hint}'
        )


def each_axis(owner: str, name: str, value: Any, rank: int) -> tuple[int, ...]:
    """One int for each of ``rank`` spatial axes; a single one holds for all."""
    sizes = (value,) * rank if np.ndim(value) == 0 else tuple(value)
    if len(sizes) != rank or not all(is_int(size, 1) for size in sizes):
        raise OptionError(
            f'{owner}: {name} is {value!r}; give an int of at least 1, or one for each spatial '
            f'axis ({rank}).'
        )
    return tuple(map(int, sizes))
