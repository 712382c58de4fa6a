"""Draws `way_through.svg`: the stops of docs/explanation/way_through.md, and the numbers of its
one weight.

The numbers come from the code blocks of that page. `python docs/pictures/way_through.py [FILE]`
needs matplotlib (`pip install -e '.[examples]'`).
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

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / 'explanation' / 'way_through.md'
INK, FAINT, TRACE, STEP, PAST = '#222222', '#8a8a8a', '#2a6f97', '#e09f3e', '#9e2a2b'
SHOWN = 3  # the step whose numbers are beside the stops
# What a stop hands on, the floor that makes it, and what it is for w[0, 0].
STOPS = [
    ('module', '_etrace_op, nn', 'ParamState w, HiddenState h'),
    ('params, carry', '_learner', "params['w'], carry['h']"),
    ('program', '_compiler/program', 'concatenate, etp_mm, mul, tanh, add'),
    ('groups, relations', '_compiler/analysis', 'etp_mm of w with group h'),
    ('plan', '_executor', 'etp_mm reads h as a constant'),
    ('factors', '_executor', 'step 3: x = {x:.2f}   D = {D:.2f}   D_f = {D_f:.2f}'),
    ('trace', '_rules', 'step 3: e = D e + D_f x = {e:.2f}'),
    (
        'gradient',
        'functional, _learner',
        'step 3: same step {same:.2f}, signal x e of step 2: {history:.2f}',
    ),
]


def run_page() -> dict:
    """The names that the page's code blocks define."""
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r'```python\n(.*?)```', PAGE.read_text(encoding='utf-8'), re.S):
            exec(compile(block, PAGE.name, 'exec'), names)
    return names


def numbers(page: dict) -> dict[str, np.ndarray]:
    """For each step the factors, the trace and both parts of the gradient of w[0, 0]."""
    h, found = page['carry'][('h',)], []
    for x in page['xs']:
        read, decay, slope = page['factors'](page['w'], h, x)
        found.append((read[0], decay[0], slope[0]))
        h = page['two_sided_pass'](page['w'], h, x)
    x, decay, slope = np.asarray(found, float).T
    same, history, *_ = np.asarray(page['rows'], float).T
    e = np.asarray([trace[0, 0] for trace in page['traces']], float)
    return {'x': x, 'D': decay, 'D_f': slope, 'e': e, 'same': same, 'history': history}


def draw_stops(axes, of_one_step: dict[str, float]) -> None:
    axes.set(xlim=(0, 10), ylim=(-len(STOPS) + 0.3, 0.9))
    axes.axis('off')
    for i, (what, floor, shown) in enumerate(STOPS):
        box = {'boxstyle': 'round,pad=0.45', 'fc': 'white', 'ec': TRACE, 'lw': 1.2}
        axes.text(0.2, -i, f'{i + 1}', color=FAINT, va='center', ha='center')
        axes.text(2.3, -i, what, color=INK, va='center', ha='center', bbox=box)
        axes.text(4.4, -i + 0.16, floor, color=TRACE, va='center', family='monospace')
        axes.text(4.4, -i - 0.18, shown.format(**of_one_step), color=FAINT, va='center')
        if i:
            ends = {'xy': (2.3, -i + 0.3), 'xytext': (2.3, -i + 0.7)}
            axes.annotate('', **ends, arrowprops={'arrowstyle': '->', 'color': INK})


def draw_factors(axes, found: dict[str, np.ndarray]) -> None:
    steps = np.arange(len(found['x']))
    axes.bar(steps, found['x'] * found['D_f'], 0.5, color=STEP, label='D_f x, what the step adds')
    axes.plot(steps, found['e'], 'o-', color=TRACE, label='e, the trace')
    kept = np.concatenate([[0], found['D'][1:] * found['e'][:-1]])
    axes.plot(steps, kept, '_', ms=14, color=PAST, label='D e, what is kept of it')
    axes.set_ylim(top=1.75)
    axes.set_title('stop 7: the trace of w[0, 0]', loc='left')
    axes.set_xlabel('step')


def draw_gradient(axes, found: dict[str, np.ndarray]) -> None:
    steps = np.arange(len(found['x']))
    axes.bar(steps - 0.2, found['same'], 0.4, color=STEP, label='same step')
    axes.bar(steps + 0.2, found['history'], 0.4, color=PAST, label='history, by the trace')
    axes.plot(steps, found['same'] + found['history'], 'o', color=TRACE, label='gradient')
    axes.set_title('stop 8: the gradient of each step', loc='left')
    axes.set_xlabel('step')


def main(arguments: list[str]) -> Path:
    to = Path(arguments[0]) if arguments else HERE / 'way_through.svg'
    found = numbers(run_page())
    # Text stays text, and nothing in the file depends on the day.
    style = {'svg.fonttype': 'none', 'svg.hashsalt': 'way_through', 'font.size': 9}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9.6, 5.4), layout='constrained')
        stops, factors, gradient = figure.subplot_mosaic(
            [['stops', 'factors'], ['stops', 'gradient']], width_ratios=[1.1, 1]
        ).values()
        draw_stops(stops, {name: float(values[SHOWN]) for name, values in found.items()})
        draw_factors(factors, found)
        draw_gradient(gradient, found)
        for axes in (factors, gradient):
            axes.axhline(0, color=FAINT, lw=0.6)
            axes.spines[['top', 'right']].set_visible(False)
            axes.legend(frameon=False, fontsize=8)
        figure.savefig(to, metadata={'Date': None})
        if to.suffix == '.svg':  # matplotlib ends lines with blanks
            text = to.read_text(encoding='utf-8')
            to.write_text(re.sub(r' +\n', '\n', text), encoding='utf-8')
    return to


if __name__ == '__main__':
    print(main(sys.argv[1:]))
