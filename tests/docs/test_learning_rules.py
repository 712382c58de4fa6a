"""The page of learning rules prints what it shows, and has every rule."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from braintrace import rules

from .pages import check_blocks

PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'learning_rules.md'
TEXT = PAGE.read_text(encoding='utf-8')


@pytest.mark.slow
def test_every_block_prints_what_stands_behind_it(capsys):
    check_blocks('learning_rules.md', 3, capsys)


def test_every_value_has_a_row():
    values = {n for n in rules.__all__ if inspect.isfunction(getattr(rules, n))}
    table = TEXT[TEXT.index('| value |') :].split('\n\n')[0]
    assert values == set(re.findall(r'`(\w+)\(', '\n'.join(r[:60] for r in table.splitlines())))
