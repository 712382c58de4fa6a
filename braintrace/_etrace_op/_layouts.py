"""Parts of trace rules, and whole rules derived from an op's function alone in the three layouts of
a trace.

``parameter``: an entry for each entry of a trainable. It is exact where such an entry feeds one
element of y per sample; ``places`` say which one. ``effective``: an entry for each pair of an
element of x and an element of y, for an op that is linear in x; the gradient is pulled back from
there. ``position``: an entry for each pair of an element of y and an entry of a trainable, which is
the whole Jacobian dy/dw; it is exact for every op, and the largest.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import RuleContractError
from ._operands import drawn, shape_of

# parts that the built-in primitives share ---------------------------------------------------------


def add_bias(y, bias):
    """Add a bias along the last axis of ``y``."""
    return y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)


def bias_at(index: int, **names: int) -> Callable[[dict], dict[str, int]]:
    """Make a ``trainable_invars_fn`` of the operands ``names``, and of a bias at ``index`` where
    ``has_bias`` is set.
    """
    return lambda params: {**names, 'bias': index} if params.get('has_bias', False) else {**names}


def samples(fn: Callable) -> Callable:
    """Map ``fn``, a function of one sample, over a batch in axis 0 of x and of y."""

    def impl(x, *operands, **params):
        axes = (0, *(None for _ in operands))
        return jax.vmap(functools.partial(fn, **params), in_axes=axes)(x, *operands)

    return impl


def zeros_trace(shape, var, num_hidden_state: int):
    """Zeros of ``shape`` and a last axis of states, in a variable's dtype."""
    return jnp.zeros((*shape, num_hidden_state), var.aval.dtype)


def output_trace(x_var, y_var, weight_vars, num_hidden_state):
    """The ``init_pp`` of every op: zeros of y's shape and a last axis of states."""
    return zeros_trace(y_var.aval.shape, y_var, num_hidden_state)


# a trace of the parameter's shape -----------------------------------------------------------------


def parameter_trace(batched: bool) -> Callable:
    """Make the ``init_drtrl`` of a trace with the parameters' shapes for each sample."""

    def init_drtrl(x_var, y_var, weight_vars, num_hidden_state):
        batch = x_var.aval.shape[:1] if batched else ()
        return {
            name: zeros_trace((*batch, *var.aval.shape), var, num_hidden_state)
            for name, var in weight_vars.items()
        }

    return init_drtrl


def over_columns(hidden_dim, trace, **params):
    """The ``yw_to_w`` of a bias and of matrices whose last axis is y's."""
    return {
        name: value * (hidden_dim if name == 'bias' else jnp.expand_dims(hidden_dim, -2))
        for name, value in trace.items()
    }


def at_places(hidden_dim, trace, *, places, **params):
    """The ``yw_to_w`` that spreads factors at y to the entries by the equation's ``places``."""
    return {
        name: e * (hidden_dim if name == 'bias' else places.spread(name, hidden_dim))
        for name, e in trace.items()
    }


# places of weights --------------------------------------------------------------------------------
#
# The element of y that each entry of a trainable feeds, found from an op's function alone.


# Factors of the random weights at which an op is tried. An op that clips its weights, or takes one
# sign of them alone, has a derivative of zero at some weights; another scale may show the entry.
SCALES = (1.0, -1.0, 0.1, -0.1, 0.01, -0.01, 10.0, -10.0)


@dataclasses.dataclass(frozen=True)
class Places:
    """The shapes of one sample of x and of y, and the element of y that each entry of a trainable
    feeds; hashable by value.

    ``at`` has a row for each trainable: its name, its shape, and either the axes of the trainable
    that are y's axes, in y's order, or the flat indices into y as bytes.
    """

    x: tuple[int, ...]
    y: tuple[int, ...]
    at: tuple[tuple[str, tuple[int, ...], tuple[int, ...] | bytes], ...] = ()

    def spread(self, name: str, d: jax.Array) -> jax.Array:
        """Turn factors at y, with any axes in front, into factors at the entries of a trainable."""
        lead = d.ndim - len(self.y)
        _, shape, where = next(row for row in self.at if row[0] == name)
        if isinstance(where, bytes):
            return d.reshape(*d.shape[:lead], math.prod(self.y))[
                ..., np.frombuffer(where, np.int32).reshape(shape)
            ]
        d = jnp.transpose(d, (*range(lead), *(lead + int(i) for i in np.argsort(where))))
        return jnp.expand_dims(d, [lead + axis for axis in range(len(shape)) if axis not in where])


