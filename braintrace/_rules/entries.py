"""The entries of a trace: how steps make them, how they are moved, read and written, by the rules
of the op's own primitive.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import Coordinates, OpUse, abstract, depends, is_complex
from .._executor import Transition, Vector, add, apply, dense, dot, is_read
from ..errors import RuleContractError
from .contraction import by_group, contracted, finite, in_parts, in_wide, like_avals, outside_loops
from .layout import (
    Entry,
    Pair,
    States,
    after,
    anywhere,
    by_name,
    by_state,
    chances,
    chosen,
    folded,
    held_dtype,
    is_narrow,
    is_plain,
    mapped_over_added,
    one_lane,
    read,
    stored,
    where_lanes,
    without_added,
)

FUSED_STREAMS = 4  # lanes times states that are summed in one expression, which XLA fuses
FEW_ROWS = 8  # rows that are multiplied out in the one pass that writes the entry
SMALL_LANE = 2**15  # bytes of a lane that may as well be copied


Block = tuple[jax.Array | None, Vector]  # rows of x and of q


class Change(NamedTuple):
    """The change of one entry; factors are at its relation's coordinates.

    e <- p e + sum over rows k of x_k (x) q_k
    """

    p: Transition
    blocks: tuple[Block, ...]

    def part(self, wanted: Sequence[bool]) -> Change:
        """The change of the wanted states alone."""
        p = chosen(self.p, wanted, (None,) * len(wanted))
        return Change(p, tuple((x, chosen(q, wanted)) for x, q in self.blocks))

    @property
    def few(self) -> Change:
        """What is multiplied with an entry number by number: p, and blocks of few rows."""
        return Change(
            self.p, tuple((None, q) for x, q in self.blocks if rows_of((x, q)) <= FEW_ROWS)
        )

    def with_few(self, few: Change) -> Change:
        """With another ``few`` in its place."""
        others = iter(q for _, q in few.blocks)
        return Change(
            few.p,
            tuple((x, next(others) if rows_of((x, q)) <= FEW_ROWS else q) for x, q in self.blocks),
        )


def rows_of(block: Block) -> int:
    """The number of rows of a block."""
    return next((len(a) for a in block[1] if a is not None), 0)


class OpTrace:
    """The entry of an op at some coordinates, made with these weights (None: only shapes are asked
    for).

    A fresh entry comes from ``init_drtrl`` with the states in a last axis; a trace stores one array
    for each state, which XLA can write in place. In between an entry is a vector of the algebra of
    D: for each state its arrays by trainable name, multiplied by ``yw_to_w``. Factors are at the
    coordinates. Of a stored entry the lanes ``alive`` count, or with one flag all or none; flags
    are at the coordinates if it is ``by_position``. All is computed in single precision at least.
    """

    def __init__(
        self,
        op: OpUse,
        coords: Coordinates,
        weights: Entry | None = None,
        by_position: bool = False,
    ):
        self.given, self.op, self.coords = op, in_wide(op), coords
        self.by_position = by_position
        self.weights = {} if weights is None else finite(op, like_avals(self.op, weights))

    # the empty trace ------------------------------------------------------------------------------

    def zeros(self, num_state: int) -> Entry:
        """The empty entry of D-RTRL, states in a last axis: ``init_drtrl``, repeated over added
        axes. Its arrays must have the shapes of one step's.
        """
        op, entry = outside_loops(self.op), self._init('init_drtrl', 'D_RTRL', num_state)
        entry = {n: self._repeated(e) for n, e in entry.items()}

        def one(x, d, weights):
            return OpTrace(op.empty(), self.coords, weights).instant(x, d)

        # without the axes of a mesh that the step was traced under
        x, weights = jax.tree.map(abstract, (op.x_aval, op.weight_avals))
        d = (jax.ShapeDtypeStruct(self.coords.shape, op.y_aval.dtype),)
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
                'must return zeros of the batch axis (if batched), the layout of one sample, and '
                'the state axis last.'
            )
        return entry

    def zeros_pp(self, num_state: int) -> jax.Array:
        """The empty output trace of ES-D-RTRL: ``init_pp``, repeated over added axes."""
        zero = self._repeated(self._init('init_pp', 'ES_D_RTRL', num_state))
        return jnp.broadcast_to(zero, (*self.op.repeats, *zero.shape))

    def _init(self, slot: str, algorithm: str, num_state: int):
        op = self.given
        variable = lambda a: SimpleNamespace(aval=jax.ShapeDtypeStruct(a.shape, a.dtype))
        x = None if op.x is None else variable(op.x_aval)
        weights = {n: variable(a) for n, a in op.weight_avals.items()}
        rule = op.primitive.bound_rule(slot, op.params, algorithm)
        return rule(x, variable(op.y_aval), weights, num_state)

    def _repeated(self, zero: jax.Array) -> jax.Array:
        """Zeros, repeated over the added axes."""
        coords = self.coords
        at, behind = coords.axis, coords.axis + coords.added
        sizes = *zero.shape[:at], *coords.shape[at:behind], *zero.shape[at:]
        return jnp.broadcast_to(jnp.expand_dims(zero, range(at, behind)), sizes)

    # one step, and many ---------------------------------------------------------------------------

    def instant(self, x, df: Vector) -> Vector:
        """One step's entry ``D_f (x) x``, sample by sample, summed over the turns of loops around
        the op.
        """
        op, root = self.op, self.op.primitive.root
        if op.repeats:
            return self.accumulate(x, df)
        slot = 'xy_to_dw' if root.optional_rule('instant_drtrl') is None else 'instant_drtrl'
        if op.primitive.structure:  # its parameters are arrays, and no key
            rule = self._lane_by_lane(root.bound_rule(slot, op.params, 'D_RTRL'), 0)
        else:
            params, layout = tuple(op.params.items()), self.coords.layout
            rule = _traced_once(op.primitive, slot, root.rule(slot), params, layout)
        x = self._as_read(x)
        return self._each(lambda d: rule(x, d.astype(op.y_aval.dtype), self.weights), df)

    def accumulate(self, xs, pushes: Vector) -> Vector:
        """``sum_t x_t (x) push_t`` over a leading time axis: one contraction where the entry has
        the parameter's layout.
        """
        op, root = self.op, self.op.primitive.root
        if op.repeats:  # the turns of loops are summed as steps of time are
            xs = folded(xs, () if op.x is None else op.x_aval.shape)
            pushes = jax.tree.map(lambda a: folded(a, self.coords.shape), pushes)
            return OpTrace(outside_loops(op), self.coords, self.weights).accumulate(xs, pushes)
        if op.x is None:
            return self.instant(None, jax.tree.map(lambda a: a.sum(0), pushes))
        # in the parameter's layout the reverse rule sums over time; the axes that a trace keeps
        # apart are mapped
        if root.optional_rule('instant_drtrl') is None:
            contract = functools.partial(contracted, dataclasses.replace(op, primitive=root))
            rule, xs = self._lane_by_lane(contract, 1), self._as_read(xs)
            return self._each(lambda d: rule(xs, d, self.weights), pushes)

        # another layout (conv, lora) has no contraction over time: step by step
        def plus(total, step):
            return jax.tree.map(jnp.add, total, self.instant(*step)), None

        first = jax.tree.map(lambda a: a[0], (xs, pushes))
        shapes = jax.eval_shape(self.instant, *first)
        empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        return jax.lax.scan(plus, empty, (xs, pushes))[0]

    def carry(self, d: Transition, entry: Vector) -> Vector:
        """``D e``: for state s the sum over states r of ``yw_to_w(D[s][r], e_r)``."""
        return apply(d, entry, self.transport)

    @functools.cached_property
    def transport(self) -> Callable:
        """``yw_to_w``: the product of values at y's positions with one state of an entry."""
        rule = self.op.primitive.bound_rule('yw_to_w', self.op.params, 'D_RTRL')
        return mapped_over_added(rule, self.coords.layout, self.coords.axis)

    def _each(self, fn: Callable, vector: Vector) -> Vector:
        def one(x):
            found = in_parts(self.op, fn, x)
            return jax.tree.map(lambda e: e.astype(_jax.wide(e.dtype)), found)

        return tuple(None if x is None else one(x) for x in vector)

    def _as_read(self, x):
        """x in the dtype in which the op is computed."""
        return None if x is None else x.astype(self.op.x_aval.dtype)

    def _lane_by_lane(self, fn: Callable, lane: int) -> Callable:
        """``fn(x, d, weights)`` of the root, mapped over the axes that must not be summed: the
        added axes, the axes of ``vmap``, and the batch (axis ``lane``).
        """
        over_batch = self.op.primitive.by_sample(fn, self.op.params, lane)
        axes = None, lane + self.coords.axis, None
        return mapped_over_added(over_batch, self.coords.layout, axes)

    # reading --------------------------------------------------------------------------------------

    def solve(self, signal: Vector, entry: States, alive: jax.Array, groups: int = 0) -> Entry:
        """``< signal , e >``: the gradient of the weights from a stored entry, summed over states
        and lanes; of so many groups of lanes apart.
        """
        op, coords, avals = self.op, self.coords, self.op.weight_avals
        if all(x is None for x in signal):
            zeros = {n: jnp.zeros(a.shape, _jax.wide(a.dtype)) for n, a in avals.items()}
            return jax.tree.map(lambda z: jnp.stack([z] * groups) if groups else z, zeros)
        # a layout that is not the parameter's has a rule of its own, which sums over lanes
        own, product = op.primitive.optional_rule('solve_drtrl'), self.transport
        if own is not None:
            rule = op.primitive.bound_rule('solve_drtrl', op.params, 'D_RTRL')
            of_state = lambda signal, e: rule(signal, e, self.weights)
            product = mapped_over_added(of_state, (coords.added, 0), coords.axis)

        def times(signal, e):
            """One state's part; of a real weight the real part."""
            found = product(signal, e)
            return {n: g if is_complex(avals[n]) else jnp.real(g) for n, g in found.items()}

        def of_lanes(signal, numbers):
            total = dot(signal, by_state(numbers), times)
            if own is not None:
                return {n: g.sum(tuple(range(coords.added))) for n, g in total.items()}
            # over the lanes and over added axes, to the parameter's shape
            total = {n: without_added(coords, g) for n, g in total.items()}
            return {n: g.sum(0) if op.primitive.batched else g for n, g in total.items()}

        numbers = self._numbers(entry, alive)
        return (
            by_group(groups, of_lanes, 0, signal, numbers) if groups else of_lanes(signal, numbers)
        )

    def solve_onto(
        self, onto: Entry, signal: Vector, entry: States, alive: jax.Array, groups: int = 0
    ) -> Entry:
        """``onto + < signal , e >`` by the op's own code on platforms that have it."""
        if all(x is None for x in signal):
            return onto

        def default(onto, signal, entry, alive):
            def read():
                (found,) = solve_each([(self, signal, entry, alive, groups)])
                return {n: g.astype(onto[n].dtype) for n, g in found.items()}

            found = read() if groups else if_any(alive, read, onto)
            return jax.tree.map(operator.add, onto, found)

        def by(reader):
            def run(*operands):
                return {**default(*operands), **reader(*operands, **self.op.params)}

            return run

        operands = onto, signal, entry, alive
        table = {} if groups else self.op.primitive.trace_reader
        readers = {platform: by(reader) for platform, reader in table.items()}
        return _jax.platform_dependent(*operands, default=default, **readers)

    def _numbers(self, entry: States, alive: jax.Array) -> States:
        """A stored entry, zero in lanes without a past, in the dtype in which sums are made."""
        dtype = _jax.wide(self.op.y_aval.dtype)
        return self.alive(jax.tree.map(lambda e: read(e, dtype), entry), alive)

    def alive(self, numbers: States, alive: jax.Array) -> States:
        """The numbers of an entry, zero in lanes without a past."""
        if not self.by_position or not alive.ndim:
            return jax.tree.map(lambda e: where_lanes(alive, True, e), numbers)
        # what a D that is 1 or 0 at the coordinates would leave, which may multiply no NaN
        shape = self.coords.shape
        if self._is_by_sample:  # of the lanes at hand, which may be one of them
            shape = (len(jax.tree.leaves(numbers)[0]), *shape[1:])
        at = jnp.broadcast_to(alive, shape).astype(self.op.y_aval.dtype)

        def state(entry: Entry) -> Entry:
            kept = self.transport(at, jax.tree.map(jnp.ones_like, entry))
            return {n: jnp.where(kept[n] != 0, e, jnp.zeros((), e.dtype)) for n, e in entry.items()}

        # a state that is not asked for is None
        states = (state(e) if jax.tree.leaves(e) else None for e in by_state(numbers))
        return by_name(tuple(states), numbers)

    @property
    def _is_by_sample(self) -> bool:
        """Whether an entry is the parameter's layout for each sample, so that lanes can be taken
        one at a time.
        """
        op, root = self.op, self.op.primitive.root
        own = root.optional_rule('instant_drtrl') or root.optional_rule('solve_drtrl')
        plain = op.primitive.batched and op.primitive.original is None and own is None
        return plain and op.x is not None and not op.repeats and not self.coords.added

    # writing --------------------------------------------------------------------------------------
    #
    # Steps that are written into a stored entry: in one pass over it, lane by lane, or by a kernel.

    def renewed(self, entry: States, alive: jax.Array, change: Change, t: jax.Array) -> States:
        """The stored entry after a change at step count ``t``, by the op's own code on platforms
        that have it.
        """
        own = is_plain(self.op, self.coords) and not self.by_position
        table = self.op.primitive.trace_writer if own else {}

        def default(change, entry, alive):
            return self._renewed(entry, alive, change, t)

        def by(writer):
            def run(change, entry, alive):
                # XLA leaves out what is made in vain
                found = writer(*change, entry, alive, **self.op.params)
                return {**default(change, entry, alive), **found}

            return run

        writers = {platform: by(writer) for platform, writer in table.items()}
        return _jax.platform_dependent(change, entry, alive, default=default, **writers)

    def _renewed(self, entry: States, alive: jax.Array, change: Change, t: jax.Array) -> States:
        op, coords = self.op, self.coords
        narrow = any(is_narrow(held_dtype(e.dtype)) for e in jax.tree.leaves(entry))
        chance = chances(t, alive.any() if self.by_position else alive) if narrow else None
        rows = [rows_of(block) for block in change.blocks]
        if sum(rows) == 1 and is_plain(op, coords) and op.primitive.trace_kernel:
            # a kernel knows values of y's dtype, not the derivative of a complex state by a real y
            (block,) = (block for block in change.blocks if rows_of(block))
            if all(is_complex(q) == is_complex(op.y_aval) for q in jax.tree.leaves(block[1])):
                return self._by_kernel(entry, alive, change.p, block, chance)

        # what decides: the number of rows, whether states can be written one by one, how many old
        # states make a new one
        few, order, sparse = max(rows) <= FEW_ROWS, _order(change.p), bool(op.primitive.structure)
        terms = max(sum(x is not None for x in row) for row in change.p)

        def all_at_once(entry, order=None):
            return self._state_by_state(entry, alive, change, order, t, chance)

        # one row for states that are made of several: XLA's code for it is slower than lane by lane
        if few and (sparse or (order is not None and (terms < 2 or sum(rows) > 1))):
            return all_at_once(entry, order)
        if self._is_by_sample and coords.shape and coords.shape[0]:
            lane = sum(e.nbytes for e in jax.tree.leaves(entry)) // coords.shape[0]
            if not few or lane > SMALL_LANE:
                lane_by_lane = functools.partial(
                    self._over_lanes, alive=alive, change=change, chance=chance
                )
                return _jax.platform_dependent(entry, cpu=lane_by_lane, default=all_at_once)
        return all_at_once(entry)

    def changed(self, change: Change, entry: States, alive: jax.Array) -> Vector:
        """The numbers after a change, which may be those of other states."""
        return self._changed(change, by_state(self._numbers(entry, alive)), self._summed)

    def _changed(self, change: Change, entry: Vector, summed: Callable) -> Vector:
        """The numbers of an entry after a change; ``summed(block)`` is its sum over rows."""
        return functools.reduce(added, map(summed, change.blocks), self.carry(change.p, entry))

    def _summed(self, block: Block) -> Vector:
        """``sum_k x_k (x) q_k``, a few rows multiplied out in the pass that writes them."""
        number = rows_of(block)
        if self.op.primitive.structure or number > FEW_ROWS:
            return self.accumulate(*block)
        row = lambda k: jax.tree.map(lambda a: a[k], block)
        made = [self.instant(*row(k)) for k in range(number)]
        return functools.reduce(added, made) if made else (None,) * len(block[1])

    def _state_by_state(
        self,
        entry: States,
        alive: jax.Array,
        change: Change,
        order: list[int] | None,
        t: jax.Array,
        chance: jax.Array | None,
    ) -> States:
        """All lanes at once, one state after the other in an order in which XLA can write in
        place.
        """
        numbers = by_state(self._numbers(entry, alive))
        if order is None or len(order) == 1:
            return put_back(self._changed(change, numbers, self._summed), entry, chance)
        made: list = [None] * len(order)
        for state in order:
            own = change.part([s == state for s in range(len(order))])
            made[state] = self._changed(own, numbers, self._summed)[state]
            if state != order[-1]:
                change = change._replace(p=after(made[state], t, change.p))
        return put_back(tuple(made), entry, chance)

    def _over_lanes(
        self, entry: States, alive: jax.Array, change: Change, chance: jax.Array | None
    ) -> States:
        """Each lane in turn: one product of matrices, written in place.

        Of several states a lane's old numbers are read one turn ahead: each new state is made of
        several old ones, so XLA would copy all of them to write one of them.
        """
        lanes, needed = len(jax.tree.leaves(entry)[0]), is_read(change.p)
        ahead = len(needed) > 1

        def summed(block: Block) -> Vector:
            x, q = self._as_read(block[0]), block[1]
            made = lambda d: contracted(self.op, x, d, self.weights)
            return jax.tree.map(lambda e: e[None], self._each(made, q))

        def lane(entry, b):
            return one_lane({n: chosen(es, needed) for n, es in entry.items()}, b)

        def write(b, carried):
            entry, old = carried
            old = self._numbers(old if ahead else lane(entry, b), one_lane(alive, b))
            here = Change(one_lane(change.p, b), one_lane(change.blocks, b, 1))
            put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=b, axis=0)
            made = self._changed(here, by_state(old), summed)
            own = functools.partial(put, allow_negative_indices=False)
            entry = put_back(made, entry, one_lane(chance, b), own)
            return entry, lane(entry, jnp.minimum(b + 1, lanes - 1)) if ahead else None

        start = entry, lane(entry, 0) if ahead else None
        return jax.lax.fori_loop(0, lanes, write, start)[0]

    def _by_kernel(
        self, entry: States, alive: jax.Array, p: Transition, block: Block, chance: jax.Array | None
    ) -> States:
        """One step, written by a kernel, to which the states are a last axis, on platforms that
        have one.
        """
        op, (x, q) = self.op, jax.tree.map(lambda a: a[0], block)

        def default(p, q, x, weights, entry):
            moved = self.carry(p, by_state(self._numbers(entry, alive)))
            return put_back(added(moved, self.instant(x, q)), entry, chance)

        def by(kernel):
            def run(p, q, x, weights, entry):
                numbers = self._numbers(entry, alive)
                trace = {n: jnp.stack(e, -1) for n, e in numbers.items()}
                dtype = jnp.result_type(*trace.values())
                d, f = (dense(tree, self.coords.shape, dtype).astype(dtype) for tree in (p, q))
                new = kernel(d, trace, f, x, weights, **op.params)
                wanted, is_dict = {n: e.shape for n, e in trace.items()}, isinstance(new, Mapping)
                of_dict = {n: jnp.shape(e) for n, e in new.items()} if is_dict else {}
                found = of_dict if is_dict else {'no dict': type(new).__name__}
                if wanted != found:
                    raise RuleContractError(
                        f'{op.where}: a trace kernel of {op.primitive.name} must return a trace '
                        f'like the one given: {wanted} expected, {found} found.'
                    )
                return {
                    n: tuple(stored(new[n][..., s], e.dtype, chance) for s, e in enumerate(es))
                    for n, es in entry.items()
                }

            return run

        kernels = {platform: by(kernel) for platform, kernel in op.primitive.trace_kernel.items()}
        operands = p, q, self._as_read(x), self.weights, entry
        return _jax.platform_dependent(*operands, default=default, **kernels)


