"""Online learning rules as pure functions over factors."""

from .contraction import same_step
from .d_rtrl import DRTRL
from .es_d_rtrl import ESDRTRL
from .no_history import SameStep
from .rule import MOST_PENDING, Network, Rule, Start, Trace, Window
from .signs import Signs
from .storage import read
from .uoro import UORO
from .view import View

__all__ = [
    'DRTRL',
    'ESDRTRL',
    'MOST_PENDING',
    'Network',
    'Rule',
    'SameStep',
    'Signs',
    'Start',
    'Trace',
    'UORO',
    'View',
    'Window',
    'read',
    'same_step',
]
