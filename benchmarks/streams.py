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
from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
from nets import NETS, Cell
from runner import CACHE, RESULTS, load, measure, options, versions

import braintrace
from braintrace import nn, rules, tasks
from braintrace.tasks import Batch, Task

PATH = RESULTS / 'streams.json'
SEEDS = tuple(range(1, 11))
RATE = 1e-3  # of Adam, everywhere
EXACT = {'Henon': 10, 'sunspots': 3}  # seeds of exact RTRL, a few minutes of a core each; else 1
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
# Means and standard deviations of ten seeds, five of truncation, from results/TIMESERIES_TABLES.md
# of https://github.com/sonaradarcn/sketched-rtrl.
RULES = 'RTRL', 'SnAp-1', 'RFLO', 'UORO', 'truncated BPTT, 25'
FIGURES = {
    'Henon': '.0052 .0010  .0052 .0012  .0704 .0163  .6583 .2966  .0311 .0030',
    'Mackey-Glass': '.0180 .0218  .0050 .0010  .0572 .0331  .0497 .0238  .0080 .0010',
    'Lorenz': '.0051 .0040  .0024 .0008  .0442 .0124  .0425 .0431  .0054 .0007',
    'laser': '.0199 .0041  .0214 .0012  .2759 .2241  .4145 .1523',
    'sunspots': '.1451 .0061  .1437 .0019  .1536 .0038  .2119 .0461',
}


def in_pairs(line: str) -> list[tuple[float, float]]:
    numbers = list(map(float, line.split()))
    return list(zip(numbers[::2], numbers[1::2]))


PUBLISHED = {name: dict(zip(RULES, in_pairs(line))) for name, line in FIGURES.items()}


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


def of_nets(name: str) -> Callable:
    return lambda task: NETS[name](task, False)


def restarted(build: Callable, task: Task) -> Restarted:
    return Restarted(build(replace(task, inputs=task.inputs - 1)))


