"""README and every page of the site: its blocks of Python run in order and print what it shows.

A block that begins with the name of a file, as `# run.py`, is written into that file instead.
"""

import os
import re
import sys
from pathlib import Path

import brainstate
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]
BLOCK = re.compile(r'^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?', re.DOTALL | re.MULTILINE)
FILE = re.compile(r'# (\w+\.py)[,\n]')
NIGHTLY = {  # pages that take long, and the first one, whose block is README's
    'docs': 'index',
    'docs/explanation': 'windows',
    'docs/howto': 'batches checkpoint coming_from debug_gradients few_bits large_networks migrate '
    'shd training',
    'docs/reference': 'learning_rules',
    'docs/tutorials': 'acting equinox first_network flax_equinox flax_nnx nir other_frameworks '
    'own_op own_rule receipts spiking spiking_ei stream',
}


def pages() -> list:
    found = []
    for path in PAGES:
        name = str(path.relative_to(ROOT))
        if '```python\n' in path.read_text(encoding='utf-8'):
            late = path.stem in NIGHTLY.get(str(Path(name).parent), '').split()
            mark = pytest.mark.nightly if late else pytest.mark.slow
            found.append(pytest.param(name, id=name, marks=mark))
    return found


@pytest.fixture
def as_in_a_process_of_its_own():
    """No time step is left behind, and `braintrace.compat` is imported anew by a page that does."""
    before = sys.modules.pop('braintrace.compat', None)
    yield
    brainstate.environ.pop('dt', None)
    if after := sys.modules.pop('braintrace.compat', None):
        after._remove()
    if before is not None:
        sys.modules['braintrace.compat'] = before


@pytest.mark.usefixtures('as_in_a_process_of_its_own')
@pytest.mark.parametrize('name', pages())
def test_every_block_prints_what_stands_behind_it(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / 'receipts')))
    monkeypatch.setenv('PYTHONPATH', paths)  # of the processes that a page starts
    text = (ROOT / name).read_text(encoding='utf-8')
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count('```python\n')
    names: dict = {}
    for code, shown in blocks:
        if file := FILE.match(code):
            (tmp_path / file[1]).write_text(code, encoding='utf-8')
            continue
        exec(compile(code, name.removeprefix('docs/'), 'exec'), names)
        assert capsys.readouterr().out == shown, code


def test_no_line_of_a_page_is_taken_for_a_comment():
    """A line of prose that begins with a per cent sign is one to MyST, and is not shown."""
    lost = [
        (path.name, line)
        for path in PAGES
        for line in re.sub(
            r'```.*?```', '', path.read_text(encoding='utf-8'), flags=re.DOTALL
        ).splitlines()
        if line.startswith('%')
    ]
    assert not lost
