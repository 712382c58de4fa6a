"""Delay lines between weights and synapses, written as sums over the rows of a line."""

import brainstate
import numpy as np
import saiunit as u

from braintrace import nn
from tests.nn.rows.cells import affine
from tests.nn.rows.row import Row

FIRST = brainstate.nn.init.Normal(scale=0.5)
WHOLE, LONGEST, WIDTH = np.array([0, 2, 3, 1, 2]), 3, 0.8
SHARED = np.array([[0.4], [1.3]])


class Delayed(brainstate.nn.Module):
    """Weights, a line, and synapses behind it."""

    def __init__(self, line, synapses):
        super().__init__()
        self.inp = nn.Linear(3, 5, w_init=FIRST, b_init=FIRST)
        self.line, self.syn = line, synapses

    def update(self, x):
        return self.syn(self.line(self.inp(x)))


def through(ops, p, s, x):
    """The input and the rows of the line that are read, and the line one step later."""
    line = s['line.line']
    rows = [affine(ops, p['inp.weight'], x), *(line[..., k, :] for k in range(LONGEST))]
    return rows, ops.stack(rows, -2)


def fixed(ops, p, s, x):
    rows, line = through(ops, p, s, x)
    y = sum(np.where(k == WHOLE, 1.0, 0.0) * row for k, row in enumerate(rows))
    g = np.exp(-1 / 3) * s['syn.g'] + y
    return g, {'line.line': line, 'syn.g': g}


def learnt(ops, p, s, x):
    rows, line = through(ops, p, s, x)
    delay = LONGEST * ops.sigmoid(ops.element_wise(p['line.delay']))
    weights = [ops.exp(-(((k - delay) / WIDTH) ** 2) / 2) for k in range(len(rows))]
    y = sum(w * row for w, row in zip(weights, rows)) / sum(weights)
    g = np.exp(-1 / 3) * s['syn.g'] + y
    return g, {'line.line': line, 'syn.g': g}


def classes(ops, p, s, x):
    rows, line = through(ops, p, s, x)
    delay = LONGEST * ops.sigmoid(ops.element_wise(p['line.delay']))
    weights = [ops.exp(-(((k - delay) / WIDTH) ** 2) / 2) for k in range(len(rows))]
    y = sum(w * row[..., None, :] for w, row in zip(weights, rows)) / sum(weights)
    return y, {'line.line': line}


TIMES = {'width': WIDTH, 'line_init': FIRST, 'learn': True}
ROWS = [
    Row(
        'delay_fixed',
        lambda: Delayed(nn.Delay(5, WHOLE * u.ms, line_init=FIRST), nn.Expon(5, 3.0, FIRST)),
        fixed,
        exact=True,
        context={'dt': 1 * u.ms},
    ),
    Row(
        'delay_learnt',
        lambda: Delayed(
            nn.Delay(5, np.array([0.3, 2, 2.9, 1, 1.5]) * u.ms, LONGEST * u.ms, **TIMES),
            nn.Expon(5, 3.0, FIRST),
        ),
        learnt,
        exact=True,
        context={'dt': 1 * u.ms},
    ),
    Row(
        'delay_classes',
        lambda: Delayed(nn.Delay(5, SHARED, LONGEST, classes=2, **TIMES), lambda y: y),
        classes,
        exact=True,
    ),
]
