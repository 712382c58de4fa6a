"""What each learning rule learns, and what it costs: the leaderboard.

    python benchmarks/rules.py                 every row that is not there yet (make rules)
    python benchmarks/rules.py --again --only '*sine* | D_RTRL'    rows of these names, once more
    python benchmarks/rules.py --quick         two settings, one seed, one rate; keeps nothing

The records go to ``benchmarks/results/rules.json``, one after another, so that a run that is cut
off goes on where it was. ``benchmarks/rules_page.py`` makes ``docs/rules.md`` from them.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from nets import NETS, TAU_OUT
from runner import RESULTS, in_turn, learnt, measure, options, seconds

import braintrace
from braintrace import rules, tasks
from braintrace.functional import Gradient
from braintrace.tasks import Task

PATH = RESULTS / 'rules.json'
GRU, SMALL, SPIKING, SPARSE = 'GRU 64', 'GRU 16', 'LIF + ALIF 100', 'sparse 32'
LRU = 'LRU 64'
CLIP = 1.0  # the largest norm of a gradient
CHUNK = 32  # steps of a stream between two updates by BPTT, and of its measured gradients
TESTED = 300  # sequences that are scored


# the rows: ways to a gradient, each with its optimiser ------------------------------------------


OPTIMIZERS = {
    'Adam': optax.adam,
    'RMSprop': lambda rate: optax.rmsprop(rate, decay=0.99),
    'SGD': lambda rate: optax.sgd(SGD_FACTOR * rate),
}
SGD_FACTOR = 30  # SGD takes larger rates: its steps are not divided by the gradient's size


class Method(NamedTuple):
    """A row: ``rule`` makes a value of :mod:`braintrace.rules`; None: reverse mode through
    ``cut`` steps at a time, all if that is None.

    ``window``: exact windows of that many steps over the rule. ``leaky``: the readout of the
    spiking net is filtered behind its weights. ``nets``: only there, by default on all.
    """

    name: str
    rule: Callable | None = None
    optimizer: str = 'Adam'
    cut: int | None = None
    window: int | None = None
    leaky: bool = False
    nets: tuple = ()


def e_prop(feedback: str) -> Callable:
    return lambda: rules.e_prop(math.exp(-1 / TAU_OUT), feedback)


BPTT = 'BPTT'
METHODS = (
    Method(BPTT),
    Method('truncated BPTT, 8', cut=8),
    Method('truncated BPTT, 32', cut=32),
    *(
        Method(f'same step, {optimizer}', lambda: rules.same_step(), optimizer)
        for optimizer in ('SGD', 'RMSprop', 'Adam')
    ),
    Method('D_RTRL', lambda: rules.d_rtrl()),
    Method('D_RTRL, whole credit', lambda: rules.d_rtrl(credit='whole')),
    Method('SnAp-1', lambda: rules.snap(1)),
    Method('SnAp-2', lambda: rules.snap(2), nets=(SPARSE,)),
    Method('RTRL', lambda: rules.rtrl(), nets=(SMALL,)),
    Method('ES_D_RTRL 0.5', lambda: rules.es_d_rtrl(0.5)),
    Method('ES_D_RTRL 0.9', lambda: rules.es_d_rtrl(0.9)),
    Method('signs', lambda: rules.signs()),
    Method('UORO', lambda: rules.uoro(), nets=(GRU, SMALL, SPIKING)),
    *(
        Method(name, e_prop(feedback), leaky=True, nets=(SPIKING,))
        for name, feedback in (('e-prop', 'symmetric'), ('e-prop, random feedback', 'random'))
    ),
    Method('exact windows of 8', lambda: rules.d_rtrl(), window=8),
    Method('exact windows of 16', lambda: rules.d_rtrl(), window=16),
)
NAMED = {method.name: method for method in METHODS}


def applies(method: Method, net: str, steps: int) -> bool:
    """Whether the row belongs to a net, and its windows are shorter than the whole sequence."""
    longest = max(method.cut or 0, method.window or 0)
    return (not method.nets or net in method.nets) and longest < steps


def gradient(method: Method, online, loss: Callable, keep_trace: bool = False) -> Callable:
    """``(params, state, xs, ys, mask) -> Gradient`` over a sequence."""
    if method.rule is None:
        return reverse(online.cell, loss, method.cut)
    if method.window:  # their trace is read at the borders, so it is kept
        return online.sequence_grad(loss, window=method.window, inside='exact', keep_trace=True)
    return online.sequence_grad(loss, keep_trace=keep_trace)


def reverse(cell: Callable, loss: Callable, cut: int | None) -> Callable:
    """Reverse mode of the whole loop; with ``cut`` no gradient passes a border of ``cut`` steps."""

    def run(params, state, xs, ys, mask):
        def total(params):
            def step(carry, at):
                t, x, y = at
                if cut and cut < len(xs):
                    carry = jax.tree.map(
                        lambda c: jnp.where(t % cut == 0, jax.lax.stop_gradient(c), c), carry
                    )
                outputs, carry = cell(params, carry, x)
                return carry, loss(outputs, y)

            carry, losses = jax.lax.scan(step, state.carry, (jnp.arange(len(xs)), xs, ys))
            return jnp.average(losses, weights=mask), (losses, carry)

        grads, (losses, carry) = jax.grad(total, has_aux=True)(params)
        return Gradient(grads, losses, None, state.replace(carry=carry))

    return run


# a row is trained, scored and compared --------------------------------------------------------


class Setting(NamedTuple):
    """A task on a net: sequences in a batch, and updates (a stream has its steps)."""

    task: Task
    net: str
    batch: int
    updates: int

    @property
    def steps(self) -> int:
        """Those of one gradient by BPTT."""
        return min(self.task.steps, CHUNK) if self.task.stream else self.task.steps


class Study:
    """A setting with one method: its compiled functions."""

    def __init__(self, setting: Setting, method: Method):
        self.setting, self.method = setting, method
        self.task = setting.task
        rule = method.rule() if method.rule else None
        self.model = NETS[setting.net](self.task, method.leaky)
        first = jnp.zeros((setting.batch, self.task.inputs))
        learner = braintrace.compile(self.model, rule, first, batch_size=setting.batch)
        self.online, self.params, self.carry = learner.pure()
        self.first = first
        self.optimizer = optax.inject_hyperparams(
            lambda rate: optax.chain(
                optax.clip_by_global_norm(CLIP), OPTIMIZERS[method.optimizer](rate)
            )
        )(rate=1.0)
        run = self._stream if self.task.stream else self._sequences
        self.train = jax.jit(jax.vmap(run))
        self.score = jax.jit(self._scores, static_argnums=2)
        self.steps = setting.steps
        self.grads = jax.jit(gradient(method, self.online, self.task.loss))

    def initial(self, seed: int) -> dict:
        """Parameters drawn from a seed."""
        brainstate.random.seed(seed)
        model = NETS[self.setting.net](self.task, self.method.leaky)
        states = model.states(brainstate.ParamState)
        return {path: states[path].value for path in self.params}

    def _start(self, params, rate):
        state = self.online.init(params, self.carry, self.first)
        moments = self.optimizer.init(params)
        moments.hyperparams['rate'] = rate
        return state, moments

    def _sequences(self, params, rate, key):
        """An update after each batch of sequences."""
        grads_of = gradient(self.method, self.online, self.task.loss)

        def update(at, key):
            params, moments, state = at
            batch = self.task.sample(key, self.setting.batch)
            grads, losses, _, state = grads_of(params, self._anew(state), *batch)
            changes, moments = self.optimizer.update(grads, moments, params)
            params = optax.apply_updates(params, changes)
            return (params, moments, state), jnp.average(losses, weights=batch.mask)

        state, moments = self._start(params, rate)
        keys = jax.random.split(key, self.setting.updates)
        (params, _, _), losses = jax.lax.scan(update, (params, moments, state), keys)
        return params, losses

    def _anew(self, state):
        """The state before a new sequence; what is dropped at the end of one is empty already."""
        if self.method.window:
            return braintrace.functional.reset(state, jnp.ones_like(state.t, bool), self.carry)
        return state.replace(carry=self.carry)

    def _stream(self, params, rate, key):
        """An update at each step of a stream, or at the end of each piece for reverse mode."""
        batch = self.task.sample(key, self.setting.batch)
        state, moments = self._start(params, rate)
        method, loss = self.method, self.task.loss
        every = method.window or (1 if method.rule else method.cut or CHUNK)
        if every == 1:
            learn = self.online.sequence_update(loss, self.optimizer)
            params, losses, *_ = learn(params, moments, state, batch.xs, batch.ys)
            return params, losses
        grads_of = gradient(method, self.online, loss, keep_trace=True)

        def update(at, piece):
            params, moments, state = at
            grads, losses, _, state = grads_of(params, state, *piece, jnp.ones(every))
            changes, moments = self.optimizer.update(grads, moments, params)
            return (optax.apply_updates(params, changes), moments, state), losses

        pieces = [a.reshape(-1, every, *a.shape[1:]) for a in (batch.xs, batch.ys)]
        (params, _, _), losses = jax.lax.scan(update, (params, moments, state), pieces)
        return params, losses.reshape(-1)

    def _scores(self, params, keys, part):
        return jax.vmap(lambda params, key: self._score(params, key, part))(params, keys)

    def _score(self, params, key, part):
        """The score of held-out sequences, in lanes of the batch's size."""
        size, carry = self.setting.batch, self.carry
        batch = self.task.sample(key, TESTED // size * size, part)
        lanes = batch.xs.reshape(self.task.steps, -1, size, self.task.inputs)

        def outputs(xs):
            def step(carry, x):
                out, carry = self.online.cell(params, carry, x)
                return carry, out

            return jax.lax.scan(step, carry, xs)[1]

        found = jax.vmap(outputs, 1, 1)(lanes)
        found = found.reshape(self.task.steps, -1, self.task.outputs)
        return self.task.score(found, batch.ys, batch.mask)

    # what it costs --------------------------------------------------------------------------------

    @functools.cached_property
    def given(self) -> tuple:
        """A state and a batch at which gradients are measured."""
        xs, ys, mask = self.task.sample(jax.random.key(7), self.setting.batch)
        mask = jnp.ones_like(mask) if self.task.stream else mask
        state = self.online.init(self.params, self.carry, self.first)
        return state, xs[: self.steps], ys[: self.steps], mask[: self.steps]

    def seconds(self) -> float:
        """The time of one gradient."""
        return seconds(lambda: self.grads(self.params, *self.given))

    def direction(self, params) -> np.ndarray:
        """The whole gradient as one vector."""
        return np.asarray(ravel_pytree(self.grads(params, *self.given)[0])[0], float)

    def bytes(self) -> int:
        """Those of the trace for one batch, and of what reverse mode keeps of its steps."""
        memory = self.online.memory()
        trace = sum(row[-1] for row in memory.rows if row[0].startswith('trace'))
        window = self.method.window or (0 if self.method.rule else self.method.cut or self.steps)
        return trace + (self._kept(min(window, self.steps)) if window else 0)

    def _kept(self, steps: int) -> int:
        """Bytes of what JAX stores between the forward and the backward pass of some steps."""
        state, xs, ys, _ = self.given

        def total(params, carry):
            def step(carry, at):
                outputs, carry = self.online.cell(params, carry, at[0])
                return carry, self.task.loss(outputs, at[1])

            return jax.lax.scan(step, carry, (xs[:steps], ys[:steps]))[1].sum()

        pull = jax.eval_shape(lambda *at: jax.vjp(total, *at)[1], self.params, state.carry)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))


