"""Entries of a trace: their shapes, how they are read and written."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import Coordinates, OpUse, abstract, depends, is_complex
from .._executor import Transition, Vector, add, apply, compose, dense, dot, is_read
from ..errors import RuleContractError
from .contraction import by_group, finite, in_parts, op_gradient, outside_loops
from .layout import (
    Entry,
    Pair,
    States,
    Stored,
    after,
    anywhere,
    by_name,
    by_state,
    folded,
    is_plain,
    mapped_over_added,
    one_lane,
    stored,
    without_added,
)

# entries ------------------------------------------------------------------------------------------
#
# A trace entry, and how steps make it with the rules of the op's own primitive.
#
# A fresh entry comes from ``init_drtrl`` with the states in a last axis; a trace stores one array
# for each state, which XLA can write in place. In between an entry is a vector of the algebra of D:
# for each state its arrays by trainable name, multiplied by ``yw_to_w``. Factors stand at a
# relation's coordinates.


# the empty trace -----------------------------------------------------------------------------


def zeros(op: OpUse, coords: Coordinates, num_state: int) -> Entry:
    """The empty entry of D-RTRL, states in a last axis: ``init_drtrl``, repeated over added
    axes.
    """
    entry = _init(op, 'init_drtrl', 'D_RTRL', num_state)
    entry = {n: _repeated(coords, e) for n, e in entry.items()}
    _check_layout(op, coords, entry, num_state)
    return entry


def zeros_pp(op: OpUse, coords: Coordinates, num_state: int) -> jax.Array:
    """The empty output trace of ES-D-RTRL: ``init_pp``, repeated over added axes."""
    zero = _repeated(coords, _init(op, 'init_pp', 'ES_D_RTRL', num_state))
    return jnp.broadcast_to(zero, (*op.repeats, *zero.shape)) if op.repeats else zero


def apart(entry: Entry) -> States:
    """An entry as one array for each state."""
    return {n: tuple(e[..., s] for s in range(e.shape[-1])) for n, e in entry.items()}


def _repeated(coords: Coordinates, zero: jax.Array) -> jax.Array:
    """Zeros, repeated over the added axes."""
    at, behind = coords.axis, coords.axis + coords.added
    sizes = *zero.shape[:at], *coords.shape[at:behind], *zero.shape[at:]
    return jnp.broadcast_to(jnp.expand_dims(zero, range(at, behind)), sizes)


def _init(op: OpUse, slot: str, algorithm: str, num_state: int):
    x = None if op.x is None else _variable(op.x_aval)
    weights = {n: _variable(a) for n, a in op.weight_avals.items()}
    rule = op.primitive.bound_rule(slot, op.params, algorithm)
    return rule(x, _variable(op.y_aval), weights, num_state)


def _variable(aval):
    return SimpleNamespace(aval=jax.ShapeDtypeStruct(aval.shape, aval.dtype))


def _check_layout(op: OpUse, coords: Coordinates, entry: Entry, num_state: int) -> None:
    """Refuse an ``init_drtrl`` whose arrays have other shapes than the entries of one step."""
    op = outside_loops(op)
    d = (jax.ShapeDtypeStruct(coords.shape, op.y_aval.dtype),)

    def one(x, d, weights):
        return instant(op.empty(), coords, x, d, weights)

    # without the axes of a mesh that the step was traced under
    x, weights = jax.tree.map(abstract, (op.x_aval, op.weight_avals))
    (fresh,) = jax.eval_shape(one, x, d, weights)
    wanted = {n: (*fresh[n].shape, num_state) for n in entry}
    wrong = {n: (e.shape, wanted[n]) for n, e in entry.items() if e.shape != wanted[n]}
    if wrong:
        text = ', '.join(
            f'{n!r}: {list(a)} from init_drtrl, {list(b)} from one step'
            for n, (a, b) in wrong.items()
        )
        raise RuleContractError(
            f'{op.where}: the trace of {op.primitive.name} has two layouts: {text}. init_drtrl '
            'must return zeros of the batch axis (if batched), the layout of one sample, and the '
            'state axis last.'
        )


# one step, and many ----------------------------------------------------------------------------


def instant(op: OpUse, coords: Coordinates, x, df: Vector, weights: Entry) -> Vector:
    """One step's entry ``D_f (x) x``, sample by sample, summed over the turns of loops around the
    op.
    """
    weights = finite(op, weights)
    if op.repeats:
        return accumulate(op, coords, x, df, weights)
    root = op.primitive.root
    slot = 'xy_to_dw' if root.optional_rule('instant_drtrl') is None else 'instant_drtrl'
    if op.primitive.structure:  # its parameters are arrays, and no key
        rule = _lane_by_lane(root.bound_rule(slot, op.params, 'D_RTRL'), op, coords, 0)
    else:
        params = tuple(op.params.items())
        rule = _traced_once(op.primitive, slot, root.rule(slot), params, coords.layout)
    return _each(op, lambda d: rule(x, d.astype(op.y_aval.dtype), weights), df)


@functools.lru_cache(maxsize=256)
def _traced_once(primitive, slot: str, rule: Callable, params: tuple, layout: tuple) -> Callable:
    """The rule of a kind of op, which is traced once for each shape: a write asks for each row and
    state, and a stack of layers for each layer. ``rule`` is a key: another may be registered.
    """
    fn = primitive.root.bound_rule(slot, dict(params), 'D_RTRL')
    fn = primitive.by_lane(fn, dict(params), 0)
    return jax.jit(mapped_over_added(fn, layout, (None, layout[1], None)), inline=True)


def accumulate(op: OpUse, coords: Coordinates, xs, pushes: Vector, weights: Entry) -> Vector:
    """``sum_t x_t (x) push_t`` over a leading time axis: one contraction where the entry has the
    parameter's layout.
    """
    weights = finite(op, weights)
    if op.repeats:  # the turns of loops are summed as steps of time are
        xs = folded(xs, () if op.x is None else op.x_aval.shape)
        pushes = jax.tree.map(lambda a: folded(a, coords.shape), pushes)
        return accumulate(outside_loops(op), coords, xs, pushes, weights)
    if op.x is None:
        return instant(op, coords, None, jax.tree.map(lambda a: a.sum(0), pushes), weights)
    root = op.primitive.root
    if root.optional_rule('instant_drtrl') is None:
        contract = functools.partial(op_gradient, dataclasses.replace(op, primitive=root))
        rule = _lane_by_lane(contract, op, coords, 1)
        return _each(op, lambda d: rule(xs, d, weights), pushes)

    # another layout (conv, lora) has no contraction over time: step by step
    def plus(total, step):
        x, push = step
        return jax.tree.map(jnp.add, total, instant(op, coords, x, push, weights)), None

    first = jax.tree.map(lambda a: a[0], (xs, pushes))
    shapes = jax.eval_shape(lambda x, push: instant(op, coords, x, push, weights), *first)
    empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return jax.lax.scan(plus, empty, (xs, pushes))[0]


def carry(op: OpUse, coords: Coordinates, d: Transition, entry: Vector) -> Vector:
    """``D e``: for state s the sum over states r of ``yw_to_w(D[s][r], e_r)``."""
    return apply(d, entry, transport(op, coords))


def added(a: Vector, b: Vector) -> Vector:
    """The sum of two entries, state by state."""
    return tuple(add(*pair) for pair in zip(a, b, strict=True))


def transport(op: OpUse, coords: Coordinates) -> Callable:
    """``yw_to_w``: the product of values at y's positions with one state of an entry."""
    rule = op.primitive.bound_rule('yw_to_w', op.params, 'D_RTRL')
    return mapped_over_added(rule, coords.layout, coords.axis)


