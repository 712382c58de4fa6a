"""The pure core: online learning as functions over pytrees, for any cell written in JAX.

A cell is a function ``cell(params, carry, *inputs) -> (outputs, carry)``. Everything here takes
values and returns values, so ``jax.jit``, ``jax.vmap`` and ``jax.shard_map`` act on it as on any
function.

>>> import jax, jax.numpy as jnp, braintrace
>>> cell = lambda p, h, x: (h, jnp.tanh(0.9 * h + braintrace.matmul(x, p['W'])))
>>> learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl())
>>> params, h, xs = {'W': jnp.ones((2, 4))}, jnp.zeros((3, 4)), jnp.ones((7, 3, 2))
>>> state = learner.init(params, h, xs[0])
>>> gradient = jax.jit(learner.sequence_grad(lambda h, y: jnp.mean((h - y) ** 2)))
>>> found = gradient(params, state, xs, jnp.zeros((7, 3, 4)))
>>> found.grads['W'].shape
(2, 4)
"""

from typing import TYPE_CHECKING

from .._public_names import lacking as _lacking
from .._windows import Gradient, Skipped, StepGradient, Trained
from ..extra.chunks import chunks
from ..extra.edge import Exported, load_exported
from ..extra.files import load_state, save_state
from ..extra.observed import Observed
from ..extra.saving import structure_diff
from ._export import export_step
from ._online import Memory, OnlineLearner, online
from ._state import (
    OnlineState,
    combine,
    flatten_paths,
    fold_lane,
    partition,
    reset,
    unflatten_paths,
)

__all__ = [
    'Exported',
    'Gradient',
    'Memory',
    'Observed',
    'OnlineLearner',
    'OnlineState',
    'Skipped',
    'StepGradient',
    'Trained',
    'chunks',
    'combine',
    'export_step',
    'flatten_paths',
    'fold_lane',
    'load_exported',
    'load_state',
    'online',
    'partition',
    'reset',
    'save_state',
    'structure_diff',
    'unflatten_paths',
]

if not TYPE_CHECKING:
    __getattr__ = _lacking(__name__, __all__)