@functools.lru_cache(maxsize=256)
def _traced_once(primitive, slot: str, rule: Callable, params: tuple, layout: tuple) -> Callable:
    """The rule of a kind of op, which is traced once for each shape: a write asks for each row and
    state, and a stack of layers for each layer. ``rule`` is a key: another may be registered.
    """
    fn = primitive.root.bound_rule(slot, dict(params), 'D_RTRL')
    fn = primitive.by_sample(fn, dict(params), 0)
    return jax.jit(mapped_over_added(fn, layout, (None, layout[1], None)), inline=True)


def added(a: Vector, b: Vector) -> Vector:
    """The sum of two entries, state by state."""
    return tuple(add(*pair) for pair in zip(a, b, strict=True))


def apart(entry: Entry) -> States:
    """A fresh entry as one array for each state."""
    return {n: tuple(e[..., s] for s in range(e.shape[-1])) for n, e in entry.items()}


def put_back(
    new: Vector, entry: States, chance: jax.Array | None, put: Callable = lambda e, x: x
) -> States:
    """The new numbers as the entry stores them; a state that is zero by structure stays."""
    return {
        n: tuple(
            e if x is None or e is None else put(e, stored(x, e.dtype, chance))
            for x, e in zip(of_name, entry[n], strict=True)
        )
        for n, of_name in by_name(new, entry).items()
    }


