"""README and every page of the site: its blocks of Python run in order and print what it shows.

A block whose first line is the name of a file, as `# run.py`, is written into that file instead.
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
FILE = re.compile(r'# (\w+\.py)\n')
NIGHTLY = {  # pages that take long, and the first one, whose block is README's
    'docs/explanation/windows.md',
    'docs/howto/batches.md',
    'docs/howto/checkpoint.md',
    'docs/howto/coming_from.md',
    'docs/howto/debug_gradients.md',
    'docs/howto/few_bits.md',
    'docs/howto/large_networks.md',
    'docs/howto/migrate.md',
    'docs/howto/shd.md',
    'docs/howto/training.md',
    'docs/index.md',
    'docs/reference/learning_rules.md',
    'docs/tutorials/acting.md',
    'docs/tutorials/equinox.md',
    'docs/tutorials/first_network.md',
    'docs/tutorials/flax_equinox.md',
    'docs/tutorials/flax_nnx.md',
    'docs/tutorials/nir.md',
    'docs/tutorials/other_frameworks.md',
    'docs/tutorials/own_op.md',
    'docs/tutorials/own_rule.md',
    'docs/tutorials/receipts.md',
    'docs/tutorials/spiking.md',
    'docs/tutorials/spiking_ei.md',
    'docs/tutorials/stream.md',
}
OWN = {'docs/reference/primitives.md'}  # tests/test_readme.py runs it


def pages() -> list:
    found = []
    for path in PAGES:
        name = str(path.relative_to(ROOT))
        if '```python\n' in path.read_text(encoding='utf-8') and name not in OWN:
            mark = pytest.mark.nightly if name in NIGHTLY else pytest.mark.slow
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
