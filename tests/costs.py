"""A pytest plugin: what the tests of a run cost, in CPU seconds, which a busy machine changes less
than minutes; and the tests that are slow since they were measured.

`slow.txt` has a line for each of these: how many of its first rows are quick, and its name. `2/3`
stands for two quick rows, and of those behind them a third in the gate, the others at night; by
`tests.tiers` the gate has at least one row of every value.
`python -m tests.costs build/costs.json` prints such lines for what a run with `--costs` measured.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests import tiers

FILES = 10  # that the summary names
QUICK = 0.8  # CPU seconds of all quick rows of one test together
SLOW = Path(__file__).with_name('slow.txt')


def cpu_seconds() -> float:
    """Of this process, and of the processes that it has started and waited for."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--costs', metavar='FILE', help='write the CPU seconds of every test')


def pytest_configure(config: pytest.Config) -> None:
    """Each process takes the time of its own tests; the one that hears of all of them adds up."""
    config.pluginmanager.register(Clock(), 'costs-clock')
    if not hasattr(config, 'workerinput'):
        config.pluginmanager.register(Costs(config.getoption('--costs')), 'costs')


def test_of(name: str) -> str:
    """The name of a test without its row."""
    return name.split('[')[0]


def mark_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `slow.txt` names. A whole run has every value in the gate, and refuses a name that
    is no test.
    """
    lines = dict(reversed(line.split()) for line in SLOW.read_text().splitlines())
    tests, late = defaultdict(list), []
    for item in items:
        tests[test_of(item.nodeid)].append(item)
    for name in lines.keys() & tests.keys():
        first, _, turn = lines[name].partition('/')
        rows = [row for row in tests[name] if not row.get_closest_marker('nightly')]
        unmarked = [row for row in rows if not row.get_closest_marker('slow')]
        for row in unmarked[int(first) :]:
            row.add_marker('slow')
        quick = unmarked[: int(first)]
        others = [row for row in rows if row not in quick]
        late += tiers.at_night(quick, others, int(turn or 1))
    whole = config.args == config.getini('testpaths')
    for row in tiers.of_no_use(items, late) if whole else late:
        row.add_marker('nightly')
    if whole:
        refuse_names_of_no_test(config, lines, tests)
        if lost := tiers.lost_values(tests):
            raise pytest.UsageError(
                'values of these rows run at night alone; mark a row of each value slow, not '
                f'nightly, or say why not in AT_NIGHT of tests/tiers.py: {", ".join(lost)}'
            )


def refuse_names_of_no_test(config: pytest.Config, lines: dict, tests: dict) -> None:
    """A line names a test, or a file that is left out of this run."""
    files = {name.split('::')[0] for name in tests}
    gone = [
        name
        for name in lines
        if name not in tests
        and ((file := name.split('::')[0]) in files or not (config.rootpath / file).exists())
    ]
    if gone:
        raise pytest.UsageError(f'{SLOW} names what is no test; delete: {", ".join(gone)}')


class Clock:
    """CPU seconds of each test, carried by its reports, and those of the whole process."""

    def __init__(self):
        self.last = cpu_seconds()

    def lap(self) -> float:
        before, self.last = self.last, cpu_seconds()
        return self.last - before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        """Called after setup, call and teardown: what was spent since the last of them."""
        report = yield
        report.cpu_seconds = self.lap()
        return report

    def pytest_runtest_logstart(self) -> None:
        """What lies between two tests is nobody's."""
        self.lap()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, 'workeroutput'):
            session.config.workeroutput['cpu_seconds'] = cpu_seconds()


class Costs:
    """Adds up the reports of all processes, and prints the dearest files."""

    def __init__(self, path: str | None):
        self.path, self.tests, self.processes = path, Counter(), 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests[report.nodeid] += getattr(report, 'cpu_seconds', 0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        """A process of pytest-xdist has ended."""
        self.processes += getattr(node, 'workeroutput', {}).get('cpu_seconds', 0.0)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self.path:
            Path(self.path).write_text(json.dumps(self.tests, indent=1))
        for line in summary(self.tests, self.processes + time.process_time()):
            terminalreporter.write_line(line)


def summary(tests: dict[str, float], whole: float) -> list[str]:
    """The sum, and the dearest files with the number and the CPU seconds of their tests."""
    if not tests:
        return []
    seconds, number = Counter(), Counter(name.split('::')[0] for name in tests)
    for name, cost in tests.items():
        seconds[name.split('::')[0]] += cost
    spent = sum(tests.values())
    beside = max(whole - spent, 0.0)
    return [
        f'CPU seconds: {spent:.0f} in {len(tests)} tests, {beside:.0f} beside them; '
        'the dearest files:',
        *(
            f'{cost:8.1f} s {number[file]:5} tests  {file}'
            for file, cost in seconds.most_common(FILES)
        ),
    ]


def slow_lines(tests: dict[str, float]) -> list[str]:
    """Lines for `slow.txt`: the first rows of a test that together cost ``QUICK`` stay quick."""
    lines = []
    for name, rows in itertools.groupby(sorted(tests, key=test_of), key=test_of):
        costs = list(itertools.accumulate(tests[row] for row in rows))
        number = sum(cost <= QUICK for cost in costs)
        lines += [f'{number} {name}'] if number < len(costs) else []
    return lines


if __name__ == '__main__':
    print(*slow_lines(json.loads(Path(sys.argv[1]).read_text())), sep='\n')
