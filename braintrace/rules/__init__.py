"""The online learning rules, as values for :func:`braintrace.functional.online` and
:func:`braintrace.compile`.
"""

from .._rules import Rule
from ._traces import d_rtrl, es_d_rtrl, same_step

__all__ = ['Rule', 'd_rtrl', 'es_d_rtrl', 'same_step']


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith('__'))})
