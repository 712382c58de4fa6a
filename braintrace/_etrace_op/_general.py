"""Rules that follow from an implementation alone, in the three layouts of a trace.

``parameter``: an entry for each entry of a trainable, where that feeds one element of y per sample; ``places`` say which.
``effective``: an entry for each pair of an element of x and one of y, where the op is linear in x; the gradient is pulled back from there.
``position``: an entry for each pair of an element of y and one of a trainable; right for every op, and the largest.
"""
from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import RuleContractError
from ._derive import zeros_trace
from ._operands import drawn, shape_of

__all__ = ['Places', 'effective_rules', 'parameter_rules', 'places_of', 'position_rules', 'samples']


def samples(fn: Callable, x_index: int) -> Callable:
    """``fn`` of one sample, mapped over a batch in axis 0 of x and of y."""
    def impl(*operands, **params):
        axes = [0 if i == x_index else None for i in range(len(operands))]
        return jax.vmap(functools.partial(fn, **params), in_axes=axes)(*operands)
    return impl


# a trace for each pair of y and a trainable -----------------------------------------------------------------------------

def position_rules(of_weights: Callable, batched: bool) -> dict[str, Callable]:
    """Trace rules; ``of_weights(x, weights, **params) -> y`` has a batch in front where ``batched``. Layout ``(batch, *y, size)``."""
    def instant_drtrl(x, hidden_dim, weights, **params):
        y, pull = jax.vjp(lambda w: of_weights(x, w, **params), weights)
        d = hidden_dim.astype(y.dtype)
        basis = jnp.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape) * d
        entry = {name: g.reshape(*y.shape, weights[name].size) for name, g in jax.vmap(pull)(basis)[0].items()}
        return {name: e.sum(0) for name, e in entry.items()} if batched else entry

    def yw_to_w(hidden_dim, trace, **params):
        return {name: e * hidden_dim[..., None] for name, e in trace.items()}

    def solve_drtrl(signal, trace, weights, **params):
        scaled = {name: e.sum(tuple(range(e.ndim - 1))) for name, e in yw_to_w(signal, trace).items()}
        return {name: _unwidened(e, weights[name], signal.shape) for name, e in scaled.items()}

    def init_drtrl(x_var, y_var, weight_vars, num_hidden_state):
        y = y_var.aval.shape
        return {name: zeros_trace((*y, math.prod(w.aval.shape)), w, num_hidden_state) for name, w in weight_vars.items()}

    return {'instant_drtrl': instant_drtrl, 'yw_to_w': yw_to_w, 'solve_drtrl': solve_drtrl, 'init_drtrl': init_drtrl}


