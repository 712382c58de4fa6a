"""What each learning rule learns, and what it costs: the leaderboard.

    python benchmarks/rules.py                 every row that is not there yet (make rules)
    python benchmarks/rules.py --again --only '*sine* | D_RTRL'    rows of these names, once more
    python benchmarks/rules.py --quick         two settings, one seed, one rate; keeps nothing

The records go to ``benchmarks/results/rules.json``, one after another, so that a run that is cut
off goes on where it was. ``benchmarks/rules_page.py`` makes ``docs/rules.md`` from them.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from learning import QUICK, Effort, Setting, record
from methods import GRU, METHODS, SMALL, SPARSE, SPIKING, Method, applies
from records import measure, options

from braintrace import tasks
from braintrace.errors import BraintraceError

PATH = Path(__file__).parent / 'results' / 'rules.json'
LRU = 'LRU 64'


def settings() -> list[Setting]:
    """Each task on the nets that learn it by BPTT within the updates."""
    short, copy = tasks.copy_memory(10, length=5), tasks.copy_memory(20)
    add, sine = tasks.adding(48), tasks.shifting_sine(20_480, 1024)
    rows, pixels, evidence = tasks.digits(), tasks.digits('pixels'), tasks.evidence()
    return [
        Setting(short, GRU, 30, 500),
        Setting(copy, LRU, 30, 200),
        Setting(add, GRU, 30, 300),
        Setting(add, SMALL, 30, 400),
        Setting(evidence, SPIKING, 30, 60),
        Setting(rows, GRU, 30, 150),
        Setting(rows, SPIKING, 30, 150),
        Setting(rows, SPARSE, 30, 150),
        Setting(pixels, LRU, 30, 150),
        *(Setting(sine, net, 1, 1) for net in (GRU, LRU, SPIKING)),
    ]


def quick() -> list[Setting]:
    every = settings()
    return [every[3], every[6]]


def todo(found: list[Setting]) -> list[tuple[Setting, Method]]:
    """The rows of these settings."""
    return [
        (setting, method)
        for setting in found
        for method in METHODS
        if applies(method, setting.net, setting.steps)
    ]


def named(setting: Setting, method: Method) -> tuple[str, str, str]:
    return setting.task.name, setting.net, method.name


def measured(setting: Setting, method: Method, effort: Effort) -> dict:
    """The record of a row, or why there is none."""
    task = setting.task
    head = dict(zip(('task', 'net', 'row'), named(setting, method)))
    head |= {'floor': task.floor, 'metric': task.metric, 'steps': task.steps}
    head |= {'batch': setting.batch, 'updates': setting.updates // effort.less}
    head |= {'load': os.getloadavg()[0] / os.cpu_count()}
    try:
        return head | record(setting, method, effort)
    except BraintraceError as error:
        return head | {'refused': f'{type(error).__name__}: {error}'}


def line(row: dict) -> str:
    """A row as one line of progress."""
    name = f'{row["task"]} | {row["net"]} | {row["row"]}'
    if 'refused' in row:
        return f'{name}: refused, {row["refused"][:100]}'
    scores = ' '.join(f'{score:.4g}' for score in row['scores'])
    return f'{name}: {scores} ({row["metric"]}, floor {row["floor"]:.4g}), {row["seconds"]:.0f} s'


def main():
    given = options(__doc__, PATH)
    effort = QUICK if given.quick else Effort()
    rows = todo(quick() if given.quick else settings())
    measure(given, {named(*row): partial(measured, *row, effort) for row in rows}, line)


if __name__ == '__main__':
    main()
