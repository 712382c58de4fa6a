"""Comparing trees of gradients."""
from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import pytest

from tests import models

TOLERANCE = 1e-10
CORE = {'leaky', 'vector', 'gru', 'lstm_fused', 'lru', 'plain_input', 'adaptive_lif', 'learned_decay', 'sparse', 'lora', 'conv1d',
        'tail_flip', 'spiking_three', 'populations'}
CORE |= {'calls_mixed', 'cond', 'cond_log_of_negative', 'scan', 'scan_spikes', 'scan_two_layers', 'while', 'vmap_weights', 'broadcast',
         'move_gather_negative', 'back_put', 'mix_norm'}
def core_first(names):
    """These rows; those outside the core are slow, since each one costs a compilation."""
    return [n if n in CORE else pytest.param(n, marks=pytest.mark.slow) for n in names]


every = pytest.mark.parametrize('name', core_first(models.MODELS))


def every_core_first(table=models.MODELS, **flags):
    """Every row of a table with these flags."""
    return pytest.mark.parametrize('name', core_first(models.names(table, **flags)))


every_program = every_core_first(models.PROGRAMS)


def crossed(names, values):
    """Each row with one of these values in turn; the tests of the other rule turn them the other way round."""
    return list(zip(names, itertools.cycle(values)))


def every_window(*others):
    """Every row with a window and a rest; those of the core with one of the other windows as well."""
    core = [n for n in models.MODELS if n in CORE]
    return pytest.mark.parametrize('name, window', [
        *[(n, 3) if n in CORE else pytest.param(n, 3, marks=pytest.mark.slow) for n in models.MODELS],
        *[pytest.param(*row, marks=pytest.mark.slow) for row in crossed(core, others)]])


def at(steps, t):
    """Step ``t`` of per-step gradients."""
    return jax.tree.map(lambda g: g[t], steps)


def added(trees):
    return functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), trees)


def error(got, want) -> dict[str, float]:
    """Largest relative error of each parameter; absolute where the gradient is zero."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True)
    return {jax.tree_util.keystr(path): float(np.abs(a - b).max() / (np.abs(b).max() or 1.)) for (path, a), b in pairs}


def assert_close(got, want, tolerance=TOLERANCE):
    errors = error(got, want)
    wrong = {path: size for path, size in errors.items() if not size < tolerance}
    assert not wrong, f'relative errors {wrong}; the other parameters agree: {sorted(set(errors) - set(wrong))}'


def assert_moves(tree):
    """Every parameter has a gradient: otherwise a comparison shows nothing."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    still = [jax.tree_util.keystr(path) for path, g in leaves if not np.abs(g).max() > 1e-8]
    assert not still, f'no gradient for {still}'
