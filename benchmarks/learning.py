"""One row of the leaderboard on one task and net: training, its score, and what it costs."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from methods import BPTT, NAMED, OPTIMIZERS, Method, gradient
from nets import NETS

import braintrace
from braintrace.tasks import Task

CLIP = 1.0  # the largest norm of a gradient
CHUNK = 32  # steps of a stream between two updates by BPTT, and of its measured gradients
TESTED = 300  # sequences that are scored


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
        start = time.perf_counter()
        jax.block_until_ready(self.grads(self.params, *self.given))
        return time.perf_counter() - start

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
    for each in (study, beside):
        each.seconds()
    return float(np.median([study.seconds() / beside.seconds() for _ in range(turns)]))


def cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    """None where a vector is not finite or zero."""
    size = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / size) if np.isfinite(size) and size > 0 else None


def record(setting: Setting, method: Method, effort: Effort = Effort()) -> dict:
    """What the leaderboard keeps of one row."""
    begin = time.perf_counter()
    setting = setting._replace(updates=setting.updates // effort.less)
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
