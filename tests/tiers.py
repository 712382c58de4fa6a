"""When a combination of a table runs: always, in `make test`, or in `make test-nightly`.

A product of tables grows with each of them, and a fault mostly needs two of its values to meet. So
the gate asks for each pair of values of two tables (:func:`pairwise`), or for each value of each
table (:func:`in_turn`), and the night for the whole product.

A test is marked `slow` or `nightly`; of the rows of `tier(quick=2)` the first two are quick, the
others slow. Which slow rows leave the gate follows from what they see (`tests/cover.py`): those of
`tests/cover/night.json` see nothing that others do not see for less.
"""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

slow, nightly = pytest.mark.slow, pytest.mark.nightly
Quick = Callable[..., bool]
NIGHT = Path(__file__).with_name('cover') / 'night.json'

# Examples in docstrings, which cannot be marked, by the ends of their names.
SLOW_DOCTESTS = (
    '.adapters',
    '.etrace_grad',
    '.etrace_train',
    '_audit.audit',
    '_capture.Block',
    '_capture.Record',
    '_capture.Run',
    '_check.assert_conformant',
    '_check.check',
    '_matrix_memory.MambaCell',
    '_online.online',
    '_recorder.Recorder',
    '_report.ConformanceReport',
    '_report.Row',
    '_run.Run',
    '_run.run',
    'compare.compare_rules',
    'diagnosis.Activity',
    'diagnosis.ParameterRow',
    'diagnosis.TraceGrowth',
    'doctor.diagnose',
)


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


def assign(items: list[pytest.Item], night: dict[str, list[str]]) -> None:
    """Mark the rows of each test by its `tier`, and the slow rows that left the gate."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker('nightly') or item.nodeid.endswith(SLOW_DOCTESTS):
            item.add_marker('slow')
        tests[function(item.nodeid)].append(item)
    for name, rows in tests.items():
        if tier := rows[0].get_closest_marker('tier'):
            unmarked = [row for row in rows if not late(row)]
            for row in unmarked[tier.kwargs['quick'] :]:
                row.add_marker('slow')
        left = set(night.get(name, ()))
        for row in rows:
            if late(row) and row_of(row.nodeid) in left:
                row.add_marker('nightly')


def late(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker('slow'))


def function(name: str) -> str:
    """The name of a test without its row."""
    return name.partition('[')[0]


def row_of(name: str) -> str:
    return name.partition('[')[2].removesuffix(']')


def of_the_night() -> dict[str, list[str]]:
    """Test -> those of its slow rows that left the gate."""
    return json.loads(NIGHT.read_text(encoding='utf-8'))
