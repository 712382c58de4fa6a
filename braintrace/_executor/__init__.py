"""The executor: one compiled step as pure functions."""

from .blocks import even
from .executor import Executor, Factors, Signals, stopped
from .shards import Axes, axes_of, each, in_shards, share, spread, varying, without_types
from .traced_step import Steps, TracedStep
from .transition import *
from .transition import __all__ as _transition

__all__ = [
    'Axes',
    'Executor',
    'Factors',
    'Signals',
    'Steps',
    'TracedStep',
    'axes_of',
    'each',
    'even',
    'in_shards',
    'share',
    'spread',
    'stopped',
    'varying',
    'without_types',
    *_transition,
]
