"""Draws `stream.svg`: the error along the stream of docs/tutorials/stream.md, of a learner that
goes on and of one that stops.

`python docs/pictures/stream.py [FILE]` needs matplotlib and optax (`pip install -e '.[examples]'`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import brainstate
import jax
import matplotlib
import numpy as np
import optax
from matplotlib.figure import Figure

import braintrace
from braintrace import nn, rules, tasks

HERE = Path(__file__).resolve().parent
INK, LEARNS, STOPPED = '#222222', '#0072b2', '#d55e00'
STEPS, STOP, PIECE = 60_000, 30_000, 1000


def errors() -> tuple[np.ndarray, np.ndarray]:
    """The squared error of each step: of the learner that goes on, and with the weights at STOP."""
    task = tasks.drifting_filter(STEPS, taps=4, period=40_000)
    xs, ys, _ = task.sample(jax.random.key(0), 1)
    brainstate.random.seed(0)
    model = nn.LRUCell(1, 32, r_max=0.99)
    learner = braintrace.compile(model, rules.d_rtrl(), xs[0], batch_size=1)
    optimizer, opt_state, learnt, stopped = optax.adam(1e-3), None, [], None

    def step(x, y):
        return task.loss(learner(x), y)

    for part in (slice(0, STOP), slice(STOP, STEPS)):
        found = learner.etrace_train(
            xs[part], ys[part], step_fn=step, optimizer=optimizer, opt_state=opt_state
        )
        losses, opt_state = found.losses, found.opt_state
        learnt.append(losses)
        if stopped is None:
            squares = lambda outputs, targets: ((outputs - targets) ** 2)[:, 0, 0]
            stopped = braintrace.evaluate(learner, xs[STOP:], ys[STOP:], squares)
    return np.concatenate(learnt), np.asarray(stopped)


def draw(learnt: np.ndarray, stopped: np.ndarray) -> Figure:
    figure = Figure(figsize=(7.4, 3.2), layout='constrained', facecolor='white')
    axis = figure.subplots()
    for values, first, colour in ((learnt, 0, LEARNS), (stopped, STOP, STOPPED)):
        means = values.reshape(-1, PIECE).mean(1)
        axis.plot(first + PIECE * (0.5 + np.arange(len(means))), means, colour, lw=2)
    axis.axhline(1, color=INK, lw=1, ls='--')
    axis.axvline(STOP, color=INK, lw=1, ls=':')
    axis.text(2000, 1.2, 'who always says 0', color=INK)
    axis.text(STOP + 700, 12, 'learning stops here, or goes on', color=INK)
    axis.text(36_000, 0.006, 'it goes on', color=LEARNS, weight='bold')
    axis.text(46_000, 2.6, 'it stops', color=STOPPED, weight='bold', va='top')
    axis.set(xlabel='step', ylabel='squared error', yscale='log', xlim=(0, STEPS), ylim=(1e-4, 30))
    axis.xaxis.set_major_formatter(lambda value, _: f'{value:,.0f}')
    axis.spines[['top', 'right']].set_visible(False)
    return figure


def main(argv: list[str]) -> None:
    """Write the picture."""
    file = Path(argv[0]) if argv else HERE / 'stream.svg'
    plain = {'svg.hashsalt': 'stream', 'svg.fonttype': 'path', 'font.size': 10}
    with matplotlib.rc_context(plain):
        draw(*errors()).savefig(file, metadata={'Date': None} if file.suffix == '.svg' else None)


if __name__ == '__main__':
    main(sys.argv[1:])
