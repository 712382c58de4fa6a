"""What a trace entry of one relation and group can do, written with the primitive's own rules.

Entries are dicts by trainable name: from a primitive's ``init_drtrl`` with the state axis last, in a trace a tuple of one array for each
state, which XLA can write in place. Factors at a relation's coordinates have shape ``(*coords, S)``, or ``(*coords, S, S)`` for the
transition. Where y was expanded over axes that it lacks, an op has its rules mapped over the added axes; one that passes its weight on,
element by element, is called on weights of the expanded shape.
"""
from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._compiler import Coordinates, OpUse
from .._errors import RuleContractError

__all__ = ['Old', 'accumulate', 'added_axes', 'after', 'apart', 'as_represented', 'at_coordinates', 'carry', 'factored_gradient',
           'has_kernel', 'instant', 'op_gradient', 'read', 'renewed', 'represented', 'solve', 'stored', 'stored_dtype', 'to_y',
           'where_lanes', 'zeros', 'zeros_pp']

Entry = dict[str, jax.Array]
States = dict[str, tuple[jax.Array, ...]]
FUSED_LANES = 8                   # of a sum over lanes, in one expression that XLA fuses
UNROLLED_SUMS = 8
FEW_ROWS = 8                      # of factors that are multiplied out in the one pass that writes the trace


def apart(entry: Entry) -> States:
    """An entry as one array for each state."""
    return {n: tuple(e[..., s] for s in range(e.shape[-1])) for n, e in entry.items()}


def stored_dtype(dtype) -> jnp.dtype:
    """How a trace of some dtype is kept: bfloat16 as its bits, since XLA reads bfloat16 arrays on a CPU ten times slower."""
    return jnp.dtype(jnp.uint16 if dtype == jnp.bfloat16 else dtype)


