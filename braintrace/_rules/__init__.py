"""Online learning rules as pure functions over factors."""

from .contraction import same_step
from .d_rtrl import DRTRL
from .es_d_rtrl import ESDRTRL
from .no_history import SameStep
from .rule import MOST_PENDING, Network, Rule, Start, Trace, Window
from .storage import read
from .view import View

__all__ = [
    'DRTRL',
    'ESDRTRL',
    'MOST_PENDING',
    'Network',
    'Rule',
    'SameStep',
    'Start',
    'Trace',
    'View',
    'Window',
    'read',
    'same_step',
]
