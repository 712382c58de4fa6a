"""The executor: one compiled step as pure functions."""

from .executor import Executor, Factors, Probes, Signals, stopped
from .feedback import feedback_weights
from .over_time import over_time
from .positions import gathered
from .shards import (
    Axes,
    axes_of,
    each,
    in_shards,
    share,
    spread,
    summed_twice,
    varying,
    without_types,
)
from .traced_step import VARIES, Steps, TracedStep, even
from .transition import *
from .transition import __all__ as _transition

__all__ = [
    'Axes',
    'Executor',
    'Factors',
    'Probes',
    'Signals',
    'Steps',
    'VARIES',
    'TracedStep',
    'axes_of',
    'each',
    'even',
    'feedback_weights',
    'gathered',
    'in_shards',
    'over_time',
    'share',
    'spread',
    'summed_twice',
    'stopped',
    'varying',
    'without_types',
    *_transition,
]
