"""Draws `partition.svg`: the equations of an LSTM's step, and where each of them runs.

The equations and their places come from the code blocks of docs/explanation/partition.md. `python
docs/pictures/partition.py [FILE]` needs matplotlib.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

from drawing import BLUE, FAINT, GREEN, HERE, INK, save, style, target
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

PAGE = HERE.parent / 'explanation' / 'partition.md'
SIGNS = {'dot_general': '@', 'add': '+', 'mul': '×', 'logistic': 'σ'}
COLOURS = {'before': GREEN, 'loop': BLUE, 'after': GREEN}
# Where the equations stand, in their order, and the values that come in.
AT = [(1, 0), (2.2, 1), (3.2, 0.5), (4.2, 0.5), (5.2, 2), (6.2, 2), (5.2, 1), (5.2, 0), (6.2, 0.5)]
AT += [(7.2, 1.4), (5.2, -1), (8.2, 1.4), (9.2, 0), (10.6, 0)]
CARRIED = {'c': (6.2, 2.65), 'h': (2.2, 2.0), 'x': (0, 0)}


def run_page() -> dict:
    """The names that the page's code blocks define, up to the partition of the LSTM."""
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r'```python\n(.*?)```', PAGE.read_text(encoding='utf-8'), re.S):
            exec(compile(block, PAGE.name, 'exec'), names)
            if 'places' in names:
                break
    return names


def arrow(axes, start: tuple, end: tuple) -> None:
    look = {'arrowstyle': '-|>', 'color': FAINT, 'lw': 1, 'shrinkA': 11, 'shrinkB': 12}
    axes.annotate('', xy=end, xytext=start, arrowprops=look, zorder=1)


def draw_regions(axes) -> None:
    regions = {'before': (-0.4, 1.55), 'loop': (1.65, 9.75), 'after': (9.85, 11.2)}
    notes = {'before': 'all steps at once', 'loop': 'step by step', 'after': 'all steps at once'}
    for name, (start, end) in regions.items():
        look = {'boxstyle': 'round,pad=0,rounding_size=0.1', 'fc': COLOURS[name], 'ec': 'none'}
        box = FancyBboxPatch((start, -1.6), end - start, 4.5, alpha=0.1, zorder=0, **look)
        axes.add_patch(box)
        middle = (start + end) / 2
        axes.text(middle, 3.35, name, ha='center', weight='bold', color=COLOURS[name])
        axes.text(middle, 3.03, notes[name], ha='center', color=FAINT, fontsize=8.5)


def draw(axes, page: dict) -> None:
    axes.set(xlim=(-0.5, 11.3), ylim=(-1.7, 3.7))
    axes.axis('off')
    draw_regions(axes)
    shown = [e for e, at in zip(page['equations'], page['places'], strict=True) if at != 'once']
    places = [at for at in page['places'] if at != 'once']
    old_c, old_h = page['parts'].old
    made = {old_c: CARRIED['c'], old_h: CARRIED['h'], page['parts'].inputs[0]: CARRIED['x']}
    for at, label in zip(CARRIED.values(), ('old c', 'old h', 'x'), strict=True):
        axes.text(*at, label, ha='center', va='center', style='italic', zorder=3)
    stored = {v for loop in page['parts'].loops for v in loop.stacked}
    for equation, at, place in zip(shown, AT, places, strict=True):
        for v in equation.invars:
            if v in made:
                arrow(axes, made[v], at)
        made |= dict.fromkeys(equation.outvars, at)
        name = equation.primitive.name
        thick = not stored.isdisjoint(equation.outvars)
        look = {'boxstyle': 'round,pad=0.3', 'fc': COLOURS[place], 'ec': INK if thick else 'white'}
        text = {'color': 'white', 'ha': 'center', 'va': 'center', 'zorder': 3}
        axes.text(*at, SIGNS.get(name, name), bbox=look | {'lw': 2 if thick else 0.5}, **text)
    axes.text(8.2, 2.15, 'new c', ha='center', style='italic')
    arrow(axes, AT[9], (8.2, 2.2))
    axes.text(9.3, 0.42, 'new h', ha='center', style='italic')
    axes.text(10.6, 0.42, 'out', ha='center', style='italic')
    for (x, y), gate in zip((AT[4], AT[6], AT[7], AT[10]), 'figo', strict=True):
        axes.text(x, y + 0.3, gate, ha='center', color=FAINT, fontsize=9)


def main(arguments: list[str]) -> Path:
    page = run_page()
    with style('partition'):
        figure = Figure(figsize=(9.6, 4.2), layout='constrained')
        draw(figure.subplots(), page)
        return save(figure, target(arguments, 'partition.svg'))


if __name__ == '__main__':
    print(main(sys.argv[1:]))
