"""When a combination of a table runs: always, in `make test`, or in `make test-nightly`.

A product of tables grows with each of them, and a fault mostly needs two of its values to meet. So
the gate asks for each pair of values of two tables (:func:`pairwise`), or for each value of each
table (:func:`in_turn`), and the night for the whole product.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import pytest

slow, nightly = pytest.mark.slow, pytest.mark.nightly
Quick = Callable[..., bool]


def pairwise(quick: Quick, **tables: Iterable):
    """Parametrise by the product of the tables; every pair of values of two of them is in the gate.

    ``quick(*values)`` says which of those in the gate are not slow.
    """
    return _parametrize(quick, tables, _pairs_first)


def in_turn(quick: Quick, **tables: Iterable):
    """Parametrise by the product of the tables; the gate has each row of the longest one once, and
    the values of the others by turns.
    """
    return _parametrize(quick, tables, _turns)


def none(*values) -> bool:
    """All are slow."""
    return False


def first(*values_of_first) -> Quick:
    """Those with one of these in the first place are quick."""
    return lambda value, *others: value in values_of_first


def _parametrize(quick, tables, choose):
    values = [list(own) for own in tables.values()]
    sizes = [len(own) for own in values]
    gate, rows = choose(sizes), []
    for at in itertools.product(*map(range, sizes)):
        row = [own[k] for own, k in zip(values, at, strict=True)]
        marks = nightly if at not in gate else [] if quick(*row) else slow
        rows.append(pytest.param(*row, id='-'.join(map(_name, row)), marks=marks))
    return pytest.mark.parametrize(','.join(tables), rows)


def _name(value) -> str:
    return str(getattr(value, 'name', getattr(value, '__name__', value)))


def _turns(sizes: Sequence[int]) -> set[tuple[int, ...]]:
    """Each index of the longest table with the others counted up as digits are, or all at once
    where the longest one is too short for that.
    """
    longest, found = sizes.index(max(sizes)), set()
    digits = math.prod(sizes) <= max(sizes) ** 2
    for i in range(max(sizes)):
        at, rest = [], i
        for place, size in enumerate(sizes):
            at.append(i if place == longest else rest % size)
            rest = rest // size if digits and place != longest else rest
        found.add(tuple(at))
    return found


def _pairs_first(sizes: Sequence[int]) -> set[tuple[int, ...]]:
    """Combinations that hold every pair, chosen one by one, each with the most new pairs."""

    def pairs(at):
        return {(i, j, at[i], at[j]) for i, j in itertools.combinations(range(len(at)), 2)}

    rest = {at: pairs(at) for at in itertools.product(*map(range, sizes))}
    missing, found = set().union(*rest.values()), set()
    while missing:
        best = max(rest, key=lambda at: len(rest[at] & missing))
        missing -= rest[best]
        found.add(best)
    return found
