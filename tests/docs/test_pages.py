"""Every page of the site: its blocks of Python run, one after another, and print what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / 'docs'
BLOCK = re.compile(r'^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?', re.DOTALL | re.MULTILINE)
NIGHTLY: set[str] = set()  # pages that take long
OWN = {'reference/primitives.md'}  # tests/test_readme.py runs it


def pages() -> list:
    found = []
    for path in sorted(DOCS.rglob('*.md')):
        text, name = path.read_text(encoding='utf-8'), str(path.relative_to(DOCS))
        if '```python\n' in text and name not in OWN:
            mark = pytest.mark.nightly if name in NIGHTLY else pytest.mark.slow
            found.append(pytest.param(name, id=name, marks=mark))
    return found


@pytest.mark.parametrize('name', pages())
def test_every_block_prints_what_stands_behind_it(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / name).read_text(encoding='utf-8')
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count('```python\n')
    names: dict = {}
    for code, shown in blocks:
        exec(compile(code, name, 'exec'), names)
        assert capsys.readouterr().out == shown, code
