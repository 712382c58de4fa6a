"""Online learning rules as pure functions over factors."""
from .d_rtrl import DRTRL, same_step
from .es_d_rtrl import ESDRTRL
from .kernels import read
from .rule import MOST_PENDING, Rule, Trace

__all__ = ['DRTRL', 'ESDRTRL', 'MOST_PENDING', 'Rule', 'Trace', 'read', 'same_step']
