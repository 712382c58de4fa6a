"""The page of learning rules prints what it shows, and has every rule."""

import inspect
import re
from pathlib import Path

from braintrace import rules

PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'reference' / 'learning_rules.md'
TEXT = PAGE.read_text(encoding='utf-8')


def test_every_value_has_a_row():
    values = {n for n in rules.__all__ if inspect.isfunction(getattr(rules, n))}
    table = TEXT[TEXT.index('| value |') :].split('\n\n')[0]
    assert values == set(re.findall(r'`(\w+)\(', '\n'.join(r[:60] for r in table.splitlines())))
