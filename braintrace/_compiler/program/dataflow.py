"""Dataflow over a program: facts are bit sets on values, followed round loops until none is new."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np

from ..._jax import is_key
from .program import Program

Groups = int  # a bit set of group numbers


def bits(numbers: Iterable[int]) -> int:
    total = 0
    for n in numbers:
        total |= 1 << n
    return total


def members(found: int) -> Iterator[int]:
    """The numbers in a set, ascending."""
    while found:
        low = found & -found
        yield low.bit_length() - 1
        found ^= low


def union(facts: list[int], values: Iterable[int]) -> int:
    total = 0
    for v in values:
        total |= facts[v]
    return total


def gradients(program: Program) -> Callable[[int, int], int]:
    """For ``keep``: facts go where a gradient goes."""
    blocks = program.blocks
    return lambda i, found: 0 if i in blocks else found


def forward(
    program: Program,
    start: Mapping[int, int],
    keep: Callable[[int, int], int] = lambda i, found: found,
    silent: Collection[int] = (),
) -> list[int]:
    """The facts that arrive at each value.

    Equation ``i`` passes on ``keep(i, facts)``; ``silent`` values pass nothing.
    """
    return _follow(program, start, keep, silent=silent)


def backward(
    program: Program,
    start: Mapping[int, int],
    keep: Callable[[int, int], int] = lambda i, found: found,
    skip: Callable[[int, int], bool] = lambda i, k: False,
) -> list[int]:
    """The facts that each value leads to, but for operands ``skip(i, k)``."""
    return _follow(program, start, keep, ahead=False, skip=skip)


def _follow(
    program: Program,
    start: Mapping[int, int],
    keep: Callable[[int, int], int],
    ahead: bool = True,
    silent: Collection[int] = (),
    skip: Callable[[int, int], bool] = lambda i, k: False,
) -> list[int]:
    """Facts from operands to results, or not ``ahead`` from results to operands."""
    facts = [0] * len(program.avals)
    for v, found in start.items():
        facts[v] |= found
    n, turns = len(program.equations), program.begin_of if ahead else program.end_of
    i = 0 if ahead else n - 1
    while 0 <= i < n:
        eqn = program.equations[i]
        sources, targets = (eqn.ins, eqn.outs) if ahead else (eqn.outs, eqn.ins)
        if eqn.loop is None:
            found = union(facts, (v for v in sources if v not in silent))
            if found and (found := keep(i, found)):
                for k, v in enumerate(targets):
                    if not skip(i, k):
                        facts[v] |= found
        else:
            # the border of a loop passes facts on slot by slot
            for source, target in zip(sources, targets, strict=True):
                if source not in silent:
                    facts[target] |= facts[source]
            # If that is news for the carry of the next iteration, the loop is followed once more.
            # Facts only grow, so that ends.
            news = False
            for first, last in program.feedback(i) if i in turns else ():
                source, target = (last, first) if ahead else (first, last)
                news = news or bool(facts[source] & ~facts[target])
                facts[target] |= facts[source]
            if news:
                i = turns[i]
        i += 1 if ahead else -1
    return facts


def over_steps(
    program: Program, start: Mapping[int, int], carried: Iterable[int], ahead: bool = True
) -> list[int]:
    """The facts that gradients bring to each value or, not ``ahead``, that each value leads to, by
    any number of steps, from one to the next through these parts of the carry.
    """
    pairs = [(program.new_carry[c], program.carry[c])[:: 1 if ahead else -1] for c in carried]
    start, follow = dict(start), forward if ahead else backward
    while True:
        facts = follow(program, start, gradients(program))
        news = [(a, b) for a, b in pairs if facts[a] & ~start.get(b, 0)]
        if not news:
            return facts
        for a, b in news:
            start[b] = start.get(b, 0) | facts[a]


def reach(program: Program, source: int, stop: Collection[int]) -> set[int]:
    """Values that depend on one value without passing the equations in ``stop``."""
    found, todo = {source}, [source]
    while todo:
        v = todo.pop()
        for i in program.consumers.get(v, ()):
            if i not in stop:
                fresh = [o for o in program.results(i, v) if o not in found]
                found.update(fresh)
                todo.extend(fresh)
    return found


def slice_behind(
    program: Program, targets: Iterable[int], passed: Callable[[int], bool] = lambda i: True
) -> list[int]:
    """The equations that some values depend on, as far as ``passed(i)`` holds for all of them."""
    todo = list(targets)
    found: set[int] = set()
    seen = set(todo)
    while todo:
        v = todo.pop()
        i = program.producer.get(v)
        if i is not None and passed(i):
            found.add(i)
            fresh = [u for u in program.operands(i, v) if u not in seen]
            seen.update(fresh)
            todo.extend(fresh)
    return sorted(found)


def key_counts(program: Program) -> frozenset[tuple[str, ...]]:
    """The paths in the cell's carry of integers that are folded into random keys, and read for
    nothing else: the counters of draws.
    """
    makes_key = {
        i
        for i, eqn in enumerate(program.equations)
        if eqn.loop is None and any(is_key(program.avals[v]) for v in eqn.outs)
    }
    counts = [
        c
        for c, v in enumerate(program.carry)
        if not is_key(program.avals[v]) and np.issubdtype(program.avals[v].dtype, np.integer)
    ]
    facts = forward(
        program,
        {program.carry[c]: 1 << c for c in counts},
        lambda i, found: 0 if i in makes_key else found,
    )
    folded = union(facts, (v for i in makes_key for v in program.equations[i].ins))
    elsewhere = union(facts, program.outputs)
    for c, v in enumerate(program.new_carry):
        elsewhere |= facts[v] & ~(1 << c)
    return frozenset(
        program.leaf_keys[program.leaf_of(c)] for c in counts if folded & ~elsewhere & 1 << c
    )


def reached_groups(
    program: Program, group_of: dict[int, int], cuts: Collection[int]
) -> dict[int, Groups]:
    """For each cut equation, the groups whose new states its result reaches by any path.

    ``group_of``: positions in the carry -> numbers of groups.
    """
    start: dict[int, Groups] = {}
    for c, g in group_of.items():
        start[program.new_carry[c]] = start.get(program.new_carry[c], 0) | 1 << g
    ahead = backward(program, start, gradients(program))
    return {i: union(ahead, program.equations[i].outs) for i in cuts}


def old_ancestors(
    program: Program, group_of: dict[int, int], recurrent: dict[int, Groups]
) -> list[Groups]:
    """For each value, the groups whose old states it reads live without passing a new state."""
    new = {program.new_carry[c] for c in group_of if program.new_carry[c] in program.producer}
    start: dict[int, Groups] = {program.carry[c]: 1 << g for c, g in group_of.items()}
    return forward(
        program,
        start,
        lambda i, found: 0 if i in program.blocks else found & ~recurrent.get(i, 0),
        new,
    )
