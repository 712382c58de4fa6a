"""How a subject is measured: in fresh processes, turn by turn, and what is kept of it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import jax

import braintrace

HERE = Path(__file__).parent
RESULTS = HERE / 'results'
CACHE = HERE.parent / 'build' / 'jax_cache'


# files ------------------------------------------------------------------------------------------


def kept(path: Path) -> dict:
    """What a file of results holds; nothing where there is none."""
    return json.loads(path.read_text(encoding='utf-8')) if path.exists() else {}


def keep(path: Path, found: dict) -> None:
    path.write_text(json.dumps(found, indent=1) + '\n', encoding='utf-8')


def versions() -> dict:
    """Those of Python and of packages, and the device."""
    device = f'{jax.devices()[0].device_kind}, {platform.machine()}'
    found = {name: importlib.metadata.version(name) for name in ('jax', 'brainstate', 'optax')}
    found |= {'braintrace': braintrace.__version__}
    return {'python': platform.python_version(), 'device': device} | found


# processes --------------------------------------------------------------------------------------


def environment(ours: bool, **variables: str) -> dict:
    """The variables of a process: ours imports this checkout, the public package is installed."""
    env = {key: value for key, value in os.environ.items() if key != 'PYTHONPATH'}
    return env | ({'PYTHONPATH': str(HERE.parent)} if ours else {}) | variables


def fresh(file: str, *args, python: str = sys.executable, ours: bool = True, **variables) -> dict:
    """What a program of this folder prints last, as JSON, in a process of its own; or its error."""
    done = subprocess.run(
        [python, str(HERE / file), *map(str, args)],
        capture_output=True,
        text=True,
        env=environment(ours, **variables),
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return {'error': done.stderr[-300:]}
    return json.loads(done.stdout.splitlines()[-1])


class Worker:
    """A process of ``worker.py`` under one interpreter, on one core alone if it is asked to."""

    def __init__(self, python: str, ours: bool, one_core: bool = False):
        self.python, self.ours = python, ours
        self.process = subprocess.Popen(
            [python, str(HERE / 'worker.py'), *(['one-core'] if one_core else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(ours),
        )

    def ask(self, **message) -> dict:
        self.process.stdin.write(json.dumps(message) + '\n')
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else {'error': 'the process ended'}

    def once(self, *args, **variables) -> dict:
        """One measurement of ``once.py`` in a fresh process."""
        return fresh('once.py', *args, python=self.python, ours=self.ours, **variables)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


# turns ------------------------------------------------------------------------------------------


def in_turn(calls: dict[str, Callable], turns: int) -> dict[str, list]:
    """What the calls return, by name: in every turn each of them runs once."""
    found = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            found[name].append(call())
    return found


def seconds(call: Callable, clock: Callable = time.perf_counter) -> float:
    """Those of a call, until what it returns is there."""
    start = clock()
    jax.block_until_ready(call())
    return clock() - start


# records of rows, so that a run that is cut off goes on -----------------------------------------


def options(doc: str, path: Path) -> argparse.Namespace:
    """The command line of a program whose records go to ``path``."""
    parser = argparse.ArgumentParser(description=doc.split('\n\n')[0])
    for flag in ('--quick', '--again'):
        parser.add_argument(flag, action='store_true')
    parser.add_argument('--only', nargs='+', default=('*',))
    parser.add_argument('--output', type=Path, default=path)
    return parser.parse_args()


def measure(given: argparse.Namespace, rows: dict) -> None:
    """Measure the rows, functions by ``(task, net, row)``, that are asked for and not there yet.

    Each is told by a line, and kept at once, but for ``--quick``.
    """
    found = {} if given.quick else kept(given.output)
    there = {(r['task'], r['net'], r['row']): r for r in found.get('records', ())}
    begin = time.perf_counter()
    for number, (name, measured) in enumerate(rows.items(), 1):
        wanted = any(fnmatchcase(' | '.join(name), pattern) for pattern in given.only)
        if not wanted or (name in there and not given.again):
            continue
        there[name] = dict(zip(('task', 'net', 'row'), name)) | measured()
        spent = time.perf_counter() - begin
        print(f'[{number}/{len(rows)}, {spent:.0f} s] {told(there[name])}', flush=True)
        if not given.quick:
            keep(given.output, {'versions': versions(), 'records': list(there.values())})
    print(f'{len(rows)} rows in {time.perf_counter() - begin:.0f} s')


def told(row: dict) -> str:
    """A record as one line of progress."""
    name = f'{row["task"]} | {row["net"]} | {row["row"]}'
    if 'refused' in row:
        return f'{name}: refused, {row["refused"][:100]}'
    scores = ' '.join(f'{score:.4g}' for score in row['scores'])
    return f'{name}: {scores}, {row["seconds"]:.0f} s'


def learnt(task, train: Callable[[], dict], **more) -> dict:
    """The record of a row of a task: what ``train`` finds, or why it is refused."""
    from braintrace.errors import BraintraceError  # the public package has none

    head = {'floor': task.floor, 'metric': task.metric, 'steps': task.steps, 'load': load()}
    try:
        return head | more | train()
    except BraintraceError as error:
        return head | more | {'refused': f'{type(error).__name__}: {error}'}


def load() -> float:
    """Programs that run or wait, for each core."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)
