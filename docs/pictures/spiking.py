"""Draws `spiking.png`: one trial of the network of docs/tutorials/spiking.md after learning.

The spikes come from the code blocks of that page. `python docs/pictures/spiking.py [FILE]` needs
matplotlib and optax (`pip install -e '.[examples]'`).
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / 'tutorials' / 'spiking.md'
INK, LIF, ALIF, YELLOW = '#222222', '#0072b2', '#d55e00', '#f0e442'
GROUPS = ('left', 'right', 'question', 'noise')  # of ten inputs each
STEP = 10  # milliseconds


def run_page() -> dict:
    """The names that the page's code blocks define."""
    names: dict = {}
    text = PAGE.read_text(encoding='utf-8')
    with contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r'```python\n(.*?)```', text, re.S):
            exec(compile(block, PAGE.name, 'exec'), names)
    return names


def raster(axes, fired: np.ndarray, colour: str) -> None:
    """A short line for each spike of ``(step, unit)``, the first unit on top."""
    times = [STEP * np.flatnonzero(unit) for unit in fired.T]
    axes.eventplot(times, colors=colour, linelengths=0.8, linewidths=1.6)
    axes.set(ylim=(fired.shape[1] - 0.5, -0.5), yticks=[])


def draw(axes: dict, page: dict) -> None:
    trial, spikes = page['trial'], np.asarray(page['spikes'])[:, 0]
    raster(axes['inputs'], np.asarray(trial.xs)[:, 0], INK)
    axes['inputs'].set(yticks=[4.5, 14.5, 24.5, 34.5], yticklabels=GROUPS, title='inputs')
    half = spikes.shape[1] // 2
    raster(axes['lif'], spikes[:, :half], LIF)
    raster(axes['alif'], spikes[:, half:], ALIF)
    axes['lif'].set(ylabel='30 LIF', title='neurons')
    axes['alif'].set(ylabel='30 ALIF')
    likely = jax.nn.softmax(page['answers'][:, 0])[:, page['trial'].ys[0, 0]]
    times = STEP * np.arange(len(likely))
    axes['answer'].plot(times, likely, color=INK, lw=2)
    axes['answer'].axhline(0.5, color=INK, lw=0.8, ls=':')
    axes['answer'].set(
        ylim=(-0.05, 1.05), xlabel='time (ms)', title='probability of the right answer'
    )
    asked = times[np.asarray(trial.mask) > 0]
    for each in axes.values():
        each.axvspan(asked[0] - STEP / 2, asked[-1] + STEP / 2, color=YELLOW, alpha=0.4, lw=0)
        each.set_xlim(-STEP, times[-1] + STEP)
        each.title.set(fontsize=10, position=(0, 1), ha='left')
        each.spines[['top', 'right']].set_visible(False)


def main(arguments: list[str]) -> Path:
    to = Path(arguments[0]) if arguments else HERE / 'spiking.png'
    page = run_page()
    with matplotlib.rc_context({'font.size': 10}):
        figure = Figure(figsize=(8, 7.2), layout='constrained')
        names = ['inputs', 'lif', 'alif', 'answer']
        axes = figure.subplot_mosaic([[name] for name in names], height_ratios=[4, 3, 3, 2])
        for name in names[:-1]:
            axes[name].sharex(axes['answer'])
            axes[name].tick_params(labelbottom=False)
        draw(axes, page)
        figure.savefig(to, dpi=150, metadata={'Software': None})
    return to


if __name__ == '__main__':
    print(main(sys.argv[1:]))
