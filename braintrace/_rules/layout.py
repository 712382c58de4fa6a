"""How traces are laid out: lanes, coordinates of relations, and the numbers that are stored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._compiler import Coordinates, ETraceGraph, HiddenGroup, Kept, OpUse, Relation, is_complex
from .._executor import add, closure, gathered
from ..errors import NotSupportedError

# lanes --------------------------------------------------------------------------------------------
#
# Arrays with zeros in the lanes (samples of a batch) that a flag leaves out.


@jax.custom_batching.custom_vmap
def anywhere(flags: jax.Array) -> jax.Array:
    """Whether any flag is set, also in another lane of a surrounding ``vmap``: a ``lax.cond`` that
    asks this stays one there, where a flag of each lane makes it run both branches.
    """
    return flags.any()


@anywhere.def_vmap
def _anywhere_mapped(axis_size, in_batched, flags):
    return anywhere(flags), False


def gathered_once(graph: ETraceGraph, flags: jax.Array, values: dict[str, dict]) -> dict[str, dict]:
    """Values by pair, which may be zeros where no flag is set: the gathered ones are computed once,
    where XLA would gather them for each number of a trace. On a CPU, where XLA drops a barrier
    before it fuses, a branch does it whose flag XLA does not know.
    """
    moved = {p.place: p.of(values) for p in pairs(graph) if p.coords.positions is not None}
    if not moved:
        return values

    def branch(flags, moved):
        none = lambda: jax.tree.map(jnp.zeros_like, moved)
        return jax.lax.cond(anywhere(flags), lambda: moved, none)

    def barrier(flags, moved):
        return jax.lax.optimization_barrier(moved)

    made = _jax.platform_dependent(flags, moved, cpu=branch, default=barrier)
    return by_pair(graph, lambda pair: made.get(pair.place, pair.of(values)))


def where_lanes(flags: jax.Array, laned: bool, x: jax.Array, axis: int = 0) -> jax.Array:
    """``x`` where a lane's flag is set and zero elsewhere, lanes in ``axis``; without lanes, where
    any flag is set. Flags of several axes are at so many axes of x.
    """
    flags = flags if laned or flags.ndim == 0 else flags.any()
    if flags.ndim:
        flags = flags.reshape((1,) * axis + flags.shape + (1,) * (x.ndim - axis - flags.ndim))
    return jnp.where(flags, x, jnp.zeros((), x.dtype))


def not_finite(x: jax.Array, axis: int | None) -> jax.Array:
    """The lanes, in ``axis``, in which a number of a stored array is not finite; None: whether one
    is anywhere.
    """
    axes = tuple(k for k in range(x.ndim) if k != axis)
    # a sum over all axes but the last is vectorised on CPU, `all` is not
    return ~jnp.isfinite((0 * read(x)).sum(axes[:-1], keepdims=True)).all(axes)


def of_groups(graph: ETraceGraph, flags: jax.Array, by_group: dict) -> dict:
    """Vectors or transitions by group, in the flagged lanes."""
    axes = {g.name: graph.batch_axis(g) for g in graph.hidden_groups}

    def one(axis: int | None, a):
        return where_lanes(flags, axis is not None, a, axis or 0)

    return {name: jax.tree.map(partial(one, axes[name]), tree) for name, tree in by_group.items()}


def of_pairs(graph: ETraceGraph, flags: jax.Array, by_relation: dict, rows: bool = False) -> dict:
    """Vectors of every pair, in the flagged lanes; ``rows``: rows are in their first axis."""

    def one(pair: Pair):
        axis, at = rows + len(pair.op.repeats), pair.at_entries(flags)
        return jax.tree.map(lambda a: where_lanes(at, True, a, axis), pair.of(by_relation))

    return by_pair(graph, one)


def is_laned(graph: ETraceGraph, op: OpUse) -> bool:
    """Whether axis 0 of an op's x is the lanes, each of which reaches its own states alone."""
    own = (pair for pair in pairs(graph) if pair.relation.key == op.key)
    apart = all(pair.laned and not pair.has_lanes_added for pair in own)
    rows = op.primitive.batched and op.x is not None and op.x_aval.shape[:1] == (graph.lanes,)
    return rows and apart


