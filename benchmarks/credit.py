"""Where credit through time begins to pay: `python benchmarks/credit.py [UPDATES]`.

A GRU of 16 units holds two bits that it is shown for one step, until the next ones come after
``delay`` steps; it is told its error at the last steps before that, a share of all. It learns by
the same step and by D_RTRL, at two learning rates and from three seeds each, in 25 settings of both
numbers. The meter reads the cosine of the same step. The numbers go to
``benchmarks/results/credit.json``, the picture to ``docs/pictures/credit.png``, after four minutes
of a core.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cells import Spec, cell, loss_of
from printer import PICTURES, figure
from runner import RESULTS, keep, versions

from braintrace import functional, rules, verify

PATH, PICTURE = RESULTS / 'credit.json', PICTURES / 'credit.png'
DELAYS, SHARES = (4, 8, 16, 32, 64), (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
UNITS, BATCH, STEPS, UPDATES = 16, 16, 128, 400
RATES, SEEDS = (3e-3, 1e-2), (1, 2, 3)
GRU = partial(cell, Spec('gru', UNITS, 3, STEPS, BATCH))
RULES = {'same step': rules.same_step(), 'D_RTRL': rules.d_rtrl()}
DIRECTIONS, READINGS = 4, 8
LEVELS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def sample(key, delay, share):
    """Inputs, targets and the mask of a batch; a third input tells that bits are shown."""
    bits = jax.random.rademacher(key, (STEPS, BATCH, 2), jnp.float32)
    since = jnp.arange(STEPS) % delay
    ys = bits[jnp.arange(STEPS) - since]
    shown = (since == 0)[:, None, None]
    xs = jnp.where(shown, jnp.concatenate([ys, jnp.ones((STEPS, BATCH, 1))], -1), 0)
    told = jnp.maximum(1, jnp.round(share * delay))
    return xs, ys, (since >= delay - told).astype(jnp.float32)


def first_weights(seed):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = {**dict.fromkeys(('z0', 'r0', 'h0'), (3 + UNITS, UNITS)), 'out': (UNITS, 2)}
    return {k: jax.random.normal(key, s) / s[0] ** 0.5 for key, (k, s) in zip(keys, shapes.items())}


class Lane:
    """One setting, learning rate and seed, of a rule; functions for ``jax.vmap``."""

    def __init__(self, rule):
        self.learner = functional.online(GRU, rule)
        self.carry = {'state0': jnp.zeros((BATCH, UNITS))}
        self.gradient = self.learner.sequence_grad(loss_of, keep_trace=False)
        self.meter = verify.Meter(
            self.learner, loss_of, directions=DIRECTIONS, keep=DIRECTIONS * READINGS
        )
        self.adam = optax.scale_by_adam()

    def grads(self, params, xs, ys, mask):
        state = self.learner.init(params, self.carry, xs[0])
        return self.gradient(params, state, xs, ys, mask).grads

    def train(self, now, lane, begin, updates: int):
        """``(params, opt_state)`` after some updates from ``begin`` on."""
        delay, share, rate, seed = lane

        def update(now, i):
            params, opt_state = now
            key = jax.random.fold_in(jax.random.key(seed), i)
            grads = self.grads(params, *sample(key, delay, share))
            moves, opt_state = self.adam.update(grads, opt_state)
            return (jax.tree.map(lambda p, m: p - rate * m, params, moves), opt_state), None

        return jax.lax.scan(update, now, begin + jnp.arange(updates))[0]

    def error(self, params, lane):
        """The mean squared error on fresh sequences; 1 is that of a network that says nothing."""
        delay, share, _, seed = lane

        def of(i):
            key = jax.random.fold_in(jax.random.key(seed), -1 - i)
            xs, ys, mask = sample(key, delay, share)
            step = lambda h, x: GRU(params, h, x)[::-1]
            outputs = jax.lax.scan(step, self.carry, xs)[1]
            return jnp.average(((outputs - ys) ** 2).mean((1, 2)), weights=mask)

        return jax.lax.map(of, jnp.arange(8)).mean()

    def read(self, params, lane):
        """A state of the meter that has seen some batches at these weights."""
        delay, share, _, seed = lane

        def once(metered, i):
            data = sample(jax.random.fold_in(jax.random.key(seed), -100 - i), delay, share)
            xs, ys, mask = data
            grads = self.grads(params, *data)
            return self.meter.update(metered, params, self.carry, xs, ys, grads, mask), None

        metered = self.meter.init(params, self.carry, jax.random.key(seed))
        return jax.lax.scan(once, metered, jnp.arange(READINGS))[0]


def lanes() -> tuple:
    """``(delay, share, rate, seed)`` of all lanes, as arrays."""
    every = [(d, s, r, k) for d in DELAYS for s in SHARES for r in RATES for k in SEEDS]
    return tuple(map(jnp.array, zip(*every)))


def by_setting(values) -> np.ndarray:
    """Numbers of the lanes along (delays, shares, rates, seeds)."""
    return np.asarray(values, float).reshape(len(DELAYS), len(SHARES), len(RATES), len(SEEDS))


def read(lane: Lane, params, each: tuple) -> dict:
    """The meter's cosine, and its error: means over rates and seeds."""
    metered = replace(jax.jit(jax.vmap(lane.read))(params, each), key=None)
    metered = jax.tree.map(np.asarray, metered)
    states = [jax.tree.map(lambda a: a[i], metered) for i in range(len(each[0]))]  # noqa: B023
    told = [lane.meter.reading(state).cosine for state in states]
    values, errors = (by_setting(numbers) for numbers in list(zip(*told))[:2])
    errors = np.sqrt((errors**2).mean((2, 3)) / (len(RATES) * len(SEEDS)))
    return {'value': values.mean((2, 3)).tolist(), 'error': errors.tolist()}


