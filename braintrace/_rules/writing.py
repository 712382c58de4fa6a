"""Steps that are written into a stored entry: in one pass over it, lane by lane, or by a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._compiler import Coordinates, OpUse
from .._errors import RuleContractError
from .contraction import op_gradient
from .entries import accumulate, added, carry, instant, is_by_sample
from .storage import Entry, States, Stored, by_name, by_state, one_lane, stored
from .transition import Transition, Vector, dense, is_read

__all__ = ['Change', 'has_kernel', 'renewed']

FEW_ROWS = 8  # rows that are multiplied out in the one pass that writes the entry


class Change(NamedTuple):
    """The change of one entry, then the change ``then``; factors are at its relation's coordinates.

    e <- p e + sum over rows k of x_k (x) q_k
    """

    p: Transition
    x: jax.Array | None
    q: Vector
    then: Change | None = None

    @property
    def rows(self) -> int:
        """The number of steps in ``x`` and ``q``."""
        return next((len(a) for a in self.q if a is not None), 0)

    def row(self, k: int) -> tuple:
        """x and q of one step."""
        return jax.tree.map(lambda a: a[k], (self.x, self.q))

    def lane(self, b) -> Change:
        """The change of one lane, with an axis of size 1."""
        then = None if self.then is None else self.then.lane(b)
        x, q = one_lane((self.x, self.q), b, 1)
        return Change(one_lane(self.p, b), x, q, then)


def renewed(op: OpUse, coords: Coordinates, old: Stored, change: Change, weights: Entry) -> States:
    """The stored entry after a change."""
    if change.rows == 1 and change.then is None and has_kernel(op, coords):
        return _by_kernel(op, coords, old, change, weights)

    def new(entry: Vector, change: Change, summed: Callable) -> Vector:
        """The new entry; ``summed(change)`` is its sum over rows."""
        entry = added(carry(op, coords, change.p, entry), summed(change))
        return entry if change.then is None else new(entry, change.then, summed)

    def multiplied_out(change):
        rows = [instant(op, coords, *change.row(k), weights) for k in range(change.rows)]
        return functools.reduce(added, rows) if rows else (None,) * len(change.q)

    def contracted(change):
        return accumulate(op, coords, change.x, change.q, weights)

    def of_one_lane(change):
        made = (None if d is None else op_gradient(op, change.x, d, weights) for d in change.q)
        return tuple(jax.tree.map(lambda e: e[None], e) for e in made)

    def all_at_once(entry):
        numbers = by_state(old._replace(entry=entry).numbers)
        return _stored(new(numbers, change, contracted), entry)

    def lane_by_lane(entry):
        return _lane_by_lane(old._replace(entry=entry), change, lambda *at: new(*at, of_one_lane))

    if change.rows <= FEW_ROWS and op.primitive.structure:
        return all_at_once(old.entry)
    if change.rows <= FEW_ROWS:
        return _stored(new(by_state(old.numbers), change, multiplied_out), old.entry)
    if is_by_sample(op, coords) and coords.shape and coords.shape[0]:
        return jax.lax.platform_dependent(old.entry, cpu=lane_by_lane, default=all_at_once)
    return all_at_once(old.entry)


def _lane_by_lane(old: Stored, change: Change, new: Callable) -> States:
    """Each lane in turn: one product of matrices, written in place.

    A lane's old numbers are read one turn ahead. Each new state is made of several old ones, so
    XLA would copy all of them to write one of them.
    """
    lanes, needed = len(jax.tree.leaves(old.entry)[0]), is_read(change.p)

    def lane(entry, b):
        read = {
            n: tuple(e if there else None for e, there in zip(es, needed, strict=True))
            for n, es in entry.items()
        }
        return one_lane(read, b)

    def write(b, carried):
        entry, numbers = carried
        here = Stored(numbers, old.alive_in(b), old.dtype)
        made = new(by_state(here.numbers), change.lane(b))
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
    plain = not op.repeats and not coords.expanded and coords.positions is None
    return bool(op.primitive.trace_kernel) and plain


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
    return jax.lax.platform_dependent(*operands, default=default, **kernels)


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
