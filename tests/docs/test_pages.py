"""README and every page of the site: its blocks of Python run in order and print what it shows.

A block that begins with the name of a file, as `# run.py`, is written into that file instead.
"""

import os
import re
import sys
from pathlib import Path

import brainstate
import pytest

from tests import names

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]
BLOCK = re.compile(r'^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?', re.DOTALL | re.MULTILINE)
FILE = re.compile(r'# (\w+\.py)[,\n]')
IN_THE_GATE = 'README.md', 'docs/howto/sharp_bits.md'  # what they show, they alone hold


def blocks_of(name: str) -> list[tuple[str, str]]:
    text = (ROOT / name).read_text(encoding='utf-8')
    found = BLOCK.findall(text)
    assert len(found) == text.count('```python\n'), name
    return found


WITH_BLOCKS = [name for path in PAGES if blocks_of(name := str(path.relative_to(ROOT)))]


def pages() -> list:
    marks = {name: pytest.mark.slow for name in IN_THE_GATE}
    return [
        pytest.param(name, id=name, marks=marks.get(name, pytest.mark.nightly))
        for name in WITH_BLOCKS
    ]


@pytest.fixture
def as_in_a_process_of_its_own():
    """No time step is left behind, and `braintrace.compat` is imported again by who does."""
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
    monkeypatch.syspath_prepend(str(tmp_path))  # files that a page writes are imported from here
    paths = os.pathsep.join(map(str, (ROOT, ROOT / 'receipts')))
    monkeypatch.setenv('PYTHONPATH', paths)  # of the processes that a page starts
    values: dict = {}
    for code, shown in blocks_of(name):
        if file := FILE.match(code):
            (tmp_path / file[1]).write_text(code, encoding='utf-8')
            continue
        exec(compile(code, name.removeprefix('docs/'), 'exec'), values)
        assert capsys.readouterr().out == shown, code


@pytest.mark.parametrize('name', WITH_BLOCKS)
def test_every_block_names_what_is_there(name):
    """Imports, attributes of modules, arguments of functions: without a run, so in the gate."""
    code = [code for code, _ in blocks_of(name)]
    files = tuple(Path(found[1]).stem for each in code if (found := FILE.match(each)))
    assert not names.lost('\n'.join(code), files)


@pytest.mark.parametrize(
    ('code', 'line'),
    {
        'from braintrace import no_such': 'from braintrace import no_such: cannot import name',
        'import braintrace\nbraintrace.no_such': 'braintrace.no_such: module',
        'from braintrace import functional as f\nf.online(1, 2, no_such=3)': 'f.online(1, 2, no_s',
        'from braintrace import rules\nrules.e_prop(1, 2, 3, 4, 5, *[], **{})': '',
        'from braintrace import rules\nrules = {}\nrules.no_such': '',
        'import no_such_package as braintrace\nbraintrace.no_such': '',
    }.items(),
)
def test_what_is_not_there_is_told(code, line):
    found = names.lost(code)
    assert len(found) == bool(line) and all(each.startswith(line) for each in found)


def test_no_line_of_a_page_is_taken_for_a_comment():
    """A line of prose that begins with a per cent sign is one to MyST, and is not shown."""
    prose = {path.name: re.sub('(?s)```.*?```', '', path.read_text('utf-8')) for path in PAGES}
    assert not [name for name, text in prose.items() if re.search('^%', text, re.MULTILINE)]
