"""Draws `from_river.svg`: the error along a stream, of a River model and of networks.

`python docs/pictures/from_river.py [FILE]` needs matplotlib, optax and river, for half a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import optax
from drawing import BLUE, FAINT, ORANGE, save, style, target
from matplotlib.figure import Figure
from river import linear_model, preprocessing

from braintrace import nn, rules
from braintrace.adapters.river import OnlineRegressor

STEPS, DELAY, PIECE = 6_000, 3, 200


def network(rule):
    return OnlineRegressor(lambda i, o: nn.LRUCell(i, 32), rule, optax.adam(3e-3))


def errors(model) -> np.ndarray:
    """The mean squared error of each piece of the stream, before its samples are learnt."""
    noise, squares = np.random.default_rng(0).normal(size=STEPS + DELAY), []
    for t in range(DELAY, STEPS + DELAY):
        x, y = {'x': noise[t]}, np.cos(t / 1000) * noise[t - DELAY]
        squares.append((model.predict_one(x) - y) ** 2)
        model.learn_one(x, y)
    return np.reshape(squares, (-1, PIECE)).mean(1)


def main(arguments: list[str]) -> Path:
    models = {
        'linear regression of River': (
            preprocessing.StandardScaler() | linear_model.LinearRegression(), FAINT),
        'linear recurrent unit, same step': (network(rules.same_step()), ORANGE),
        'linear recurrent unit, D_RTRL': (network(rules.d_rtrl()), BLUE),
    }  # fmt: skip
    with style('from_river'):
        figure = Figure(figsize=(7.2, 3.4), layout='constrained')
        axes = figure.subplots()
        for name, (model, color) in models.items():
            at = np.arange(0, STEPS, PIECE) + PIECE / 2
            found = errors(model)
            axes.plot(at, found, color=color, label=name)
            print(f'{name}, second half: {found[len(found) // 2 :].mean():.4f}')
        axes.set(xlabel='sample', ylabel='squared error', yscale='log')
        figure.legend(loc='outside upper center', ncols=3, frameon=False)
        return save(figure, target(arguments, 'from_river.svg'))


if __name__ == '__main__':
    print(main(sys.argv[1:]))
