"""The trace of one parameter, as users see it."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph, path_name
from .._errors import OptionError
from .._rules import Trace, read
from .world import as_path


def parameter_path(states: Mapping, param) -> str:
    """The path of a parameter that is given as its state or as its path, joined by dots."""
    for key, state in states.items():
        path = as_path(key)
        if state is param or param in (path_name(path), '/'.join(path)) or as_path(param) == path:
            return path_name(path)
    raise OptionError(f'{param!r} is no parameter of the model; its parameters are {list(states)}.')


def of_parameter(graph: ETraceGraph, trace: Trace, t: jax.Array, parameter: str) -> dict:
    """``(relation, group) -> slots`` of the relations that hold a parameter or a part of it."""
    found = {}
    for rel in graph.hidden_param_op_relations:
        paths = [path for several in rel.paths.values() for path in several]
        if any(path == parameter or path.startswith(parameter + '/') for path in paths):
            for group, slots in trace.get(rel.key, {}).items():
                found[rel.key, group] = {name: _counting(e, t) for name, e in slots.items()}
    return found


def _counting(slot, t: jax.Array):
    """A slot as numbers, zero where a lane has no past; separate states go to a last axis."""

    def leaf(e):
        flags = t > 0 if t.ndim == 0 or e.shape[:1] == t.shape else (t > 0).any()
        return jnp.where(flags.reshape(flags.shape + (1,) * (e.ndim - flags.ndim)), read(e), 0)

    return jnp.stack([leaf(e) for e in slot], -1) if isinstance(slot, tuple) else leaf(slot)
