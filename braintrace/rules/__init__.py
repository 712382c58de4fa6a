"""The online learning rules, as values for :func:`braintrace.functional.online` and
:func:`braintrace.compile`.

Rules are compared by what they are, and two methods make a rule of a rule:

>>> import braintrace
>>> rule = braintrace.rules.d_rtrl().filtered(0.9).with_feedback(braintrace.Feedback('random'))
>>> rule == braintrace.rules.e_prop(0.9, 'random')
True
"""

from typing import TYPE_CHECKING

from .._public_names import lacking as _lacking
from .._rules import Rule, StepRule
from ._factories import (
    by_part,
    d_rtrl,
    e_prop,
    es_d_rtrl,
    ostl,
    otpe,
    ottt,
    rflo,
    rtrl,
    same_step,
    signs,
    snap,
    uoro,
)

__all__ = [
    'Rule',
    'StepRule',
    'by_part',
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


if not TYPE_CHECKING:
    __getattr__ = _lacking(__name__, __all__)
