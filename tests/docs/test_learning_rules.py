"""The page of learning rules prints what it shows, and has every rule."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from braintrace import rules

PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'learning_rules.md'
TEXT = PAGE.read_text(encoding='utf-8')


@pytest.mark.slow
def test_every_block_prints_what_stands_behind_it(capsys):
    blocks = re.findall(r'```python\n(.*?)```\n\n```text\n(.*?)```', TEXT, flags=re.DOTALL)
    names: dict = {}
    for code, shown in blocks:
        exec(compile(code, PAGE.name, 'exec'), names)
        assert capsys.readouterr().out == shown, code
    assert len(blocks) == TEXT.count('```python') == 3


def test_every_value_has_a_row():
    values = {n for n in rules.__all__ if inspect.isfunction(getattr(rules, n))}
    table = TEXT[TEXT.index('| value |') :].split('\n\n')[0]
    assert values == set(re.findall(r'`(\w+)\(', '\n'.join(r[:60] for r in table.splitlines())))
