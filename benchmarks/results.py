"""What networks learn, by which rule: each task with the nets that suit it, three seeds.

    python benchmarks/results.py                   every row that is not there yet (make results)
    python benchmarks/results.py --again --only '*copy* | D_RTRL'    these rows, once more
    python benchmarks/results.py --quick           two tasks, one seed, short; keeps nothing

The records go to ``benchmarks/results/learnt.json``, one after another, so that a run that is cut
off goes on where it was. ``benchmarks/results_page.py`` makes ``docs/results.md`` from them.
Compiled programs are kept in ``build/jax_cache``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from nets import NETS
from runner import CACHE, RESULTS, learnt, measure, options

import braintrace
from braintrace import rules, tasks, verify
from braintrace.tasks import Task

PATH = RESULTS / 'learnt.json'
CLIP = 1.0  # the largest norm of a gradient
WINDOW = 16
PENALTY = 0.02  # weight of firing rates that are not those of `nets.RATE`


class Way(NamedTuple):
    """A row: a rule, or None for back-propagation; exact windows, or those of truncation."""

    name: str
    rule: Callable | None
    window: int | None = None
    optimizer: Callable = optax.adam


def rmsprop(rate) -> optax.GradientTransformation:
    return optax.rmsprop(rate, decay=0.99)


BPTT = 'BPTT'
WAYS = (
    Way('same step, Adam', rules.same_step),
    Way('same step, RMSprop', rules.same_step, optimizer=rmsprop),
    Way('D_RTRL', rules.d_rtrl),
    Way('D_RTRL, whole credit', lambda: rules.d_rtrl(credit='whole')),
    Way('ES_D_RTRL 0.9', lambda: rules.es_d_rtrl(0.9)),
    Way(f'exact windows of {WINDOW}', rules.d_rtrl, WINDOW),
    Way(f'truncated BPTT, {WINDOW}', None, WINDOW),
    Way(BPTT, None),
)
FEW = ('same step, Adam', 'same step, RMSprop', 'D_RTRL', BPTT)


class Setting(NamedTuple):
    """A task on a net: updates, learning rate and sequences of a batch; ``aim``: the score that is
    to be reached; ``penalty``: weight of what the net's second output asks for; ``ways``: the rows,
    all if it is empty; ``test``: how many test sequences are scored.
    """

    task: Task
    net: str
    updates: int | None
    rate: float
    batch: int
    aim: float
    penalty: float = 0.0
    ways: tuple[str, ...] = ()
    test: int = 600

    def rows(self) -> list[Way]:
        """A stream has no BPTT, since it has no end."""
        named = [way for way in WAYS if not self.ways or way.name in self.ways]
        return [way for way in named if not (self.task.stream and way.name == BPTT)]


SEEDS = (1, 2, 3)


def settings() -> list[Setting]:
    fine, rated = 'LIF + ALIF 100, fine', 'LIF + ALIF 100, rates'
    match, filtered = tasks.match_to_sample(2, 500), tasks.drifting_filter(1_000_000)
    return [
        Setting(tasks.evidence(), rated, 600, 1e-2, 32, 0.97, PENALTY),
        Setting(tasks.evidence(dt=1), fine, 150, 1e-2, 32, 0.94, PENALTY, FEW),
        Setting(match, rated, 600, 5e-3, 32, 0.95, PENALTY),
        Setting(tasks.adding(200), 'minLSTM 32', 1200, 1e-2, 32, 0.002),
        Setting(tasks.copy_memory(50), 'LRU 96', 400, 1e-2, 24, 0.001),
        Setting(tasks.copy_memory(200), 'LRU 96', 800, 1e-2, 24, 0.01, ways=FEW),
        Setting(tasks.digits('pixels'), 'LRU 64', 1200, 3e-3, 50, 0.98, test=300),
        Setting(tasks.characters(), 'GRU 64', 600, 1e-2, 32, 2.0),
        Setting(tasks.pattern_generation(), rated, 400, 1e-2, 8, 0.1, PENALTY),
        Setting(filtered, 'LRU 32, linear', None, 3e-4, 1, 0.001),
        Setting(tasks.mackey_glass(), 'GRU 64', None, 5e-4, 1, 0.05),
    ]


def quick() -> list[Setting]:
    every = settings()
    return [s._replace(updates=30, ways=('D_RTRL', BPTT), test=60) for s in (every[0], every[6])]


def schedule(setting: Setting):
    """Cosine decay over the updates; a stream has no end and keeps its rate."""
    if setting.updates is None:
        return setting.rate
    return optax.cosine_decay_schedule(setting.rate, setting.updates)


def run(setting: Setting, way: Way, seeds: tuple[int, ...], updates: int | None, **how):
    """The training of a row, or its first updates."""
    return tasks.run(
        setting.task,
        lambda seed: NETS[setting.net](setting.task, False),
        way.rule and way.rule(),
        optax.chain(optax.clip_by_global_norm(CLIP), way.optimizer(schedule(setting))),
        updates,
        seeds,
        batch_size=setting.batch,
        window=way.window,
        penalty=(lambda extra: setting.penalty * extra) if setting.penalty else None,
        **how,
    )


def trained(setting: Setting, way: Way, seeds: tuple[int, ...]) -> dict:
    """What the record of a row keeps of its training."""
    found = run(setting, way, seeds, setting.updates, test=setting.test, progress=True)
    return {
        'scores': found.scores.tolist(),
        'looks': looks(found),
        'seconds': found.seconds,
        'compile_seconds': found.compile_seconds,
        'memory': found.memory,
        'cosines': cosines(setting, way, seeds[0], found.params_of(seeds[0])),
    }


def cosines(setting: Setting, way: Way, seed: int, end=None) -> list | None:
    """The meter's cosine and its error before training, in its middle and at its ``end``, of one
    seed; None for backpropagation, and for a stream.
    """
    task, batch = setting.task, setting.batch
    if way.rule is None or task.stream:
        return None
    middle = run(setting, way, (seed,), setting.updates // 2).params_of(seed)
    if end is None:
        end = run(setting, way, (seed,), setting.updates).params_of(seed)

    def loss(outputs, y):
        if not setting.penalty:
            return task.loss(outputs, y)
        return braintrace.Penalised(task.loss(outputs[0], y), setting.penalty * outputs[1])

    with brainstate.environ.context(fit=True):
        brainstate.random.seed(seed)
        model, x = NETS[setting.net](task, False), jnp.zeros((batch, task.inputs))
        learner = braintrace.compile(model, way.rule(), x, batch_size=batch)
        online, start, carry = learner.pure()
        how = {'window': way.window, 'inside': 'exact'} if way.window else {'keep_trace': False}
        gradient, meter = online.sequence_grad(loss, **how), verify.Meter(online, loss, None, 16)

        @jax.jit
        def read(params):
            def once(metered, key):
                xs, ys, mask = task.sample(key, batch)
                state = online.init(params, carry, xs[0])
                grads = gradient(params, state, xs, ys, mask).grads
                return meter.update(metered, params, carry, xs, ys, grads, mask), None

            keys = jax.random.split(jax.random.key(seed), 8)
            return jax.lax.scan(once, meter.init(params, carry), keys)[0]

        readings = [meter.reading(read(params)).cosine for params in (start, middle, end)]
    return [[e.value, e.error] for e in readings]


def looks(found: tasks.Run) -> list:
    """Pairs of a number of updates and the scores then; of a stream the loss until then."""
    if not found.task.stream:
        return [[done, scores.tolist()] for done, scores in found.validation]
    pieces = np.array_split(found.losses, 20, axis=1)
    ends = np.cumsum([piece.shape[1] for piece in pieces])
    return [[int(end), piece.mean(1).tolist()] for end, piece in zip(ends, pieces)]


def measured(setting: Setting, way: Way, seeds: tuple[int, ...]) -> dict:
    """The record of a row, or why there is none."""
    more = {name: getattr(setting, name) for name in ('batch', 'updates', 'rate', 'aim')}
    return learnt(setting.task, partial(trained, setting, way, seeds), **more)


def main():
    given = options(__doc__, PATH)
    jax.config.update('jax_compilation_cache_dir', str(CACHE))
    chosen, seeds = (quick(), SEEDS[:1]) if given.quick else (settings(), SEEDS)
    rows = {
        (setting.task.name, setting.net, way.name): partial(measured, setting, way, seeds)
        for setting in chosen
        for way in setting.rows()
    }
    measure(given, rows)


if __name__ == '__main__':
    main()
