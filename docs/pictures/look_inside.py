"""Draws `look_inside.svg` from the code blocks of docs/howto/look_inside.md.

`python docs/pictures/look_inside.py [FILE]` needs matplotlib (`pip install -e '.[examples]'`).
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import numpy as np
from drawing import BLUE, FAINT, GREEN, HERE, INK, ORANGE, save, style, target
from matplotlib.figure import Figure

PAGE = HERE.parent / 'howto' / 'look_inside.md'


def run_page() -> dict:
    """The names that the page's code blocks define."""
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r'```python\n(.*?)```', PAGE.read_text(encoding='utf-8'), re.S):
            exec(compile(block, PAGE.name, 'exec'), names)
    return names


def main(arguments: list[str]) -> Path:
    page = run_page()
    with style('look_inside'):
        figure = Figure(figsize=(7, 6), layout='constrained')
        unit, traces, signals, change = figure.subplots(4, sharex=True)
        time = np.arange(len(page['V']))
        unit.plot(time, page['V'], color=INK, lw=1)
        unit.vlines(time[np.asarray(page['fired']) > 0], 1.1, 1.4, color=ORANGE, lw=1.5)
        unit.vlines(time[np.asarray(page['spikes'])[:, page['SYNAPSE']] > 0], -1, -0.7, color=FAINT)
        words = 'the potential, its spikes (above), and those of the synapse (below)'
        unit.set_title(words, loc='left')
        for axes, values, words in (
            (traces, page['e'], 'the trace: what the weight did'),
            (signals, page['signal'], 'the learning signal: what the loss wants'),
        ):
            for k, (colour, name) in enumerate(((BLUE, 'of V'), (GREEN, 'of the filtered spikes'))):
                axes.plot(time, values[:, k], color=colour, lw=1.2, label=name)
            axes.set_title(words, loc='left')
        traces.legend(frameon=False, ncols=2, loc='upper right')
        change.plot(time, page['change'], color=INK, lw=1.2)
        change.axhline(0, color=FAINT, lw=0.6)
        change.set_title('their product: the gradient of each step', loc='left')
        change.set_xlabel('step')
        return save(figure, target(arguments, 'look_inside.svg'))


if __name__ == '__main__':
    print(main(sys.argv[1:]))
