"""The reference lists every public name once, so that each has one page."""

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / 'docs'
MODULE = re.compile(r'\.\. (?:automodule|currentmodule):: (\S+)')
LISTED = re.compile(r'(?:   |\.\. (?:py:)?\w+:: )(~?)([\w.]+)(?:\(.*\))?$')


def names_of(text: str):
    """The names in the tables and directives of a page, in full."""
    module = ''
    for line in text.splitlines():
        if found := MODULE.match(line):
            module = found[1]
            if 'automodule' in line:
                yield module
        elif found := LISTED.match(line):
            in_full = found[1] or found[2].startswith('braintrace')
            yield found[2] if in_full else f'{module}.{found[2]}'


def test_every_public_name_is_listed_once():
    pytest.importorskip('sphinx')
    spec = importlib.util.spec_from_file_location('conf', DOCS / 'conf.py')
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    counts = Counter()
    for page in (DOCS / 'reference').glob('*.md'):
        counts.update(names_of(page.read_text(encoding='utf-8')))
    wrong = {name: counts[name] for name in conf.public_names() if counts[name] != 1}
    assert not wrong
