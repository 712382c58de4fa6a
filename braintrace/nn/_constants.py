"""Constants of layers, and those that learn: a parameter in the place of a number, in a form that
keeps its range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._etrace_op import element_wise
from .._public_names import nearest
from .._signatures import ShowsArguments
from ..errors import OptionError
from ._docs import Documented
from ._time import in_unit, in_words, is_real, known, numbers, refuse_state

Learn = bool | str | tuple[str, ...]


class Range(NamedTuple):
    """Where a constant may be: it is ``form`` of the number that learns, with a unit, ``joined``
    to the constant ``of`` if there is one; ``inverse`` and ``apart`` lead back.
    """

    form: Callable
    inverse: Callable
    of: str | None = None
    joined: Callable = lambda other, own: own
    apart: Callable = lambda other, value: value


def same(x):
    return x


def logit(p):
    return jnp.log(p) - jnp.log1p(-p)


REAL, POSITIVE, SHARE = Range(same, same), Range(jnp.exp, jnp.log), Range(jax.nn.sigmoid, logit)


def above(name: str) -> Range:
    """Larger than another constant."""
    return POSITIVE._replace(
        of=name, joined=lambda base, own: base + own, apart=lambda base, value: value - base
    )


def below(name: str) -> Range:
    """Smaller than another constant."""
    return POSITIVE._replace(
        of=name, joined=lambda top, own: top - own, apart=lambda top, value: top - value
    )


def part_of(name: str) -> Range:
    """Between 0 and another constant."""
    return SHARE._replace(
        of=name, joined=lambda whole, own: whole * own, apart=lambda whole, value: value / whole
    )


class Learnt(NamedTuple):
    """What a parameter stands for: a constant in a ``range``, in a ``unit`` (of its own part), for
    units of a ``shape``.
    """

    range: Range
    unit: Any
    shape: tuple[int, ...]

    def raw(self, other: Any, value: Any) -> jax.Array:
        """The number that learns, for this value of the constant."""
        own = u.get_magnitude(in_unit(self.range.apart(other, value), self.unit))
        return self.range.inverse(jnp.asarray(own, brainstate.environ.dftype()))

    def value(self, other: Any, raw: jax.Array) -> Any:
        """The constant, one for each unit, by an op."""
        own = element_wise(jnp.broadcast_to(raw, self.shape), self.range.form)
        return self.range.joined(other, own if self.unit == u.UNITLESS else own * self.unit)


class Constant:
    """An attribute with the value of a constant, whether it learns or not. A parameter is read once
    in a step, since each reading is an op with a trace of its own.
    """

    def __init__(self, name: str):
        self.name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        try:
            value = vars(layer)[self.name]
        except KeyError:
            raise AttributeError(f'{owner} has no attribute {self.name}') from None
        if not isinstance(value, brainstate.ParamState):
            return value
        read = vars(layer).get('_read')  # by the step that runs
        if read is not None and self.name in read:
            return read[self.name]
        learnt = layer._learnt[self.name]
        value = learnt.value(layer._other(learnt.range), value.value)
        if read is not None:
            read[self.name] = value
        return value

    def __set__(self, layer: Any, value: Any) -> None:
        state = vars(layer).get(self.name)
        if isinstance(state, brainstate.ParamState) and not isinstance(value, brainstate.State):
            learnt = layer._learnt[self.name]
            value = numbers(type(layer).__name__, self.name, value, learnt.shape)
            state.value = jnp.broadcast_to(layer._raw(self.name, learnt, value), state.value.shape)
        else:
            vars(layer)[self.name] = value


class Constants(dict[str, Range]):
    """The constants of a layer that may learn: the class that names them shows their values."""

    def __set_name__(self, owner: type, name: str) -> None:
        for constant in self:
            setattr(owner, constant, Constant(constant))


class HasConstants(Documented, ShowsArguments):
    """A base whose subclasses keep numbers, in the place of which no state is set later.

    ``constants`` has the range of each that may learn (:meth:`let_learn`); an attribute of its
    name shows its value.
    """

    constants: ClassVar[Constants] = Constants()
    shared_docs = """
    Parameters
    ----------
    learn : str, tuple of str, or True
        Names of constants that learn, True for all. Each is then a ``ParamState`` of that name, in
        a form that keeps its range, and the attribute shows its present value: one for all units
        if a number was given, one for each if it was an array or an initialiser.

    Raises
    ------
    OptionError
        ``learn`` names what is no constant of this layer, or has no derivative.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if is_real(u.get_magnitude(vars(self).get(name))):
            refuse_state(type(self).__name__, name, value)
        super().__setattr__(name, value)

    def _other(self, range: Range) -> Any:
        return None if range.of is None else getattr(self, range.of)

    def _raw(self, name: str, learnt: Learnt, value: Any) -> jax.Array:
        raw = learnt.raw(self._other(learnt.range), value)
        values = known(raw)
        if values is not None and not np.isfinite(values).all():
            raise OptionError(
                f'{type(self).__name__}: {name} is {in_words(value)}, which is at the border of '
                'its range or outside of it, and learns: give a value inside.'
            )
        return raw

    @contextmanager
    def _reading_once(self) -> Iterator[None]:
        """Read each parameter of a constant once inside the block."""
        vars(self)['_read'] = {}
        try:
            yield
        finally:
            del vars(self)['_read']

    def learning(self, learn: Learn) -> tuple[str, ...]:
        """The constants that ``learn`` names."""
        owner, have = type(self).__name__, [n for n in self.constants if vars(self)[n] is not None]
        names = (learn,) if isinstance(learn, str) else have if learn is True else learn or ()
        if not isinstance(names, tuple | list | set):
            raise OptionError(f'{owner}: learn is {learn!r}; give True, or names out of {have}.')
        for name in names:
            if name == 'tau_ref':
                raise OptionError(
                    f'{owner}: tau_ref is rounded to whole steps and has no derivative, so it does '
                    f'not learn. Constants that do are {have}.'
                )
            if name not in have:
                near = nearest(str(name), have)
                raise OptionError(
                    f'{owner}: learn names {name!r}, which is no constant of this layer; they are '
                    f'{have}.' + (f' Did you mean {near!r}?' if near else '')
                )
        return tuple(dict.fromkeys(names))

    def let_learn(self, learn: Learn, shape: tuple[int, ...], **ranges: Range) -> None:
        """Put parameters in the place of the constants that ``learn`` names; ``ranges`` of some of
        them differ from those of ``constants``.
        """
        told, values = vars(self).setdefault('_learnt', {}), {}
        for name in self.learning(learn):
            range = ranges.get(name, self.constants[name])
            value = vars(self)[name]
            unit = u.get_unit(range.apart(self._other(range), value))
            learnt = told[name] = Learnt(range, unit, shape)
            values[name] = self._raw(name, learnt, value)
        for name, raw in values.items():
            vars(self)[name] = brainstate.ParamState(raw)
