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
from .transition import (
    Transition,
    Vector,
    add,
    apply,
    closure,
    compose,
    dense,
    dot,
    filled,
    identity,
    is_read,
    pull,
    reaches,
)
