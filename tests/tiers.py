"""When a combination of a table runs: always, in `make test`, or in `make test-nightly`.

A product of tables grows with each of them, and a fault mostly needs two of its values to meet. So
the gate asks for each pair of values of two tables (:func:`pairwise`), or for each value of each
table (:func:`in_turn`), and the night for the whole product.

A test is marked `slow` or `nightly`, or takes turns: of the rows of `tier(quick=2, one_in=4)` the
first two are quick, and of the others one in four is in the gate. A hash of their names chooses
those (:func:`at_night`), so that no period of the table can meet that of the choice. Every value
of a short table is among them. The values of a long one, which many tests run through, are in the
gate at least once (:func:`of_no_use`).
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from zlib import crc32

import pytest

slow, nightly = pytest.mark.slow, pytest.mark.nightly
Quick = Callable[..., bool]
SHORT = 3  # values of a table that the gate runs with every test of that table

# Tests, or files of tests, with values that the night alone has, and why.
AT_NIGHT = {
    'tests/adapters/test_nir.py': 'more random graphs: those of the gate have every node',
    'tests/adapters/test_stock_cells.py': 'every cell of every framework',
    'tests/compiler/test_unshard.py': 'four devices',
    'tests/devices/test_bytes.py': 'more cells, calls and layouts',
    'tests/devices/test_export.py': 'every cell for every platform',
    'tests/devices/test_unshared.py': 'every model',
    'tests/docs/test_pages.py': 'pages that show what other tests hold',
    'tests/etrace_op/test_mapped_rules.py': 'one of two mappings of a case is in the gate',
    'tests/gradients/test_fan_out.py': 'more random draws',
    'tests/gradients/test_random_programs.py': 'more random draws',
    'tests/gradients/test_random_rules.py::'
    'test_the_mean_of_4096_seeds_has_no_bias_and_its_error_falls': 'statistics of exact numbers',
    'tests/kit/test_random_shapes.py': 'more random draws',
    'tests/kit/test_registry.py': 'each starts a pytest of its own',
    'tests/nn/test_brainpy_state.py': 'more classes of another package',
    'receipts/tests/test_fuzz.py': 'more random changes',
    'receipts/tests/test_mutation.py': 'every number of every file',
    'tests/stream/test_not_finite.py': 'more rules and windows',
    'tests/test_examples.py': 'all but one',
    'tests/verify/test_activity.py': 'more ways to write a neuron',
}


# Examples in docstrings, which cannot be marked, by the ends of their names.
SLOW_DOCTESTS = (
    '.adapters',
    '.etrace_grad',
    '.etrace_train',
    '_check.assert_conformant',
    '_check.check',
    '_matrix_memory.MambaCell',
    '_online.online',
    '_report.ConformanceReport',
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


def assign(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the rows of each test by its `tier`. A whole run has every value in the gate."""
    tests, late = defaultdict(list), []
    for item in items:
        if not in_gate(item) or item.nodeid.endswith(SLOW_DOCTESTS):
            item.add_marker('slow')
        tests[test_of(item.nodeid)].append(item)
    for all_rows in tests.values():
        if tier := all_rows[0].get_closest_marker('tier'):
            rows = [row for row in all_rows if in_gate(row)]
            unmarked = [row for row in rows if not row.get_closest_marker('slow')]
            quick = unmarked[: tier.kwargs.get('quick')]
            others = [row for row in rows if row not in quick]
            for row in others:
                row.add_marker('slow')
            late += at_night(quick, others, tier.kwargs.get('one_in', 1))
    whole = config.args == config.getini('testpaths')
    for row in of_no_use(items, late) if whole else late:
        row.add_marker('nightly')
    if whole and (lost := lost_values(tests)):
        raise pytest.UsageError(
            'values of these rows run at night alone; mark a row of each value slow, not '
            f'nightly, or say why not in AT_NIGHT of tests/tiers.py: {", ".join(lost)}'
        )


def test_of(name: str) -> str:
    """The name of a test without its row."""
    return name.split('[')[0]


def at_night(quick: list[pytest.Item], others: list[pytest.Item], turn: int) -> list[pytest.Item]:
    """Those of the other rows that leave the gate: one of ``turn`` stays, each with the most new
    pairs of values, and as many more as it takes to have each value of a short table.
    """
    short = of_short_tables(quick + others)
    asked = {row: short[row] for row in short if not may_wait(row)}
    missing = set().union(*asked.values()).difference(*(short[row] for row in quick))
    pairs = {row: set(map(frozenset, itertools.combinations(values(row), 2))) for row in short}
    seen = set().union(*(pairs[row] for row in quick))
    rest, number = sorted(others, key=by_name), math.ceil(len(others) / turn)
    while rest and (missing or number > 0):
        best = max(rest, key=lambda row: (len(short[row] & missing), len(pairs[row] - seen)))
        rest.remove(best)
        missing -= short[best]
        seen |= pairs[best]
        number -= 1
    return rest


def of_no_use(items: list[pytest.Item], late: list[pytest.Item]) -> list[pytest.Item]:
    """``late`` without a row for each value that no other item of the gate has."""
    later = set(late)
    gate = set().union(*(values(item) for item in items if item not in later and in_gate(item)))
    rest = []
    for item in sorted(late, key=by_name):
        if values(item) <= gate or may_wait(item):
            rest.append(item)
        else:
            gate |= values(item)
    return rest


def lost_values(tests: Mapping[str, list[pytest.Item]]) -> list[str]:
    """Rows with a value that the gate lacks, one of a short table with this test, others with any,
    and its argument.
    """
    gate = set().union(*(values(row) for rows in tests.values() for row in rows if in_gate(row)))
    lost = []
    for name in sorted(tests):
        if not may_wait(tests[name][0]):
            short = of_short_tables(tests[name])
            there = set().union(*(short[row] for row in short if in_gate(row)))
            for row in short:
                found = values(row) - gate | short[row] - there
                lost += [f'{row.nodeid} ({", ".join(v[0] for v in found)})'] if found else []
    return lost


def in_gate(item: pytest.Item) -> bool:
    return not item.get_closest_marker('nightly')


def may_wait(item: pytest.Item) -> bool:
    name = item.nodeid.split('[')[0]
    return bool(AT_NIGHT.keys() & {name, name.split('::')[0]})


def by_name(item: pytest.Item) -> int:
    return crc32(item.nodeid.encode())


def of_short_tables(rows: list[pytest.Item]) -> dict[pytest.Item, set[tuple]]:
    """Each row's values of those arguments that take few."""
    tables = Counter(argument for argument, *_ in set().union(*map(values, rows)))
    return {row: {v for v in values(row) if tables[v[0]] <= SHORT} for row in rows}


def values(item: pytest.Item) -> set[tuple]:
    """What the item is parametrised by: each argument, with the type of its value, and the value or
    the text of one that cannot be hashed.
    """
    params = item.callspec.params if hasattr(item, 'callspec') else {}
    return {(argument, type(value), _hashable(value)) for argument, value in params.items()}


def _hashable(value):
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value