def _each(op: OpUse, fn: Callable, vector: Vector) -> Vector:
    return tuple(None if x is None else in_parts(op, fn, x) for x in vector)


def _lane_by_lane(fn: Callable, op: OpUse, coords: Coordinates, lane: int) -> Callable:
    """``fn(x, d, weights)`` of the root, mapped over the axes that must not be summed: the added
    axes, the axes of ``vmap``, and the batch (axis ``lane``).
    """
    over_batch = op.primitive.by_lane(fn, op.params, lane)
    return mapped_over_added(over_batch, coords.layout, (None, lane + coords.axis, None))


# what the layout of an entry allows ------------------------------------------------------------


def is_by_sample(op: OpUse, coords: Coordinates) -> bool:
    """Whether an entry is the parameter's layout for each sample, so that lanes can be taken one at
    a time.
    """
    root = op.primitive.root
    own = root.optional_rule('instant_drtrl') or root.optional_rule('solve_drtrl')
    plain = op.primitive.batched and op.primitive.original is None and own is None
    return plain and op.x is not None and not op.repeats and not coords.added


def reads_weights(pair: Pair) -> bool:
    """Whether the entry of one step is made with the weights."""
    op, coords = outside_loops(pair.op), pair.coords

    def one(values, x, d):
        weights = dict(zip(op.weight_avals, values, strict=True))
        return sum(e.sum() for e in jax.tree.leaves(instant(op.empty(), coords, x, (d,), weights)))

    d = jax.ShapeDtypeStruct(coords.shape, op.y_aval.dtype)
    return any(depends(one, list(op.weight_avals.values()), op.x_aval, d))


