"""Trace rules derived from an op's function alone, in the three layouts of a trace.

``parameter``: an entry for each entry of a trainable. It is exact where such an entry feeds one
element of y per sample; ``places`` say which one. ``effective``: an entry for each pair of an
element of x and an element of y, for an op that is linear in x; the gradient is pulled back from
there. ``position``: an entry for each pair of an element of y and an entry of a trainable; it is
exact for every op, and the largest.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ._rule_parts import zeros_trace


def samples(fn: Callable, x_index: int) -> Callable:
    """Map ``fn``, a function of one sample, over a batch in axis 0 of x and of y."""

    def impl(*operands, **params):
        axes = [0 if i == x_index else None for i in range(len(operands))]
        return jax.vmap(functools.partial(fn, **params), in_axes=axes)(*operands)

    return impl


# a trace for each pair of an element of y and an entry of a trainable -----------------------------


def position_rules(of_weights: Callable, batched: bool) -> dict[str, Callable]:
    """Trace rules of ``of_weights(x, weights, **params) -> y``, which has a batch in front where
    ``batched``. The layout is ``(batch, *y, size)``.
    """

    def instant_drtrl(x, hidden_dim, weights, **params):
        y, pull = jax.vjp(lambda w: of_weights(x, w, **params), weights)
        # One row of the basis for each element of y, scaled by that element's factor.
        d = hidden_dim.astype(y.dtype)
        basis = jnp.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape) * d
        entry = {
            name: g.reshape(*y.shape, weights[name].size)
            for name, g in jax.vmap(pull)(basis)[0].items()
        }
        return {name: e.sum(0) for name, e in entry.items()} if batched else entry

    def yw_to_w(hidden_dim, trace, **params):
        return {name: e * hidden_dim[..., None] for name, e in trace.items()}

    def solve_drtrl(signal, trace, weights, **params):
        scaled = {
            name: e.sum(tuple(range(e.ndim - 1))) for name, e in yw_to_w(signal, trace).items()
        }
        return {name: _unwidened(e, weights[name], signal.shape) for name, e in scaled.items()}

    def init_drtrl(x_var, y_var, weight_vars, num_hidden_state):
        y = y_var.aval.shape
        return {
            name: zeros_trace((*y, math.prod(w.aval.shape)), w, num_hidden_state)
            for name, w in weight_vars.items()
        }

    return {
        'instant_drtrl': instant_drtrl,
        'yw_to_w': yw_to_w,
        'solve_drtrl': solve_drtrl,
        'init_drtrl': init_drtrl,
    }


def _unwidened(e: jax.Array, weight: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reshape a flat gradient to the weight; if the op saw the weight broadcast to ``shape``, y's,
    sum over the copies.
    """
    if e.size == weight.size:
        return e.reshape(weight.shape)
    return jax.vjp(lambda w: jnp.broadcast_to(w, shape), weight.astype(e.dtype))[1](
        e.reshape(shape)
    )[0]


# a trace for each pair of an element of x and an element of y -------------------------------------


def effective_rules(fn: Callable, order: Callable, batched: bool) -> dict[str, Callable]:
    """Trace rules of ``fn(x, *order(weights))``, a function of one sample that is linear in x.

    The layout is ``(batch, x size, y size)``. The first weight in the order of names holds the
    trace for all weights, the traces of the others are empty. A bias is not part of ``fn``: it has
    a trace of y's shape.
    """
    rules = _EffectiveRules(fn, order, batched)
    return {
        'instant_drtrl': rules.instant_drtrl,
        'yw_to_w': _scale_effective,
        'solve_drtrl': rules.solve_drtrl,
        'init_drtrl': _empty_effective,
    }


@dataclasses.dataclass(frozen=True)
class _EffectiveRules:
    """The rules of :func:`effective_rules` that depend on the function or on the batch."""

    fn: Callable
    order: Callable
    batched: bool

    def instant_drtrl(self, x, hidden_dim, weights, *, places, **params):
        # For one sample this is the outer product of x and d; a batch is summed.
        lanes = math.prod(x.shape[: x.ndim - len(places.x)])
        x, d = x.reshape(lanes, math.prod(places.x)), hidden_dim.reshape(lanes, math.prod(places.y))
        entry = {name: jnp.zeros((0,), d.dtype) for name in weights} | {
            _holder(weights): x.T @ d,
            'bias': d.sum(0).reshape(places.y),
        }
        return {name: entry[name].astype(dtype) for name, dtype in _dtypes(weights).items()}

    def solve_drtrl(self, signal, trace, weights, *, places, **params):
        scaled = _scale_effective(signal, trace, places=places)
        summed = {name: e.sum(0) if self.batched else e for name, e in scaled.items()}
        matrix, pull = jax.vjp(
            lambda weights: self._matrix(weights, places, params),
            {name: w for name, w in weights.items() if name != 'bias'},
        )
        of_weights = pull(summed[_holder(weights)].astype(matrix.dtype))[0]
        return of_weights | {name: e for name, e in summed.items() if name == 'bias'}

    def _matrix(self, weights: dict, places, params: dict) -> jax.Array:
        """The matrix ``(x size, y size)`` that the weights make: its rows are ``fn`` of each unit
        vector.
        """
        size, dtype = math.prod(places.x), jax.tree.leaves(weights)[0].dtype
        basis = jnp.eye(size, dtype=dtype).reshape(size, *places.x)
        rows = jax.vmap(lambda x: self.fn(x, *self.order(weights), **params))(basis)
        return rows.reshape(size, math.prod(places.y))


def _scale_effective(hidden_dim, trace, *, places, **params):
    """``yw_to_w`` of the effective layout."""
    lead = hidden_dim.shape[: hidden_dim.ndim - len(places.y)]
    of_columns = hidden_dim.reshape(*lead, 1, math.prod(places.y))
    factors = {_holder(trace): of_columns, 'bias': hidden_dim}
    return {name: e * factors[name] if name in factors else e for name, e in trace.items()}


def _empty_effective(x_var, y_var, weight_vars, num_hidden_state, *, places):
    """``init_drtrl`` of the effective layout."""
    lead = y_var.aval.shape[: len(y_var.aval.shape) - len(places.y)]
    shapes = {_holder(weight_vars): (math.prod(places.x), math.prod(places.y)), 'bias': places.y}
    dtypes = _dtypes({name: w.aval for name, w in weight_vars.items()})
    return {
        name: zeros_trace((*lead, *shapes.get(name, (0,))), w, num_hidden_state).astype(
            dtypes[name]
        )
        for name, w in weight_vars.items()
    }


def _holder(names) -> str:
    """The weight whose slot holds the trace of the effective matrix."""
    return min(name for name in names if name != 'bias')


def _dtypes(weights: dict) -> dict:
    """The dtype of each slot of the trace; the holder's is the common one of all weights."""
    found = {name: w.dtype for name, w in weights.items()}
    common = jnp.result_type(*(dtype for name, dtype in found.items() if name != 'bias'))
    return found | {_holder(weights): common}


# a trace of the parameter's shape -----------------------------------------------------------------


def parameter_rules() -> dict[str, Callable]:
    """The rule that the parameter's layout needs beside ``parameter_trace``: factors at y are
    spread to the entries by the equation's ``places``.
    """

    def yw_to_w(hidden_dim, trace, *, places, **params):
        return {
            name: e * (hidden_dim if name == 'bias' else places.spread(name, hidden_dim))
            for name, e in trace.items()
        }

    return {'yw_to_w': yw_to_w}
