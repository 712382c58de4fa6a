"""Streams: settings of which others published figures, and real sequences, each sample once.

    python benchmarks/streams.py                              every row that is not there yet
    python benchmarks/streams.py --again --only 'Henon*'      these rows, once more
    python benchmarks/streams.py --quick                      one row, short; keeps nothing

A row has ten seeds in one compiled program. The records go to ``benchmarks/results/streams.json``,
one after another, so that a run that is cut off goes on where it was;
``benchmarks/results_page.py`` shows them. The real sequences are files inside of packages
(``pip install reservoirpy aeon river statsmodels scipy``), read where they lie: nothing is
downloaded, and a row says which file it lacks.
"""

from __future__ import annotations

import csv
import gzip
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, pstdev
from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from nets import NETS, Cell
from printer import BLUE, GREY, figure, folded, listed, table
from runner import CACHE, RESULTS, load, measure, options, versions

import braintrace
from braintrace import nn, rules, tasks
from braintrace.tasks import Batch, Task

PATH = RESULTS / 'streams.json'
SEEDS = tuple(range(1, 11))
RATE = 1e-3  # of Adam, everywhere
WINDOW = 16  # of truncated back-propagation that rolls


# files of packages ------------------------------------------------------------------------------


class Missing(Exception):
    """A package, or a file in it, is not there."""


def bundled(package: str, path: str) -> Path:
    """A file of a package, which is not imported."""
    found = find_spec(package)
    file = Path(found.submodule_search_locations[0]) / path if found else None
    if file is None or not file.exists():
        raise Missing(f'{package} has no {path} here' if found else f'pip install {package}')
    return file


@cache
def laser() -> np.ndarray:
    """The far-infrared laser of the Santa Fe competition; its set A is the first 1,000 numbers."""
    return np.load(bundled('reservoirpy', 'datasets/santafe_laser.npy')).astype(float)


@cache
def sunspots() -> np.ndarray:
    """Monthly means from 1749 to June 2009, of version 1."""
    file = bundled('statsmodels', 'datasets/sunspots/src/sunspots_monthly.dat')
    lines = [line.split() for line in file.read_text().splitlines()]
    years = [line for line in lines if len(line) > 1 and line[0].isdigit() and len(line[0]) == 4]
    return np.array([float(n) for year in years for n in year[1:]])[:, None]


@cache
def gait() -> np.ndarray:
    """Nine accelerometers at ankle, leg and trunk of a patient with Parkinson's disease."""
    file = bundled('aeon', 'datasets/data/Daphnet_S06R02E0/S06R02E0.csv')
    return np.loadtxt(file, delimiter=',', skiprows=1, usecols=range(1, 10))


@cache
def water() -> np.ndarray:
    """Flow in a pipe, hourly."""
    with bundled('river', 'datasets/water-flow.csv').open() as file:
        return np.array([[float(row[1])] for row in list(csv.reader(file))[1:]])


@cache
def volatility() -> np.ndarray:
    """The log of the mean size of ten stocks' daily returns, in percent."""
    with gzip.open(bundled('river', 'datasets/sp500.csv.gz'), 'rt') as file:
        returns = [[float(n) for n in row[1:11]] for row in list(csv.reader(file))[1:]]
    return np.log(np.abs(returns).mean(1, keepdims=True))


FILES = {
    'laser': laser,
    'sunspots': sunspots,
    'gait': gait,
    'water flow': water,
    'volatility': volatility,
}


# the settings of others -------------------------------------------------------------------------

STEPS, BATCH, UNITS, RESTART, CUT = 15_000, 8, 64, 200, 25
SOURCE = 'https://github.com/sonaradarcn/sketched-rtrl'
PUBLISHED = {  # its results/TIMESERIES_TABLES.md: means and standard deviations of ten seeds (*)
    'Henon': {
        'RTRL': (0.0052, 0.0010),
        'SnAp-1': (0.0052, 0.0012),
        'RFLO': (0.0704, 0.0163),
        'UORO': (0.6583, 0.2966),
        'truncated BPTT, 25': (0.0311, 0.0030),  # (*) of five, as the others of truncation
    },
    'Mackey-Glass': {
        'RTRL': (0.0180, 0.0218),
        'SnAp-1': (0.0050, 0.0010),
        'RFLO': (0.0572, 0.0331),
        'UORO': (0.0497, 0.0238),
        'truncated BPTT, 25': (0.0080, 0.0010),
    },
    'Lorenz': {
        'RTRL': (0.0051, 0.0040),
        'SnAp-1': (0.0024, 0.0008),
        'RFLO': (0.0442, 0.0124),
        'UORO': (0.0425, 0.0431),
        'truncated BPTT, 25': (0.0054, 0.0007),
    },
    'laser': {
        'RTRL': (0.0199, 0.0041),
        'SnAp-1': (0.0214, 0.0012),
        'RFLO': (0.2759, 0.2241),
        'UORO': (0.4145, 0.1523),
    },
    'sunspots': {
        'RTRL': (0.1451, 0.0061),
        'SnAp-1': (0.1437, 0.0019),
        'RFLO': (0.1536, 0.0038),
        'UORO': (0.2119, 0.0461),
    },
}


