"""Checks on the arguments of all layers, and the defaults of their constructors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from brainstate.nn import init

from .._signatures import is_int
from ..errors import EtpDtypeError, EtpShapeError, OptionError

Size = int | Sequence[int]
Init: TypeAlias = Callable[..., Any] | jax.Array | np.ndarray | u.Quantity | float


@dataclass(frozen=True, repr=False)
class Default:
    """An initialiser of ``brainstate.nn.init`` with its own defaults, short in a signature."""

    name: str

    def __call__(self, shape: Sequence[int], **kwargs: Any) -> Any:
        draw, own = getattr(init, self.name)(), brainstate.environ.dftype()
        # brainstate's formulas, which are not under the user's settings; not every one is drawn in
        # fewer bits than 32
        with (
            jax.numpy_rank_promotion('allow'),
            jax.numpy_dtype_promotion('standard'),
            brainstate.environ.context(precision=max(jnp.finfo(own).bits, 32)),
        ):
            return draw(shape, **kwargs).astype(own)

    def __repr__(self) -> str:
        return f'{self.name}()'


KAIMING, XAVIER = Default('KaimingNormal'), Default('XavierNormal')
LECUN, LECUN_UNIFORM = Default('LecunNormal'), Default('LecunUniform')
ORTHOGONAL, ZERO = Default('Orthogonal'), Default('ZeroInit')


def counted(owner: str, **sizes: Any) -> tuple[int, ...]:
    """The sizes as ints."""
    for name, size in sizes.items():
        if not is_int(size, 1):
            raise OptionError(f'{owner}: {name} is {size!r}; give an int of at least 1.')
    return tuple(map(int, sizes.values()))


def features(size: Size, what: str) -> int:
    """The number of features that ``size``, an int or a sequence of one int, stands for."""
    found = list(size) if isinstance(size, Sequence) else [size]
    if len(found) != 1 or not is_int(found[0], 1):
        raise OptionError(
            f'{what} is {size!r}; give the number of features, one int of at least 1 (reshape '
            'other axes away).'
        )
    return int(found[0])


def axes(size: Size, what: str) -> tuple[int, ...]:
    """The sizes of one or more axes that ``size``, an int or a sequence of ints, stands for."""
    found = tuple(size) if isinstance(size, Sequence) and not isinstance(size, str) else (size,)
    if not found or not all(is_int(each, 1) for each in found):
        raise OptionError(
            f'{what} is {size!r}; give a number of features, or a shape: ints of at least 1.'
        )
    return tuple(map(int, found))


def axes_in_and_out(owner: str, in_size: Size, out_size: Size) -> tuple[tuple, tuple]:
    """Both sizes as tuples; they may differ in the last axis only."""
    ins, outs = axes(in_size, f'{owner}: in_size'), axes(out_size, f'{owner}: out_size')
    if ins[:-1] != outs[:-1]:
        raise OptionError(
            f'{owner}: in_size is {in_size!r} and out_size {out_size!r}; the map is over the last '
            f'axis, so give both the same leading sizes, such as out_size={(*ins[:-1], outs[-1])}.'
        )
    return ins, outs


def check_array(owner: str, x: Any) -> None:
    """Refuse an input that is no array."""
    if not isinstance(x, jax.Array | np.ndarray | u.Quantity):
        raise EtpDtypeError(
            f'{owner}: the input is a {type(x).__name__}; give an array (jax.numpy.asarray makes '
            'one).'
        )


def check_trailing(owner: str, x: Any, sizes: Sequence[int]) -> None:
    """Refuse an input that is not an array whose last axes have these sizes."""
    check_array(owner, x)
    if x.shape[max(x.ndim - len(sizes), 0) :] != tuple(sizes):
        raise EtpShapeError(
            f'{owner}: the input has shape {x.shape}; expected (..., '
            f'{", ".join(map(str, sizes))}), with any leading axes.'
        )


def check_input(owner: str, x: Any, num_in: int | tuple[int, ...]) -> None:
    """Refuse an input that is not an array of shape ``(num_in,)`` or ``(batch, num_in)``; a tuple
    for ``num_in`` is the whole shape of a sample.
    """
    check_array(owner, x)
    shape = num_in if isinstance(num_in, tuple) else (num_in,)
    lead = x.ndim - len(shape)
    if lead not in (0, 1) or x.shape[lead:] != shape:
        batch = ', '.join(['batch', *map(str, shape)])
        remedy = ''
        if lead > 1:
            remedy = (
                ' Of a whole sequence, give one step: `xs[0]`. Other axes go into the batch, or '
                'are mapped with jax.vmap.'
            )
        elif x.ndim and len(shape) == 1:
            remedy = f' It has {x.shape[-1]} features, and the layer takes {shape[0]}.'
        raise EtpShapeError(
            f'{owner}: the input has shape {x.shape}; expected {shape} or ({batch}).{remedy}'
        )


def parameter(owner: str, param_type: type, value: Any) -> brainstate.ParamState:
    """A parameter of the class that the user asks for."""
    if not (isinstance(param_type, type) and issubclass(param_type, brainstate.ParamState)):
        raise OptionError(
            f'{owner}: param_type is {param_type!r}; give brainstate.ParamState or a class derived '
            'from it.'
        )
    return param_type(value)


def as_floats(value: Any) -> Any:
    """Numbers, and arrays of integers, in the environment's precision; all else as it is."""
    mantissa = u.get_magnitude(value) if isinstance(value, u.Quantity) else value
    if not isinstance(mantissa, int | float | np.number | np.ndarray | jax.Array):
        return value
    if np.ndim(mantissa) and jnp.issubdtype(jnp.result_type(mantissa), jnp.inexact):
        return value
    if jnp.iscomplexobj(mantissa):
        return value
    mantissa = jnp.asarray(mantissa, brainstate.environ.dftype())
    return u.Quantity(mantissa, unit=value.unit) if isinstance(value, u.Quantity) else mantissa


