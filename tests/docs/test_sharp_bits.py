"""The page of sharp edges prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'sharp_bits.md'


def test_every_block_prints_what_stands_behind_it(capsys):
    text = PAGE.read_text(encoding='utf-8')
    blocks = re.findall(r'```python\n(.*?)```\n\n```text\n(.*?)```', text, flags=re.DOTALL)
    names: dict = {}
    for code, shown in blocks:
        exec(compile(code, PAGE.name, 'exec'), names)
        assert capsys.readouterr().out == shown, code
    assert len(blocks) == text.count('```python') == 8
