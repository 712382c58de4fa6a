"""A step of training on a task, for one seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp

from .._jax import is_key
from .._windows import Gradient, Penalised, check_loss, optimised
from ..errors import StructureError
from ..functional import OnlineLearner, OnlineState, fold_lane, partition, reset
from ._task import Part, Task


class Options(NamedTuple):
    """How a gradient is made, and how often parameters change."""

    batch: int
    window: int | None
    every: int | None
    penalty: Callable | None


class At(NamedTuple):
    """A place in training; ``first`` is the carry with which each sequence begins."""

    params: Any
    moments: Any
    state: OnlineState
    first: Any


class Training:
    """The functions that training compiles, for one seed each."""

    def __init__(self, task: Task, learner: OnlineLearner, optimizer, options: Options):
        self.task, self.online, self.optimizer, self.options = task, learner, optimizer, options

    def asked(self, outputs):
        """The outputs that the task asks for."""
        alone = not isinstance(outputs, tuple)
        if self.options.penalty is not None and (alone or len(outputs) != 2):
            raise StructureError(
                'the model returns no pair, and there is a penalty: return (outputs, what the '
                'penalty reads).'
            )
        found = outputs if alone else outputs[0]
        wanted = self.options.batch, self.task.outputs
        if not isinstance(found, jax.Array) or found.shape != wanted:
            raise StructureError(
                f'the outputs of the model are {_told(found)}; {self.task.name} asks for an array '
                f'{list(wanted)}: batch, outputs.'
            )
        return found

    def loss(self, outputs, y):
        """The loss of a step."""
        loss, penalty = self.task.loss(self.asked(outputs), y), self.options.penalty
        if penalty is None:
            return loss
        return check_loss(Penalised(loss, penalty(outputs[1])), 'the loss of a step')

    def start(self, params, carry, seed, x) -> At:
        """Before the first update; random keys of the carry and of the rule are drawn for each seed
        again.
        """
        state = self.online.init(params, carry, x)
        fold = partial(jax.random.fold_in, data=seed)
        trace = jax.tree.map(lambda e: fold(e) if is_key(e) else e, state.trace)
        state = fold_lane(state.replace(trace=trace), seed)
        return At(params, self.optimizer.init(params), state, carry)

    def update(self, at: At, key) -> tuple[At, jax.Array]:
        """An update, or several, on new sequences, and the loss."""
        batch, state = self.task.sample(key, self.options.batch), reset(at.state, True, at.first)
        if self.options.every is not None:
            at, losses = self.learn(at._replace(state=state), *batch)
        else:
            grads, losses, _, state = self.grads(at.params, state, *batch)
            loss = jnp.average(losses, weights=batch.mask)
            params, moments = self._moved(grads, at, loss)
            return at._replace(params=params, moments=moments, state=state), loss
        return at, jnp.average(losses, weights=batch.mask)

    @cached_property
    def grads(self) -> Callable:
        window = self.options.window
        if self.online.rule is None:
            return reverse(self.online.cell, self.loss, window)
        if window is None:
            return self.online.sequence_grad(self.loss, keep_trace=False)
        return self.online.sequence_grad(self.loss, window, inside='exact')

    def _moved(self, grads, at: At, loss: jax.Array) -> tuple:
        """Parameters and moments after an update; what is not trainable stays."""
        _, _, frozen = partition(at.params, self.online)
        moves = jax.tree.map(lambda f: f is None, frozen, is_leaf=lambda f: f is None)
        return optimised(self.optimizer, (at.params, at.moments), grads, moves, loss)

    def learn(self, at: At, xs, ys, mask=None) -> tuple[At, jax.Array]:
        """Updates along sequences."""
        window, every = self.options.window, self.options.every
        whole = window is None and self.online.rule is not None
        learn = self.online.sequence_update(
            self.loss,
            self.optimizer,
            update_every=window or every or 1,
            inside='trace' if whole else 'exact',
        )
        found = learn(*at[:3], xs, ys, mask)
        moved = {'params': found.params, 'moments': found.opt_state, 'state': found.state}
        return at._replace(**moved), found.losses

    def score(self, params, carry, key, part: Part, sequences: int):
        """The score of held-out sequences, in batches."""
        size, batch = self.options.batch, self.task.sample(key, sequences, part)
        chosen = jnp.arange(-(-sequences // size) * size) % sequences  # some of them twice

        def outputs(chosen):
            def step(carry, x):
                out, carry = self.online.cell(params, carry, x)
                return carry, self.asked(out)

            return jax.lax.scan(step, carry, batch.xs[:, chosen])[1]

        with brainstate.environ.context(fit=False):
            found = jax.lax.map(outputs, chosen.reshape(-1, size)).swapaxes(0, 1)
        found = found.reshape(len(found), -1, self.task.outputs)[:, :sequences]
        return self.task.score(found, batch.ys, batch.mask)


def reverse(cell: Callable, loss: Callable, window: int | None) -> Callable:
    """``(params, state, xs, ys, mask) -> Gradient`` by reverse mode of the whole loop;
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
        return Gradient(grads, losses, None, state.replace(carry=carry))

    return run


def _told(found) -> str:
    if not isinstance(found, jax.Array):
        return f'a {type(found).__name__}'
    return f'{found.dtype}{list(found.shape)}'
