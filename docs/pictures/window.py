"""Draws `window.svg`: what is computed for a window, before, in and after the loop over time.

`python docs/pictures/window.py [FILE]` needs matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path

from drawing import BLUE, FAINT, GREEN, INK, ORANGE, PINK, save, style, target
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

STEPS, WINDOWS, GAP = 5, 2, 1.1
ROWS = {  # what is in each row, from top to bottom
    'before': 'input products, encoders',
    'loop': 'old state to new state',
    'after': 'readouts, losses, their derivatives',
    'scan back': 'signals and D, per position',
    'contract': 'one product for each weight',
}
COLOURS = dict(zip(ROWS, (GREEN, BLUE, GREEN, BLUE, ORANGE), strict=True))
Y = {name: -1.0 * k for k, name in enumerate(ROWS)}


def box(axes, x: float, y: float, width: float, colour: str, text: str = '') -> None:
    look = {'boxstyle': 'round,pad=0,rounding_size=0.08', 'fc': colour, 'ec': 'white', 'alpha': 0.9}
    axes.add_patch(FancyBboxPatch((x, y - 0.25), width, 0.5, **look))
    axes.text(x + width / 2, y, text, color='white', ha='center', va='center', fontsize=9)


def arrow(axes, start: tuple, end: tuple, colour: str = INK) -> None:
    look = {'arrowstyle': '-|>', 'color': colour, 'lw': 1.1, 'shrinkA': 0, 'shrinkB': 0}
    axes.annotate('', xy=end, xytext=start, arrowprops=look)


def draw_window(axes, x: float, first: int) -> None:
    steps = f'steps {first} to {first + STEPS - 1} at once'
    for name in ('before', 'after', 'contract'):
        box(axes, x, Y[name], STEPS, COLOURS[name], steps)
    for k in range(STEPS):
        for name in ('loop', 'scan back'):
            box(axes, x + k + 0.14, Y[name], 0.72, COLOURS[name], str(first + k))
        if k:
            arrow(axes, (x + k - 0.16, Y['loop']), (x + k + 0.16, Y['loop']))
            arrow(axes, (x + k + 0.16, Y['scan back']), (x + k - 0.16, Y['scan back']))
    for upper, lower in zip(list(ROWS)[:-1], list(ROWS)[1:], strict=True):
        arrow(axes, (x + STEPS / 2, Y[upper] - 0.28), (x + STEPS / 2, Y[lower] + 0.28), FAINT)


def draw(axes) -> None:
    end = WINDOWS * STEPS + (WINDOWS - 1) * GAP
    axes.set(xlim=(-4.6, end + 1.3), ylim=(-5.5, 0.95))
    axes.axis('off')
    for name, meaning in ROWS.items():
        axes.text(-4.5, Y[name] + 0.12, name, va='center', weight='bold', color=COLOURS[name])
        axes.text(-4.5, Y[name] - 0.2, meaning, va='center', color=FAINT, fontsize=8.5)
    for w in range(WINDOWS):
        x = w * (STEPS + GAP)
        draw_window(axes, x, w * STEPS + 1)
        axes.text(x + STEPS / 2, 0.6, f'window {w + 1}', ha='center', fontsize=11)
        middle = x + STEPS / 2
        axes.text(middle, -4.72, 'gradient of the window', ha='center', color=INK, fontsize=9)
        arrow(axes, (middle, -4.28), (middle, -4.5), FAINT)
        edge, over = x + STEPS, x + STEPS + GAP
        arrow(axes, (edge - 0.14, Y['loop']), (over + 0.14, Y['loop']))
        axes.text(edge + GAP / 2, Y['loop'] + 0.15, '$h$', ha='center')
        arrow(axes, (edge, Y['contract']), (over, Y['contract']), PINK)
        axes.text(edge + GAP / 2, Y['contract'] + 0.15, '$e$', ha='center', color=PINK)
    arrow(axes, (0, -5.2), (end + 1, -5.2), FAINT)
    axes.text(end + 1.05, -5.2, 'time', va='center', color=FAINT, fontsize=9)


def main(arguments: list[str]) -> Path:
    with style('window'):
        figure = Figure(figsize=(9.6, 4.4), layout='constrained')
        draw(figure.subplots())
        return save(figure, target(arguments, 'window.svg'))


if __name__ == '__main__':
    print(main(sys.argv[1:]))
