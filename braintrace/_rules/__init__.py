"""Online learning rules as pure functions over factors.

What is imported here is what a rule above this floor is made of, as those of
``braintrace/extra/_wide``.
"""

from .by_part import ByPart, Parts, rule_at
from .contraction import (
    add_gradients,
    factored_gradient,
    op_gradient,
    outside_loops,
    represented,
    same_step,
    without_x,
)
from .d_rtrl import DRTRL, NEWEST, Unwritten
from .entries import OpTrace
from .es_d_rtrl import ESDRTRL, alive, apart, at_entries, empty_factors, joined
from .feedback import VIEWS, Feedback, View, counting, uncounted
from .layout import (
    Entry,
    Pair,
    after,
    anywhere,
    by_op,
    by_pair,
    entry_dtype,
    held_dtype,
    is_laned,
    not_finite,
    of_rows,
    pairs,
    read,
    to_y,
    tree_bytes,
    where_lanes,
)
from .moving import Moving, arrays_of, checked, in_text, number_of, times
from .pending import reset_later
from .rule import (
    Network,
    OpGradients,
    PendsWhole,
    Rule,
    Trace,
    Window,
    Windowed,
    WritesAtOnce,
)
from .shared import numbers_of, shared_pairs
from .stepwise import NoHistory, StepRule, Stepwise
