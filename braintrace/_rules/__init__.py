"""Online learning rules as pure functions over factors."""

from .d_rtrl import DRTRL
from .es_d_rtrl import ESDRTRL
from .no_trace import NoTrace
from .rule import MOST_PENDING, Network, Rule, Trace, Window
from .storage import read

__all__ = [
    'DRTRL',
    'ESDRTRL',
    'MOST_PENDING',
    'Network',
    'NoTrace',
    'Rule',
    'Trace',
    'Window',
    'read',
]
