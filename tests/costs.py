"""A pytest plugin: what the tests of a run cost, in CPU seconds, which a busy machine changes less
than minutes. `python -m tests.costs build/costs.json` prints the marks that follow from what a run
with `--costs` measured.
"""

import itertools
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.tiers import function

FILES = 10  # that the summary names
QUICK = 0.8  # CPU seconds of all quick rows of one test together


def cpu_seconds() -> float:
    """Of this process, and of the processes that it has started and waited for."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--costs', metavar='FILE', help='write the CPU seconds of every test')
    parser.addoption(
        '--all-slow', action='store_true', help='also the slow tests that left the gate'
    )


def pytest_configure(config: pytest.Config) -> None:
    """Each process takes the time of its own tests; the one that hears of all of them adds up."""
    config.pluginmanager.register(Clock(), 'costs-clock')
    if not hasattr(config, 'workerinput'):
        config.pluginmanager.register(Costs(config.getoption('--costs')), 'costs')


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


def marks(tests: dict[str, float]) -> list[str]:
    """The first rows of a test that together cost ``QUICK`` stay quick."""
    lines = []
    for name, rows in itertools.groupby(sorted(tests, key=function), key=function):
        costs = list(itertools.accumulate(tests[row] for row in rows))
        number = sum(cost <= QUICK for cost in costs)
        mark = f'tier(quick={number})' if number else 'slow'
        lines += [f'{name}: @pytest.mark.{mark}'] if number < len(costs) else []
    return lines


if __name__ == '__main__':
    print(*marks(json.loads(Path(sys.argv[1]).read_text())), sep='\n')