@functools.lru_cache(maxsize=256)
def places_of(
    op: str, fn: Callable, x, weights: tuple[tuple[str, jax.ShapeDtypeStruct], ...], params, find
) -> Places:
    """The places of ``fn(x, *weights, **params)`` for one sample of these shapes.

    ``weights`` are pairs (name, shape and dtype). Where ``find`` is False, ``at`` stays empty.
    Raises ``RuleContractError`` if ``fn`` is not linear in x, or if an entry of a trainable feeds
    several elements of y.
    """
    call, avals = functools.partial(fn, **dict(params)), [aval for _, aval in weights]
    y = shape_of(op, call, x, *avals)
    if not isinstance(y, jax.ShapeDtypeStruct):
        raise RuleContractError(f'{op}: fn returned a {type(y).__name__}, expected one array.')
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        # linear in x: the same at a combination of two random x as the combination of both
        one, another, *values = (drawn(rng, aval) for aval in (x, x, *avals))
        together = call(2 * one - 3 * another, *values)
        apart = 2 * call(one, *values) - 3 * call(another, *values)
        if not _close(together, apart, 1e-4).all():
            raise RuleContractError(
                f'{op}: fn is not linear in x, so its traces are not those of a product. Make the '
                'op of its impl with `kit.new_etp_primitive`, whose trace is right for any '
                'function.'
            )
        if not find:
            return Places(tuple(x.shape), tuple(y.shape))
        # The integers name the elements of y. The random numbers tell one element from several.
        names = 1.0 + np.arange(math.prod(y.shape)).reshape(y.shape)
        probes = [np.ones(y.shape), names, rng.normal(size=y.shape)]
        responses = _responses(call, rng, x, avals, probes)
    rows = []
    for (name, _), (ones, named, other) in zip(weights, responses, strict=True):
        # An entry that feeds the element k alone answers the probes with ``g``, ``g (k + 1)`` and
        # ``g random[k]``. So the ratio of the first two is the integer k + 1, to within one
        # rounding, and the third confirms it: an entry that feeds several elements gives a mean of
        # integers, at whose place the random number is another one. An entry that feeds nothing
        # gets the index 0.
        random = probes[-1]
        ratio = np.divide(named, ones, out=np.ones_like(ones), where=ones != 0)
        index = np.clip(np.rint(np.real(ratio)).astype(int) - 1, 0, max(random.size - 1, 0))
        expected = ones * random.ravel()[index] if random.size else ones
        wrong = np.argwhere(~_close(other, expected, 1e-8))
        if len(wrong):
            raise RuleContractError(
                f'{op}: entry {[int(k) for k in wrong[0]]} of {name!r} feeds several elements of '
                "y, so a trace of the parameter's shape is not exact. Make the op with "
                "trace='position' or, if it is a product, trace='effective'."
            )
        axes = _axes(index, y.shape)
        rows.append((name, index.shape, index.astype(np.int32).tobytes() if axes is None else axes))
    return Places(tuple(x.shape), tuple(y.shape), tuple(rows))


def _responses(
    call: Callable, rng: np.random.Generator, x, avals: list, probes: list[np.ndarray]
) -> list[np.ndarray]:
    """The gradient of each weight for each probe as y's cotangent: arrays ``(probes, *weight)``."""
    value, *values = (drawn(rng, aval) for aval in (x, *avals))

    def at_scale(scale: float) -> list[np.ndarray]:
        y, pull = jax.vjp(lambda ws: call(value, *ws), [scale * w for w in values])
        pulled = [pull(jnp.asarray(probe, y.dtype))[0] for probe in probes]
        return [np.stack([np.asarray(g) for g in gs]) for gs in zip(*pulled, strict=True)]

    # a gradient that is zero is taken from the first scale of the weights at which it is not
    found = at_scale(SCALES[0])
    for scale in SCALES[1:]:
        if all((response[0] != 0).all() for response in found):
            break
        found = [
            np.where((old[0] == 0) & np.isfinite(new), new, old)
            for new, old in zip(at_scale(scale), found, strict=True)
        ]
    return found


def _close(a, b, tolerance: float) -> np.ndarray:
    """Where two arrays agree, relative to the largest number in them."""
    largest = np.abs(np.stack([a, b])).max(initial=0)
    return np.isclose(a, b, rtol=tolerance, atol=tolerance * largest)


