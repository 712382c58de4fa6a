"""Weight gradients as one contraction over time and lanes, with the op's own reverse rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Set
from functools import partial

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import ETraceGraph, OpUse, depends, is_complex, is_inexact
from .layout import Entry, Pair, folded, pairs, to_y
from .rule import OpGradients, Weights

# op -> so many groups of lanes, whose gradients stand apart in a first axis; no number: in one
Groups = Mapping[str, int]
WHOLE: Groups = {}


def over_lanes(graph: ETraceGraph, gradients: Callable[[Groups], OpGradients]) -> OpGradients:
    """``gradients(WHOLE)``. Devices that share the lanes add up all parts of a gradient, lanes of
    one device by themselves, before they exchange the sum.
    """
    if jax.device_count() == 1:
        return gradients(WHOLE)
    # as many groups as devices can have apart, of ops whose trace and operands have lanes in front
    number = math.gcd(graph.lanes or 1, jax.device_count())
    others = {pair.relation.key for pair in pairs(graph) if not pair.laned}
    groups = {
        op.key: number
        for op in graph.ops
        if op.key not in others
        and op.primitive.batched
        and op.x is not None
        and op.x_aval.shape[:1] == op.y_aval.shape[:1] == (graph.lanes,)
    }

    def shared():
        found = gradients(groups)
        return {
            key: jax.tree.map(lambda g: g.sum(0), g) if key in groups else g
            for key, g in found.items()
        }

    return _jax.alone_or(partial(gradients, WHOLE), shared)()


def by_group(number: int, fn: Callable, axis: int, *args):
    """``fn`` of each group of lanes, which are axis ``axis`` of every array."""

    def split(a):
        lanes = a.shape[axis]
        return a.reshape(*a.shape[:axis], number, lanes // number, *a.shape[axis + 1 :])

    return jax.vmap(fn, in_axes=axis)(*jax.tree.map(split, args))


def same_step(
    graph: ETraceGraph,
    xs: dict,
    ds: dict,
    weights: Weights,
    skip: Set[str] = frozenset(),
    groups: Groups | None = None,
) -> OpGradients:
    """Weight gradients of every owned op but those in ``skip``, from inputs and cotangents of y
    stacked over time; without ``groups`` as :func:`over_lanes` says.
    """
    if groups is None:
        return over_lanes(graph, partial(same_step, graph, xs, ds, weights, skip))
    return {
        op.key: op_gradient(op, xs.get(op.key), ds[op.key], weights[op.key], groups.get(op.key, 0))
        for op in graph.ops
        if op.owned and op.key not in skip
    }


def add_gradients(a: OpGradients, b: OpGradients) -> OpGradients:
    """The sum by op and name; an op of ``b`` must be in ``a``."""
    return {
        op: jax.tree.map(lambda x, y: (x + y).astype(x.dtype), g, b[op]) if op in b else g
        for op, g in a.items()
    }


def op_gradient(op: OpUse, xs, ds: jax.Array, weights: Entry, groups: int = 0) -> Entry:
    """``sum_t xy_to_dw(x_t, d_t)`` over a leading time axis, as one contraction; of so many groups
    of lanes apart. Sums are made, and returned, in single precision at least.
    """
    wide = in_wide(op)
    if wide is not op and xs is not None:
        xs = xs.astype(wide.x_aval.dtype)
    found = contracted(wide, xs, ds, like_avals(wide, weights), groups)
    return jax.tree.map(lambda g: g.astype(_jax.wide(g.dtype)), found)


def contracted(op: OpUse, xs, ds: jax.Array, weights: Entry, groups: int = 0) -> Entry:
    """The same in the op's own dtypes.

    Time is folded into the batch where the op has one, and is the batch where the op has a form for
    one. Elsewhere it is the reverse rule of the op mapped over time.
    """
    if groups:
        lanes = 1 + len(op.repeats)
        if (own := op.primitive.gradient_by_group) is not None:
            # lanes in front of time, so that a device has its own next to each other
            x, d = (jnp.moveaxis(a, lanes, 0) for a in (xs, ds))
            x, d = folded(x, x.shape[1 + lanes :]), folded(d, d.shape[1 + lanes :])
            return own(groups, x, d, finite(op, weights), **op.params)
        return by_group(groups, partial(contracted, op, weights=weights), lanes, xs, ds)
    weights = finite(op, weights)
    if op.repeats:
        # of a group there are fewer lanes than the op has
        flat = lambda a: folded(a, a.shape[1 + len(op.repeats) :])
        xs = None if xs is None else flat(xs)
        return contracted(outside_loops(op), xs, flat(ds), weights)
    # time is one more batch axis where the op allows it
    rule = op.primitive.bound_rule('xy_to_dw', op.params, 'every learner')
    fold = op.primitive.fold_axes
    ds = (ds if is_complex(op.y_aval) else jnp.real(ds)).astype(op.y_aval.dtype)
    if ds.shape[0] == 1:
        return rule(None if xs is None else xs[0], ds[0], weights)
    if op.primitive.batched and xs is not None and (fold is None or fold(op.params) == (0, 0)):
        return rule(folded(xs, xs.shape[2:]), folded(ds, ds.shape[2:]), weights)
    if (form := op.primitive.batched_form) is not None:
        return form.bound_rule('xy_to_dw', op.params, 'every learner')(xs, ds, weights)

    def over_time(weights):
        return jax.vmap(lambda x: op.impl(x, weights), axis_size=ds.shape[0])(xs)

    return jax.vjp(over_time, weights)[1](ds)[0]


def factored_gradient(pair: Pair, xs, ds: jax.Array, weights: Entry, groups: int = 0) -> Entry:
    """``sum_t xy_to_dw(ex_t, d_t)`` with d at a relation's coordinates."""
    op = as_represented(pair.op)
    if not pair.has_lanes_added:
        return op_gradient(op, xs, jax.vmap(lambda d: to_y(pair, d))(ds), weights, groups)
    # an ex for each lane; the other added axes are summed
    ds = ds.sum(tuple(range(2, 1 + pair.coords.added)))
    got = jax.vmap(lambda x, d: op_gradient(op, x, d, weights), 1)(xs, ds)
    return {n: g.sum(0) for n, g in got.items()}