def measured(updates: int) -> dict:
    """Errors by rule, and the cosines of the same step at the start, in the middle, at the end."""
    found: dict = {'delays': DELAYS, 'shares': SHARES, 'updates': updates, 'seeds': SEEDS}
    each, half = lanes(), updates // 2
    for name, rule in RULES.items():
        lane, params = Lane(rule), jax.vmap(first_weights)(each[3])
        now, places = (params, jax.vmap(lane.adam.init)(params)), [params]
        train = jax.jit(jax.vmap(partial(lane.train, updates=half), in_axes=(0, 0, None)))
        for begin in (0, half):
            now = train(now, each, begin)
            places.append(now[0])
            print(f'{name}: {begin + half} updates', flush=True)
        found[name] = by_setting(jax.jit(jax.vmap(lane.error))(now[0], each)).tolist()
        if name == 'same step':
            found['cosines'] = [read(lane, place, each) for place in places]
    return found


def best(found: dict, name: str) -> np.ndarray:
    """Errors along (delays, shares): means over seeds, of the better learning rate."""
    return np.array(found[name]).mean(-1).min(-1)


def draw(found: dict) -> None:
    """The error of the same step over that of D_RTRL in colour, and as contours the meter's cosine
    of the same step before training.
    """
    ratio = best(found, 'same step') / best(found, 'D_RTRL')
    cosine = np.array(found['cosines'][0]['value'])
    with figure(PICTURE, 1, 1, 4.2) as (drawn, axes):
        shown = axes.imshow(np.log10(ratio), cmap='PuOr_r', vmin=-3, vmax=3, aspect='auto')
        for (i, j), r in np.ndenumerate(ratio):
            text, color = f'{r:.0f}' if r > 9.5 else f'{r:.1f}', 'white' if r > 100 else 'black'
            axes.text(j, i - 0.3, text, ha='center', va='center', fontsize=10, color=color)
        lines = axes.contour(cosine, levels=LEVELS, colors='black', linewidths=1.2)
        axes.clabel(lines, fmt='%.1f', fontsize=9)
        shares = ['1', *(f'1/{round(1 / s)}' for s in found['shares'][1:])]
        axes.set_xticks(range(len(shares)), shares)
        axes.set_yticks(range(len(ratio)), [str(d) for d in found['delays']])
        axes.set(xlabel='share of the steps at which the error is told', ylabel='delay in steps')
        drawn.colorbar(shown, label='log10 (error of the same step / of D_RTRL)')


def main(updates: int = UPDATES) -> None:
    found = measured(updates)
    keep(PATH, {'versions': versions()} | found)
    draw(found)


if __name__ == '__main__':
    main(*map(int, sys.argv[1:]))
