"""Faults that the tests have to see: each row of `tests/cover/mutants.json` changes a line of the
package, and names tests of the gate of which one has to fail then.

    python -m tests.mutants                 try all, in a copy of the working tree
    python -m tests.mutants reset peak      those whose name has one of these words

Faults that nobody wrote down are drawn by `tests/cover.py`.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 900.0  # seconds, after which a change made a loop endless


class Mutant(NamedTuple):
    """``old``, which a file of the package has once, becomes ``new``; then one of ``tests``,
    arguments of pytest, fails.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


TABLE = Path(__file__).with_name('cover') / 'mutants.json'
MUTANTS = [
    Mutant(name, **row) for name, row in json.loads(TABLE.read_text(encoding='utf-8')).items()
]


def survives(mutant: Mutant, copy: Path) -> bool:
    """Whether its tests pass with it."""
    file = copy / 'braintrace' / mutant.file
    text = file.read_text(encoding='utf-8')
    file.write_text(text.replace(mutant.old, mutant.new), encoding='utf-8')
    run = [sys.executable, '-m', 'pytest', '-q', '-x', '-m', 'not nightly', *mutant.tests.split()]
    try:
        done = subprocess.run(run, cwd=copy, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return False
    finally:
        file.write_text(text, encoding='utf-8')
    if done.returncode not in (0, 1, 2):  # 2: a file of tests can not be imported
        raise SystemExit(f'{mutant.name}: {mutant.tests}\n{done.stdout}{done.stderr}')
    return not done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description='Faults that the tests have to see.')
    parser.add_argument('words', nargs='*', help='parts of the names of those to try')
    options = parser.parse_args()
    lived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ('benchmarks', 'braintrace', 'examples', 'receipts', 'tests', 'pyproject.toml'):
            copied = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copied(ROOT / part, copy / part)
        for mutant in MUTANTS:
            if options.words and not any(word in mutant.name for word in options.words):
                continue
            lives = survives(mutant, copy)
            print('SURVIVES' if lives else 'seen    ', mutant.name, flush=True)
            lived += lives
    return lived


if __name__ == '__main__':
    sys.exit(main())
