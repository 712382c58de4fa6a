"""The page of sharp edges prints what it shows."""

from __future__ import annotations

from pathlib import Path

from .pages import check_blocks

PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'sharp_bits.md'


def test_every_block_prints_what_stands_behind_it(capsys):
    check_blocks('sharp_bits.md', 8, capsys)
