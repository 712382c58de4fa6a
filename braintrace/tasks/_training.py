"""A step of training on a task, for one seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp

from .._learner import compile as compile_model
from .._rules import Rule
from .._windows import Penalised, is_key, optimised
from ..functional import OnlineLearner, OnlineState, online, split
from ._task import Task

__all__ = ['At', 'Options', 'Training']


class Options(NamedTuple):
    """How a gradient is made, and how often parameters change."""

    batch: int
    window: int | None
    every: int | None
    penalty: Callable | None


class At(NamedTuple):
    """A place in training."""

    params: Any
    moments: Any
    state: OnlineState


class Training:
    """The functions that training compiles, for one seed each."""

    def __init__(self, task: Task, rule: Rule | None, optimizer, options: Options, made: list):
        self.task, self.rule, self.optimizer, self.options = task, rule, optimizer, options
        self.first = jnp.zeros((options.batch, task.inputs))
        self.online, params, self.carry = self._pure(made[0])
        each = [self._params(one, params) for one in made]
        self.params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    def _pure(self, made) -> tuple[OnlineLearner, Any, Any]:
        if isinstance(made, tuple):
            cell, params, carry = made
            learner = online(cell, self.rule, mark='auto')
            jax.eval_shape(learner.init, params, carry, self.first)
            return learner, params, carry
        learner = compile_model(made, self.rule, self.first, batch_size=self.options.batch)
        return learner.pure()

    @staticmethod
    def _params(made, like):
        if isinstance(made, tuple):
            return made[1]
        states = made.states(brainstate.ParamState)
        return {path: states[path].value for path in like}

    def loss(self, outputs, y):
        """The loss of a step."""
        loss = self.task.loss(_asked(outputs), y)
        penalty = self.options.penalty
        return loss if penalty is None else Penalised(loss, penalty(outputs[1]))

    def start(self, params, seed) -> At:
        """Before the first update; random keys of the carry are drawn anew for each seed."""
        carry = jax.tree.map(
            lambda x: jax.random.fold_in(x, seed) if _is_random(x) else x, self.carry
        )
        state = self.online.init(params, carry, self.first)
        return At(params, self.optimizer.init(params), state)

    def anew(self, state: OnlineState) -> OnlineState:
        """The state before new sequences."""
        carry = jax.tree.map(
            lambda now, first: now if _is_random(now) else first, state.carry, self.carry
        )
        return state.replace(carry=carry, t=0 * state.t)

    def update(self, at: At, key) -> tuple[At, jax.Array]:
        """An update, or several, on new sequences, and the loss."""
        batch, state = self.task.sample(key, self.options.batch), self.anew(at.state)
        if self.options.every is not None:
            at, losses = self.learn(at._replace(state=state), *batch)
        else:
            grads, state, losses = self.grads(at.params, state, *batch)
            params, moments = self._moved(grads, at)
            at = At(params, moments, state)
        return at, jnp.average(losses, weights=batch.mask)

    @cached_property
    def grads(self) -> Callable:
        window = self.options.window
        if self.rule is None:
            return reverse(self.online.cell, self.loss, window)
        if window is None:
            return self.online.sequence_grad(self.loss, carry='drop')
        return self.online.sequence_grad(self.loss, window, inside='exact')

    def _moved(self, grads, at: At) -> tuple:
        """Parameters and moments after an update; what is not trainable stays."""
        _, _, frozen = split(at.params, self.online)
        moves = jax.tree.map(lambda f: f is None, frozen, is_leaf=lambda f: f is None)
        return optimised(self.optimizer, (at.params, at.moments), grads, moves)

    def learn(self, at: At, xs, ys, mask=None) -> tuple[At, jax.Array]:
        """Updates along sequences."""
        window, every = self.options.window, self.options.every
        learn = self.online.sequence_update(
            self.loss,
            self.optimizer,
            every=window or every or 1,
            inside='trace' if window is None else 'exact',
        )
        *now, losses = learn(*at, xs, ys, mask)
        return At(*now), losses

    def score(self, params, key, part: str, sequences: int):
        """The score of held-out sequences, in lanes of the batch's size."""
        task, size = self.task, self.options.batch
        batch = task.sample(key, -(-sequences // size) * size, part)
        lanes = batch.xs.reshape(task.steps, -1, size, task.inputs)

        def outputs(xs):
            def step(carry, x):
                out, carry = self.online.cell(params, carry, x)
                return carry, _asked(out)

            return jax.lax.scan(step, self.carry, xs)[1]

        found = jax.lax.map(outputs, lanes.swapaxes(0, 1)).swapaxes(0, 1)
        return task.score(found.reshape(*batch.xs.shape[:2], -1), batch.ys, batch.mask)


def reverse(cell: Callable, loss: Callable, window: int | None) -> Callable:
    """``(params, state, xs, ys, mask) -> grads, state, losses`` by reverse mode of the whole loop;
    no gradient passes a border of ``window`` steps.
    """

    def run(params, state, xs, ys, mask):
        def total(params):
            def step(carry, at):
                t, x, y = at
                if window is not None and window < len(xs):
                    held = jax.lax.stop_gradient(carry)
                    cut = t % window == 0
                    carry = jax.tree.map(lambda c, h: jnp.where(cut, h, c), carry, held)
                outputs, carry = cell(params, carry, x)
                found = loss(outputs, y)
                return carry, found if isinstance(found, Penalised) else Penalised(found, 0.0)

            every = jnp.arange(len(xs)), xs, ys
            carry, told = jax.lax.scan(step, state.carry, every)
            total = jnp.average(told.loss, weights=mask) + jnp.mean(told.penalty)
            return total, (told.loss, carry)

        grads, (losses, carry) = jax.grad(total, has_aux=True, allow_int=True)(params)
        return grads, state.replace(carry=carry), losses

    return run


def _asked(outputs):
    """The outputs that the task asks for."""
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _is_random(leaf) -> bool:
    """Whether a leaf of the carry is a random key, of the old kind too."""
    return is_key(leaf) or (leaf.dtype == jnp.uint32 and leaf.shape in ((2,), (4,)))
