"""The signatures that ``help`` and completion show, and arguments that have another form here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import OptionError

Function = TypeVar('Function', bound=Callable[..., Any])


class ShowsArguments:
    """A base whose subclasses show their constructors' arguments, which brainstate's metaclass
    hides.
    """

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
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
        return checked  # type: ignore[return-value]

    return decorate
