"""What the pictures of the explanations share: colours, and how a figure is saved."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
INK, FAINT, PALE = '#222222', '#767676', '#dcdcdc'
# Okabe and Ito's colours, which people with any colour vision can tell apart.
BLUE, ORANGE, GREEN, PINK, SKY = '#0072b2', '#d55e00', '#009e73', '#cc79a7', '#56b4e9'


@contextlib.contextmanager
def style(name: str):
    """Settings under which a figure called ``name`` looks the same everywhere, on every day."""
    chosen = {'svg.fonttype': 'path', 'svg.hashsalt': name, 'font.size': 10, 'text.color': INK}
    chosen |= {'axes.spines.top': False, 'axes.spines.right': False, 'axes.edgecolor': FAINT}
    with matplotlib.rc_context(chosen):
        yield


def save(figure: Figure, to: Path) -> Path:
    figure.savefig(to, metadata={'Date': None}, facecolor='white')
    if to.suffix == '.svg':  # matplotlib ends lines with blanks
        text = to.read_text(encoding='utf-8')
        to.write_text(re.sub(r' +\n', '\n', text), encoding='utf-8')
    return to


def target(arguments: list[str], name: str) -> Path:
    """Where a picture goes: the first argument, or ``name`` beside the script."""
    return Path(arguments[0]) if arguments else HERE / name
