"""The loop over time: a step under observation, walked along a sequence in windows."""

from .arguments import (
    CARRIES,
    REDUCTIONS,
    check_choice,
    check_flags,
    check_mask,
    check_opt_state,
    check_optimizer,
    check_scalar,
    check_updatable,
    check_window,
    choose_delay,
    length_of,
)
from .leaves import first_order, is_key, signature, tree_bytes, zero_gradient
from .progress import show_progress
from .records import (
    GradientOptions,
    Gradients,
    Moment,
    Observation,
    Result,
    Sequence,
    UpdateOptions,
    counted,
)
from .runs import Course, Observer, optimised, run_updates, run_windows

__all__ = [
    'CARRIES',
    'Course',
    'GradientOptions',
    'Gradients',
    'Moment',
    'Observation',
    'Observer',
    'REDUCTIONS',
    'Result',
    'Sequence',
    'UpdateOptions',
    'check_choice',
    'check_flags',
    'check_mask',
    'check_opt_state',
    'check_optimizer',
    'check_scalar',
    'check_updatable',
    'check_window',
    'choose_delay',
    'counted',
    'first_order',
    'is_key',
    'length_of',
    'optimised',
    'run_updates',
    'run_windows',
    'show_progress',
    'signature',
    'tree_bytes',
    'zero_gradient',
]
