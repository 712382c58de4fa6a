"""Pages whose blocks of code stand before what they print."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / 'docs'


def check_blocks(name: str, count: int, capsys, silent: int = 0) -> None:
    """Run the blocks of a page, one after another: ``count`` of them print what stands behind them,
    ``silent`` ones nothing.
    """
    text = (DOCS / name).read_text(encoding='utf-8')
    names: dict = {}
    blocks = re.findall(r'```python\n(.*?)```(?:\n\n```text\n(.*?)```)?', text, flags=re.DOTALL)
    for code, shown in blocks:
        exec(compile(code, name, 'exec'), names)
        assert capsys.readouterr().out == shown, code
    told = len([shown for _, shown in blocks if shown])
    assert (told, len(blocks) - told) == (count, silent) and len(blocks) == text.count('```python')
