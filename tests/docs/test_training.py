"""The page of training prints what it shows, and names every task."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from braintrace import tasks

PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'training.md'
TEXT = PAGE.read_text(encoding='utf-8')


@pytest.mark.slow
def test_every_block_prints_what_stands_behind_it(capsys):
    blocks = re.findall(r'```python\n(.*?)```\n\n```text\n(.*?)```', TEXT, flags=re.DOTALL)
    names: dict = {}
    for code, shown in blocks:
        exec(compile(code, PAGE.name, 'exec'), names)
        assert capsys.readouterr().out == shown, code
    assert len(blocks) == TEXT.count('```python') == 5


def test_every_task_and_every_argument_has_a_row():
    made = {n for n in tasks.__all__ if inspect.isfunction(getattr(tasks, n))} - {'run'}
    assert made == set(re.findall(r'`(\w+)\(', TEXT[: TEXT.index('### A task of your own')]))
    options = {*inspect.signature(tasks.run).parameters}
    table = TEXT[TEXT.index('| argument') : TEXT.index('## A test')]
    assert set(re.findall(r'`(\w+)=', table)) <= options
