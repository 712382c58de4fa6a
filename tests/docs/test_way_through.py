"""The way through: the page prints what it shows, and its picture is drawn from it."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / 'docs'
PAGE = (DOCS / 'explanation' / 'way_through.md').read_text(encoding='utf-8')


def test_every_folder_that_the_page_names_is_there():
    folders = set(re.findall(r'`(_?[a-z][a-z_/]*)/`', PAGE))
    assert folders and not [
        name for name in folders if not (DOCS.parent / 'braintrace' / name).is_dir()
    ]
    assert '](../pictures/way_through.svg)' in PAGE


@pytest.mark.slow
def test_the_picture_is_drawn_from_the_page(tmp_path):
    pytest.importorskip('matplotlib')
    script = DOCS / 'pictures' / 'way_through.py'
    spec = importlib.util.spec_from_file_location('docs_way_through', script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = module.main([str(tmp_path / 'drawn.svg')])
    kept = script.with_suffix('.svg')
    assert texts(drawn) == texts(kept), f'run python {script} once more'


def texts(picture: Path) -> set[str]:
    """What is written in a picture, without the numbers of its axes."""
    found = re.findall(r'<text[^>]*>([^<]*)</text>', picture.read_text(encoding='utf-8'))
    return {text for text in found if re.search('[a-z]', text)}