def _axes(index: np.ndarray, y: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes of a weight that are y's axes, in y's order, if its index array says no more."""
    # An axis along which the index moves is one of y's; an axis of size 1 may stand for one of y's.
    moving = [
        a for a in range(index.ndim) if index.shape[a] > 1 and (index != index.take([0], a)).any()
    ]
    ones = [a for a in range(index.ndim) if index.shape[a] == 1]
    for extra in itertools.combinations(ones, max(0, len(y) - len(moving))):
        for axes in itertools.permutations([*moving, *extra]):
            if tuple(index.shape[a] for a in axes) == y:
                flat = np.arange(math.prod(y)).reshape(y).transpose(np.argsort(axes))
                others = [a for a in range(index.ndim) if a not in axes]
                if (index == np.expand_dims(flat, others)).all():
                    return tuple(axes)
    return None


# a trace for each pair of an element of y and an entry of a trainable -----------------------------


def position_rules(of_weights: Callable, batched: bool) -> dict[str, Any]:
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
        found = {}
        for name, e in yw_to_w(signal, trace).items():
            flat, weight = e.sum(tuple(range(e.ndim - 1))), weights[name]
            if flat.size == weight.size:
                found[name] = flat.reshape(weight.shape)
                continue
            # The op saw the weight broadcast to y's shape: its gradient is the sum of the copies.
            copies = lambda w: jnp.broadcast_to(w, signal.shape)
            pull = jax.vjp(copies, weight.astype(flat.dtype))[1]
            found[name] = pull(flat.reshape(signal.shape))[0]
        return found

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


# a trace for each pair of an element of x and an element of y -------------------------------------


def effective_rules(fn: Callable, order: Callable, batched: bool) -> dict[str, Any]:
    """Trace rules of ``fn(x, *order(weights))``, a function of one sample that is linear in x.

    The layout is ``(batch, x size, y size)``. The first weight in the order of names, the holder,
    holds the trace for all weights; the traces of the others are empty. A bias is not part of
    ``fn``: it has a trace of y's shape.
    """

    def holder(names) -> str:
        return min(name for name in names if name != 'bias')

    def dtypes(weights: dict) -> dict:
        # the holder's slot has the common dtype of all weights
        found = {name: w.dtype for name, w in weights.items()}
        common = jnp.result_type(*(dtype for name, dtype in found.items() if name != 'bias'))
        return found | {holder(weights): common}

    def instant_drtrl(x, hidden_dim, weights, *, places, **params):
        # For one sample this is the outer product of x and d; a batch is summed.
        size = math.prod(x.shape[: x.ndim - len(places.x)])  # of the batch
        x, d = x.reshape(size, math.prod(places.x)), hidden_dim.reshape(size, math.prod(places.y))
        entry = {name: jnp.zeros((0,), d.dtype) for name in weights}
        entry |= {holder(weights): x.T @ d, 'bias': d.sum(0).reshape(places.y)}
        return {name: entry[name].astype(dtype) for name, dtype in dtypes(weights).items()}

    def yw_to_w(hidden_dim, trace, *, places, **params):
        lead = hidden_dim.shape[: hidden_dim.ndim - len(places.y)]
        of_columns = hidden_dim.reshape(*lead, 1, math.prod(places.y))
        factors = {holder(trace): of_columns, 'bias': hidden_dim}
        return {name: e * factors[name] if name in factors else e for name, e in trace.items()}

    def solve_drtrl(signal, trace, weights, *, places, **params):
        scaled = yw_to_w(signal, trace, places=places)
        summed = {name: e.sum(0) if batched else e for name, e in scaled.items()}

        def matrix_of(weights: dict) -> jax.Array:
            # The rows of the matrix from x to y are ``fn`` of each unit vector.
            size, dtype = math.prod(places.x), jax.tree.leaves(weights)[0].dtype
            basis = jnp.eye(size, dtype=dtype).reshape(size, *places.x)
            rows = jax.vmap(lambda x: fn(x, *order(weights), **params))(basis)
            return rows.reshape(size, math.prod(places.y))

        own = {name: w for name, w in weights.items() if name != 'bias'}
        matrix, pull = jax.vjp(matrix_of, own)
        found = pull(summed[holder(weights)].astype(matrix.dtype))[0]
        return found | {name: e for name, e in summed.items() if name == 'bias'}

    def init_drtrl(x_var, y_var, weight_vars, num_hidden_state, *, places):
        lead = y_var.aval.shape[: len(y_var.aval.shape) - len(places.y)]
        shapes = {holder(weight_vars): (math.prod(places.x), math.prod(places.y)), 'bias': places.y}
        return {
            name: jnp.zeros((*lead, *shapes.get(name, (0,)), num_hidden_state), dtype)
            for name, dtype in dtypes({n: w.aval for n, w in weight_vars.items()}).items()
        }

    return {
        'instant_drtrl': instant_drtrl,
        'yw_to_w': yw_to_w,
        'solve_drtrl': solve_drtrl,
        'init_drtrl': init_drtrl,
    }