def first_value(
    owner: str, name: str, value: Init, shape: Sequence[int], *, spread: bool = False
) -> Any:
    """What an initializer draws, an array of ``shape``, or a number that fills it; with ``spread``
    an array of any shape that broadcasts to it.
    """
    shape = tuple(shape)
    value = value(shape) if callable(value) else as_floats(value)
    if not isinstance(value, jax.Array | np.ndarray | np.generic | u.Quantity):
        raise OptionError(
            f'{owner}: {name} is a {type(value).__name__}; give an initializer of '
            f'brainstate.nn.init, an array of shape {shape}, or a number.'
        )
    value = value if isinstance(value, u.Quantity) else jnp.asarray(value)
    fits = value.shape in ((), shape) or (spread and _broadcasts(value.shape, shape))
    if not fits:
        raise OptionError(f'{owner}: {name} has shape {value.shape}, expected {shape}.')
    return u.math.broadcast_to(value, shape)


def _broadcasts(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    padded = (1,) * (len(shape) - len(found)) + found
    return len(padded) == len(shape) and all(a in (1, b) for a, b in zip(padded, shape))


def activation_of(activation: str | Callable, owner: str) -> Callable:
    """The function itself, or the function of that name in ``brainstate.nn``."""
    found = getattr(brainstate.nn, activation, None) if isinstance(activation, str) else activation
    if not callable(found):
        raise OptionError(
            f'{owner}: activation is {activation!r}; give a function, or the name of one in '
            'brainstate.nn.'
        )
    return found


def initial_value(
    state_init: Init, shape: Sequence[int], batch_size: int | None, owner: str
) -> Any:
    """A state's first value, of shape ``shape`` or ``(batch_size, *shape)``; a scalar fills it."""
    if batch_size is not None and not is_int(batch_size, 0):
        raise OptionError(
            f'{owner}: batch_size is {batch_size!r}; give None for one unbatched sample, or an int '
            'from 0 up.'
        )
    value = init.param(as_floats(state_init), tuple(shape), batch_size, allow_none=False)
    if not isinstance(value, u.Quantity):
        value = jnp.asarray(value)
    lead = () if batch_size is None else (int(batch_size),)
    return u.math.broadcast_to(value, (*lead, *shape))