def of_rows(graph: ETraceGraph, op: OpUse, flags: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of an op's x, in the flagged lanes; ``flags`` has rows, or one row for all. A sample of
    x that reaches states of others stays, where the trace of these counts.

    It selects, and does not multiply: in the other lanes x need not be a number.
    """
    laned, flags = is_laned(graph, op), jnp.broadcast_to(flags, (len(rows), *flags.shape[1:]))
    return jax.vmap(lambda f, x: where_lanes(f, laned, x, len(op.repeats)))(flags, rows)


# coordinates --------------------------------------------------------------------------------------
#
# Between the positions of a group and the coordinates of a relation's entries.
#
# Where an element of y feeds several positions of the state, it has an entry for each of them,
# along axes that are added to those of y; the op's rules are mapped over these.


class Pair(NamedTuple):
    """A relation and one of its groups: where one entry of the trace belongs."""

    relation: Relation
    group: HiddenGroup
    coords: Coordinates
    states: tuple[int, ...]  # those of the group of which there are entries
    laned: bool  # axis 0 of the entries is the lanes
    lane: np.ndarray | None  # of each entry, with size 1 along axes that do not matter
    weights: dict[str, jax.Array] | None = None  # of the op, where a rule is given them

    @property
    def op(self) -> OpUse:
        return self.relation.op

    @property
    def place(self) -> tuple[str, str]:
        """The keys of the relation and of the group."""
        return self.relation.key, self.group.name

    @property
    def feeds(self) -> tuple[bool, ...]:
        """Whether y reaches each new state of the group within the step."""
        feeds = self.relation.feeds
        if not feeds:
            return (True,) * self.group.num_state
        return feeds[self.relation.groups.index(self.group)]

    def vector(self, of_group: tuple) -> tuple:
        """The part of a vector that stands for states of which there are entries."""
        return tuple(of_group[s] for s in self.states)

    def transition(self, by_group: dict) -> tuple:
        """The part of the group's transition between these states, at the coordinates."""
        return tuple(map(self.vector, self.vector(self.gathered(by_group))))

    @property
    def kept(self) -> Kept:
        """What an entry of a wide rule keeps, whose graph says it of each group."""
        if self.group.kept is None:
            raise NotSupportedError(f'{self.group.name} does not say what its entries keep.')
        return self.group.kept

    @property
    def has_lanes_added(self) -> bool:
        """Whether the lanes are an added axis: an op without a batch beside a state with one."""
        return self.laned and self.coords.added > 0 and self.coords.axis == 0

    def of(self, by_relation: dict):
        """This pair's value in a dict relation -> group -> value."""
        return by_relation[self.relation.key][self.group.name]

    @property
    def by_position(self) -> bool:
        """Whether entries are for the states of several lanes, and these are not their axis 0."""
        return self.lane is not None and not self.laned

    def flags(self, of_lanes: jax.Array) -> jax.Array:
        """Flags of the lanes of an entry: of its axis 0, at its coordinates if it is
        ``by_position``, or one for all of it.
        """
        return of_lanes if self.laned else self.at_entries(of_lanes)

    def at_entries(self, of_lanes: jax.Array) -> jax.Array:
        """A number of each lane at the coordinates, those of the states that entries are for, with
        size 1 along axes that do not matter; where these are not known, the largest.
        """
        if not of_lanes.ndim or self.lane is None:
            return of_lanes.max(initial=False)
        if self.laned:
            return of_lanes.reshape(self.lane.shape)
        return of_lanes[self.lane]

    @property
    def rows_of_x(self) -> np.ndarray | None:
        """The lane of each row of what is kept of x, or the one of all of x; None where a row
        reaches states of several lanes.
        """
        if self.lane is None or self.lane.size == 1:
            return None if self.lane is None else self.lane.reshape(())
        rows = self.op.primitive.batched and not (self.coords.added and self.coords.axis == 0)
        by_row = (rows or self.has_lanes_added) and self.lane.size == len(self.lane)
        return self.lane.reshape(-1) if by_row else None

    def at_x(self, of_lanes: jax.Array) -> jax.Array:
        """A number of each lane at the rows of x, or the largest where these share lanes."""
        if not of_lanes.ndim or self.rows_of_x is None:
            return of_lanes.max(initial=False)
        return of_lanes if self.laned else of_lanes[self.rows_of_x]

    def gathered(self, by_group: dict, rows: bool = False):
        """The group's vector or transition at the relation's coordinates; ``rows``: with axes in
        front for rows and for the loops around the op.
        """
        values = gathered(self.coords, by_group[self.group.name])
        front = (1,) * (1 + len(self.op.repeats)) if rows else ()
        return jax.tree.map(lambda v: v.reshape(front + v.shape), values)


def reached(relation: Relation) -> tuple[tuple[int, ...], ...]:
    """Of each group the states that the op reaches, in one step or more."""

    def of_group(group: HiddenGroup, feeds: tuple[bool, ...]) -> tuple[int, ...]:
        moves = closure(tuple(tuple(there or None for there in row) for row in group.reads))
        return tuple(
            s for s in range(group.num_state) if feeds[s] or any(map(and_, moves[s], feeds))
        )

    return tuple(map(of_group, relation.groups, relation.feeds))


def pairs(graph: ETraceGraph) -> Iterator[Pair]:
    """Every relation with each of its groups."""
    return itertools.starmap(Pair, graph.pairs)


def by_pair(graph: ETraceGraph, fn: Callable) -> dict[str, dict]:
    """``fn(pair)`` of every pair, as a dict relation -> group -> value."""
    found: dict[str, dict] = {r.key: {} for r in graph.hidden_param_op_relations}
    for pair in pairs(graph):
        found[pair.relation.key][pair.group.name] = fn(pair)
    return found


def by_op(pairs: Iterable[Pair], fn: Callable) -> dict[str, Any]:
    """Op -> the sum of ``fn(pair)`` over its groups; None counts as nothing."""
    found: dict[str, Any] = {}
    for pair in pairs:
        value = fn(pair)
        if value is not None:
            found[pair.relation.key] = add(found.get(pair.relation.key), value)
    return found


def is_plain(op: OpUse, coords: Coordinates) -> bool:
    """Whether one entry is at each of y's positions."""
    return not op.repeats and not coords.added and coords.positions is None


def mapped_over_added(fn: Callable, layout: tuple[int, int], in_axes) -> Callable:
    """``fn`` mapped over added axes; ``layout``: their number, and where the result has them."""
    added, axis = layout
    for _ in range(added):
        fn = jax.vmap(fn, in_axes=in_axes, out_axes=axis)
    return fn


def without_added(coords: Coordinates, x: jax.Array, behind: int = 0) -> jax.Array:
    """The sum over the axes that coordinates have beside those of y, ``behind`` others in front."""
    start = behind + coords.axis
    return x.sum(tuple(range(start, start + coords.added))) if coords.added else x


def to_y(pair: Pair, d: jax.Array) -> jax.Array:
    """A cotangent at a relation's coordinates, summed to y's shape; that of a real y is real."""
    d = d if is_complex(pair.op.y_aval) else jnp.real(d)
    return without_added(pair.coords, d, len(pair.op.repeats))


def folded(array, shape: tuple[int, ...]):
    """An array, or None, with all axes in front of ``shape`` (time, loops around the op) folded
    into one.
    """
    if array is None:
        return None
    return array.reshape(math.prod(array.shape[: array.ndim - len(shape)]), *shape)


# storage ------------------------------------------------------------------------------------------
#
# How the numbers of a trace are stored, and how they are read again.


Entry = dict[str, jax.Array]  # by trainable name
States = Mapping[str, tuple[jax.Array | None, ...]]  # one array for each state; None: zero


def by_state(entry: States) -> tuple[Entry, ...]:
    """An entry as a vector: for each state its arrays by trainable name."""
    return tuple(
        dict(zip(entry, arrays, strict=True)) for arrays in zip(*entry.values(), strict=True)
    )


def by_name(vector: tuple[Entry | None, ...], names) -> States:
    """The inverse of :func:`by_state`."""
    return {n: tuple(None if e is None else e[n] for e in vector) for n in names}


def chosen(vector: tuple, wanted: Sequence[bool], zero=None) -> tuple:
    """The wanted states of a vector or transition, ``zero`` in place of the others."""
    return tuple(x if there else zero for x, there in zip(vector, wanted, strict=True))


def entry_dtype(graph: ETraceGraph, pair: Pair, dtype) -> jnp.dtype:
    """The dtype of an entry that is made in some dtype: that of the states and of the parameters
    behind the op where it is wider, and complex where a state is.

    Products may be made in fewer bits than both. A trace that is kept in these adds small numbers
    to large ones, and stands still where it decays by less than their last bit.
    """
    program, avals = graph.program, graph.program.avals
    states = (avals[program.carry[c]].dtype for c in pair.group.states)
    behind = (avals[program.params[i]] for each in pair.op.parameters.values() for i in each)
    widths = (jnp.finfo(a.dtype).dtype for a in behind if jnp.issubdtype(a.dtype, jnp.inexact))
    return _jax.promoted(dtype, *states, *widths)


def tree_bytes(tree) -> int:
    """Bytes of all leaves."""
    return sum(math.prod(jnp.shape(x)) * jnp.result_type(x).itemsize for x in jax.tree.leaves(tree))


def stored_dtype(dtype) -> jnp.dtype:
    """The dtype in which a trace of some dtype is stored: bfloat16 as its bits, since XLA reads
    bfloat16 arrays on a CPU ten times slower.
    """
    return jnp.dtype(jnp.uint16 if dtype == jnp.bfloat16 else dtype)


def held_dtype(dtype) -> jnp.dtype:
    """The dtype of the numbers in an array that is stored in some dtype."""
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.uint16 else dtype)


