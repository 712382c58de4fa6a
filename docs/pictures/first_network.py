"""Draws `first_network.svg`: what the networks of docs/tutorials/first_network.md learn, and what
the first of them remembers.

The numbers come from the code blocks of that page. `python docs/pictures/first_network.py [FILE]`
needs matplotlib and optax (`pip install -e '.[examples]'`).
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

import braintrace

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / 'tutorials' / 'first_network.md'
INK, FAINT = '#222222', '#8a8a8a'
TRACE, NONE, OTHER = '#0072b2', '#d55e00', '#009e73'
MARKED = 2, 6  # the steps whose coins are marked in the two trials that are drawn


def run_page() -> dict:
    """The names that the page's code blocks define."""
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r'```python\n(.*?)```', PAGE.read_text(encoding='utf-8'), re.S):
            exec(compile(block, PAGE.name, 'exec'), names)
    return names


def smooth(losses: np.ndarray) -> np.ndarray:
    """Means over ten trials."""
    return np.convolve(losses, np.ones(10) / 10, 'valid')


def draw_learning(axes, page: dict) -> None:
    for losses, colour, name in (
        (page['without'], NONE, 'SameStep: no trace'),
        (page['losses'], TRACE, 'D_RTRL: a trace'),
    ):
        losses = smooth(np.asarray(losses)[page['asked']])
        axes.plot(np.arange(len(losses)) + 10, losses, color=colour, lw=2, label=name)
    axes.axhline(np.log(2), color=FAINT, ls=':', lw=1.5, label='a guess')
    axes.set(xlabel='trials', ylabel='loss', ylim=(0, 0.8), xlim=(0, None))
    axes.set_title('Learning', loc='left')
    axes.legend(frameon=False, loc='center right')


def draw_memory(coins, answer, page: dict) -> None:
    steps, flips = np.arange(1, page['STEPS'] + 1), page['xs'][: page['STEPS'], 0, 0]
    xs = np.zeros((len(steps), 2, 2), 'float32')
    xs[:, :, 0] = flips[:, None]
    for sample, step in enumerate(MARKED):
        xs[step, sample, 1] = 1
    logits = braintrace.evaluate(page['learner'], xs, xs, lambda outputs, _: np.asarray(outputs))
    coins.vlines(steps, 0, flips, color=FAINT, lw=3)
    coins.axhline(0, color=INK, lw=0.6)
    for sample, colour, marker in ((0, TRACE, 'o'), (1, OTHER, 's')):
        at = MARKED[sample]
        coins.plot(at + 1, 1.3 * flips[at], marker, color=colour, clip_on=False)
        answer.plot(steps, 1 / (1 + np.exp(-logits[:, sample])), marker + '-', ms=4, color=colour)
    coins.set(ylim=(-1.5, 1.5), yticks=[-1, 1], yticklabels=['-', '+'], ylabel='coins')
    coins.set_title('After learning: two marks, two answers', loc='left')
    answer.axvspan(len(steps) - 0.5, len(steps) + 0.5, color='#f0e442', alpha=0.5, lw=0)
    answer.text(len(steps) - 0.8, 0.5, 'the question', color=INK, ha='right', va='center')
    answer.set(
        ylim=(-0.05, 1.05), ylabel='probability of +', xlabel='step', xticks=[1, 5, 10, 15, 20]
    )


def main(arguments: list[str]) -> Path:
    to = Path(arguments[0]) if arguments else HERE / 'first_network.svg'
    page = run_page()
    # Text stays text, and nothing in the file depends on the day.
    style = {'svg.fonttype': 'none', 'svg.hashsalt': 'first_network', 'font.size': 10}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9.6, 3.8), layout='constrained')
        parts = figure.subplot_mosaic(
            [['learning', 'coins'], ['learning', 'answer']], height_ratios=[1, 2.6]
        )
        parts['coins'].sharex(parts['answer'])
        parts['coins'].tick_params(labelbottom=False)
        draw_learning(parts['learning'], page)
        draw_memory(parts['coins'], parts['answer'], page)
        for axes in parts.values():
            axes.spines[['top', 'right']].set_visible(False)
        figure.savefig(to, metadata={'Date': None})
    if to.suffix == '.svg':  # matplotlib ends lines with blanks
        text = to.read_text(encoding='utf-8')
        to.write_text(re.sub(r' +\n', '\n', text), encoding='utf-8')
    return to


if __name__ == '__main__':
    print(main(sys.argv[1:]))
