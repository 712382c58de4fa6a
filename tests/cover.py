"""Which tests the gate needs: small faults are put into the package one by one, and tests are
asked which of them see it. By hand, for hours (`make cover`):

    python -m tests.cover lines                      the lines of the package that each test runs
    python -m tests.cover ask --seed 1 --number 300  puts faults in; goes on where it was cut off
    python -m tests.cover choose                     writes tests/cover/night.json
    python -m tests.cover check --seed 2             faults drawn afresh: does the gate see them?

Every quick test is in the gate. Of the slow ones those are that see a fault, or run a line, that
quick ones do not: chosen one by one, each with the most new ones for its CPU seconds. The table
`tests/cover/faults.json` names for each fault tests that were seen to fail; where none did, a
person has read it and says why it is no fault (`equal`), or has to. A process that a test starts
has no fault in it: what only such a test sees is written into the table by hand.
"""

import argparse
import heapq
import itertools
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import faults
from tests.tiers import NIGHT, function, of_the_night, row_of

ROOT = Path(__file__).resolve().parents[1]
BUILD, KEPT = ROOT / 'build' / 'cover', ROOT / 'tests' / 'cover'
LINES, COSTS, SHOWN = (BUILD / f'{name}.json' for name in ('lines', 'costs', 'shown'))
TABLE = KEPT / 'faults.json'
PACKAGES = 'braintrace', 'braintrace_receipts'
# What tests import anyway and a fault does not touch: processes for single faults start with it.
PRELOADED = 'tests.xla brainstate saiunit flax.nnx haiku equinox optax pytest'.split()
PROCESSES = 2
ENOUGH = 1, 3  # functions that failed, of the gate and of the others, after which none is asked
FILES = 8  # at most so many files of tests are imported for a fault
SECONDS = 30.0  # of CPU, that the tests of the gate may cost for a fault, and then the others
PATIENCE = 20  # times the CPU seconds of a child, of wall time: a fault may make it wait
EACH_LINE = 2  # functions of tests that run it, of those that there are


def file_of(test: str) -> str:
    return test.partition('::')[0]


def read(file: Path):
    return json.loads(file.read_text(encoding='utf-8')) if file.exists() else {}


def write(file: Path, value: dict) -> None:
    """A line for each key, all at once: a run that is cut off leaves the file as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ',\n'.join(f'{json.dumps(key)}: {json.dumps(value[key])}' for key in value)
    file.with_suffix('.part').write_text(f'{{\n{lines}\n}}\n', encoding='utf-8')
    file.with_suffix('.part').replace(file)


# -- lines --------------------------------------------------------------------------------------


def lines() -> None:
    """``LINES``: the tests that run each line, by their places in its list of names, and which of
    them are quick.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    config = BUILD / 'coveragerc'
    sources = ''.join(f'\n    {name}' for name in PACKAGES)
    config.write_text(f'[run]\nparallel = true\ndata_file = {BUILD}/coverage\nsource ={sources}\n')
    run = [sys.executable, '-m', 'pytest', '-q']
    only = [*run, '--collect-only', '-m', 'not slow and not nightly']
    quick = subprocess.run(only, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tests = ['-n', str(PROCESSES), '--dist', 'worksteal', '-m', 'not nightly', '--all-slow']
    told = [f'--costs={COSTS}', f'--etp-results={SHOWN}']
    cover = ['--cov', f'--cov-config={config}', '--cov-context=test', '--cov-report=']
    subprocess.run([*run, *tests, *told, *cover], cwd=ROOT, check=True)
    write(LINES, lines_of(BUILD / 'coverage') | {'quick': quick.splitlines()})


def lines_of(file: Path) -> dict:
    """What `coverage` found, with each name once."""
    from coverage import CoverageData

    data = CoverageData(str(file))
    data.read()
    number, found = {}, {}
    for path in sorted(data.measured_files()):
        of_file = found[str(Path(path).relative_to(ROOT))] = {}
        for line, contexts in data.contexts_by_lineno(path).items():
            tests = {context.partition('|')[0] for context in contexts} - {''}
            of_file[line] = sorted(number.setdefault(test, len(number)) for test in tests)
    return {'tests': list(number), 'lines': found}


class Suite:
    """The tests, what each costs and runs, and which are quick."""

    def __init__(self):
        data = read(LINES)
        self.names = data['tests']
        self.lines = {
            file: {int(line): tests for line, tests in own.items()}
            for file, own in data['lines'].items()
        }
        self.costs, quick = read(COSTS), set(data['quick'])
        self.quick = {test for test in self.names if test in quick}
        self.slow = set(self.names) - self.quick

    def near(self, fault: faults.Fault) -> list[str]:
        """The tests that run the line of a fault, and behind them others that run its file, each
        part with the cheapest row of each function in front: what a test computes may be kept for
        the next, which then runs fewer lines.
        """
        lines = self.lines[fault.file]
        beside = set().union(*lines.values())
        at = set(lines.get(fault.line, ()))
        return [t for part in (at, beside - at) for t in self.by_cost(self.names[k] for k in part)]

    def by_cost(self, tests) -> list[str]:
        place, later = defaultdict(int), {}
        for test in sorted(tests, key=lambda t: (self.costs.get(t, 0.0), t)):
            later[test] = place[function(test)]
            place[function(test)] += 1
        return sorted(later, key=later.get)


# -- ask ----------------------------------------------------------------------------------------


class Asked:
    """A plugin of pytest: runs these tests until enough of them failed or so many CPU seconds are
    gone, and writes down who was asked and who failed.
    """

    def __init__(self, tests: list[str], seconds: float, enough: int, out: Path):
        # one row of each function in front; tests of a file share its fixtures
        file, turn = itertools.count(), Counter()
        files = {name: next(file) for name in dict.fromkeys(map(file_of, tests))}
        self.order = {}
        for k, test in enumerate(tests):
            self.order[test] = turn[function(test)], files[file_of(test)], k
            turn[function(test)] += 1
        self.seconds, self.enough, self.out = seconds, enough, out
        self.failed: set[str] = set()

    def tell(self, what: str, test: str) -> None:
        with self.out.open('a', encoding='utf-8') as file:
            print(what, test, file=file)

    def fails(self, test: str) -> None:
        self.failed.add(function(test))
        self.tell('fails', test)

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            for test in [t for t in self.order if file_of(t) == file_of(report.nodeid)]:
                self.fails(test)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session, items) -> None:
        self.session = session
        mine = [item for item in items if item.nodeid in self.order]
        items[:] = sorted(mine, key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid) -> None:
        self.tell('asks', nodeid)

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.fails(report.nodeid)

    def pytest_runtest_logfinish(self) -> None:
        if len(self.failed) >= self.enough or time.process_time() > self.seconds:
            self.session.shouldstop = 'enough'


