"""A step that is traced once and run in a loop over time, each equation where it costs least (see
:mod:`.partition`)."""

from __future__ import annotations

import itertools
import math
import operator
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import PROPERTIES, is_inexact
from .dataflow import variables
from .over_time import keeps_its_order, over_time
from .partition import Dataflow, Partition, nbytes
from .rewriting import rewritten

# sums over the steps of a block -------------------------------------------------------------------


class Part(NamedTuple):
    """A value of each step whose sum over the steps is taken; its ``operands`` are wanted.

    ``eqn`` makes the value of its operands: of one that is larger than they are, step by step; of a
    matrix product ``at_once``, where one product contracts the steps too. None: it is the operand.
    """

    value: Any
    operands: tuple
    eqn: Any = None
    at_once: bool = False

    def total(self, blocks, env: Mapping, counts: jax.Array | None, length: int) -> jax.Array:
        """The sum over the steps that count."""
        if self.eqn is not None and not self.at_once:

            def step(total, at):
                values, here = at
                inside = blocks.values(zip(self.operands, values, strict=True))
                _jax.evaluate_into(inside, [self.eqn])
                return total + where_counted(here, inside[self.value]), None

            empty = jnp.zeros(self.value.aval.shape, self.value.aval.dtype)
            rows = [env[v] for v in self.operands]
            return jax.lax.scan(step, empty, (rows, counts), length)[0]
        operands = [where_counted(counts, blocks.each(v, env, length)) for v in self.operands]
        if self.eqn is None:
            return operands[0].sum(0)
        # the axis of time in front is contracted too
        params = dict(self.eqn.params)
        contracted, batch = params['dimension_numbers']
        params['dimension_numbers'] = tuple(
            tuple((*(d + 1 for d in dims), *also) for dims in pair)
            for pair, also in ((contracted, (0,)), (batch, ()))
        )
        return _jax.bind(self.eqn, *operands, params=params)[0]


class Term(NamedTuple):
    """A value whose sum over the steps the linear ``equations`` make of the sums of its parts."""

    value: Any
    parts: tuple[Part, ...]
    equations: tuple

    @property
    def operands(self) -> list:
        return [v for part in self.parts for v in part.operands]

    def total(self, *at) -> jax.Array:
        """The sum over the steps that count, of the arguments of :meth:`Part.total`."""
        if not self.equations:
            return self.parts[0].total(*at)
        sums = {part.value: part.total(*at) for part in self.parts}
        _jax.evaluate_into(sums, self.equations)
        return sums[self.value]


def where_counted(counts: jax.Array | None, x: jax.Array) -> jax.Array:
    """``x`` where a step counts (its axes come first), else zero."""
    if counts is None:
        return x
    flags = counts.reshape(counts.shape + (1,) * (x.ndim - counts.ndim))
    return jnp.where(flags, x, jnp.zeros((), x.dtype))


def terms_of(values: Iterable, flow: Dataflow) -> list[Term]:
    """Each of these values as a term."""
    # equations whose result waits for the sum over the steps, and whether all of their operands do
    waiting: dict[Any, bool] = {}
    for eqn in flow.jaxpr.eqns:
        found = _waits(eqn, flow, waiting)
        if found is not None:
            waiting[eqn.outvars[0]] = found
    return [_term(v, flow, waiting) for v in values]


def _waits(eqn, flow: Dataflow, waiting: Mapping[Any, bool]) -> bool | None:
    """Whether the operands of an equation wait too; None if it does not wait itself."""
    ins, outs, does = eqn.invars, eqn.outvars, PROPERTIES[eqn.primitive.name]
    if len(outs) != 1 or len(variables(ins)) < len(ins) or not flow.varies(outs[0]):
        return None
    if _is_product(eqn, flow):
        return True
    if does.sums and any(v in waiting for v in ins):
        return all(waiting.get(v, False) for v in ins)
    # devices that share the lanes exchange what is summed over the steps, not a sum of each step
    if eqn.primitive.name == 'reduce_sum' and jax.device_count() > 1:
        parts = _term(ins[0], flow, waiting).parts
        if all(part.at_once or part.eqn is None for part in parts):
            return True
    # an equation that is linear in its one operand and keeps its size can wait for the sum
    linear = len(ins) == 1 and does.linear is not None and is_inexact(outs[0].aval)
    alike = linear and math.prod(ins[0].aval.shape) == math.prod(outs[0].aval.shape)
    return True if alike and waiting.get(ins[0], False) else None


def _is_product(eqn, flow: Dataflow) -> bool:
    return eqn.primitive.name == 'dot_general' and all(map(flow.varies, eqn.invars))


