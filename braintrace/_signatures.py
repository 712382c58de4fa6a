"""The signatures that ``help`` and completion show."""

from __future__ import annotations

import inspect

__all__ = ['ShowsArguments']


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
