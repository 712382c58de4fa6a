"""Records of rows that are measured one after another, so that a run that is cut off goes on."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import jax

import braintrace

__all__ = ['measure', 'options', 'versions']


def options(doc: str, path: Path) -> argparse.Namespace:
    """The command line of a program whose records go to ``path``."""
    parser = argparse.ArgumentParser(description=doc.split('\n\n')[0])
    parser.add_argument('--quick', action='store_true')
    parser.add_argument('--again', action='store_true')
    parser.add_argument('--only', nargs='+', default=('*',))
    parser.add_argument('--output', type=Path, default=path)
    return parser.parse_args()


def measure(given: argparse.Namespace, rows: dict, line: Callable[[dict], str]) -> None:
    """Measure the rows, functions by ``(task, net, row)``, that are asked for and not there yet.

    Each is told by a line, and kept at once, but for ``--quick``.
    """
    kept = not given.quick and given.output.exists()
    found = json.loads(given.output.read_text(encoding='utf-8'))['records'] if kept else []
    there = {(r['task'], r['net'], r['row']): r for r in found}
    begin = time.perf_counter()
    for number, (name, measured) in enumerate(rows.items(), 1):
        wanted = any(fnmatchcase(' | '.join(name), pattern) for pattern in given.only)
        if not wanted or (name in there and not given.again):
            continue
        there[name] = measured()
        spent = time.perf_counter() - begin
        print(f'[{number}/{len(rows)}, {spent:.0f} s] {line(there[name])}')
        sys.stdout.flush()
        if not given.quick:
            text = json.dumps({'versions': versions(), 'records': list(there.values())}, indent=1)
            given.output.write_text(text + '\n', encoding='utf-8')
    print(f'{len(rows)} rows in {time.perf_counter() - begin:.0f} s')


def versions() -> dict:
    device = f'{jax.devices()[0].device_kind}, {platform.machine()}'
    found = {name: importlib.metadata.version(name) for name in ('jax', 'brainstate', 'optax')}
    found |= {'braintrace': braintrace.__version__}
    return {'python': platform.python_version(), 'device': device} | found
