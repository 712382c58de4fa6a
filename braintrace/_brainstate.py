"""brainstate, imported on first use in a way that leaves the process as the user set it up.

brainstate 0.5 turns ``jax_enable_x64`` off when it is imported, and draws the seed of its generator
from NumPy's global one. A module that imports brainstate imports this one first.
"""

from __future__ import annotations

import importlib
import sys

import jax
import numpy as np

from . import _jax


def bring_in() -> None:
    """Import brainstate, unless it has been imported.

    ``jax.config`` and NumPy's global generator stay as they are, and ``brainstate.environ`` gets
    the precision that ``jax_enable_x64`` says. Constants that the import makes are values, even
    while a function is traced.
    """
    if 'brainstate' in sys.modules:
        return
    config, drawn = _jax.config_values(), np.random.get_state()
    with jax.ensure_compile_time_eval():
        environ = importlib.import_module('brainstate').environ
    np.random.set_state(drawn)
    precision = 64 if config['jax_enable_x64'] else 32
    if environ.get_precision() != precision:
        environ.set(precision=precision)
    for name, value in _jax.config_values().items():
        if value != config.get(name, value):
            jax.config.update(name, config[name])


bring_in()
