"""Online learning rules as pure functions over factors."""

from .contraction import same_step
from .coordinates import by_pair
from .d_rtrl import DRTRL
from .es_d_rtrl import ESDRTRL
from .feedback import Feedback, counting, uncounted
from .influence import EveryPath, Reach
from .lanes import anywhere, where_lanes
from .no_history import NoHistory
from .rule import MOST_PENDING, Network, Rule, Start, Trace, Window
from .signs import Signs
from .storage import held_dtype, read
from .uoro import OneProduct
from .view import View

__all__ = [
    'DRTRL',
    'ESDRTRL',
    'Feedback',
    'MOST_PENDING',
    'Network',
    'EveryPath',
    'Reach',
    'Rule',
    'NoHistory',
    'Signs',
    'Start',
    'Trace',
    'OneProduct',
    'View',
    'Window',
    'by_pair',
    'counting',
    'held_dtype',
    'read',
    'same_step',
    'uncounted',
    'anywhere',
    'where_lanes',
]
