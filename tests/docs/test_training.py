"""The page of training prints what it shows, and names every task."""

import inspect
import re
from pathlib import Path

from braintrace import tasks

PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'howto' / 'training.md'
TEXT = PAGE.read_text(encoding='utf-8')


def test_every_task_and_every_argument_has_a_row():
    made = {n for n in tasks.__all__ if inspect.isfunction(getattr(tasks, n))} - {'run'}
    assert made == set(re.findall(r'`(\w+)\(', TEXT[: TEXT.index('### A task of your own')]))
    options = {*inspect.signature(tasks.run).parameters}
    table = TEXT[TEXT.index('| argument') : TEXT.index('## A test')]
    assert set(re.findall(r'`(\w+)=', table)) <= options