def _term(v, flow: Dataflow, waiting: Mapping[Any, bool]) -> Term:
    """The sums from which that of a value follows."""
    parts, seen, todo = [], set(), [v]
    while todo:
        x = todo.pop()
        eqn = None if isinstance(x, _jax.Literal) else flow.made.get(x)
        operands = () if eqn is None else tuple(flow.sources(x))
        if eqn is None or not flow.varies(x):
            parts.append(Part(x, (x,)))
        elif _is_product(eqn, flow):
            parts.append(Part(x, tuple(eqn.invars), eqn, at_once=True))
        elif x in waiting:
            todo += [u for u in dict.fromkeys(eqn.invars) if u not in seen]
            seen.update(eqn.invars)
        elif operands and nbytes(x) > sum(map(nbytes, operands)):
            parts.append(Part(x, operands, eqn))
        else:
            parts.append(Part(x, (x,)))
    if len(parts) == 1 and parts[0].value is v:
        return Term(v, tuple(parts), ())
    return Term(v, tuple(parts), flow.needed([v], {part.value for part in parts}))


# blocks of steps ----------------------------------------------------------------------------------
#
# The parts of a step run over time, block after block.


BLOCK_BYTES = 2**26  # of what is computed for all steps of a block at once


class Constants(dict):
    """Values that are the same at all steps; some equations are made again at each read."""

    def __init__(self, repeats: Sequence):
        self.repeated = {eqn.outvars[0]: eqn for eqn in repeats}

    def __missing__(self, v):
        eqn = self.repeated[v]
        return _jax.bind(eqn, *(_value(x, self) for x in eqn.invars))[0]


def _value(v, env: Mapping):
    return _jax.literal(v) if isinstance(v, _jax.Literal) else env[v]