def if_any(alive: jax.Array, read: Callable, like):
    """``read()``, arrays like these, which are zeros while no lane has a past; on a CPU it is
    skipped then.
    """

    def skipped():
        none = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
        return jax.lax.cond(anywhere(alive), read, none)

    return _jax.platform_dependent(cpu=skipped, default=read)


def reads_weights(pair: Pair) -> bool:
    """Whether the entry of one step is made with the weights."""
    op = outside_loops(pair.op)

    def one(values, x, d):
        weights = dict(zip(op.weight_avals, values, strict=True))
        entry = OpTrace(op.empty(), pair.coords, weights).instant(x, (d,))
        return sum(e.sum() for e in jax.tree.leaves(entry))

    d = jax.ShapeDtypeStruct(pair.coords.shape, op.y_aval.dtype)
    return any(depends(one, list(op.weight_avals.values()), op.x_aval, d))


def solve_each(asked: Sequence[tuple]) -> list[Entry]:
    """:meth:`OpTrace.solve` for each ``(trace, *arguments)``. A processor reads each number once
    where it sums few lanes at a time: traces of as many lanes and states share a loop, since a
    program of many loops takes long to compile.
    """
    found: dict[int, Entry] = {}
    loops: dict[tuple[int, int], list[int]] = {}
    for k, (own, signal, entry, alive, groups) in enumerate(asked):
        there = [x for x in signal if x is not None]
        by_lane = own._is_by_sample and there and there[0].ndim and not groups
        if by_lane and len(there[0]):
            loops.setdefault((len(there[0]), len(there)), []).append(k)
        else:
            found[k] = own.solve(signal, entry, alive, groups)
    for (lanes, states), members in loops.items():

        def all_at_once(members=members):
            return [own.solve(*args) for own, *args in map(asked.__getitem__, members)]

        def of_lane(b, members=members):
            here = one_lane([asked[k][1:4] for k in members], b)
            return [asked[k][0].solve(*args) for k, args in zip(members, here, strict=True)]

        number = max(1, FUSED_STREAMS // states)
        lane_by_lane = functools.partial(sum_over_lanes, of_lane, lanes, number)
        each = _jax.platform_dependent(cpu=lane_by_lane, default=all_at_once)
        found.update(zip(members, each, strict=True))
    return [found[k] for k in range(len(asked))]


def sum_over_lanes(of_lane: Callable, lanes: int, fused: int):
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


def _order(reads: Transition) -> list[int] | None:
    """An order of the states in which each is read for the last time when it is written, if there
    is one.
    """
    left, order = list(range(len(reads))), []
    while left:
        free = [s for s in left if all(reads[r][s] is None for r in left if r != s)]
        if not free:
            return None
        order.append(free[0])
        left.remove(free[0])
    return order
