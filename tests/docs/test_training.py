"""The page of training prints what it shows, and names every task."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from braintrace import tasks

from .pages import check_blocks

PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'training.md'
TEXT = PAGE.read_text(encoding='utf-8')


@pytest.mark.slow
def test_every_block_prints_what_stands_behind_it(capsys):
    check_blocks('training.md', 5, capsys)


def test_every_task_and_every_argument_has_a_row():
    made = {n for n in tasks.__all__ if inspect.isfunction(getattr(tasks, n))} - {'run'}
    assert made == set(re.findall(r'`(\w+)\(', TEXT[: TEXT.index('### A task of your own')]))
    options = {*inspect.signature(tasks.run).parameters}
    table = TEXT[TEXT.index('| argument') : TEXT.index('## A test')]
    assert set(re.findall(r'`(\w+)=', table)) <= options
