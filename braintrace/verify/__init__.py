"""Gradients by independent means, and the gradient doctor, which compares a learner with them and
names the paths that it leaves out.

>>> import braintrace, jax, jax.numpy as jnp
>>> model, loss = braintrace.nn.MinGRUCell(2, 4), lambda output, target: jnp.mean(output**2)
>>> learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((3, 2)), batch_size=3, seed=0)
>>> xs = jax.random.normal(jax.random.key(0), (6, 3, 2))
>>> braintrace.verify.diagnose(learner, xs, xs, loss).findings
('Every gradient is that of BPTT: no path is left out.',)
"""

from typing import TYPE_CHECKING

from .._public_names import lacking as _lacking
from ._meter import Meter, MeterState
from ._reading import Estimate, Reading
from .compare import Comparison, RuleRow, compare_rules
from .cut import cut_bptt_gradients
from .diagnosis import Activity, Diagnosis, ParameterRow, TraceGrowth
from .doctor import diagnose
from .jacobians import hidden_jacobians
from .oracles import bptt_gradients, dense_recursion_gradients, finite_difference_gradients

__all__ = [
    'Activity',
    'Comparison',
    'Diagnosis',
    'Estimate',
    'Meter',
    'MeterState',
    'ParameterRow',
    'Reading',
    'RuleRow',
    'TraceGrowth',
    'bptt_gradients',
    'compare_rules',
    'cut_bptt_gradients',
    'dense_recursion_gradients',
    'diagnose',
    'finite_difference_gradients',
    'hidden_jacobians',
]

if not TYPE_CHECKING:
    __getattr__ = _lacking(__name__, __all__)