def stored(x: jax.Array, dtype, chance: jax.Array | None = None) -> jax.Array:
    """``x`` as a trace of that stored dtype holds it; by ``chance``: see :func:`dithered`."""
    if chance is not None:
        x = dithered(x, held_dtype(dtype), chance)
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), dtype)
    return x.astype(dtype)


def is_narrow(dtype) -> bool:
    """Whether a real number of that dtype has 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 16


def chances(t: jax.Array, alive: jax.Array) -> jax.Array:
    """A number for each lane of an entry, or one for all of it, that is another at each step count:
    the same in every run.
    """
    lanes = alive.size
    own = t * lanes + jnp.arange(lanes, dtype=t.dtype) if alive.ndim else t.sum()
    x = own.astype(jnp.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0x9E3779B9)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x


def dithered(x: jax.Array, dtype, chance: jax.Array) -> jax.Array:
    """``x`` in a dtype. In one of 16 bits it is rounded up or down by chance, the nearer the
    likelier, so that it is ``x`` on average: to the nearest, a number that changes by less than
    half of its last digit would never change.
    """
    if not is_narrow(dtype) or is_narrow(x.dtype):
        return x.astype(dtype)
    x, rest = x.astype(jnp.float32), 23 - jnp.finfo(dtype).nmant
    place = jnp.arange(x.size, dtype=jnp.uint32).reshape(x.shape) * jnp.uint32(0x9E3779B9)
    drawn = place + chance.reshape(chance.shape + (1,) * (x.ndim - chance.ndim))
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (drawn >> (32 - rest))
    near = jax.lax.bitcast_convert_type(bits >> rest << rest, jnp.float32)
    return jnp.where(jnp.isfinite(x), near, x).astype(dtype)


def read(e: jax.Array, dtype=None) -> jax.Array:
    """A stored array as numbers, in its own dtype or in ``dtype`` if that is wider; real numbers
    stay real.
    """
    own = held_dtype(e.dtype)
    if e.dtype == jnp.uint16:
        e = jax.lax.bitcast_convert_type(e.astype(jnp.uint32) << 16, jnp.float32)
    if dtype is None:
        return e.astype(own)
    if not jnp.issubdtype(own, jnp.complexfloating):
        dtype = jnp.finfo(dtype).dtype  # of the real parts, where it is complex
    return e.astype(_jax.promoted(own, dtype))


def one_lane(tree, b, axis: int = 0):
    """Lane ``b`` of every array; its axis stays, with size 1. A number is that of every lane."""
    # `b` counts from the front: to ask whether it is negative would be half of the program
    cut = partial(jax.lax.dynamic_slice_in_dim, slice_size=1, axis=axis)
    return jax.tree.map(lambda x: cut(x, b, allow_negative_indices=False) if x.ndim else x, tree)


def after(read, t: jax.Array, values):
    """``values`` unchanged, but computed after ``read``.

    Where XLA does not know that a trace is read before it is written, it writes into a copy. The
    step count is never negative, which XLA does not know either.
    """
    first = [leaf for leaf in jax.tree.leaves(read) if leaf.size]
    if not first:
        return values

    def total():
        # slices, since devices would send each other all that a reshape reads
        slices = (jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim) for x in first)
        return sum(jnp.real(x).astype(jnp.float32).sum() for x in slices)

    def guarded(values, total):
        return jax.tree.map(lambda v: v + total.astype(v.dtype) if v.size else v, values)

    # branches, since an expression would be made again for each number of the trace, and the total
    # for each of the values; a GPU makes it while it waits for the trace, and would wait longer for
    # the flag of a branch
    def branch(never, values):
        one = jax.lax.cond(never, total, lambda: jnp.float32(0))
        return jax.lax.cond(never, guarded, lambda v, _: v, values, one)

    def selected(never, values):
        return jax.tree.map(partial(jnp.where, never), guarded(values, total()), values)

    return _jax.platform_dependent(jnp.any(t < 0), values, cpu=branch, default=selected)
