"""Draws `paths.svg`: the paths of one step in a simple RNN, an LSTM and two layers.

`python docs/pictures/paths.py [FILE]` needs matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path

from drawing import BLUE, FAINT, GREEN, INK, ORANGE, save, style, target
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

POSITION = {'color': BLUE, 'lw': 2.4, 'zorder': 3}
MIXING = {'color': ORANGE, 'lw': 0.9, 'zorder': 1}
LAYER = {'color': GREEN, 'lw': 1.3, 'ls': (0, (4, 1.5)), 'zorder': 2}
ROWS = (2.0, 1.0, 0.0)  # the places of three units


def node(axes, at: tuple[float, float], text: str) -> None:
    axes.plot(*at, 'o', ms=20, mfc='white', mec=INK, mew=1.1, zorder=4)
    axes.text(*at, text, ha='center', va='center', fontsize=9, zorder=5)


def arrow(axes, start: tuple, end: tuple, kind: dict, bend: float = 0.0) -> None:
    look = {'arrowstyle': '-|>', 'mutation_scale': 9, 'shrinkA': 10.5, 'shrinkB': 10.5}
    curve = f'arc3,rad={bend}'
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=curve, **look, **kind))


def frame(axes, title: str, columns: dict[float, str], height: float) -> None:
    axes.set(xlim=(-0.5, 2.6), ylim=(-0.85, height))
    axes.axis('off')
    axes.set_title(title, fontsize=11)
    for x, text in columns.items():
        axes.text(x, -0.75, text, ha='center', color=FAINT, fontsize=9)


def draw_rnn(axes) -> None:
    frame(axes, 'a simple RNN that leaks', {0: 'old state', 2.1: 'new state'}, 2.6)
    for k, y in enumerate(ROWS, 1):
        node(axes, (0, y), f'$h_{k}$')
        node(axes, (2.1, y), f"$h_{k}'$")
        arrow(axes, (0, y), (2.1, y), POSITION, -0.12)
        for other in ROWS:
            arrow(axes, (0, y), (2.1, other), MIXING)


def draw_lstm(axes) -> None:
    frame(axes, 'an LSTM: two states at each position', {0: 'old states', 2.1: 'new states'}, 2.6)
    for k, y in enumerate(ROWS, 1):
        above, below = y + 0.2, y - 0.2
        for x, mark in ((0, ''), (2.1, "'")):
            box = {'boxstyle': 'round,pad=0.16', 'fc': 'none', 'ec': FAINT, 'lw': 0.8}
            axes.add_patch(FancyBboxPatch((x - 0.18, y - 0.22), 0.36, 0.44, **box))
            node(axes, (x - 0.14, above), f'$c_{k}{mark}$')
            node(axes, (x + 0.14, below), f'$h_{k}{mark}$')
        arrow(axes, (-0.14, above), (1.96, above), POSITION, -0.06)
        arrow(axes, (1.96, above), (2.24, below), POSITION)
        for other in ROWS:
            arrow(axes, (0.14, below), (1.99, other), MIXING)


def draw_layers(axes) -> None:
    frame(axes, 'two layers', {0: 'old states', 1.75: 'new states'}, 2.6)
    lower, upper = (0.65, 0.0), (2.25, 1.6)
    for name, rows, new in (('a', lower, 1.35), ('b', upper, 2.2)):
        for k, y in enumerate(rows, 1):
            node(axes, (0, y), f'${name}_{k}$')
            node(axes, (new, y), f"${name}_{k}'$")
            arrow(axes, (0, y), (new, y), POSITION, -0.12)
            for other in rows:
                arrow(axes, (0, y), (new, other), MIXING)
    for y in lower:
        for other in upper:
            arrow(axes, (1.35, y), (2.2, other), LAYER)


def main(arguments: list[str]) -> Path:
    with style('paths'):
        figure = Figure(figsize=(9.6, 4.1), layout='constrained')
        rnn, lstm, layers = figure.subplots(1, 3)
        draw_rnn(rnn)
        draw_lstm(lstm)
        draw_layers(layers)
        kinds = {'position-wise': POSITION, 'mixing': MIXING, 'through a layer': LAYER}
        lines = [Line2D([], [], **kind) for kind in kinds.values()]
        figure.legend(lines, list(kinds), loc='outside lower center', ncols=3, frameon=False)
        return save(figure, target(arguments, 'paths.svg'))


if __name__ == '__main__':
    print(main(sys.argv[1:]))