def run_with(fault: faults.Fault | None, tests, seconds: float, enough: int, out: Path) -> None:
    """In a process of its own: the package with the fault, and the tests."""
    os.chdir(ROOT)
    limit = int(seconds + SECONDS)  # a fault may make a loop endless
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    if fault:
        faults.put_in(fault)
    # pytest would import a module whose doctests it runs by a loader of its own, without the fault
    options = ['-q', '-p', 'no:cacheprovider', '--continue-on-collection-errors', '--assert=plain']
    # tests of `receipts/` alone would else be named as from there
    options += ['-c', str(ROOT / 'pyproject.toml')]
    files = dict.fromkeys(map(file_of, tests))
    with Path(os.devnull).open('w') as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        done = pytest.main([*options, *files], plugins=[Asked(tests, seconds, enough, out)])
    broken = (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)
    os._exit(3 if done in broken else 0)


def ask(fault: faults.Fault | None, tests: list[str], enough: int, seconds=2 * SECONDS):
    """``(number of tests asked, tests that failed)``; a test in which the time ran out failed, and
    all do where the package cannot even be imported.
    """
    out = BUILD / f'asked-{threading.get_ident()}'
    out.unlink(missing_ok=True)
    child = CONTEXT.Process(target=run_with, args=(fault, tests, seconds, enough, out))
    child.start()
    child.join(PATIENCE * seconds)
    child.kill()
    child.join()
    told = out.read_text(encoding='utf-8').splitlines() if out.exists() else []
    out.unlink(missing_ok=True)
    asked = [line.removeprefix('asks ') for line in told if line.startswith('asks ')]
    failed = [line.removeprefix('fails ') for line in told if line.startswith('fails ')]
    if child.exitcode < 0:
        failed += asked[-1:]
    elif child.exitcode and not failed:
        failed = tests[:enough]
    return len(asked), list(dict.fromkeys(failed))


def within(suite: Suite, tests: list[str]) -> list[str]:
    """Those of the ``FILES`` files with the most functions among them, and of these the first that
    together cost no more.
    """
    functions = Counter(file_of(name) for name in {function(test) for test in tests})
    files = dict(functions.most_common(FILES))
    mine = [test for test in tests if file_of(test) in files]
    spent = itertools.accumulate(suite.costs.get(test, 0.0) for test in mine)
    return [test for test, sum_ in zip(mine, spent) if sum_ <= SECONDS]