@dataclass(frozen=True)
class Effort:
    """Learning rates that are tried, seeds, turns of each comparison of times, and a divisor of
    the updates.
    """

    rates: tuple = (1e-3, 3e-3, 1e-2)
    seeds: tuple = (1, 2, 3)
    turns: int = 7
    less: int = 1


QUICK = Effort((3e-3,), (1,), 1, 10)


def trained(study: Study, beside: Study, effort: Effort) -> tuple[dict, tuple]:
    """The rate that a validation seed chooses, the scores of the seeds at it, and the parameters
    of the first of them before and after.
    """
    rates, tried = effort.rates, {}
    if len(rates) > 1:
        first = jax.tree.map(lambda p: jnp.stack([p] * len(rates)), study.initial(0))
        scores, _ = judged(study, beside, first, rates, (0,) * len(rates), 'validation')
        tried = {str(rate): float(score) for rate, score in zip(rates, scores)}
        rates = (best(rates, scores, study.task),)
    starts = [study.initial(seed) for seed in effort.seeds]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    seeds = effort.seeds
    scores, params = judged(study, beside, params, rates * len(seeds), seeds, 'test')
    found = {'validation': tried, 'rate': rates[0], 'scores': [float(s) for s in scores]}
    return found, (starts[0], jax.tree.map(lambda p: p[0], params))