BUILT = {
    PLAIN: partial(restarted, plain),
    f'{PLAIN}, leak': partial(restarted, Leaky),
    **{name: partial(restarted, of_nets(name)) for name in NETWORKS},
    **{f'{name}, alone': of_nets(name) for name in NETWORKS},
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
    pieces = np.array_split(found.losses.mean(0), min(30, found.losses.shape[1]))
    curve = [piece.mean() for piece in pieces]
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


# each sample once -------------------------------------------------------------------------------

FARTHEST = 10.0  # deviations; a patient who starts to walk after standing is at 150


@cache
def sequence(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Samples and the next ones (T, D), as deviations from the mean of what came until then."""
    x = FILES[name]()
    x = x - x[0]
    count = np.arange(1, len(x) + 1)[:, None]
    so_far = np.cumsum(x, 0) / count
    spread = np.sqrt(np.maximum(np.cumsum(x**2, 0) / count - so_far**2, 0))
    spread = np.where(spread > 1e-9, spread, 1)[:-1]
    scaled = lambda x: np.clip((x - so_far[:-1]) / spread, -FARTHEST, FARTHEST)
    return scaled(x[:-1]), scaled(x[1:])


def scored(targets: np.ndarray) -> np.ndarray:
    """Where a sequence counts: behind its first tenth."""
    return np.arange(len(targets)) >= len(targets) // 10


def normalised(losses: np.ndarray, targets: np.ndarray) -> list[float]:
    """Mean squared errors of the seeds (N, T) over that of the mean of what came so far."""
    counts = scored(targets)
    return (losses[:, counts].mean(1) / (targets[counts] ** 2).mean()).tolist()


def forecast(name: str) -> Task:
    """The next sample of a sequence, which is the same for all seeds."""
    xs, ys = (jnp.asarray(a[:, None], jnp.float32) for a in sequence(name))
    mask = jnp.asarray(scored(ys), jnp.float32)
    sizes = len(xs), xs.shape[-1], ys.shape[-1]
    return as_stream(name, sizes, lambda key, lanes, part: Batch(xs, ys, mask))


def along(name: str, way: Way, frozen: bool, seeds: tuple[int, ...]) -> dict:
    """A network that learns at each step; or not any more behind the first tenth."""
    task, first = forecast(name), len(sequence(name)[0]) // 10
    rate = (lambda count: RATE * (count < first)) if frozen else RATE
    found = learnt(task, way, rate, 1, seeds)
    return of_run(found, seeds) | {'scores': normalised(found.losses, sequence(name)[1])}


def timed(losses_of: Callable, name: str, seeds: tuple[int, ...]) -> dict:
    """The record of what has no `tasks.run`: of ``losses_of(xs, ys, seeds)``, (N, T)."""
    xs, ys = sequence(name)
    begin = time.perf_counter()
    losses = np.asarray(losses_of(xs, ys, seeds))
    spent = time.perf_counter() - begin
    scores = normalised(losses, ys)
    return {'seeds': seeds, 'scores': scores, 'samples': xs.shape, 'seconds': spent}


def rolling(net: str, xs, ys, seeds: tuple[int, ...], window: int = WINDOW):
    """Back-propagation of each step's loss through the last steps, a window for every step."""
    xs, ys = (jnp.asarray(a[:, None], jnp.float32) for a in (xs, ys))
    task = as_stream('a stream', (len(xs), xs.shape[-1], ys.shape[-1]), lambda *_: None)
    made = []
    for seed in seeds:
        brainstate.random.seed(seed)
        model = NETS[net](task, False)
        made.append(braintrace.compile(model, rules.same_step(), xs[0], batch_size=1).pure())
    cell, adam = made[0][0].cell, optax.adam(RATE)

    def losses(params, carry):
        def turn(now, begin):
            params, moments, carry = now
            seen, asked = (jax.lax.dynamic_slice_in_dim(a, begin, window) for a in (xs, ys))

            def loss(params):
                outputs = jax.lax.scan(lambda c, x: cell(params, c, x)[::-1], carry, seen)[1]
                return squared(outputs[-1], asked[-1])

            found, grads = jax.value_and_grad(loss)(params)
            carry = cell(params, carry, seen[0])[1]
            moves, moments = adam.update(grads, moments)
            return (optax.apply_updates(params, moves), moments, carry), found

        begins = jnp.arange(len(xs) - window + 1)
        found = jax.lax.scan(turn, (params, adam.init(params), carry), begins)[1]
        return jnp.concatenate([jnp.zeros(window - 1), found])

    each = (jax.tree.map(lambda *a: jnp.stack(a), *(m[k] for m in made)) for k in (1, 2))
    return jax.jit(jax.vmap(losses))(*each)


RESERVOIR, RADIUS, FORGETS, RIDGE = 128, 0.9, 0.999, 1.0


def reservoir(xs, ys, seeds: tuple[int, ...]) -> np.ndarray:
    """An echo state network, whose readout is that of recursive least squares (Jaeger 2002), of
    the states, the inputs and 1; in double precision.
    """
    size = RESERVOIR + xs.shape[1] + 1
    draws = [np.random.default_rng(seed) for seed in seeds]
    W = np.stack([rng.normal(size=(RESERVOIR, RESERVOIR)) for rng in draws])
    W *= RADIUS / np.abs(np.linalg.eigvals(W)).max(1)[:, None, None]
    into = np.stack([rng.uniform(-1, 1, (xs.shape[1], RESERVOIR)) for rng in draws])
    h, readout = np.zeros((len(seeds), RESERVOIR)), np.zeros((len(seeds), size, ys.shape[1]))
    P = np.tile(np.eye(size) / RIDGE, (len(seeds), 1, 1))
    losses = np.zeros((len(seeds), len(xs)))
    for t, (x, y) in enumerate(zip(xs, ys)):
        h = np.tanh(np.einsum('nij,ni->nj', W, h) + x @ into)
        known = np.broadcast_to(np.append(x, 1.0), (len(seeds), len(x) + 1))
        z = np.concatenate([h, known], 1)
        error = y - np.einsum('ni,nio->no', z, readout)
        losses[:, t] = (error**2).mean(1)
        Pz = np.einsum('nij,nj->ni', P, z)
        gain = Pz / (FORGETS + np.einsum('ni,ni->n', z, Pz))[:, None]
        readout += gain[:, :, None] * error[:, None]
        P = (P - gain[:, :, None] * Pz[:, None]) / FORGETS
        P = (P + P.swapaxes(1, 2)) / 2
    return losses


LAGS = 8  # samples that a linear model sees, of one number each; of several numbers, the newest


def linear(steps: bool, xs, ys, seeds: tuple[int, ...]) -> np.ndarray:
    """River's linear regression, for each number that is asked: by its default steps along the
    gradient, with scaled features, or by least squares (its Bayesian one).
    """
    try:
        from river import linear_model, preprocessing
    except ImportError:
        raise Missing('pip install river') from None
    models = [
        preprocessing.StandardScaler() | linear_model.LinearRegression()
        if steps
        else linear_model.BayesianLinearRegression()
        for _ in ys[0]
    ]
    lags, errors = LAGS if xs.shape[1] == 1 else 1, np.zeros(ys.shape)
    for t in range(lags - 1, len(xs)):
        features = dict(enumerate(xs[t - lags + 1 : t + 1].ravel().tolist()))
        for k, model in enumerate(models):
            errors[t, k] = ys[t, k] - model.predict_one(features)
            model.learn_one(features, ys[t, k])
    return (errors**2).mean(1)[None]


def last(xs, ys, seeds: tuple[int, ...]) -> np.ndarray:
    return ((ys - xs) ** 2).mean(1)[None]


ONLINE = {
    'D_RTRL': (rules.d_rtrl, False),
    'ES_D_RTRL 0.9': (lambda: rules.es_d_rtrl(0.9), False),
    'same step': (rules.same_step, False),
    'D_RTRL, frozen': (rules.d_rtrl, True),
}
ROLLING = f'rolling windows of {WINDOW}'
BESIDE = {
    f'reservoir of {RESERVOIR}, least squares': reservoir,
    'River, linear': partial(linear, True),
    'River, linear, least squares': partial(linear, False),
    'the last sample': last,
}
ALONE = '-'  # in place of a network
ABSENT = {  # named by who asks for real streams, and in no file of the package
    'web traffic': ('river', 'datasets/web-traffic.csv'),
    'blood pressure': ('aeon', 'datasets/data/PigArtPressure/PigArtPressure_TEST.ts'),
    'PLAID': ('aeon', 'datasets/data/PLAID/PLAID_TEST.ts'),
}


def prequential(seeds: tuple[int, ...]) -> dict:
    found: dict = {}
    for name in FILES:
        for net in NETWORKS:
            for row, (rule, frozen) in ONLINE.items():
                way = Way(row, f'{net}, alone', rule)
                found[f'next {name}', net, row] = partial(along, name, way, frozen, seeds)
            call = partial(timed, partial(rolling, net), name, seeds)
            found[f'next {name}', net, ROLLING] = call
        for row, losses_of in BESIDE.items():
            found[f'next {name}', ALONE, row] = partial(timed, losses_of, name, seeds)
    for name, where in ABSENT.items():
        found[f'next {name}', ALONE, 'every row'] = partial(bundled, *where)
    return found


# a set of digits, longer tasks, and decays that fit ----------------------------------------------

KEPT_BACK = 400  # of the 4,000 sequences to learn from, for the scores on the way


@cache
def one_line_digits() -> tuple[tuple, tuple]:
    """Digits as lines of 40 numbers, 4,000 to learn from and 1,000 for the test, as the package
    makes them (Greydanus and Kobak, 2024).
    """
    try:
        from mnist1d.data import get_dataset_args, make_dataset
    except ImportError:
        raise Missing('pip install mnist1d requests') from None
    with np.errstate(all='ignore'):
        found = make_dataset(get_dataset_args())
    return (found['x'], found['y']), (found['x_test'], found['y_test'])


def lines(shuffled: bool) -> Task:
    """Which digit a line of `one_line_digits` is, told at its last number; ``shuffled``: with its
    numbers in one order that was drawn.
    """
    (x, y), test = one_line_digits()
    order = np.random.default_rng(0).permutation(40) if shuffled else np.arange(40)
    parts = {'train': (x[KEPT_BACK:], y[KEPT_BACK:]), 'test': test}
    parts['validation'] = x[:KEPT_BACK], y[:KEPT_BACK]
    parts = {k: (jnp.asarray(x[:, order], float), jnp.asarray(y)) for k, (x, y) in parts.items()}

    def draw(key, lanes: int, part: str) -> Batch:
        xs, labels = parts[part]
        chosen = jnp.arange(lanes) % len(xs)  # those that are scored: all, in their order
        if part == 'train':
            chosen = jax.random.choice(key, len(xs), (lanes,), replace=False)
        ys = jnp.broadcast_to(labels[chosen], (40, lanes))
        return Batch(xs[chosen].T[..., None], ys, jnp.zeros(40).at[-1].set(1))

    def loss(logits, labels):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def score(logits, labels, mask):
        return jnp.mean(logits[-1].argmax(-1) == labels[-1])

    name = 'mnist1d, shuffled' if shuffled else 'mnist1d'
    return Task(name, 40, 1, 10, draw, loss, score, 'accuracy', 0.1)


def es(*decays: float) -> results.Way:
    given = decays if len(decays) > 1 else decays[0]
    return results.Way(f'ES_D_RTRL {", ".join(map(str, decays))}', lambda: rules.es_d_rtrl(given))


TRIED = 'same step, Adam', 'D_RTRL', 'D_RTRL, whole credit', results.BPTT
MOST = [way for way in results.WAYS if way.name in TRIED]
DECAYS = [es(0.9), es(0.99), es(0.999), es(0.99, 0.9), es(0.9, 0.99)]
RATED = 'LIF + ALIF 100, rates'
TRIALS = {  # by task and net: the task, updates, learning rate, batch, test sequences, rows, seeds
    ('evidence 7', RATED): (tasks.evidence, 600, 1e-2, 32, 600, DECAYS, 3),
    **{
        (name, net): (partial(lines, name != 'mnist1d'), 4000, 5e-3, 50, 1000, ways, 3)
        for name in ('mnist1d', 'mnist1d, shuffled')
        for net, ways in (('GRU 64', MOST), ('LRU 64', MOST[1:2]))
    },
    ('copy 500', 'LRU 96'): (partial(tasks.copy_memory, 500), 800, 1e-2, 24, 600, MOST[:2], 3),
    ('adding 1000', 'minLSTM 32'): (partial(tasks.adding, 1000), 1200, 1e-2, 32, 600, MOST[:2], 3),
}


def tried(net: str, trial: tuple, way: results.Way, seeds: tuple[int, ...]) -> dict:
    make, updates, rate, batch, test = trial[:5]
    task, penalty = make(), results.PENALTY if net == RATED else 0.0
    setting = results.Setting(task, net, updates, rate, batch, 0.0, penalty)
    found = results.run(setting, way, seeds, updates, test=test)
    return of_run(found, seeds) | {'metric': task.metric, 'memory': found.memory}


def rows(seeds: tuple[int, ...] = SEEDS, steps: int = STEPS) -> dict:
    """All rows: functions by ``(task, net, row)``."""
    found: dict = {}
    for name in SYSTEMS:
        for way in OURS:
            of = seeds[: EXACT.get(name, 1)] if way.name == 'RTRL' else seeds
            found[name, way.net, way.name] = partial(beside, name, way, RESTART, of, steps)
        for way in OURS:
            if way.name in FEW:
                key = f'{name}, without restarts', way.net, way.name
                found[key] = partial(beside, name, way, None, seeds, steps)
    found |= prequential(seeds)
    for (name, net), trial in TRIALS.items():
        *_, ways, number = trial
        for way in ways:
            found[name, net, way.name] = partial(tried, net, trial, way, seeds[:number])
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
