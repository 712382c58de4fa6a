"""Online learning rules as pure functions over factors."""

from .contraction import same_step
from .d_rtrl import DRTRL
from .es_d_rtrl import ESDRTRL
from .feedback import Feedback, View, counting, uncounted
from .influence import EveryPath, Reach
from .inside import NoHistory
from .layout import anywhere, by_pair, held_dtype, read, where_lanes
from .rule import MOST_PENDING, Network, Rule, Start, Trace, Window
from .uoro import OneProduct, Signs

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