def best(rates: tuple, scores: np.ndarray, task: Task) -> float:
    """The rate of the best score that is a number."""
    sign = 1 if task.metric == 'accuracy' else -1
    return rates[int(np.argmax(np.where(np.isfinite(scores), sign * scores, -np.inf)))]


def judged(study: Study, beside: Study, params, rates, seeds, part: str):
    """Train from each of these parameters, and score: ``(scores, parameters)``."""
    keys = jnp.stack([jax.random.fold_in(jax.random.key(11), seed) for seed in seeds])
    params, losses = study.train(params, jnp.asarray(rates, jnp.float32), keys)
    if study.task.stream:  # what it said on the way, when it could not know better
        mask = study.task.sample(keys[0], 1).mask
        return np.average(np.asarray(losses), axis=1, weights=np.asarray(mask)), params
    return np.asarray(beside.score(params, keys, part)), params


def compared(study: Study, beside: Study, turns: int) -> float:
    """The median, over turns, of the time of a gradient beside that of BPTT."""
    times = in_turn({'own': study.seconds, 'bptt': beside.seconds}, turns + 1)
    return float(np.median(np.divide(times['own'], times['bptt'])[1:]))  # the first turn compiles


def cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    """None where a vector is not finite or zero."""
    size = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / size) if np.isfinite(size) and size > 0 else None