def stored(x: jax.Array, dtype) -> jax.Array:
    """``x`` as it is kept in a trace of that stored dtype."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), dtype) if dtype == jnp.uint16 else x.astype(dtype)


def read(e: jax.Array, dtype=None) -> jax.Array:
    """A stored array as numbers, in its own dtype or in ``dtype`` if that is wider."""
    own = jnp.dtype(jnp.bfloat16) if e.dtype == jnp.uint16 else e.dtype
    if e.dtype == jnp.uint16:
        e = jax.lax.bitcast_convert_type(e.astype(jnp.uint32) << 16, jnp.float32)
    return e.astype(own if dtype is None else jnp.promote_types(own, dtype))


class Old(NamedTuple):
    """A stored entry and which of its lanes count (one flag for each lane, or one for all); ``dtype``: in which sums are made."""
    entry: States
    alive: jax.Array
    dtype: Any

    def masked(self, lane=None) -> States:
        """The entry as it counts, of all lanes or of one (an axis of size 1)."""
        def leaf(e):
            flags = self.alive
            if lane is not None:
                e = jax.lax.dynamic_slice_in_dim(e, lane, 1)
                flags = jax.lax.dynamic_slice_in_dim(flags, lane, 1) if flags.ndim else flags
            return where_lanes(flags, True, read(e, self.dtype))
        return jax.tree.map(leaf, self.entry)


def at_coordinates(coords: Coordinates, values: jax.Array, rank: int) -> jax.Array:
    """Values at a group's positions, with ``rank`` trailing state axes, gathered to a relation's coordinates."""
    if coords.positions is None:
        return values
    return _rows(values, values.shape[values.ndim - rank:])[coords.positions]


def after(read, t: jax.Array, values):
    """``values`` as they are, computed after ``read``.

    Where XLA does not know that a trace is read before it is written, it writes into a copy. The step count is never negative, which
    XLA does not know either.
    """
    first = [jnp.real(leaf).ravel()[0] for leaf in jax.tree.leaves(read) if leaf.size]
    never = jnp.any(t < 0)

    def leaf(v):
        return jnp.where(never, v + sum(x.astype(v.dtype) for x in first), v) if first and v.size else v
    return jax.tree.map(leaf, values)


def _over_states(fn: Callable, *arrays: jax.Array) -> States:
    """``fn`` of the arrays at each index of their trailing state axis."""
    each = [fn(*(a[..., s] for a in arrays)) for s in range(arrays[0].shape[-1])]
    return {n: tuple(out[n] for out in each) for n in each[0]}


def added_axes(op: OpUse, coords: Coordinates) -> int:
    """Number of leading axes that the rules are mapped over."""
    return len(coords.shape) - op.y_aval.ndim if coords.expanded and not op.pointwise else 0


def _wide(op: OpUse, coords: Coordinates) -> bool:
    return coords.expanded and op.pointwise


def _mapped(fn: Callable, times: int, in_axes) -> Callable:
    for _ in range(times):
        fn = jax.vmap(fn, in_axes=in_axes)
    return fn


def _weights(op: OpUse, coords: Coordinates, weights: Entry) -> Entry:
    return {n: jnp.broadcast_to(w, coords.shape) for n, w in weights.items()} if _wide(op, coords) else weights


def _variable(shape, dtype):
    return SimpleNamespace(aval=jax.ShapeDtypeStruct(tuple(shape), dtype))


def zeros(op: OpUse, coords: Coordinates, num_state: int) -> Entry:
    """The empty entry: ``init_drtrl``, on expanded shapes for an op without an input, else repeated over added axes."""
    wide = coords.shape if _wide(op, coords) else None
    entry = _init(op, 'init_drtrl', 'D_RTRL', wide or op.y_aval.shape, wide, num_state)
    added = coords.shape[:added_axes(op, coords)]
    entry = {n: jnp.broadcast_to(e, (*added, *e.shape)) for n, e in entry.items()} if added else entry
    _check_layout(op, coords, entry, num_state)
    return entry


def _init(op: OpUse, slot: str, algorithm: str, y_shape, weight_shape, num_state: int):
    x = None if op.x is None else _variable(op.x_aval.shape, op.x_aval.dtype)
    weights = {n: _variable(weight_shape or a.shape, a.dtype) for n, a in op.weight_avals.items()}
    return op.primitive.bound_rule(slot, op.params, algorithm)(x, _variable(y_shape, op.y_aval.dtype), weights, num_state)


def _check_layout(op: OpUse, coords: Coordinates, entry: Entry, num_state: int) -> None:
    """Refuse an ``init_drtrl`` whose shapes are not those of the entries that come to it."""
    def one(x, d, weights):
        return instant(op, coords, x, d, weights)
    d, op = jax.ShapeDtypeStruct((*coords.shape, num_state), op.y_aval.dtype), _outside_loops(op)
    fresh = jax.eval_shape(one, op.x_aval, d, op.weight_avals)
    wrong = {n: (e.shape, (*fresh[n][0].shape, num_state)) for n, e in entry.items() if e.shape != (*fresh[n][0].shape, num_state)}
    if wrong:
        text = ', '.join(f'{n!r}: {list(a)} from init_drtrl, {list(b)} from one step' for n, (a, b) in wrong.items())
        raise RuleContractError(f'{op.where}: the trace of {op.primitive.name} has two layouts: {text}. init_drtrl must return zeros of '
                                'the batch axis (if batched), the layout of one sample, and the state axis last.')


def _lane_by_lane(fn: Callable, op: OpUse, coords: Coordinates, lane: int) -> Callable:
    """Map ``fn(x, d, weights)`` of the root over what must not be summed, at axis ``lane``: added and mapped axes, the batch."""
    return _mapped(op.primitive.by_lane(fn, op.params, lane), added_axes(op, coords), (None, lane, None))


def _finite(op: OpUse, weights: Entry) -> Entry:
    """Weights as rules may multiply a zero by them: of a branch that is not taken they need not be numbers."""
    return {n: jnp.where(jnp.isfinite(w), w, 0) for n, w in weights.items()} if op.conditional else weights


def _outside_loops(op: OpUse) -> OpUse:
    return dataclasses.replace(op, repeats=()) if op.repeats else op


def _rows(array, shape):
    """Fold all leading axes, time and those of loops, into one."""
    return None if array is None else array.reshape(math.prod(array.shape[:array.ndim - len(shape)]), *shape)


def instant(op: OpUse, coords: Coordinates, x, df: jax.Array, weights: Entry) -> States:
    """One step's entry ``D_f (x) x``, sample by sample; the sum over the iterations of loops around the op."""
    weights = _finite(op, weights)
    if op.repeats:
        return accumulate(op, coords, x, df, weights)
    root, weights = op.primitive.root, _weights(op, coords, weights)
    slot = 'xy_to_dw' if root.optional_rule('instant_drtrl') is None else 'instant_drtrl'
    one = _lane_by_lane(root.bound_rule(slot, op.params, 'D_RTRL'), op, coords, 0)
    return _over_states(lambda d: one(x, d.astype(op.y_aval.dtype), weights), df)