# reading ------------------------------------------------------------------------------------------
#
# ``< signal , e >``: the gradient of the weights, read from a stored entry.


FUSED_STREAMS = 4  # lanes times states that are summed in one expression, which XLA fuses


def solve(
    op: OpUse, coords: Coordinates, signal: Vector, old: Stored, weights: Entry, groups: int = 0
) -> Entry:
    """``< signal , e >`` of one entry, summed over states and lanes; of so many groups of lanes
    apart.
    """
    some = next((x for x in signal if x is not None), None)
    if some is None:
        zeros = {n: jnp.zeros(a.shape, a.dtype) for n, a in op.weight_avals.items()}
        return jax.tree.map(lambda z: jnp.stack([z] * groups) if groups else z, zeros)
    moved = transport(op, coords)
    own = op.primitive.optional_rule('solve_drtrl')

    def rule(signal, entry):
        return _real(op, moved(signal, entry))

    def of_lanes(signal, numbers):
        if own is not None:
            return _by_own_rule(op, coords, signal, numbers, weights)
        total = dot(signal, by_state(numbers), rule)
        # over the lanes and over added axes, to the parameter's shape
        total = {n: without_added(coords, g) for n, g in total.items()}
        return {n: g.sum(0) if op.primitive.batched else g for n, g in total.items()}

    def all_at_once():
        return of_lanes(signal, old.numbers)

    def lane_by_lane():
        def of_lane(b):
            total = dot(one_lane(signal, b), by_state(old.lane(b).numbers), rule)
            return {n: g[0] for n, g in total.items()}

        states = sum(x is not None for x in signal)
        return _sum_over_lanes(of_lane, some.shape[0], max(1, FUSED_STREAMS // states))

    if groups:
        return by_group(groups, of_lanes, 0, signal, old.numbers)
    if is_by_sample(op, coords) and some.ndim and some.shape[0]:
        return _jax.platform_dependent(cpu=lane_by_lane, default=all_at_once)
    return all_at_once()


def has_reader(op: OpUse, coords: Coordinates) -> bool:
    """Whether a platform may have code of its own that reads this entry."""
    return bool(op.primitive.trace_reader) and is_plain(op, coords)


def solve_onto(
    onto: Entry,
    op: OpUse,
    coords: Coordinates,
    signal: Vector,
    old: Stored,
    weights: Entry,
    groups: int = 0,
) -> Entry:
    """``onto + < signal , e >`` by the op's own code on platforms that have it."""
    if all(x is None for x in signal):
        return onto

    def default(onto, signal, entry, alive):
        def read():
            found = solve(op, coords, signal, Stored(entry, alive, old.dtype), weights, groups)
            return {n: g.astype(onto[n].dtype) for n, g in found.items()}

        found = read() if groups else if_any(alive, read, onto)
        return jax.tree.map(operator.add, onto, found)

    def by(reader):
        def run(*operands):
            return {**default(*operands), **reader(*operands, **op.params)}

        return run

    operands = onto, signal, old.entry, old.alive
    if groups:
        return default(*operands)
    readers = {platform: by(reader) for platform, reader in op.primitive.trace_reader.items()}
    return _jax.platform_dependent(*operands, default=default, **readers)


def if_any(alive: jax.Array, read: Callable, like):
    """``read()``, arrays like these, which are zeros while no lane has a past; on a CPU it is
    skipped then.
    """

    def skipped():
        none = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)  # noqa: E731
        return jax.lax.cond(anywhere(alive), read, none)

    return _jax.platform_dependent(cpu=skipped, default=read)


def _by_own_rule(
    op: OpUse, coords: Coordinates, signal: Vector, numbers: States, weights: Entry
) -> Entry:
    """The gradient by the primitive's ``solve_drtrl``, whose layout is not the parameter's."""
    own, weights = op.primitive.bound_rule('solve_drtrl', op.params, 'D_RTRL'), finite(op, weights)
    axis = coords.axis
    rule = mapped_over_added(lambda d, e: _real(op, own(d, e, weights)), (coords.added, 0), axis)
    total = dot(signal, by_state(numbers), rule)
    return {n: g.sum(tuple(range(coords.added))) for n, g in total.items()}


def _real(op: OpUse, entry: Entry) -> Entry:
    """A product of a signal and an entry: the real part of it for a real weight."""
    avals = op.weight_avals
    return {n: e if is_complex(avals[n]) else jnp.real(e) for n, e in entry.items()}


def _sum_over_lanes(of_lane: Callable, lanes: int, fused: int):
    """``sum_b of_lane(b)``, so many lanes in one expression: lanes often begin at the same place of
    a processor's cache, so that few of them can be read at once.
    """
    plus = functools.partial(jax.tree.map, operator.add)

    of_lane = jax.jit(of_lane, inline=True)  # traced once

    def block(start, number):
        return functools.reduce(plus, [of_lane(start + jnp.int32(b)) for b in range(number)])

    if lanes <= fused:
        return block(0, lanes)
    # the lanes that fill no block, or zeros: a block in front would be half of the program; then a
    # loop over blocks
    whole, rest = divmod(lanes, fused)
    shapes = jax.eval_shape(of_lane, jnp.int32(0))
    none = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    first = block(whole * fused, rest) if rest else none
    return jax.lax.scan(
        lambda total, i: (plus(total, block(i * fused, fused)), None),
        first,
        jnp.arange(whole, dtype=jnp.int32),
    )[0]


# writing ------------------------------------------------------------------------------------------
#
# Steps that are written into a stored entry: in one pass over it, lane by lane, or by a kernel.


FEW_ROWS = 8  # rows that are multiplied out in the one pass that writes the entry
SMALL_LANE = 2**15  # bytes of a lane that may as well be copied


class Change(NamedTuple):
    """The change of one entry; factors are at its relation's coordinates.

    e <- p e + sum over rows k of x_k (x) q_k
    """

    p: Transition
    x: jax.Array | None
    q: Vector

    @property
    def rows(self) -> int:
        """The number of steps in ``x`` and ``q``."""
        return next((len(a) for a in self.q if a is not None), 0)

    def row(self, k: int) -> tuple:
        """x and q of one step."""
        return jax.tree.map(lambda a: a[k], (self.x, self.q))

    def lane(self, b) -> Change:
        """The change of one lane, with an axis of size 1."""
        return Change(one_lane(self.p, b), *one_lane((self.x, self.q), b, 1))


Changes = tuple[Change, ...]  # one after the other


def renewed(
    op: OpUse, coords: Coordinates, old: Stored, changes: Changes, weights: Entry, t: jax.Array
) -> States:
    """The stored entry after some changes, at step count ``t``."""
    rows = max(change.rows for change in changes)
    if rows == 1 and len(changes) == 1 and has_kernel(op, coords):
        # a kernel knows values of y's dtype, not the derivative of a complex state by a real y
        if all(is_complex(q) == is_complex(op.y_aval) for q in jax.tree.leaves(changes[0].q)):
            return _by_kernel(op, coords, old, changes[0], weights)

    def new(entry: Vector, changes: Changes, summed: Callable) -> Vector:
        """The new entry; ``summed(change)`` is its sum over rows."""
        for change in changes:
            entry = added(carry(op, coords, change.p, entry), summed(change))
        return entry

    def multiplied_out(change):
        made = [instant(op, coords, *change.row(k), weights) for k in range(change.rows)]
        return functools.reduce(added, made) if made else (None,) * len(change.q)

    def contracted(change):
        return accumulate(op, coords, change.x, change.q, weights)

    def of_one_lane(change):
        # the sum over rows in one contraction
        made = lambda d: op_gradient(op, change.x, d, weights)  # noqa: E731
        return jax.tree.map(lambda e: e[None], _each(op, made, change.q))

    def all_at_once(entry, order=None):
        here = old._replace(entry=entry)
        summed = multiplied_out if few and not sparse else contracted
        return _state_by_state(here, changes, lambda *at: new(*at, summed), order, t)

    def lane_by_lane(entry):
        return _over_lanes(old._replace(entry=entry), changes, lambda *at: new(*at, of_one_lane))

    few, order, sparse = rows <= FEW_ROWS, _order(changes), bool(op.primitive.structure)
    terms = max(sum(x is not None for x in row) for row in changes[0].p)
    # one row for states that are made of several: XLA's code for it is slower than lane by lane
    if few and (sparse or (order is not None and (terms < 2 or rows > 1))):
        return all_at_once(old.entry, order)
    if is_by_sample(op, coords) and coords.shape and coords.shape[0]:
        lane = sum(e.nbytes for e in jax.tree.leaves(old.entry)) // coords.shape[0]
        if not few or lane > SMALL_LANE:
            return _jax.platform_dependent(old.entry, cpu=lane_by_lane, default=all_at_once)
    return all_at_once(old.entry)


def renewed_if(
    flag: jax.Array | None,
    op: OpUse,
    coords: Coordinates,
    old: Stored,
    changes: Changes,
    weights: Entry,
    t: jax.Array,
) -> States:
    """The stored entry after some changes where the flag is set (None: always), else as it was, by
    the op's own code on platforms that have it. Then nothing passes a branch, where XLA copies it.
    """

    always = flag is None

    def new(changes, entry, alive):
        return renewed(op, coords, Stored(entry, alive, old.dtype), changes, weights, t)

    def default(flag, changes, entry, alive):
        """In a loop of one turn or none: XLA copies what passes the branches of ``lax.cond``."""
        if always:
            return new(changes, entry, alive)

        def turn(_, entry):
            # the barrier keeps what is made of the changes inside the loop
            entry, *others = jax.lax.optimization_barrier((entry, changes, alive))
            return new(others[0], entry, others[1])

        return jax.lax.fori_loop(0, flag.astype(jnp.int32), turn, entry)

    def by(writer):
        def run(flag, changes, entry, alive):
            found = writer(flag, changes, entry, alive, **op.params)
            if not found:
                return default(flag, changes, entry, alive)
            # XLA leaves out what a branch makes in vain
            others = jax.lax.cond(flag, lambda e: new(changes, e, alive), lambda e: e, entry)
            return {**others, **found}

        return run

    writers = {platform: by(writer) for platform, writer in op.primitive.trace_writer.items()}
    flag = jnp.ones((), bool) if always else flag
    operands = flag, changes, old.entry, old.alive
    return _jax.platform_dependent(*operands, default=default, **writers)


def _order(changes: Changes) -> list[int] | None:
    """An order of the states in which each is read for the last time when it is written, if there
    is one.
    """
    reads = functools.reduce(lambda p, change: compose(change.p, p), changes[1:], changes[0].p)
    left, order = list(range(len(reads))), []
    while left:
        free = [s for s in left if all(reads[r][s] is None for r in left if r != s)]
        if not free:
            return None
        order.append(free[0])
        left.remove(free[0])
    return order


def _state_by_state(
    old: Stored, changes: Changes, new: Callable, order: list[int] | None, t: jax.Array
) -> States:
    """All lanes at once, one state after the other in an order in which XLA can write in place."""
    numbers, first = by_state(old.numbers), changes[0]
    if order is None or len(order) == 1:
        return _stored(new(numbers, changes), old.entry)
    made: list = [None] * len(order)
    for state in order:
        wanted = [s == state for s in range(len(order))]
        made[state] = new(numbers, _wanted((first, *changes[1:]), wanted))[state]
        if state != order[-1]:
            first = first._replace(p=after(made[state], t, first.p))
    return _stored(tuple(made), old.entry)


def _wanted(changes: Changes, wanted: list[bool]) -> Changes:
    """What makes the wanted states: the rest of the changes is left out."""
    found: list[Change] = []
    for change in reversed(changes):
        p = tuple(
            row if there else (None,) * len(row)
            for row, there in zip(change.p, wanted, strict=True)
        )
        q = tuple(a if there else None for a, there in zip(change.q, wanted, strict=True))
        found.insert(0, Change(p, change.x, q))
        wanted = is_read(p)
    return tuple(found)


def _over_lanes(old: Stored, changes: Changes, new: Callable) -> States:
    """Each lane in turn: one product of matrices, written in place.

    Of several states a lane's old numbers are read one turn ahead: each new state is made of
    several old ones, so XLA would copy all of them to write one of them.
    """
    lanes, needed = len(jax.tree.leaves(old.entry)[0]), is_read(changes[0].p)
    ahead = len(needed) > 1

    def lane(entry, b):
        read = {
            n: tuple(e if there else None for e, there in zip(es, needed, strict=True))
            for n, es in entry.items()
        }
        return one_lane(read, b)

    def write(b, carried):
        entry, numbers = carried
        here = Stored(numbers if ahead else lane(entry, b), old.alive_in(b), old.dtype)
        made = new(by_state(here.numbers), tuple(change.lane(b) for change in changes))
        entry = _stored(made, entry, put(b))
        return entry, lane(entry, jnp.minimum(b + 1, lanes - 1)) if ahead else None

    def put(b):
        at = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=b, axis=0)
        return lambda e, x: at(e, x, allow_negative_indices=False)

    start = old.entry, lane(old.entry, 0) if ahead else None
    return jax.lax.fori_loop(0, lanes, write, start)[0]