def seen_by(suite: Suite, fault: faults.Fault, gate: set[str]) -> dict:
    """Tests of the gate are asked first, and others where none of these sees it."""
    near, found = suite.near(fault), {'asked': 0, 'seen': []}
    for mine, enough in zip((gate, set(suite.names) - gate), ENOUGH):
        if tests := within(suite, [test for test in near if test in mine]):
            asked, found['seen'] = ask(fault, tests, enough)
            found['asked'] += asked
        if found['seen']:
            break
    return found


def ask_all(suite: Suite, gate: set[str], seed: int, number: int, file: Path) -> None:
    there = {fault.name for name in suite.lines for fault in faults.faults_of(name)}
    table = {name: found for name, found in read(file).items() if name in there}
    places = {name: set(own) for name, own in suite.lines.items()}

    def one(fault):
        known = table.get(fault.name)
        if known is None or not (known['seen'] or known.get('equal')):
            table[fault.name] = seen_by(suite, fault, gate)
            write(file, table)
        print(len(table[fault.name]['seen']), fault.name, flush=True)

    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(one, faults.drawn(seed, number, places)))
    fail_anyway = set(
        ask(None, sorted({t for row in table.values() for t in row['seen']}), 99, 1e4)[1]
    )
    for found in table.values():
        found['seen'] = [test for test in found['seen'] if test not in fail_anyway]
    write(file, table)
    unseen = [name for name, found in table.items() if not found['seen']]
    print(
        f'{len(table) - len(unseen)} of {len(table)} faults are seen; not seen:', *unseen, sep='\n'
    )


# -- choose -------------------------------------------------------------------------------------


def choose() -> None:
    """``NIGHT``: the slow rows of each function that leave the gate."""
    suite, does = Suite(), defaultdict(set)
    for file, own in suite.lines.items():
        for line, tests in own.items():
            for k in tests:
                does[suite.names[k]].add((file, line))
    for fault, found in read(TABLE).items():
        for test in found['seen']:
            does[test].add(fault)
    for shown in read(SHOWN)['tests']:  # rules and laws of ops, which the gate asks for
        if shown['status'] == 'pass':
            does[shown['test']].add((shown['op'], shown['rule'], shown['law']))
    functions = defaultdict(set)
    for test in suite.names:
        for each in does[test]:
            functions[each].add(function(test))
    missing = {each: min(len(names), EACH_LINE) for each, names in functions.items()}
    has = defaultdict(set)

    def new(test):
        return [each for each in does[test] if missing[each] and function(test) not in has[each]]

    def worth(test):
        return len(new(test)) / max(suite.costs.get(test, 0.0), 0.01)

    def take(test):
        for each in new(test):
            has[each].add(function(test))
            missing[each] -= 1

    for test in suite.quick:
        take(test)
    # what a test is worth only falls while others are taken
    heap, chosen = [(-worth(test), test) for test in suite.slow], []
    heapq.heapify(heap)
    while heap and heap[0][0]:
        _, test = heap[0]
        now = -worth(test)
        if now > heap[0][0]:
            heapq.heapreplace(heap, (now, test))
        else:
            heapq.heappop(heap)
            take(test)
            chosen.append(test)
    rest = sorted(test for _, test in heap)
    night = defaultdict(list)
    for test in rest:
        night[function(test)].append(row_of(test))
    write(NIGHT, night)
    for name, tests in (('quick', suite.quick), ('slow', chosen), ('for the night', rest)):
        spent = sum(suite.costs.get(test, 0.0) for test in tests)
        print(f'{name}: {len(tests)} tests, {spent:.0f} CPU s')


def main() -> None:
    parser = argparse.ArgumentParser(description='Which tests the gate needs.')
    parser.add_argument('what', choices=('lines', 'ask', 'choose', 'check'))
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--number', type=int, default=300)
    options = parser.parse_args()
    match options.what:
        case 'lines':
            lines()
        case 'ask':
            suite = Suite()
            ask_all(suite, suite.quick, options.seed, options.number, TABLE)
        case 'choose':
            choose()
        case 'check':
            suite = Suite()
            night = of_the_night()
            left = {t for t in suite.slow if row_of(t) in night.get(function(t), ())}
            file = BUILD / f'faults-{options.seed}.json'
            ask_all(suite, set(suite.names) - left, options.seed, options.number, file)


if __name__ == '__main__':
    CONTEXT = multiprocessing.get_context('forkserver')
    CONTEXT.set_forkserver_preload(PRELOADED)
    os.environ['JAX_PLATFORMS'] = 'cpu'
    main()
