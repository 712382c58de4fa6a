"""Every page of the site: its blocks of Python run, one after another, and print what it shows.

A block whose first line is the name of a file, as `# run.py`, is written into that file instead.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / 'docs'
BLOCK = re.compile(r'^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?', re.DOTALL | re.MULTILINE)
FILE = re.compile(r'# (\w+\.py)\n')
NIGHTLY = {  # pages that take long
    'howto/batches.md',
    'howto/checkpoint.md',
    'tutorials/flax_equinox.md',
    'tutorials/stream.md',
}
OWN = {'howto/debug_gradients.md', 'reference/compiling.md', 'reference/primitives.md'}


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
    monkeypatch.setenv('PYTHONPATH', str(ROOT))  # of the processes that a page starts
    text = (DOCS / name).read_text(encoding='utf-8')
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count('```python\n')
    names: dict = {}
    for code, shown in blocks:
        if file := FILE.match(code):
            Path(file[1]).write_text(code, encoding='utf-8')
            continue
        exec(compile(code, name, 'exec'), names)
        assert capsys.readouterr().out == shown, code