def henon(key, lanes: int, steps: int):
    """``x' = 1 - 1.4 x^2 + y``, ``y' = 0.3 x`` (Henon 1976)."""

    def turn(now, _):
        x, y = now
        new = 1 - 1.4 * x**2 + y
        return (new, 0.3 * x), new

    start = tuple(jax.random.uniform(key, (2, lanes), minval=-0.1, maxval=0.1))
    return jax.lax.scan(turn, start, length=steps)[1]


def mackey_glass(key, lanes: int, steps: int):
    """The equation of ``tasks.mackey_glass`` with tau = 17, by Euler's steps of 1."""

    def turn(past, _):
        new = 0.9 * past[-1] + 0.2 * past[0] / (1 + past[0] ** 10)
        return jnp.concatenate([past[1:], new[None]]), new

    start = 1.2 + 0.1 * jax.random.uniform(key, (18, lanes), minval=-1, maxval=1)
    return jax.lax.scan(turn, start, length=steps)[1]


def lorenz(key, lanes: int, steps: int, dt: float = 0.02):
    """x of Lorenz (1963), sigma = 10, rho = 28, beta = 8/3, by Runge and Kutta's steps."""

    def slope(s):
        x, y, z = s
        return jnp.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

    def turn(s, _):
        a = slope(s)
        b = slope(s + dt / 2 * a)
        c = slope(s + dt / 2 * b)
        s = s + dt / 6 * (a + 2 * b + 2 * c + slope(s + dt * c))
        return s, s[0]

    start = jax.random.normal(key, (3, lanes)) + jnp.array([[1.0], [1.0], [20.0]])
    return jax.lax.scan(turn, start, length=steps)[1]


WARM = 1000  # steps before a series begins


def drawn(series: Callable, key, lanes: int, steps: int):
    """Lanes of a system that begin anywhere on its attractor, with mean 0 and variance 1."""
    x = series(key, lanes, WARM + steps)[WARM:]
    return (x - x.mean()) / x.std()


def circling(name: str, key, lanes: int, steps: int):
    """Lanes that begin anywhere in a file, and go round it; with mean 0 and variance 1."""
    x = FILES[name]()[:1000] if name == 'laser' else FILES[name]()
    x = jnp.asarray((x - x.mean()) / x.std(), jnp.float32)[:, 0]
    begin = jax.random.randint(key, (lanes,), 0, len(x))
    return x[(begin + jnp.arange(steps)[:, None]) % len(x)]


SYSTEMS = {
    'Henon': partial(drawn, henon),
    'Mackey-Glass': partial(drawn, mackey_glass),
    'Lorenz': partial(drawn, lorenz),
    'laser': partial(circling, 'laser'),
    'sunspots': partial(circling, 'sunspots'),
}


