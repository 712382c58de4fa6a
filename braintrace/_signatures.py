"""The signatures that ``help`` and completion show, arguments that have another form here, and what
a call says that fails.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from numbers import Integral
from types import TracebackType
from typing import Any, TypeVar

import jax

from ._public_names import instead_of_arguments, nearest
from .errors import OptionError

Function = TypeVar('Function', bound=Callable[..., Any])


class ShowsArguments:
    """A base whose subclasses show their constructors' arguments, which brainstate's metaclass
    hides.
    """

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if '__init__' in vars(cls):
            cls.__init__ = public(cls.__name__)(cls.__init__)  # type: ignore[method-assign]
        signature = inspect.signature(cls.__init__)
        arguments = list(signature.parameters.values())[1:]
        shown = signature.replace(parameters=arguments, return_annotation=inspect.Signature.empty)
        cls.__signature__ = shown  # type: ignore[attr-defined]


def refuses(owner: str, **instead: str) -> Callable[[Function], Function]:
    """A decorator that refuses keyword arguments by ``OptionError`` with what to do instead; the
    function and its signature stay without them, and its attribute `refused` has their names.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def checked(*args, **kwargs):
            for name in instead.keys() & kwargs.keys():
                raise OptionError(f'{owner}: there is no argument {name}. {instead[name]}')
            return function(*args, **kwargs)

        checked.refused = frozenset(instead)  # type: ignore[attr-defined]
        return public(owner)(checked)  # type: ignore[return-value]

    return decorate


def is_int(value: Any, least: int) -> bool:
    """Whether ``value`` is an int, not a bool, and at least ``least``."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


# what users would call an argument, beside its name in a signature
OTHER_NAMES = {
    'batch': 'batch_size',
    'carry': 'keep_trace',
    'every': 'update_every',
    'lanes': 'batched',
    'lr': 'optimizer',
    'optim': 'optimizer',
    'loss': 'loss_fn',
}
PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def public(name: str) -> Callable[[Function], Function]:
    """A decorator of what users call by this name. Arguments that do not fit are an ``OptionError``
    that says which do, and a traceback shows no other frame of this package
    (``JAX_TRACEBACK_FILTERING=off`` shows all).
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def called(*args, **kwargs):
            try:
                try:
                    return function(*args, **kwargs)
                except TypeError:
                    if problem := _problem(function, name, args, kwargs):
                        raise OptionError(problem) from None
                    raise
            except Exception as error:
                _hide(error)
                raise

        if '<locals>' in function.__qualname__:
            called.__qualname__ = name
        return called  # type: ignore[return-value]

    return decorate


def _problem(function: Callable, name: str, args: tuple, kwargs: dict) -> str:
    """Why arguments do not fit a function; empty where they do."""
    if function.__name__ == '__init__':
        name = type(args[0]).__name__  # a class has it of a base
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = [key for key in signature.parameters if key != 'self']
        unknown = next((key for key in kwargs if key not in names), None)
        if unknown is None:
            plain = (p.replace(annotation=p.empty) for p in signature.parameters.values())
            order = ', '.join(str(p) for p in plain if p.name != 'self')
            return f'{name}: {error}. It is called as `{name}({order})`.'
        other = OTHER_NAMES.get(unknown)
        near = other if other in names else nearest(unknown, names)
        text = f' Did you mean {near}?' if near else f' It takes {", ".join(names)}.'
        if unknown == 'return_value':
            text = ' Losses always come back, as `.losses`.'
        return f'{name}: there is no argument {unknown}.{instead_of_arguments([unknown]) or text}'
    return ''


def does_not_fit(function: Callable, number: int) -> str:
    """Why a function can not be called with so many arguments by place; empty where it can."""
    try:
        inspect.signature(function).bind(*range(number))
    except TypeError as error:
        return f'{getattr(function, "__name__", function)}: {error}'
    except ValueError:  # it does not tell its signature
        pass
    return ''


def takes_several(cell: Callable, given: Any) -> bool:
    """Whether a tuple is several inputs of ``cell(params, carry, *inputs)``, and not one."""
    if type(given) is not tuple:
        return False
    return bool(does_not_fit(cell, 3)) or not does_not_fit(cell, 2 + len(given))


def check_needs_no_inputs(function: Callable, number: int, how: str) -> None:
    """Refuse a step without inputs where its function, called with ``number`` arguments, needs
    some.
    """
    if problem := does_not_fit(function, number):
        raise OptionError(
            f"no inputs are given, but {problem}. Give an example of one step's inputs, arrays or "
            f'jax.ShapeDtypeStruct, as in `{how}`.'
        )


def _hide(error: BaseException | None) -> None:
    """Take the frames of this package out of an error's traceback."""
    if jax.config.jax_traceback_filtering == 'off':  # type: ignore[attr-defined]
        return
    while error is not None:
        frames, at = [], error.__traceback__
        while at is not None:
            frames, at = [*frames, at], at.tb_next
        shown = None
        for at in reversed(frames):
            if not at.tb_frame.f_code.co_filename.startswith(PACKAGE):
                shown = TracebackType(shown, at.tb_frame, at.tb_lasti, at.tb_lineno)
        error.__traceback__ = shown
        error = error.__cause__ or error.__context__