def _transport(op: OpUse, coords: Coordinates) -> Callable:
    return _mapped(op.primitive.bound_rule('yw_to_w', op.params, 'D_RTRL'), added_axes(op, coords), 0)


def carry(op: OpUse, coords: Coordinates, d: jax.Array, entry: States) -> States:
    """``D e``: entry s is the sum over states r of ``yw_to_w(D[s, r], e_r)``."""
    rule, states = _transport(op, coords), range(d.shape[-1])
    rows = [[rule(d[..., s, r], {n: e[r] for n, e in entry.items()}) for r in states] for s in states]
    sums = [jax.tree.map(lambda *terms: functools.reduce(operator.add, terms), *row) for row in rows]
    return {n: tuple(row[n] for row in sums) for n in sums[0]}


def _sample_by_sample(op: OpUse, coords: Coordinates) -> bool:
    """Whether an entry is the parameter's layout for each sample, so that lanes can be taken one at a time."""
    own = op.primitive.root.optional_rule('instant_drtrl') or op.primitive.root.optional_rule('solve_drtrl')
    return op.primitive.batched and op.primitive.original is None and op.x is not None and own is None and not op.repeats \
        and not coords.expanded


def _pool(op: OpUse, coords: Coordinates, name: str, x: jax.Array) -> jax.Array:
    """Sum an entry over its lanes, to the parameter's shape."""
    if _wide(op, coords):
        shape = op.weight_avals[name].shape
        x = x.sum(tuple(range(x.ndim - len(shape))))
        return x.sum(tuple(i for i, n in enumerate(shape) if n != x.shape[i]), keepdims=True)
    return x.sum(tuple(range(added_axes(op, coords) + op.primitive.batched)))


def _summed_lanes(of_lane: Callable, lanes: int):
    """The sum of ``of_lane(b)`` over lanes: slices in one expression, which XLA fuses with what makes them, some at a time."""
    add = functools.partial(jax.tree.map, operator.add)

    def block(start, number):
        return functools.reduce(add, [of_lane(start + b) for b in range(number)])
    starts = range(0, lanes, FUSED_LANES)
    if len(starts) <= UNROLLED_SUMS:
        total = block(0, min(lanes, FUSED_LANES))
        for start in starts[1:]:
            total = add(jax.lax.optimization_barrier(total), block(start, min(lanes - start, FUSED_LANES)))
        return total
    whole, rest = divmod(lanes, FUSED_LANES)
    first = block(whole * FUSED_LANES, rest) if rest else block(0, FUSED_LANES)
    return jax.lax.scan(lambda total, i: (add(total, block(i * FUSED_LANES, FUSED_LANES)), None), first, jnp.arange(not rest, whole))[0]


def solve(op: OpUse, coords: Coordinates, signal: jax.Array, old: Old, weights: Entry) -> Entry:
    """``< signal, e >``: the weights' gradient, summed over states and lanes."""
    rule, lanes = _transport(op, coords), signal.shape[0] if signal.ndim > 1 else 0

    def scaled(signal, entry: States):
        each = [rule(signal[..., s], {n: e[s] for n, e in entry.items()}) for s in range(signal.shape[-1])]
        return jax.tree.map(lambda *terms: functools.reduce(operator.add, terms), *each)

    def all_at_once():
        return {n: _pool(op, coords, n, g) for n, g in scaled(signal, old.masked()).items()}

    def lane_by_lane():
        def of_lane(b):
            return {n: g[0] for n, g in scaled(jax.lax.dynamic_slice_in_dim(signal, b, 1), old.masked(b)).items()}
        return _summed_lanes(of_lane, lanes)
    if _sample_by_sample(op, coords) and lanes:
        return jax.lax.platform_dependent(cpu=lane_by_lane, default=all_at_once)
    if op.primitive.optional_rule('solve_drtrl') is None:
        return all_at_once()
    own, added, weights = op.primitive.bound_rule('solve_drtrl', op.params, 'D_RTRL'), added_axes(op, coords), _finite(op, weights)
    each = [_mapped(lambda d, e: own(d, e, weights), added, 0)(signal[..., s], {n: e[s] for n, e in old.masked().items()})
            for s in range(signal.shape[-1])]
    total = jax.tree.map(lambda *terms: functools.reduce(operator.add, terms), *each)
    return {n: g.sum(tuple(range(added))) for n, g in total.items()}


