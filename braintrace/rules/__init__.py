"""The online learning rules, as values for :func:`braintrace.functional.online` and
:func:`braintrace.compile`.
"""

from .._rules import Rule
from ._feedback import e_prop, otpe, rflo
from ._influence import rtrl, snap
from ._presets import ostl, ottt
from ._random import signs, uoro
from ._traces import d_rtrl, es_d_rtrl, same_step

__all__ = [
    'Rule',
    'd_rtrl',
    'e_prop',
    'es_d_rtrl',
    'ostl',
    'otpe',
    'ottt',
    'rflo',
    'rtrl',
    'same_step',
    'signs',
    'snap',
    'uoro',
]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith('__'))})