def _unwidened(e: jax.Array, weight: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A flat gradient in the weight's shape; that of an op called on its weight broadcast to y's shape is summed over the copies."""
    if e.size == weight.size:
        return e.reshape(weight.shape)
    return jax.vjp(lambda w: jnp.broadcast_to(w, shape), weight.astype(e.dtype))[1](e.reshape(shape))[0]


# a trace for each pair of x and y ---------------------------------------------------------------------------------------

def effective_rules(fn: Callable, order: Callable, batched: bool) -> dict[str, Callable]:
    """Trace rules of ``fn(x, *weights)`` of one sample, linear in x; ``order(weights)`` lists them. Layout ``(batch, x size, y size)``.

    The first weight in the order of names holds the trace for all, the others are empty. A bias is not part of ``fn``: it has a trace of
    y's shape.
    """
    def holder(names) -> str:
        return min(name for name in names if name != 'bias')

    def dtypes(weights) -> dict:
        found = {name: w.dtype for name, w in weights.items()}
        return found | {holder(weights): jnp.result_type(*(dtype for name, dtype in found.items() if name != 'bias'))}

    def instant_drtrl(x, hidden_dim, weights, *, places, **params):
        lanes = math.prod(x.shape[:x.ndim - len(places.x)])
        x, d = x.reshape(lanes, math.prod(places.x)), hidden_dim.reshape(lanes, math.prod(places.y))
        found = {name: jnp.zeros((0,), d.dtype) for name in weights} | {holder(weights): x.T @ d, 'bias': d.sum(0).reshape(places.y)}
        return {name: found[name].astype(dtype) for name, dtype in dtypes(weights).items()}

    def yw_to_w(hidden_dim, trace, *, places, **params):
        flat = hidden_dim.reshape(*hidden_dim.shape[:hidden_dim.ndim - len(places.y)], 1, math.prod(places.y))
        return trace | {name: trace[name] * d for name, d in {holder(trace): flat, 'bias': hidden_dim}.items() if name in trace}

    def solve_drtrl(signal, trace, weights, *, places, **params):
        scaled = {name: e.sum(0) if batched else e for name, e in yw_to_w(signal, trace, places=places).items()}
        size = math.prod(places.x)
        basis = jnp.eye(size, dtype=jax.tree.leaves(weights)[0].dtype).reshape(size, *places.x)

        def effective(weights):
            return jax.vmap(lambda x: fn(x, *order(weights), **params))(basis).reshape(size, math.prod(places.y))
        at, pull = jax.vjp(effective, {name: w for name, w in weights.items() if name != 'bias'})
        return pull(scaled[holder(weights)].astype(at.dtype))[0] | {name: e for name, e in scaled.items() if name == 'bias'}

    def init_drtrl(x_var, y_var, weight_vars, num_hidden_state, *, places):
        lead = y_var.aval.shape[:len(y_var.aval.shape) - len(places.y)]
        shapes = {holder(weight_vars): (math.prod(places.x), math.prod(places.y)), 'bias': places.y}
        kinds = dtypes({name: w.aval for name, w in weight_vars.items()})
        return {name: zeros_trace((*lead, *shapes.get(name, (0,))), w, num_hidden_state).astype(kinds[name])
                for name, w in weight_vars.items()}

    return {'instant_drtrl': instant_drtrl, 'yw_to_w': yw_to_w, 'solve_drtrl': solve_drtrl, 'init_drtrl': init_drtrl}


# a trace of the parameter's shape ---------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Places:
    """One sample's shapes of x and y, and the element of y that each entry of a trainable feeds; hashable by value.

    ``at`` has a row for each trainable: its name, its shape, and either the axes of it that are y's, in y's order, or the flat indices
    of y as bytes.
    """
    x: tuple[int, ...]
    y: tuple[int, ...]
    at: tuple[tuple[str, tuple[int, ...], tuple[int, ...] | bytes], ...] = ()

    def spread(self, name: str, d: jax.Array) -> jax.Array:
        """Factors at y, with any axes in front, as factors at the entries of a trainable."""
        lead = d.ndim - len(self.y)
        _, shape, where = next(row for row in self.at if row[0] == name)
        if isinstance(where, bytes):
            return d.reshape(*d.shape[:lead], math.prod(self.y))[..., np.frombuffer(where, np.int32).reshape(shape)]
        d = jnp.transpose(d, (*range(lead), *(lead + int(i) for i in np.argsort(where))))
        return jnp.expand_dims(d, [lead + axis for axis in range(len(shape)) if axis not in where])


def parameter_rules() -> dict[str, Callable]:
    """Trace rules by the places of an equation; ``init_drtrl`` is that of the parameters' shapes."""
    def yw_to_w(hidden_dim, trace, *, places, **params):
        return {name: e * (hidden_dim if name == 'bias' else places.spread(name, hidden_dim)) for name, e in trace.items()}
    return {'yw_to_w': yw_to_w}


@functools.lru_cache(maxsize=256)
def places_of(op: str, fn: Callable, names: tuple[str, ...], x, weights: tuple, params: tuple, find: bool) -> Places:
    """The places of ``fn(x, *weights)`` for these shapes of one sample; looked for, by the op's own reverse rule, where ``find``.

    Raises ``RuleContractError`` where an entry of a trainable feeds several elements of y, and where ``fn`` is not linear in x.
    """
    static = dict(params)
    y = _sample_of_y(op, functools.partial(fn, **static), x, *weights)
    rng, size = np.random.default_rng(0), math.prod(y)
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        one, another, *values = (drawn(rng, a) for a in (x, x, *weights))
        apart = 2 * fn(one, *values, **static) - 3 * fn(another, *values, **static)
        if not _close(fn(2 * one - 3 * another, *values, **static), apart, 1e-4).all():
            raise RuleContractError(f'{op}: fn is not linear in x, so its traces are not those of a product. Make the op of its impl with '
                                    '`kit.new_etp_primitive`, whose trace is right for any function.')
    if not find:
        return Places(tuple(x.shape), tuple(y))
    labels = [np.ones(y), 1 + rng.permutation(size).reshape(y) / max(size, 1), rng.normal(size=y)]
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        value, *values = (drawn(rng, a) for a in (x, *weights))

        def reverse(scale: float) -> list[list[np.ndarray]]:
            at, pull = jax.vjp(lambda ws: fn(value, *ws, **static), [scale * w for w in values])
            return [[np.asarray(g) for g in pull(jnp.asarray(d, at.dtype))[0]] for d in labels]
        found = reverse(1.)
        for scale in (-1., 0.1, -0.1, 0.01, -0.01, 10., -10.):      # what bounds its weights, or takes one sign, is flat elsewhere
            still = [g == 0 for g in found[0]]
            if any(flat.any() for flat in still):
                found = [[np.where(flat & np.isfinite(new), new, old) for flat, new, old in zip(still, *pair, strict=True)]
                         for pair in zip(reverse(scale), found, strict=True)]
    ones, named, other = found
    rows = []
    for i, name in enumerate(names):
        live = ones[i] != 0
        ratio = np.divide(named[i], ones[i], out=np.ones(ones[i].shape), where=live)
        index = np.rint(np.real(ratio - 1) * max(size, 1)).astype(int)
        where = np.zeros(max(size, 1), int)
        where[np.rint((labels[1].ravel() - 1) * max(size, 1)).astype(int)] = np.arange(size)
        index = where[np.clip(index, 0, max(size - 1, 0))]
        want = ones[i] * labels[2].ravel()[index] if size else ones[i]
        if not _close(other[i], want, 1e-8).all():
            wrong = tuple(int(k) for k in np.argwhere(~_close(other[i], want, 1e-8))[0])
            raise RuleContractError(f"{op}: entry {list(wrong)} of {name!r} feeds several elements of y, so a trace of the parameter's "
                                    "shape is not exact. Make the op with trace='position' or, if it is a product, trace='effective'.")
        axes = _axes(index, y)
        rows.append((name, index.shape, index.astype(np.int32).tobytes() if axes is None else axes))
    return Places(tuple(x.shape), tuple(y), tuple(rows))


def _sample_of_y(op: str, fn: Callable, x, *weights) -> tuple[int, ...]:
    """The shape of one sample of y."""
    y = shape_of(op, fn, x, *weights)
    if not isinstance(y, jax.ShapeDtypeStruct):
        raise RuleContractError(f'{op}: fn returned a {type(y).__name__}, expected one array.')
    return y.shape


def _close(a, b, tolerance: float) -> np.ndarray:
    """Where two arrays agree, relative to the largest number in them."""
    return np.isclose(a, b, rtol=tolerance, atol=tolerance * np.abs(np.stack([a, b])).max(initial=0))


def _axes(index: np.ndarray, y: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes of an index array that are those of y, where it is nothing but that."""
    kept = [a for a in range(index.ndim) if index.shape[a] > 1 and (index != index.take([0], a)).any()]
    ones = [a for a in range(index.ndim) if index.shape[a] == 1]
    for extra in itertools.combinations(ones, len(y) - len(kept)) if len(y) >= len(kept) else ():
        for axes in itertools.permutations([*kept, *extra]):
            if tuple(index.shape[a] for a in axes) == y:
                flat = np.arange(math.prod(y)).reshape(y).transpose(np.argsort(axes))
                if (index == np.expand_dims(flat, [a for a in range(index.ndim) if a not in axes])).all():
                    return tuple(axes)
    return None
