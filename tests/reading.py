"""How much a reader of the core has to hold, beside what it should be: ``make reading``.

The core is all of ``braintrace/`` but what is beside it. The last two rows are counted while a
GRU of five units with a readout takes its first gradient of a sequence.
"""

import ast
import collections
import re
import sys
from pathlib import Path
from typing import NamedTuple

import brainstate
import jax.numpy as jnp

import braintrace

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'braintrace'
BESIDE = {'nn', 'tasks', 'receipts', 'kit', 'verify', 'adapters', 'rules', 'compat', 'extra'}


class Figure(NamedTuple):
    """A row of the table: what is counted, how many there are, and the most there should be."""

    name: str
    value: float
    bound: float
    at_least: bool = False

    def __str__(self) -> str:
        good = self.value >= self.bound if self.at_least else self.value <= self.bound
        side = 'at least' if self.at_least else 'at most'
        return f'{"    " if good else "over"} {self.name:45} {self.value:>8} ({side} {self.bound})'


def floor_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def lines_of(*folders: str, tests: bool) -> int:
    files = [f for name in folders for f in (ROOT / name).rglob('*.py')]
    return sum(f.read_text().count('\n') for f in files if ('tests' in f.parts) == tests)


def of_text() -> list[Figure]:
    """What the files of the core hold."""
    texts = {f: f.read_text() for f in PACKAGE.rglob('*.py') if floor_of(f) not in BESIDE}
    records, private, classes = 0, collections.Counter(), collections.defaultdict(set)
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip('_')].add(file)
                marks = map(ast.unparse, (*node.bases, *node.decorator_list))
                records += any('NamedTuple' in m or 'dataclass' in m for m in marks)
            if isinstance(node, ast.FunctionDef) and re.match('_(?!_)', node.name):
                private[node.name] += 1
    every = ''.join(texts.values())
    words = collections.Counter(re.findall(r'\b_[A-Za-z]\w*\b', every))
    lines = [line.strip() for line in every.splitlines()]
    comments = sum(line.startswith('#') for line in lines)
    once = sum(1 for name, k in private.items() if k == 1 and words[name] == 2)
    shared = sum(len(files) > 1 for files in classes.values())
    return [
        Figure('lines of the core', len(lines), 22_000),
        Figure('files of the core', len(texts), 118),
        Figure('records (NamedTuple, dataclass)', records, 80),
        Figure('private functions with one reference', once, 150),
        Figure('classes of one name in several files', shared, 0),
        Figure(
            'own-line comments, per cent', round(100 * comments / sum(map(bool, lines)), 1), 4, True
        ),
        Figure(
            'lines of the package and the verifier',
            lines_of('braintrace', 'receipts', tests=False),
            42_500,
        ),
        Figure('lines of tests', lines_of('tests', 'receipts/tests', tests=True), 40_000),
    ]


def of_a_first_gradient() -> list[Figure]:
    """The functions that a newcomer would step through, and how often the floor changes."""
    model = brainstate.nn.Sequential(braintrace.nn.GRUCell(3, 5), braintrace.nn.Linear(5, 2))
    xs, ys = jnp.ones((4, 2, 3)), jnp.ones((4, 2, 2))
    learner = braintrace.compile(model, 'D_RTRL', xs[0], batch_size=2)
    entered, changes, last = set(), 0, None

    def floor(frame) -> str | None:
        path = Path(frame.f_code.co_filename) if frame else None
        inside = path is not None and path.is_relative_to(PACKAGE)
        return floor_of(path) if inside and floor_of(path) not in BESIDE else None

    def hook(frame, event, arg):
        nonlocal changes, last
        if event not in ('call', 'return') or (here := floor(frame)) is None:
            return
        if event == 'call':
            entered.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
        else:
            here = floor(frame.f_back) or here
        changes += last not in (None, here)
        last = here

    sys.setprofile(hook)
    try:
        learner.etrace_grad(xs, ys, step_fn=lambda x, y: jnp.mean((learner(x) - y) ** 2))
    finally:
        sys.setprofile(None)
    return [
        Figure('functions that a first etrace_grad enters', len(entered), 450),
        Figure('changes of floor in it', changes, 1_100),
    ]


if __name__ == '__main__':
    print(*of_text(), *of_a_first_gradient(), sep='\n')
