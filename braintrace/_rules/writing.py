"""Steps that are written into a stored entry: in one pass over it, lane by lane, or by a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import Coordinates, OpUse, is_complex
from .._errors import RuleContractError
from .._executor import Transition, Vector, compose, dense, is_read
from .contraction import in_parts, op_gradient
from .coordinates import is_plain
from .entries import accumulate, added, carry, instant, is_by_sample
from .storage import Entry, States, Stored, after, by_name, by_state, one_lane, stored

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
    if rows == 1 and len(changes) == 1 and _fits_kernel(op, coords, changes[0]):
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
        return _of_one_lane(op, change, weights)

    def all_at_once(entry, order=None):
        here = old._replace(entry=entry)
        summed = multiplied_out if few and not sparse else contracted
        return _state_by_state(here, changes, lambda *at: new(*at, summed), order, t)

    def lane_by_lane(entry):
        return _lane_by_lane(old._replace(entry=entry), changes, lambda *at: new(*at, of_one_lane))

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


def _fits_kernel(op: OpUse, coords: Coordinates, change: Change) -> bool:
    """Whether a kernel can write a change: it knows values of y's dtype, not the derivative of a
    complex state by a real y.
    """
    alike = all(is_complex(q) == is_complex(op.y_aval) for q in jax.tree.leaves(change.q))
    return alike and has_kernel(op, coords)


def _of_one_lane(op: OpUse, change: Change, weights: Entry) -> Vector:
    """The sum over rows of a change of one lane, in one contraction."""

    def made(d):
        return op_gradient(op, change.x, d, weights)

    of_states = (None if d is None else in_parts(op, made, d) for d in change.q)
    return tuple(jax.tree.map(lambda e: e[None], e) for e in of_states)


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


def _lane_by_lane(old: Stored, changes: Changes, new: Callable) -> States:
    """Each lane in turn: one product of matrices, written in place.

    A lane's old numbers are read one turn ahead. Each new state is made of several old ones, so
    XLA would copy all of them to write one of them.
    """
    lanes, needed = len(jax.tree.leaves(old.entry)[0]), is_read(changes[0].p)

    def lane(entry, b):
        read = {
            n: tuple(e if there else None for e, there in zip(es, needed, strict=True))
            for n, es in entry.items()
        }
        return one_lane(read, b)

    def write(b, carried):
        entry, numbers = carried
        here = Stored(numbers, old.alive_in(b), old.dtype)
        made = new(by_state(here.numbers), tuple(change.lane(b) for change in changes))
        entry = _stored(made, entry, lambda e, x: jax.lax.dynamic_update_slice_in_dim(e, x, b, 0))
        return entry, lane(entry, jnp.minimum(b + 1, lanes - 1))

    return jax.lax.fori_loop(0, lanes, write, (old.entry, lane(old.entry, 0)))[0]


def _stored(new: Vector, entry: States, put: Callable = lambda e, x: x) -> States:
    """The new numbers as the entry stores them; a state that is zero by structure stays."""
    return {
        n: tuple(
            e if x is None else put(e, stored(x, e.dtype))
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
