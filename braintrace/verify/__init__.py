"""Gradients by independent means, and the gradient doctor, which compares a learner with them and
names the paths that it leaves out.
"""

from .cut import cut_bptt_gradients
from .diagnosis import Activity, Diagnosis, ParameterRow, TraceGrowth
from .doctor import diagnose
from .oracles import bptt_gradients, dense_recursion_gradients, finite_difference_gradients

__all__ = [
    'Activity',
    'Diagnosis',
    'ParameterRow',
    'TraceGrowth',
    'bptt_gradients',
    'cut_bptt_gradients',
    'dense_recursion_gradients',
    'diagnose',
    'finite_difference_gradients',
]
