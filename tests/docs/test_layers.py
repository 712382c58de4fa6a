"""The page of layers: its blocks, its names, and what its table says of history."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

import braintrace
from braintrace import nn

PAGE = (Path(__file__).resolve().parents[2] / 'docs' / 'reference' / 'layers.md').read_text(
    encoding='utf-8'
)
CELLS = {
    name: cells[1]
    for line in re.findall(r'^\| (`\w+(?:Cell|GRU|LSTM)`.*) \|$', PAGE, flags=re.MULTILINE)
    for names, *cells in [line.split(' | ')]
    for name in re.findall(r'\w+', names)
}


def test_every_class_is_named():
    assert [n for n in nn.__all__ if f'`{n}`' not in PAGE and f'nn.{n}(' not in PAGE] == []


@pytest.mark.tier(quick=7)
@pytest.mark.parametrize('name', CELLS)
def test_the_table_says_what_the_report_says(name):
    cell = getattr(nn, name)(3, 4)
    learner = braintrace.compile(cell, 'D_RTRL', jnp.ones(3))
    assert learner.report.exact == {'whole': True, 'part': False}[CELLS[name]]


def test_the_table_has_every_cell():
    cells = {name for name in nn.__all__ if name.endswith('Cell')}
    assert cells == CELLS.keys()