def in_parts(op: OpUse, fn: Callable, d: jax.Array):
    """``fn(d)`` of values at y, linear in real numbers. The derivative of a complex state by a real
    y goes through it as a real and an imaginary part.
    """
    if is_complex(d) and not is_complex(op.y_aval):
        real, imaginary = jnp.real(d), jnp.imag(d)
        parts = jax.tree.map(lambda e: e.astype(real.dtype), (fn(real), fn(imaginary)))
        return jax.tree.map(jax.lax.complex, *parts)
    return fn(d)


def finite(op: OpUse, weights: Entry) -> Entry:
    """Weights with NaN and inf set to 0 for an op in a branch: the branch may not be taken, and
    ``0 * NaN`` would poison the trace.
    """
    if not op.conditional:
        return weights
    return {n: jnp.where(jnp.isfinite(w), w, 0) for n, w in weights.items()}


def in_wide(op: OpUse) -> OpUse:
    """The op on numbers of single precision at least, in which its gradients are made: sums of many
    numbers of 8 or 11 bits would stand still. Itself where its y has another dtype nevertheless.
    """

    def wide(aval):
        dtype = _jax.wide(aval.dtype) if is_inexact(aval) else aval.dtype
        return jax.ShapeDtypeStruct(aval.shape, dtype)

    own = op.x_aval, op.weight_avals, op.y_aval
    x, weights, y = found = jax.tree.map(wide, own)
    dtypes = lambda avals: [a.dtype for a in jax.tree.leaves(avals)]
    if dtypes(own) == dtypes(found) or jax.eval_shape(op.empty().impl, x, weights).dtype != y.dtype:
        return op
    return dataclasses.replace(op, x_aval=x, weight_avals=weights, y_aval=y)


def like_avals(op: OpUse, weights: Entry) -> Entry:
    """Weights in the dtypes that the op takes."""
    return {n: w.astype(op.weight_avals[n].dtype) for n, w in weights.items()}


def outside_loops(op: OpUse) -> OpUse:
    """The op as if no loop was around it."""
    return dataclasses.replace(op, repeats=()) if op.repeats else op


def represented(op: OpUse, x: jax.Array) -> jax.Array:
    """x in the form in which ES-D-RTRL sums it: one-hot for the indices of an embedding, else x."""
    represent = op.primitive.root.represent
    return x if represent is None else represent(x, op.weight_avals)


def as_represented(op: OpUse) -> OpUse:
    """The op, called with x in that form."""
    if op.x is None:
        return op
    return dataclasses.replace(op, x_aval=jax.eval_shape(lambda x: represented(op, x), op.x_aval))


def without_x(op: OpUse) -> set[str]:
    """The weights of an op whose gradient does not read x, as that of a bias."""
    if op.x is None:
        return set()
    op = outside_loops(as_represented(op)).empty()
    d = jax.ShapeDtypeStruct(op.y_aval.shape, op.y_aval.dtype)

    def gradient(name: str) -> Callable:
        return lambda xs, d, weights: op_gradient(op, xs[0][None], d[None], weights)[name]

    x = jax.ShapeDtypeStruct(op.x_aval.shape, op.x_aval.dtype)
    avals = op.weight_avals
    return {name for name in avals if not any(depends(gradient(name), [x], d, avals))}
