"""Type checkers know what users write: every answer has the type that it has, and wrong calls are
found. What a user's own functions return is theirs.
"""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RIGHT, WRONG = (ROOT / 'tests' / 'typed' / f'{name}.py' for name in ('right', 'wrong'))


def by_mypy() -> set[tuple[str, int]]:
    """By the settings and the cache of `make mypy`, which has looked at the package already."""
    pytest.importorskip('mypy')
    run = subprocess.run(
        [sys.executable, '-m', 'mypy', RIGHT, WRONG], capture_output=True, text=True, cwd=ROOT
    )
    assert 'checked 2 source files' in run.stdout, run.stdout + run.stderr
    found = re.findall(r'(\w+)\.py:(\d+): error', run.stdout)
    return {(name, int(line)) for name, line in found}


def by_pyright() -> set[tuple[str, int]]:
    pytest.importorskip('basedpyright')
    settings = ROOT / 'tests' / 'typed' / 'pyright.json'
    run = subprocess.run(
        [sys.executable, '-m', 'basedpyright', '--outputjson', '-p', settings],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    found = json.loads(run.stdout)
    assert found['summary']['filesAnalyzed'] == 2, run.stdout
    return {
        (Path(each['file']).stem, each['range']['start']['line'] + 1)
        for each in found['generalDiagnostics']
        if each['severity'] == 'error'
    }


@pytest.mark.slow
def test_the_right_calls_run():
    runpy.run_path(str(RIGHT))


@pytest.mark.slow
@pytest.mark.parametrize('checker', [by_mypy, by_pyright])
def test_right_calls_have_their_types_and_each_wrong_call_is_found(checker):
    lines = WRONG.read_text().splitlines()
    wrong = {('wrong', k) for k, line in enumerate(lines, 1) if line.endswith('# wrong')}
    assert len(wrong) == 20
    assert checker() == wrong