def _stored(new: Vector, entry: States, put: Callable = lambda e, x: x) -> States:
    """The new numbers as the entry stores them; a state that is zero by structure stays."""
    return {
        n: tuple(
            e if x is None or e is None else put(e, stored(x, e.dtype))
            for x, e in zip(of_name, entry[n], strict=True)
        )
        for n, of_name in by_name(new, entry).items()
    }


def has_kernel(op: OpUse, coords: Coordinates) -> bool:
    """Whether a platform may have a kernel that writes one step into this entry."""
    return bool(op.primitive.trace_kernel) and is_plain(op, coords)


def has_writer(op: OpUse, coords: Coordinates) -> bool:
    """Whether a platform may have code of its own that writes pending steps into this entry."""
    return bool(op.primitive.trace_writer) and is_plain(op, coords)


def _by_kernel(
    op: OpUse, coords: Coordinates, old: Stored, change: Change, weights: Entry
) -> States:
    """One step, written by a kernel, to which the states are a last axis, on platforms that have
    one.
    """
    x, q = change.row(0)

    def default(p, q, x, weights, entry):
        entry = Stored(entry, old.alive, old.dtype)
        moved = carry(op, coords, p, by_state(entry.numbers))
        return _stored(added(moved, instant(op, coords, x, q, weights)), entry.entry)

    def by(kernel):
        def run(p, q, x, weights, entry):
            numbers = old._replace(entry=entry).numbers
            trace = {n: jnp.stack(e, -1) for n, e in numbers.items()}
            d, f = (dense(tree, coords.shape, op.y_aval.dtype) for tree in (p, q))
            new = kernel(d, trace, f, x, weights, **op.params)
            _check_kernel(op, trace, new)
            return {
                n: tuple(stored(new[n][..., s], e.dtype) for s, e in enumerate(es))
                for n, es in entry.items()
            }

        return run

    kernels = {platform: by(kernel) for platform, kernel in op.primitive.trace_kernel.items()}
    operands = (change.p, q, x, weights, old.entry)
    return _jax.platform_dependent(*operands, default=default, **kernels)


def _check_kernel(op: OpUse, trace: Entry, new) -> None:
    """Refuse a kernel's result that is no trace like the kernel's argument."""
    wanted, is_dict = {n: e.shape for n, e in trace.items()}, isinstance(new, Mapping)
    of_dict = {n: jnp.shape(e) for n, e in new.items()} if is_dict else {}
    found = of_dict if is_dict else {'no dict': type(new).__name__}
    if wanted != found:
        raise RuleContractError(
            f'{op.where}: a trace kernel of {op.primitive.name} must return a trace like '
            f'the one given: {wanted} expected, {found} found.'
        )
