"""Online learning rules as pure functions over factors."""

from .contraction import same_step
from .d_rtrl import DRTRL
from .es_d_rtrl import ESDRTRL
from .rule import MOST_PENDING, Network, Rule, Trace, Window
from .storage import read

__all__ = [
    'DRTRL',
    'ESDRTRL',
    'MOST_PENDING',
    'Network',
    'Rule',
    'Trace',
    'Window',
    'read',
    'same_step',
]