class Blocks:
    """A partition with the values of its constants, and of the carries that never change.
    ``auto``: see :func:`over_time`.
    """

    def __init__(
        self, parts: Partition, consts: Sequence, constant: Sequence, state: Sequence, auto: bool
    ):
        self.parts, self.auto = parts, auto
        jaxpr = parts.jaxpr
        # what only repeats a constant is made where it is read: a loop would load it at each turn
        repeats = [eqn for eqn in parts.constant if _repeats(eqn)]
        self._constant = Constants(repeats)
        given = zip((*jaxpr.constvars, *parts.given), (*consts, *constant), strict=True)
        kept = zip(parts.old, state, parts.kept, strict=True)
        self._constant.update(given)
        self._constant.update((v, x) for v, x, same in kept if same)
        repeated = self._constant.repeated
        rest = [eqn for eqn in parts.constant if eqn.outvars[0] not in repeated]
        _jax.evaluate_into(self._constant, rest)

    def values(self, given: Iterable = ()) -> ChainMap:
        """The values of a step or of a block: these, and the constants of all steps behind them."""
        return ChainMap(dict(given), self._constant)

    def each(self, v, rows: Mapping, length: int) -> jax.Array:
        """The value of each step, time in front."""
        if self.parts.varies(v):
            return rows[v]
        x = jnp.asarray(_value(v, self._constant))
        return jnp.broadcast_to(x, (length, *x.shape))

    def opened(self, targets, row: Sequence):
        """A tree of values of one step, made of its row."""
        env = self.values(zip(self.parts.rows, row, strict=True))
        _jax.evaluate_into(env, self.parts.needed(jax.tree.leaves(targets), env.maps[0]))
        return jax.tree.map(lambda v: _value(v, env), targets)

    def once(self, v):
        """A value that repeats a constant, with axes of size 1 where it does; else ``VARIES``."""
        if isinstance(v, _jax.Literal) or v not in self._constant.repeated:
            return VARIES
        eqn = self._constant.repeated[v]
        x = jnp.asarray(_value(eqn.invars[0], self._constant))
        dims = eqn.params['broadcast_dimensions']
        return jnp.expand_dims(x, [k for k in range(v.aval.ndim) if k not in dims])

    # the steps ------------------------------------------------------------------------------------

    def run(
        self, state: list, at: list, length: int, counts, terms: list[Term], zeros: list
    ) -> tuple:
        """``(state, sums of the terms, rows)`` after some steps."""
        # a block costs little, and another program for those that are left as much as this one
        size = even(length, min(length, most_steps(self.parts.block_bytes)), 8)
        # rows that are inputs are there already
        stored = [v for v in self.parts.rows if v not in self.parts.inputs]

        def block(carry, part):
            (state, sums), (at, counted) = carry, part
            number = len(at[0])
            state, env = self._block(state, at, number)
            totals = [term.total(self, env, counted, number) for term in terms]
            sums = list(map(operator.add, sums, totals))
            return (state, sums), [env[v] for v in stored]

        # whole blocks in a loop, then the steps that are left; the first block adds to zeros
        carry, xs, pieces = (state, zeros), (at, counts), []
        whole, rest = divmod(length, size)
        if whole == 1:
            carry, got = block(carry, jax.tree.map(lambda a: a[:size], xs))
            pieces.append(got)
        else:
            parts = jax.tree.map(lambda a: a[: whole * size].reshape(whole, size, *a.shape[1:]), xs)
            carry, got = jax.lax.scan(block, carry, parts)
            pieces.append([a.reshape(whole * size, *a.shape[2:]) for a in got])
        if rest:
            carry, got = block(carry, jax.tree.map(lambda a: a[whole * size :], xs))
            pieces.append(got)
        state, sums = carry
        rows = dict(zip(self.parts.inputs, at, strict=True))
        for v, *each in zip(stored, *pieces, strict=True):
            rows[v] = each[0] if len(each) == 1 else jnp.concatenate(each)
        return state, sums, {v: rows[v] for v in self.parts.rows}

    def _block(self, state: list, at: list, length: int) -> tuple[list, ChainMap]:
        """Some steps: the mapped equations all at once, the loops step by step."""
        parts, new = self.parts, list(state)
        env = self.values(zip(parts.inputs, at, strict=True))
        there = env.maps[0]
        for loop in parts.loops:
            self._map(loop.outer, env)
            olds = [parts.old[k] for k in loop.carries]

            def step(state, at, loop=loop, olds=olds):
                inside = self.values(zip((*olds, *loop.outer), (*state, *at), strict=True))
                _jax.evaluate_into(inside, loop.equations)
                news = [_value(parts.new[k], inside) for k in loop.carries]
                return news, [inside[v] for v in loop.stacked]

            before, rows = [state[k] for k in loop.carries], [env[v] for v in loop.outer]
            if length == 1:
                moved, stacked = step(before, [x[0] for x in rows])
                stacked = [x[None] for x in stacked]
            else:
                moved, stacked = over_time(step, before, rows, length, auto=self.auto)
            env.update(zip(loop.stacked, stacked, strict=True))
            for k, old, last in zip(loop.carries, olds, moved, strict=True):
                new[k], after = last, parts.new[k]
                # where its old values are stored, the new ones are those of the next step
                if old in there and not isinstance(after, _jax.Literal) and after not in there:
                    env[after] = jnp.concatenate([env[old][1:], last[None]])
        self._map(parts.mapped, env)
        return new, env

    def _map(self, targets: Iterable, env: ChainMap) -> None:
        """The targets for all steps of a block, which ``env`` then holds."""
        equations = self.parts.needed(targets, env.maps[0])
        # runs of equations that are evaluated in one way
        for way, group in itertools.groupby(equations, self._way):
            run = list(group)
            if way is None:
                for eqn in run:
                    env[eqn.outvars[0]] = _convolved(eqn, *(_value(v, env) for v in eqn.invars))
                continue
            made = [v for eqn in run for v in eqn.outvars]
            reads = [v for eqn in run for v in self.parts.sources(eqn.outvars[0])]
            reads = list(dict.fromkeys(v for v in reads if v not in made))

            def step(values, run=run, made=made, reads=reads):
                inside = self.values(zip(reads, values, strict=True))
                _jax.evaluate_into(inside, run)
                return [inside[v] for v in made]

            outs = way(step)([env[v] for v in reads])
            env.update(zip(made, outs, strict=True))

    def _way(self, eqn) -> Callable | None:
        """What maps an equation over time; None for a convolution whose batch is time."""
        if keeps_its_order(eqn):
            return lambda step: partial(jax.lax.map, step)  # one after the other
        shared = jax.device_count() > 1 and eqn.primitive.name == 'conv_general_dilated'
        if shared and eqn.params['batch_group_count'] == 1:
            x, kernel = map(self.parts.varies, eqn.invars)
            return None if x and not kernel else jax.vmap
        return jax.vmap


