"""The page for those who come from the public package: its blocks, its tables and its figures."""

import importlib.util
import re
from pathlib import Path

import pytest

import braintrace
from braintrace import compat
from braintrace._public_names import ABSENT, COMPAT
from braintrace.compat._arguments import ARGUMENTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / 'docs' / 'howto' / 'migrate.md').read_text(encoding='utf-8')


def table(title: str) -> list[list[str]]:
    """The rows of the table with this first column, whose cells stand without their code marks."""
    lines = PAGE[PAGE.index(f'| {title} |') :].split('\n\n')[0].splitlines()[2:]
    rows = [line.removeprefix('| ').removesuffix(' |').split(' | ') for line in lines]
    return [[first.strip('`'), *cells] for first, *cells in rows]


def test_every_name_is_there_or_says_what_to_use():
    rows = table('theirs')
    of_package = {name: cell for name, cell in rows if not name.startswith('nn.')}
    assert (len(of_package), len(rows) - len(of_package)) == (62, 21)
    said = {name: cell for name, cell in of_package.items() if name in ABSENT}
    assert said == {name: f'absent: {text}' for name, text in ABSENT.items()}
    there = [name for name, cell in of_package.items() if cell.startswith(('the same', 'compat'))]
    assert {*there, *ABSENT} == {*of_package}
    in_compat = {name.removeprefix('nn.') for name, cell in rows if cell.startswith('compat')}
    assert in_compat == (COMPAT | {'NotSupportedError'}) - {'load_public'}
    known = [*braintrace.__all__, *compat.__all__, *braintrace.errors.__all__]
    known += ['__version__', '__version_info__']
    assert [name for name in there if name not in known] == []


def test_every_layer_and_cell_is_there():
    cells = [cell for name, cell in table('theirs') if name.startswith('nn.')]
    named = [name[3:] for name, _ in table('theirs') if name.startswith('nn.')]
    named += re.findall(r'`(\w+(?:Cell|Readout))`', ' '.join(cells))
    known = [*braintrace.nn.__all__, *compat.__all__]
    assert [name for name in named if name not in known] == []


def test_every_argument_has_its_sentence():
    rows = dict(table('argument'))
    assert rows.keys() == {*ARGUMENTS, 'vjp_method', 'chunk_size', 'projection_key'}
    for name, argument in ARGUMENTS.items():
        assert argument.remedy in rows[name], name


@pytest.mark.slow
def test_our_figures_are_those_of_the_program():
    where = importlib.util.spec_from_file_location('faults', ROOT / 'benchmarks/public_faults.py')
    faults = importlib.util.module_from_spec(where)
    where.loader.exec_module(faults)
    found = [
        [title.strip('`'), f'`{weight}`', figures]
        for title, kind, gradient in faults.CASES
        for weight, figures in faults.measure(kind, gradient).items()
    ]
    assert found == [[step, weight, ours] for step, weight, *_, ours in table('step')]