def has_kernel(op: OpUse, coords: Coordinates) -> bool:
    """Whether a platform may have its own update of this trace by one step."""
    return bool(op.primitive.trace_kernel) and not op.repeats and not coords.expanded and coords.positions is None


def _by_kernel(op: OpUse, coords: Coordinates, p: jax.Array, old: Old, x, d_f: jax.Array, weights: Entry) -> States:
    """One step written by the platform's kernel, which has the states in a last axis, else as everywhere."""
    def default(p, d_f, x, weights, entry):
        return _in_one_pass(op, coords, p, old._replace(entry=entry), None if x is None else x[None], d_f[None], weights)

    def by(kernel):
        def run(p, d_f, x, weights, entry):
            trace = {n: jnp.stack(e, -1) for n, e in old._replace(entry=entry).masked().items()}
            new = kernel(p, trace, d_f, x, weights, **op.params)
            wanted = {n: e.shape for n, e in trace.items()}
            found = {n: jnp.shape(e) for n, e in new.items()} if isinstance(new, Mapping) else {'no dict': type(new).__name__}
            if wanted != found:
                raise RuleContractError(f'{op.where}: a trace kernel of {op.primitive.name} must return a trace like the one given: '
                                        f'{wanted} expected, {found} found.')
            return {n: tuple(stored(new[n][..., s], e.dtype) for s, e in enumerate(es)) for n, es in entry.items()}
        return run
    kernels = {platform: by(kernel) for platform, kernel in op.primitive.trace_kernel.items()}
    return jax.lax.platform_dependent(p, d_f, x, weights, old.entry, default=default, **kernels)


def _in_one_pass(op: OpUse, coords: Coordinates, p: jax.Array, old: Old, xs, q: jax.Array, weights: Entry) -> States:
    """A few rows multiplied out in the pass that writes."""
    add = functools.partial(jax.tree.map, operator.add)
    rows = [instant(op, coords, None if xs is None else xs[i], q[i], weights) for i in range(len(q))]
    new = functools.reduce(add, rows, carry(op, coords, p, old.masked()))
    return jax.tree.map(lambda n, e: stored(n, e.dtype), new, old.entry)


def renewed(op: OpUse, coords: Coordinates, p: jax.Array, old: Old, xs, q: jax.Array, weights: Entry) -> States:
    """``p e + sum over rows of q (x) x``, written in one pass where rows are few or lanes can be taken one at a time."""
    add = functools.partial(jax.tree.map, operator.add)
    if len(q) == 1 and has_kernel(op, coords):
        return _by_kernel(op, coords, p, old, None if xs is None else xs[0], q[0], weights)
    if len(q) <= FEW_ROWS:
        return _in_one_pass(op, coords, p, old, xs, q, weights)

    def all_at_once(entry):
        new = add(carry(op, coords, p, old._replace(entry=entry).masked()), accumulate(op, coords, xs, q, weights))
        return jax.tree.map(lambda n, e: stored(n, e.dtype), new, entry)

    def lane_by_lane(entry):
        def one(b, entry):
            x, push, move = (jax.lax.dynamic_slice_in_dim(a, b, 1, axis) for a, axis in ((xs, 1), (q, 1), (p, 0)))
            new = add(carry(op, coords, move, old._replace(entry=entry).masked(b)),
                      {n: tuple(e[None] for e in es) for n, es in _over_states(lambda d: op_gradient(op, x, d, weights), push).items()})
            return jax.tree.map(lambda e, n: jax.lax.dynamic_update_slice_in_dim(e, stored(n, e.dtype), b, 0), entry, new)
        return jax.lax.fori_loop(0, q.shape[1], one, entry)
    if _sample_by_sample(op, coords) and q.shape[1]:
        return jax.lax.platform_dependent(old.entry, cpu=lane_by_lane, default=all_at_once)
    return all_at_once(old.entry)