def _convolved(eqn, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution of all steps, mapped over the lanes. Mapped over time, JAX folds it in front of
    the lanes, and devices that share these would gather the whole input.
    """
    layout = eqn.params['dimension_numbers']
    lanes, of_result = layout.lhs_spec[0], layout.out_spec[0]

    def of_lane(x):
        (y,) = _jax.bind(eqn, jnp.moveaxis(x, 0, lanes), kernel)
        return jnp.moveaxis(y, of_result, 0)

    return jax.vmap(of_lane, 1 + lanes, 1 + of_result)(x)


def _repeats(eqn) -> bool:
    """Whether an equation makes several numbers of each that it reads."""
    (new,) = eqn.outvars[:1]
    grows = eqn.primitive.name == 'broadcast_in_dim' and new.aval.size > eqn.invars[0].aval.size
    return grows and not eqn.effects


def most_steps(bytes_of_one: int) -> int:
    """The number of steps in a block: what they compute at once does not outgrow the memory that
    an allocator keeps.
    """
    return max(1, BLOCK_BYTES // max(bytes_of_one, 1))


def even(length: int, most: int, times: int = 2) -> int:
    """The largest part <= ``most`` that divides ``length``, so that one program serves all parts;
    if that would make more than so many ``times`` the fewest parts, these instead.
    """
    fewest = -(-length // most)
    return next(
        (length // n for n in range(fewest, min(times * fewest, length) + 1) if length % n == 0),
        -(-length // fewest),
    )


# the traced step ----------------------------------------------------------------------------------


VARIES = object()


class Steps(NamedTuple):
    """Steps of a loop: ``open(row)`` makes of one row of ``rows`` (time in front) the values of its
    step. ``once`` has those that are the same at all steps and repeat a smaller array, with axes of
    size 1 where they do, and :data:`VARIES` for others; None: nothing is known.
    """

    rows: Any
    open: Callable[[Any], Any]
    once: Any = None

    def at(self, k: int):
        return self.open(jax.tree.map(lambda a: a[k], self.rows))

    @property
    def all(self):
        """The values of all steps, time in front."""
        rows = self.rows
        return jax.vmap(self.open)(rows) if jax.tree.leaves(rows) else self.open(rows)

    @property
    def like(self):
        """The shapes of the values of a step."""
        return jax.eval_shape(lambda: self.at(0))


class TracedStep:
    """``step(constant, state, at) -> (state, terms, shown, opened)`` on pytrees, traced for the
    shapes of these arguments.

    ``terms`` are summed over the steps of a loop, ``shown`` is stored for each step, and ``opened``
    follows from what is. Only a ``differentiable`` loop keeps derivative rules of functions.
    ``auto``: see :func:`over_time`.
    """

    def __init__(
        self,
        step: Callable,
        constant,
        state,
        at,
        *,
        differentiable: bool = False,
        auto: bool = True,
    ):
        self.auto = auto
        numbers = len(jax.tree.leaves(constant)), len(jax.tree.leaves(state))
        jaxpr, consts, shapes = _jax.opened(step, (constant, state, at))
        jaxpr, self._consts = rewritten(jaxpr, consts, numbers, differentiable)
        # the variables of the results, in trees as the step returns them
        results = jax.tree.unflatten(jax.tree.structure(shapes), jaxpr.outvars)
        state, terms, self._shown, self._opened = results
        self._of_state, self._of_terms = map(jax.tree.structure, (state, terms))
        flow, self._terms = Dataflow(jaxpr, numbers), jax.tree.leaves(terms)
        self._sums = terms_of(self._terms, flow)
        summed = [v for term in self._sums for v in term.operands]
        shown, opened = map(jax.tree.leaves, (self._shown, self._opened))
        self.parts = Partition(jaxpr, numbers, shown, summed, opened)

    @property
    def row_bytes(self) -> int:
        """Bytes that are stored for each step, beside its inputs."""
        return sum(nbytes(v) for v in self.parts.rows if v not in self.parts.inputs)

    def loop(self, constant, state, xs, length: int, counts: jax.Array | None = None):
        """``(state, sums of terms, shown, opened)`` after some steps; ``xs`` and ``shown`` have
        time as first axis, ``opened`` are :class:`Steps`.

        ``counts``: bool ``(length,)``, the steps whose terms are summed; at the others a term need
        not be a number. None: all.
        """
        state, at = jax.tree.leaves(state), jax.tree.leaves(xs)
        blocks = Blocks(self.parts, self._consts, jax.tree.leaves(constant), state, self.auto)
        zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in self._terms]
        state, terms, rows = blocks.run(state, at, length, counts, self._sums, zeros)
        return (
            jax.tree.unflatten(self._of_state, state),
            jax.tree.unflatten(self._of_terms, terms),
            jax.tree.map(lambda v: blocks.each(v, rows, length), self._shown),
            Steps(
                [rows[v] for v in self.parts.rows],
                partial(blocks.opened, self._opened),
                jax.tree.map(blocks.once, self._opened),
            ),
        )
