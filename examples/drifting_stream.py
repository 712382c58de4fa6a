"""A million steps of a stream whose law drifts: an update at each of them, in memory that stays.

The target is a filter of the last six inputs, which turns once in 400,000 steps. The gradient of
each step alone keeps up at first, and loses its way as the filter turns.
"""

import resource
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import optax

from braintrace import nn, rules, tasks


def megabytes():
    """The most memory that the process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(steps=1_000_000, path=Path(__file__).parent / 'output' / 'drifting_stream.png'):
    """Learn by both rules, draw the errors along the stream, and return those of its last half."""
    task, scores = tasks.drifting_filter(steps, period=400_000), {}
    figure, axis = plt.subplots(figsize=(7, 4), layout='constrained')
    for rule in (rules.d_rtrl(), rules.same_step()):
        model = lambda seed: nn.LRUCell(1, 32, r_max=0.99)
        found = tasks.run(task, model, rule, optax.adam(3e-4), batch_size=1, progress=True)
        buffers = f'{found.memory / 2**10:.0f} KiB of buffers'
        print(f'{found}, {buffers}, {megabytes():.0f} MB in all')
        pieces = np.array_split(found.losses[0], 50)
        ends = np.cumsum([len(piece) for piece in pieces])
        axis.plot(ends, [piece.mean() for piece in pieces], label=found.method)
        scores[rule.name] = float(found.scores[0])
    axis.set(xlabel='steps', ylabel='squared error (target: 1)', yscale='log')
    axis.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    return scores


if __name__ == '__main__':
    main()