def squared(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


def as_stream(name: str, sizes: tuple, draw: Callable) -> Task:
    score = lambda outputs, ys, mask: jnp.average(jax.vmap(squared)(outputs, ys), weights=mask)
    return Task(name, *sizes, draw, squared, score, 'mse', 1.0, stream=True)


def published(name: str, restart: int | None = RESTART, steps: int = STEPS) -> Task:
    """The next value of a series; a second input is 0 where all states begin at 0 again. The score
    is that of the last sixth.
    """

    def draw(key, lanes: int, part: str) -> Batch:
        x = SYSTEMS[name](key, lanes, steps + 1)[..., None]
        goes_on = jnp.arange(steps) % (restart or steps) > 0
        flags = jnp.broadcast_to(goes_on[:, None, None].astype(x.dtype), x[:-1].shape)
        last = jnp.arange(steps) >= steps - steps // 6
        return Batch(jnp.concatenate([x[:-1], flags], -1), x[1:], last.astype(float))

    told = name if restart else f'{name}, without restarts'
    return as_stream(told, (steps, 2, 1), draw)


class Restarted(brainstate.nn.Module):
    """A network whose hidden states are multiplied by the last input, 0 or 1, before a step."""

    def __init__(self, net: brainstate.nn.Module):
        super().__init__()
        self.net = net

    def update(self, x):
        for state in self.net.states(brainstate.HiddenState).values():
            state.value = jax.tree.map(lambda h: h * x[:, -1:].astype(h.dtype), state.value)
        return self.net(x[:, :-1])


def plain(task: Task) -> Cell:
    """Tanh units and a linear readout, whose weights and biases are uniform in +-1/8. The records
    tell this: Frobenius norm 4.6 and spectral radius 0.57 of the first recurrent weights.
    """
    draw = lambda shape: brainstate.random.uniform(-1, 1, size=shape) / UNITS**0.5
    how = {'w_init': draw, 'b_init': draw}
    net = Cell(task, nn.VanillaRNNCell(task.inputs, UNITS, activation='tanh', **how), UNITS)
    net.readout = nn.Linear(UNITS, task.outputs, **how)
    return net


class Leaky(brainstate.nn.Module):
    """`plain` for a rule that has a trace of ``leak``, and nothing that a leak does to the states:
    what such a state had before is taken away again where no gradient goes.
    """

    def __init__(self, task: Task, leak: float = 0.9):
        super().__init__()
        self.net, self.leak = plain(task), leak

    def update(self, x):
        cell = self.net.cell
        before, y = cell.h.value, cell.W(jnp.concatenate([x, cell.h.value], -1))
        cell.h.value = jnp.tanh(y) + self.leak * (before - jax.lax.stop_gradient(before))
        return self.net.readout(cell.h.value)


PLAIN = f'tanh {UNITS}'
NETWORKS = 'LRU 64', 'GRU 64'


def restarted(build: Callable, task: Task) -> Restarted:
    return Restarted(build(replace(task, inputs=task.inputs - 1)))


BUILT = {
    PLAIN: partial(restarted, plain),
    f'{PLAIN}, leak': partial(restarted, Leaky),
    **{
        name: partial(restarted, lambda task, name=name: NETS[name](task, False))
        for name in NETWORKS
    },
}


class Way(NamedTuple):
    """A row: a rule, or None for windows of back-propagation that is truncated at their borders."""

    name: str
    net: str
    rule: Callable | None
    window: int | None = None


OURS = (
    Way('RTRL', PLAIN, rules.rtrl),
    Way('SnAp-1', PLAIN, lambda: rules.snap(1)),
    Way('RFLO', f'{PLAIN}, leak', rules.d_rtrl),
    Way('rflo()', PLAIN, rules.rflo),
    Way('UORO', PLAIN, lambda: rules.uoro('batch')),
    Way('UORO, a pair each', PLAIN, rules.uoro),
    Way('D_RTRL', PLAIN, rules.d_rtrl),
    Way('same step', PLAIN, rules.same_step),
    Way(f'truncated BPTT, {CUT}', PLAIN, None, CUT),
    *(Way('D_RTRL', net, rules.d_rtrl) for net in NETWORKS),
)
EXACT = ('Henon', 'Mackey-Glass')  # where RTRL is measured: 22 minutes of a core each
FEW = ('SnAp-1', 'same step', f'truncated BPTT, {CUT}')  # rows without restarts


def learnt(task: Task, way: Way, rate, batch: int, seeds: tuple[int, ...]) -> tasks.Run:
    """The training of a row by Adam."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # a file has one sequence, whatever the key
        return tasks.run(
            task,
            lambda seed: BUILT[way.net](task),
            way.rule and way.rule(),
            optax.adam(rate),
            None,
            seeds,
            batch_size=batch,
            window=way.window,
        )


def of_run(found: tasks.Run, seeds: tuple[int, ...]) -> dict:
    """What a record keeps: the scores of the seeds, and their mean losses on the way."""
    curve = [piece.mean() for piece in np.array_split(found.losses.mean(0), 30)]
    return {
        'seeds': seeds,
        'scores': found.scores.tolist(),
        'curve': [float(f'{loss:.4g}') for loss in curve],
        'seconds': found.seconds,
        'compile_seconds': found.compile_seconds,
    }


def recorded(train: Callable[[], dict]) -> dict:
    """A record of its own: where and of which commit it is; or which file it lacks."""
    asked = ['git', 'rev-parse', '--short=12', 'HEAD']
    commit = subprocess.run(asked, capture_output=True, text=True, cwd=RESULTS).stdout.strip()
    try:
        found = train()
    except Missing as why:
        found = {'refused': str(why)}
    return {'commit': commit, 'versions': versions(), 'load': load(), **found}


def beside(name: str, way: Way, restart: int | None, seeds: tuple[int, ...], steps: int) -> dict:
    task = published(name, restart, steps)
    return of_run(learnt(task, way, RATE, BATCH, seeds), seeds)


def rows(seeds: tuple[int, ...] = SEEDS, steps: int = STEPS) -> dict:
    """All rows: functions by ``(task, net, row)``."""
    found: dict = {}
    for name in SYSTEMS:
        for way in OURS:
            if way.name != 'RTRL' or name in EXACT:
                found[name, way.net, way.name] = partial(beside, name, way, RESTART, seeds, steps)
        for way in OURS:
            if way.name in FEW:
                key = f'{name}, without restarts', way.net, way.name
                found[key] = partial(beside, name, way, None, seeds, steps)
    dearest_last = sorted(found.items(), key=lambda row: row[0][2] == 'RTRL')
    return {key: partial(recorded, train) for key, train in dearest_last}


def main():
    given = options(__doc__, PATH)
    jax.config.update('jax_compilation_cache_dir', str(CACHE))
    if given.quick:
        measure(given, dict(list(rows(SEEDS[:1], 400).items())[1:2]))
    else:
        measure(given, rows())


if __name__ == '__main__':
    main()