def record(setting: Setting, method: Method, effort: Effort = Effort()) -> dict:
    """What the leaderboard keeps of one row."""
    begin = time.perf_counter()
    study = Study(setting, method)
    beside = study if method.name == BPTT else reference(setting, method.leaky)
    found, ends = trained(study, beside, effort)
    cosines = [cosine(study.direction(p), beside.direction(p)) for p in ends]
    return found | {
        'time': 1.0 if study is beside else compared(study, beside, effort.turns),
        'bytes': study.bytes(),
        'cosine': cosines,
        'seconds': time.perf_counter() - begin,
    }


@functools.lru_cache(maxsize=2)
def reference(setting: Setting, leaky: bool) -> Study:
    """BPTT on the same net."""
    return Study(setting, NAMED[BPTT]._replace(leaky=leaky))


# the settings ------------------------------------------------------------------------------------


def settings() -> list[Setting]:
    """Each task on the nets that learn it by BPTT within the updates."""
    short, copy = tasks.copy_memory(10, length=5), tasks.copy_memory(20)
    add, sine = tasks.adding(48), tasks.shifting_sine(20_480, 1024)
    rows, pixels, evidence = tasks.digits(), tasks.digits('pixels'), tasks.evidence()
    return [
        Setting(short, GRU, 30, 500),
        Setting(copy, LRU, 30, 200),
        Setting(add, GRU, 30, 300),
        Setting(add, SMALL, 30, 400),
        Setting(evidence, SPIKING, 30, 60),
        Setting(rows, GRU, 30, 150),
        Setting(rows, SPIKING, 30, 150),
        Setting(rows, SPARSE, 30, 150),
        Setting(pixels, LRU, 30, 150),
        *(Setting(sine, net, 1, 1) for net in (GRU, LRU, SPIKING)),
    ]


def rows(chosen: list[Setting]) -> dict[tuple[str, str, str], tuple[Setting, Method]]:
    """The rows of these settings by name."""
    return {
        (setting.task.name, setting.net, method.name): (setting, method)
        for setting in chosen
        for method in METHODS
        if applies(method, setting.net, setting.steps)
    }


def measured(setting: Setting, method: Method, effort: Effort) -> dict:
    """The record of a row, or why there is none."""
    setting = setting._replace(updates=setting.updates // effort.less)
    train = partial(record, setting, method, effort)
    return learnt(setting.task, train, batch=setting.batch, updates=setting.updates)


def main():
    given, every = options(__doc__, PATH), settings()
    chosen, effort = ([every[3], every[6]], QUICK) if given.quick else (every, Effort())
    measure(given, {n: partial(measured, *row, effort) for n, row in rows(chosen).items()})


if __name__ == '__main__':
    main()
