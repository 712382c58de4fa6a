"""``jax.lax.scan`` over the steps of a window, lowered to what each platform runs fastest.

On a CPU it is that scan. A GPU or a TPU waits for the launch of each kernel of each step, so there

- carries that move linearly, ``h' = A h + b`` at each position, with ``A`` and ``b`` made of none
  of them, are found for all steps at once by an associative scan, which takes ``log T`` passes, and
  a carry that only sums is a sum over time;
- the others go step by step, :data:`UNROLL` steps in a turn of the loop.

``python benchmarks/accelerator.py`` on an H100: a gradient of 1,000 steps of an LRU of 256 units
takes 0.21 of the time of the scans, of a minGRU 0.10; of 200 steps of a GRU 0.59.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import PROPERTIES, is_inexact
from .dataflow import NONE, coupled, dependence, variables
from .transition import Transition, Vector, add, apply, closure, filled

UNROLL = 4
MOST_COUPLED = 3  # carries of one recurrence: to join two steps costs the cube of their number
MOST_BYTES = 2**28  # of the A and b of all steps, of which an associative scan makes a tree


def over_time(
    step: Callable, init, xs, length: int | None = None, reverse: bool = False, auto: bool = True
):
    """``jax.lax.scan(step, init, xs, length, reverse)``; where not ``auto``, on every platform."""

    def scan(init, xs):
        return jax.lax.scan(step, init, xs, length, reverse)

    closed, shapes = jax.make_jaxpr(scan, return_shape=True)(init, xs)
    (jaxpr, consts), leaves = _jax.closed_jaxpr(closed), jax.tree.leaves((init, xs))
    checks_keys = jax.config.jax_debug_key_reuse  # type: ignore[attr-defined]
    if auto and not jaxpr.effects and not checks_keys:  # which knows JAX's own primitives alone
        out = _jax.by_platform(jaxpr, [*consts, *leaves], at_once)
    else:
        out = _jax.evaluate_with(jaxpr, [*consts, *leaves])
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def at_once(jaxpr, args: Sequence) -> list:
    """The results of a jaxpr, its scan as a GPU or a TPU runs it."""

    def evaluate(eqn, ins: list) -> list:
        scan = _jax.scan_parts(eqn)
        if scan is None:
            return _jax.bind(eqn, *ins)
        return Recurrence(scan, ins).run()

    return _jax.walk(jaxpr, args[: len(jaxpr.constvars)], args[len(jaxpr.constvars) :], evaluate)


class Recurrence:
    """A scan with its operands. ``self.olds[k]`` has the values of carry k before each step, time
    in front, as soon as they are known, and ``self.ends[k]`` its last value.
    """

    def __init__(self, scan: _jax.ScanParts, operands: list):
        given, self.init, self.xs = scan.split(operands)
        self.length, self.reverse = scan.length, scan.reverse

        def body(*args):
            return _jax.evaluate(scan.body, scan.consts, (*given, *args))

        row = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in self.xs]
        self.body, self.consts, _ = _jax.opened(body, [*self.init, *row])
        number = len(self.init)
        self.old, self.new = self.body.invars[:number], self.body.outvars[:number]
        self.olds: dict[int, jax.Array] = {}
        self.ends: dict[int, jax.Array] = {}
        # for each value the carries that it depends on
        sets = [frozenset([k]) for k in range(number)] + [NONE] * len(row)
        self.reads = dependence(self.body, sets)

    def run(self) -> list:
        """``[*carry, *ys]``."""
        # nothing to win, or equations that have to run one step after the other
        if self.length < 2 or any(keeps_its_order(eqn) for eqn in self.body.eqns):
            ys = self._step_by_step(set(range(len(self.init))), True)
            return [*self.ends.values(), *(ys or ())]
        # sets of carries that need each other: first those whose operands are known
        left, ys = coupled([self.reads(v) for v in self.new]), None
        linear = {members for members in left if self._is_linear(members)}
        while left:
            ready = [s for s in left if s in linear and self._needs(s) <= self.olds.keys()]
            for members in ready:
                self._solve(sorted(members))
            left = [s for s in left if s not in ready]
            # in one loop, what needs no linear carry still unknown
            together: set[int] = set()
            for members in left:
                known = self.olds.keys() | together
                if not ready and members not in linear and self._needs(members) <= known:
                    together |= members
            left = [s for s in left if not s <= together]
            ys = self._step_by_step(together, not left) if together else None
        if ys is None:  # all is known: the rest of a step, for all steps at once
            outs = jax.vmap(self._evaluate, axis_size=self.length)(self.olds, self.xs)
            ys = outs[len(self.init) :]
        return [*(self.ends[k] for k in range(len(self.init))), *ys]

    def _evaluate(self, olds: dict[int, jax.Array], row: list) -> list:
        """What the body makes of one step; carries that are not given are zero."""
        carry = [olds.get(k, jnp.zeros_like(h)) for k, h in enumerate(self.init)]
        return _jax.evaluate(self.body, self.consts, (*carry, *row))

    # which carries need each other ----------------------------------------------------------------

    def _needs(self, members: frozenset) -> frozenset:
        """The other carries that these need."""
        return NONE.union(*(self.reads(self.new[k]) for k in members)) - members

    def _is_linear(self, members: frozenset) -> bool:
        """Whether the new values are linear in the old ones position by position, by what is known
        of each equation between them. Where complex numbers have no complex derivative, an
        operation on them is none of these.
        """
        first = self.init[min(members)]
        size = sum(self.init[k].nbytes for k in members) * (len(members) + 1) * self.length
        if len(members) > MOST_COUPLED or size > MOST_BYTES:
            return False
        # follow the carries forward: a value is linear in them, or spoilt, or reads none
        varying: set = {self.old[k] for k in members}
        spoilt: set = set()

        def alike(v) -> bool:
            return (
                is_inexact(v.aval) and v.aval.shape == first.shape and v.aval.dtype == first.dtype
            )

        for eqn in self.body.eqns:
            inside = [not isinstance(v, _jax.Literal) and v in varying for v in eqn.invars]
            broken = not spoilt.isdisjoint(variables(eqn.invars))
            if broken or any(inside):
                does = PROPERTIES[eqn.primitive.name]
                linear = does.elementwise and does.linear is not None and does.linear(inside)
                if jnp.iscomplexobj(first):
                    linear = linear and does.holomorphic
                good = not broken and linear and all(map(alike, eqn.outvars))
                (varying if good else spoilt).update(eqn.outvars)
        news = variables(self.new[k] for k in members)
        return all(alike(self.old[k]) for k in members) and spoilt.isdisjoint(news)

    def _only_sums(self, k: int) -> bool:
        """Whether a carry is added to, and nothing else reads it."""
        old, new = self.old[k], self.new[k]
        read = [v for eqn in self.body.eqns for v in eqn.invars] + self.body.outvars
        made = next((eqn for eqn in self.body.eqns if new in eqn.outvars), None)
        if made is None or not PROPERTIES[made.primitive.name].sums or old not in made.invars:
            return False
        return [sum(v is w for v in read) for w in (old, new)] == [1, 1]

    # the steps ------------------------------------------------------------------------------------

    def _step_by_step(self, members: set[int], last: bool) -> list | None:
        """Run some carries in a loop; the ``last`` one makes the outputs of the steps too."""
        order, number = sorted(members), len(self.init)

        def step(carry, at):
            olds, row = at
            outs = self._evaluate(olds | dict(zip(order, carry, strict=True)), row)
            new = [outs[k] for k in order]
            return new, (None, outs[number:]) if last else (list(carry), None)

        start = [self.init[k] for k in order]
        end, (before, ys) = jax.lax.scan(
            step, start, (self.olds, self.xs), self.length, self.reverse, UNROLL
        )
        self.ends |= dict(zip(order, end, strict=True))
        if last:
            return ys
        self.olds |= dict(zip(order, before, strict=True))
        return None

    def _solve(self, members: list[int]) -> None:
        """Find linear carries at all steps, from the ``A`` and ``b`` of each."""
        first = tuple(self.init[k] for k in members)
        reads = [[r in self.reads(self.new[k]) for r in members] for k in members]

        def step(olds, row, h):
            outs = self._evaluate(olds | dict(zip(members, h, strict=True)), row)
            return tuple(outs[k] for k in members)

        def parts(olds, row) -> tuple[Transition, Vector]:
            at = functools.partial(step, olds, row)
            none = tuple(jnp.zeros_like(h) for h in first)
            # A column by column: the derivative along ones in one carry
            columns = []
            for r, h in enumerate(first):
                one = tuple(jnp.ones_like(h) if r == s else z for s, z in enumerate(none))
                columns.append(jax.jvp(at, (none,), (one,))[1])
            a = tuple(
                tuple(x if there else None for x, there in zip(row, read, strict=True))
                for row, read in zip(zip(*columns, strict=True), reads, strict=True)
            )
            return a, at(none)

        mapped = functools.partial(jax.vmap, axis_size=self.length)
        if not any(map(any, reads)):  # none of them reads itself
            after = mapped(lambda olds, row: step(olds, row, first))(self.olds, self.xs)
        elif len(members) == 1 and self._only_sums(members[0]):
            zero = (jnp.zeros_like(first[0]),)
            (each,) = mapped(lambda olds, row: step(olds, row, zero))(self.olds, self.xs)
            k = members[0]
            self.ends[k] = first[0] + each.sum(0)
            return
        else:
            after = linear_scan(*mapped(parts)(self.olds, self.xs), first, self.reverse)
        for k, start, new in zip(members, first, after, strict=True):
            ends = (new[1:], start[None]) if self.reverse else (start[None], new[:-1])
            self.olds[k] = jnp.concatenate(ends)
            self.ends[k] = new[0 if self.reverse else -1]


def keeps_its_order(eqn) -> bool:
    """Whether an equation is run step by step, so that it does what it does in a loop: a branch
    that is not taken does not run, and a generator whose numbers depend on a mapped axis draws the
    same.
    """
    name = eqn.primitive.name
    kinds = {str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, 'dtype')}
    if name.startswith('random_') and any(k.startswith('key<') for k in kinds - {'key<fry>'}):
        return True
    return PROPERTIES[eqn.primitive.name].alone or name.endswith('callback')


def linear_scan(a: Transition, b: Vector, first: Vector, reverse: bool = False) -> Vector:
    """``h_k`` after each step of ``h_k = A_k h_{k-1} + b_k`` from ``h_0 = first``, time in front;
    with ``reverse`` from the last step to the first.
    """
    start = -1 if reverse else 0
    # the first step is from h_0, which the scan over pairs (A, b) does not know
    begun = apply(jax.tree.map(lambda x: x[start], a), first, _times)
    b = tuple(
        x if more is None else x.at[start].add(more) for x, more in zip(b, begun, strict=True)
    )
    # products of several A have numbers where none of them has
    like = tuple(tuple(b[0] if there else None for there in row) for row in closure(a))
    return jax.lax.associative_scan(_joined, (filled(a, like), b), reverse=reverse)[1]


def _joined(one: tuple[Transition, Vector], two: tuple[Transition, Vector]):
    """Two steps, or many, as one."""
    (a, b), (later_a, later_b) = one, two
    columns = [apply(later_a, column, _times) for column in zip(*a, strict=True)]
    return tuple(zip(*columns, strict=True)), tuple(map(add, apply(later_a, b, _times), later_b))


def _times(a: jax.Array, x: jax.Array) -> jax.Array:
    """``a x``, where x need not be a number if a is zero, as at a reset, and a may be infinite if x
    is zero: it is a product of many steps, which may overflow where no single one does.
    """
    a = jnp.where(jnp.isinf(a) & (x == 0), 0, a)
    return a * jnp.where((a != 0) | jnp.isfinite(x), x, 0)