def op_gradient(op: OpUse, xs, ds: jax.Array, weights: Entry) -> Entry:
    """Sum over a leading time axis of ``xy_to_dw(x_t, d_t)``, as one contraction.

    Time is folded into the batch where the op has one; else it is the reverse rule of the op mapped over time.
    """
    weights = _finite(op, weights)
    if op.repeats:
        xs, ds = _rows(xs, () if op.x is None else op.x_aval.shape), _rows(ds, op.y_aval.shape)
        return op_gradient(_outside_loops(op), xs, ds, weights)
    rule, fold = op.primitive.bound_rule('xy_to_dw', op.params, 'every learner'), op.primitive.fold_axes
    ds = ds.astype(op.y_aval.dtype)
    if ds.shape[0] == 1:
        return rule(None if xs is None else xs[0], ds[0], weights)
    if op.primitive.batched and xs is not None and (fold is None or fold(op.params) == (0, 0)):
        return rule(_rows(xs, xs.shape[2:]), _rows(ds, ds.shape[2:]), weights)

    def mapped(weights):
        return jax.vmap(lambda x: op.impl(x, weights), axis_size=ds.shape[0])(xs)
    return jax.vjp(mapped, weights)[1](ds)[0]


def accumulate(op: OpUse, coords: Coordinates, xs, pushes: jax.Array, weights: Entry) -> States:
    """Sum over a leading time axis of ``instant(x_t, push_t)``, as one contraction where the entry has the parameter's layout."""
    weights = _finite(op, weights)
    if op.repeats:
        xs, pushes = _rows(xs, () if op.x is None else op.x_aval.shape), _rows(pushes, (*coords.shape, pushes.shape[-1]))
        return accumulate(_outside_loops(op), coords, xs, pushes, weights)
    if op.x is None:
        return instant(op, coords, None, pushes.sum(0), weights)
    root = op.primitive.root
    if root.optional_rule('instant_drtrl') is None:
        one = _lane_by_lane(functools.partial(op_gradient, dataclasses.replace(op, primitive=root)), op, coords, 1)
        return _over_states(lambda d: one(xs, d, weights), pushes)
    first = jax.eval_shape(lambda: instant(op, coords, xs[0], pushes[0], weights))

    def add(total, xd):
        return jax.tree.map(operator.add, total, instant(op, coords, *xd, weights)), None
    return jax.lax.scan(add, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), first), (xs, pushes))[0]


def zeros_pp(op: OpUse, coords: Coordinates, num_state: int) -> jax.Array:
    """The empty output trace of ES-D-RTRL: ``init_pp`` on the expanded y."""
    zero = _init(op, 'init_pp', 'ES_D_RTRL', coords.shape, None, num_state)
    return jnp.broadcast_to(zero, (*op.repeats, *zero.shape)) if op.repeats else zero


def represented(op: OpUse, x: jax.Array) -> jax.Array:
    """x as it counts in a factor of inputs, which holds sums of them."""
    represent = op.primitive.root.represent
    return x if represent is None else represent(x, op.weight_avals)


def as_represented(op: OpUse) -> OpUse:
    """The op as it is called with such a factor."""
    if op.x is None:
        return op
    return dataclasses.replace(op, x_aval=jax.eval_shape(lambda x: represented(op, x), op.x_aval))


def factored_gradient(op: OpUse, coords: Coordinates, xs, ds: jax.Array, weights: Entry) -> Entry:
    """Sum over time of ``xy_to_dw(ex_t, d_t)`` with d at a relation's coordinates and ex of each added lane."""
    added = added_axes(op, coords)
    if not added:
        return op_gradient(op, xs, jax.vmap(lambda d: to_y(op, coords, d))(ds), weights)
    got = _mapped(lambda x, d: op_gradient(op, x, d, weights), added, 1)(xs, ds)
    return {n: g.sum(tuple(range(added))) for n, g in got.items()}


def to_y(op: OpUse, coords: Coordinates, d: jax.Array) -> jax.Array:
    """A cotangent at a relation's coordinates, summed to y's shape."""
    shape = op.y_aval.shape
    if d.shape == (*op.repeats, *shape):
        return d
    d = d.sum(tuple(range(d.ndim - len(shape))))
    return d.sum(tuple(i for i, n in enumerate(shape) if n != d.shape[i]), keepdims=True)


def where_lanes(flags: jax.Array, laned: bool, x: jax.Array, axis: int = 0) -> jax.Array:
    """``x`` where a lane's flag is set and zero elsewhere, lanes in ``axis``; without lanes, where any flag is set."""
    flags = flags if laned or flags.ndim == 0 else flags.any()
    return jnp.where(flags.reshape((1,) * axis + flags.shape + (1,) * (x.ndim - axis - flags.ndim)) if flags.ndim else flags,
                     x, jnp.zeros((), x.dtype))
