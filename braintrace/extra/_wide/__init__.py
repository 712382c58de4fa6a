"""Rules whose trace follows every path of a step: RTRL, SnAp, KF-RTRL and UORO.

They are above the core by the protocol of a rule (:class:`braintrace.rules.Rule`), as a rule of
one's own does.
"""

from .influence import EveryPath, Reach
from .uoro import OneProduct, Signs

__all__ = ['EveryPath', 'OneProduct', 'Reach', 'Signs']
