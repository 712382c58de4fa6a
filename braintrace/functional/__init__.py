"""The pure core: online learning as functions over pytrees, for any cell written in JAX."""

from ._files import load_state, save_state
from ._online import Memory, OnlineLearner, online, split
from ._state import OnlineState, flatten_paths, fold_lane, merge, reset, unflatten_paths

__all__ = [
    'Memory',
    'OnlineLearner',
    'OnlineState',
    'flatten_paths',
    'fold_lane',
    'load_state',
    'merge',
    'online',
    'reset',
    'save_state',
    'split',
    'unflatten_paths',
]
