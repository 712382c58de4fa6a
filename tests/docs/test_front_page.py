"""The first page, and the pages of facts, say what README, the extras and the examples say."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding='utf-8')


def first_block(name: str) -> str:
    return re.search(r'^```python\n.*?^```\n\n```text\n.*?^```', read(name), re.S | re.M)[0]


def test_the_first_page_shows_the_program_of_the_readme():
    assert first_block('docs/index.md') == first_block('README.md')


def test_the_extras_that_the_page_names_exist():
    rows = re.findall(r'^\| `([\w-]+)` \|', read('docs/install.md').split('## Extras')[1], re.M)
    named = {row for row in rows if not row.startswith('make')}
    extras = tomllib.loads(read('pyproject.toml'))['project']['optional-dependencies']
    assert named and named <= extras.keys()


def test_the_facts_about_time_are_those_of_the_readme():
    costs, page = (read(name) for name in ('README.md', 'docs/is_it_for_me.md'))
    costs = costs.split('## What it costs')[1].split('\n## ')[0]
    flat = ' '.join(page.split())
    (beside,) = re.findall(r'It (is slower than the scan at .*?)\.', ' '.join(costs.split()))
    assert f'D_RTRL {beside}.' in flat
    (every,) = re.findall(r'An update at every step takes (.*?) times', ' '.join(costs.split()))
    assert f'{every} times the gradient of the whole sequence' in flat
    for part, behind in ((0, 'times `jax.grad` of a scan'), (1, 'times code by hand')):
        cells = [
            re.findall(r'\d+(?:\.\d+)?', row.split('|')[2 + part])
            for row in costs.splitlines()
            if row.startswith('|') and 'scan |' not in row and '---' not in row
            if 'kept for a stream' not in row
        ]
        figures = [float(figure) for cell in cells for figure in cell]
        assert f'{min(figures):g} to {max(figures):g} {behind}' in flat, behind


def test_the_page_on_citing_has_the_papers_of_the_citation_file():
    file, page = read('CITATION.cff'), read('docs/citing.md')
    titles = re.findall(r"^    title: '(.+)'$", file, re.M)
    assert titles and not [title for title in titles if title not in page]


def test_every_example_is_in_the_gallery():
    shown = set(re.findall(r'^### (\w+)\.py$', read('docs/gallery.md'), re.M))
    assert shown == {path.stem for path in (ROOT / 'examples').glob('*.py')}


@pytest.mark.parametrize('name', ['logo', 'favicon'])
def test_small_pictures_of_the_site_are_there(name):
    assert read(f'docs/_static/{name}.svg').startswith('<svg ')
