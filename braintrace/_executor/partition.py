"""Which equations of a step are where, when it runs in a loop over time with constant weights.

- *Constant* equations depend on neither the inputs nor the carry of a step: they run once.
- *Loops* hold what leads from a carry to the next carry. Carries that need each other share a loop;
  so do carries between which no product stands.
- *Mapped* equations run for all steps of a block at once: before the loops what does not depend on
  a carry, between two loops and after them what they do not need.
- *Opened* equations are cheap and lead only to values that a later loop reads step by step, so they
  are evaluated there.

What passes from one part to another is stored for each step: the least number of bytes from which
the rest follows by cheap equations, a minimal cut. Beside a step in three plain parts, in which
nothing is computed again, a gradient takes of the time, with a dropped and a kept trace: LRU 0.57,
0.76; LSTM 0.92, 0.94; GRU 1.00, 0.95; a sample of 64 units 0.96, 1.25 (measured once with
``benchmarks/parts.py`` of commit c9d827641315).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .._compiler import PROPERTIES
from .dataflow import NONE, coupled, dependence, variables


def nbytes(v) -> int:
    return math.prod(v.aval.shape) * getattr(v.aval.dtype, 'itemsize', 8)


def is_cheap(eqn) -> bool:
    """Whether computing a value again costs less than to store and read it."""
    does = PROPERTIES[eqn.primitive.name]
    return does.quick or (does.moves is not None and does.moves.by is not None)


@dataclass(frozen=True)
class LoopPart:
    """``carries`` (numbers) that move together by ``equations``; ``outer`` values are read from
    each step, ``stacked`` ones are stored for others.
    """

    carries: tuple[int, ...]
    equations: tuple
    outer: tuple
    stacked: tuple


class Dataflow:
    """What the values of ``jaxpr``, ``[*constant, *carry, *at] -> [*carry, ...]``, depend on."""

    def __init__(self, jaxpr, numbers: tuple[int, int]):
        self.jaxpr, (constant, carry) = jaxpr, numbers
        self.given = jaxpr.invars[:constant]
        self.old = jaxpr.invars[constant : constant + carry]
        self.inputs = jaxpr.invars[constant + carry :]
        self.new = jaxpr.outvars[:carry]
        self.kept = [new is old for new, old in zip(self.new, self.old, strict=True)]
        self.made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        # places of equations and of values, in the order in which they are there
        self._places = {eqn: k for k, eqn in enumerate(jaxpr.eqns)}
        self._places |= {v: k for k, v in enumerate((*self.old, *self.inputs, *self.made))}
        # for each value the carries on which it depends within a step; the inputs are one more, and
        # so is what an effect brings in, which may be another value at each step
        at = frozenset([carry])
        of_carry = [NONE if same else frozenset([k]) for k, same in enumerate(self.kept)]
        sets = [NONE] * constant + of_carry + [at] * len(self.inputs)
        self.reads = dependence(jaxpr, sets, effect=at)

    def varies(self, v) -> bool:
        return bool(self.reads(v))

    @cached_property
    def constant(self) -> list:
        """The equations whose results are the same in all steps."""
        return [
            eqn
            for eqn in self.jaxpr.eqns
            if not (eqn.effects or any(map(self.varies, eqn.outvars)))
        ]

    def varying(self, atoms: Iterable) -> list:
        """Those that differ from step to step."""
        return [v for v in variables(atoms) if self.varies(v)]

    def sources(self, v) -> list:
        """The varying operands of the equation that makes a value."""
        eqn = self.made.get(v)
        return [] if eqn is None else self.varying(eqn.invars)

    def _in_order(self, some: Iterable) -> tuple:
        """Some equations, or some values that vary."""
        return tuple(sorted(some, key=self._places.__getitem__))

    def needed(self, targets: Iterable, given: Collection) -> tuple:
        """The varying equations that make the targets of the given values, in order."""
        found, todo = set(), self.varying(targets)
        while todo:
            v = todo.pop()
            eqn = self.made.get(v)
            if eqn is not None and eqn not in found and v not in given:
                found.add(eqn)
                todo += self.varying(eqn.invars)
        return self._in_order(found)


class Partition(Dataflow):
    """The parts of a step.

    ``rows`` are values that are wanted for each step, ``loose`` ones are wanted summed over the
    steps of a block, and ``opened`` ones follow from :attr:`rows`, which then has more.
    """

    def __init__(
        self,
        jaxpr,
        numbers: tuple[int, int],
        rows: Iterable,
        loose: Iterable,
        opened: Iterable,
    ):
        super().__init__(jaxpr, numbers)
        wanted, loose = set(self.varying(rows)), self.varying(loose)
        opened = set(self.varying(opened))
        if jaxpr.effects:  # they happen step by step
            self.rows = self._in_order(wanted | opened)
            self.mapped = self._in_order({*self.rows, *loose})
            self.loops: tuple[LoopPart, ...] = (self._whole(),)
        else:
            sets = coupled([self.reads(v) - {len(self.old)} for v in self.new])
            self._sets = [members for members in sets if not self.kept[min(members)]]
            self._level_of_sets()
            free = {*wanted, *loose, *self.inputs}
            self.rows = self._in_order(wanted | self.cut(opened, free=free))
            self.mapped = self._in_order({*self.rows, *loose})
            self.loops = self._loops()

    @cached_property
    def block_bytes(self) -> int:
        """Bytes that a step of a block computes outside of the loops, and stores in them."""
        there, total = set(self.inputs), 0
        for loop in (*self.loops, None):
            targets = self.mapped if loop is None else loop.outer
            made = {v for eqn in self.needed(targets, there) for v in eqn.outvars}
            if loop is not None:
                made |= set(loop.stacked)
            total, there = total + sum(map(nbytes, made - there)), there | made
        return total

    def _whole(self) -> LoopPart:
        """One loop of all that varies."""
        carries = tuple(k for k, same in enumerate(self.kept) if not same)
        equations = tuple(
            e for e in self.jaxpr.eqns if e.effects or any(map(self.varies, e.outvars))
        )
        stacked = tuple(v for v in self.mapped if v not in self.inputs)
        return LoopPart(carries, equations, tuple(self.inputs), stacked)

    # carries that need each other, and their order ------------------------------------------------

    def _level_of_sets(self) -> None:
        """The level of every value: even inside of a loop, odd between two loops.

        A value that a costly equation outside of the cycles makes of a loop's values is after
        that loop, and carries that need it move in a later one.
        """
        inside: dict[Any, int] = {}  # value -> set of carries on whose way it stands
        for s, members in enumerate(self._sets):
            # backwards from the next values, along equations that depend on these carries
            wanted = set(variables(self.new[k] for k in members))
            for eqn in reversed(self.jaxpr.eqns):
                if not wanted.isdisjoint(eqn.outvars) and self.reads(eqn.outvars[0]) & members:
                    inside.update(dict.fromkeys(eqn.outvars, s))
                    wanted.update(variables(eqn.invars))
        # levels rise until none changes: a loop is behind all that it reads
        levels, changed = [0] * len(self._sets), True
        while changed:
            of = dict.fromkeys((*self.jaxpr.invars, *self.jaxpr.constvars), -1)
            of |= {self.old[k]: n for n, s in zip(levels, self._sets, strict=True) for k in s}
            reached = list(levels)
            for eqn in self.jaxpr.eqns:
                level = max((of[v] for v in variables(eqn.invars)), default=-1)
                own, does = inside.get(eqn.outvars[0]), PROPERTIES[eqn.primitive.name]
                if own is not None:
                    level = reached[own] = max(level + level % 2, reached[own])
                elif does.mixes or not does.axes:  # worth to run for all steps at once
                    level += 1 - level % 2
                of.update(dict.fromkeys(eqn.outvars, level))
            for s, members in enumerate(self._sets):  # a carry without a cycle waits for its value
                ins = [of[v] for v in variables(self.new[k] for k in members)]
                reached[s] = max(reached[s], *(level + level % 2 for level in ins), 0)
            changed, levels = reached != levels, reached
        self._level, self._levels = of, levels

    # minimal cuts ---------------------------------------------------------------------------------

    def cut(
        self,
        targets: Collection,
        free: Collection = (),
        given: Collection = (),
        among: Callable | None = None,
    ) -> set:
        """Values of the fewest bytes from which cheap equations make the targets: the minimal cut
        that is nearest to these, of a flow through values whose capacities are their bytes.

        ``free`` values cost nothing, ``given`` ones are there already; ``among(v)`` says whether a
        value may be stored: where it may not, all that it is made of is asked.
        """
        among = among or self.varies
        flow, nodes, todo = Flow(), set(), list(targets)
        while todo:
            v = todo.pop()
            if v in nodes or v in given:
                continue
            nodes.add(v)
            may = among(v)
            # a node is two, with a pipe between them whose capacity is what storing it costs
            room = 0 if v in free else max(nbytes(v), 1)
            flow.edge((v, 0), (v, 1), room if may else math.inf)
            eqn = self.made.get(v)
            # what can not be made again cheaply is a source of the flow
            if may and (eqn is None or not is_cheap(eqn)):
                flow.edge(Flow.START, (v, 0), math.inf)
                continue
            for x in self.sources(v):
                flow.edge((x, 1), (v, 0), math.inf)
                todo.append(x)
        reaches = flow.reaching([(v, 1) for v in targets])
        return {v for v in nodes if (v, 1) in reaches and (v, 0) not in reaches}

    # the loops ------------------------------------------------------------------------------------

    def _loops(self) -> tuple[LoopPart, ...]:
        # from the last loop to the first: what a later part wants, an earlier one stores
        wanted, given, loops = set(self.mapped), set(), []
        for level in sorted(set(self._levels), reverse=True):
            sets = [s for s, n in zip(self._sets, self._levels, strict=True) if n == level]
            carries = tuple(sorted(k for members in sets for k in members))
            # its equations, backwards from the next values of its carries
            reads, inside = set(variables(self.new[k] for k in carries)), []
            for eqn in reversed(self.jaxpr.eqns):
                if self._level[eqn.outvars[0]] == level and not reads.isdisjoint(eqn.outvars):
                    inside.append(eqn)
                    reads.update(variables(eqn.invars))
            own = {self.old[k] for k in carries} | {v for e in inside for v in e.outvars}
            own = {v for v in own if self._level.get(v) == level}
            # values from outside; what is cheap is computed again inside of the loop
            edge = {v for v in reads if self.varies(v) and self._level[v] < level}
            outer = self.cut(edge)
            inside += self.needed(edge, outer)
            stacked = self.cut(wanted, given=given, among=own.__contains__) & own
            parts = [self._in_order(each) for each in (inside, outer, stacked)]
            loops.append(LoopPart(carries, *parts))
            wanted, given = wanted | outer, given | stacked
        return tuple(reversed(loops))


class Flow:
    """A network of pipes from :attr:`START` to ends."""

    START = None

    def __init__(self):
        self.room: dict[Any, dict[Any, float]] = {}

    def edge(self, a, b, room: float) -> None:
        forward, back = self.room.setdefault(a, {}), self.room.setdefault(b, {})
        forward[b] = forward.get(b, 0) + room
        back.setdefault(a, 0)

    def reaching(self, ends: list) -> set:
        """After a maximal flow, the nodes from which more could flow to an end.

        An end to which nothing more can flow stays so: a flow to another one changes pipes between
        nodes that the start reaches.
        """
        found: set = set()
        for end in ends:
            while True:
                # the next node on a shortest way with room to the end, of every node up to the
                # start; nodes that were found with another end do not reach it
                then, todo = {end: end}, deque([end])
                while todo and self.START not in then:
                    b = todo.popleft()
                    for a in self.room.get(b, ()):
                        if a not in then and a not in found and self.room[a][b] > 0:
                            then[a] = b
                            todo.append(a)
                if self.START not in then:
                    break
                # along a shortest path the most that its narrowest pipe lets through
                path, a = [], self.START
                while a != end:
                    path.append((a, then[a]))
                    a = then[a]
                amount = min(self.room[a][b] for a, b in path)
                for a, b in path:
                    self.room[a][b] -= amount
                    self.room[b][a] += amount
            found.update(then)
        return found
