"""Records of a run along a sequence: its arguments, one step, the place of the run, its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from .._executor import Factors, Signals, Vector
from .arguments import check_mask, divisor

Count = TypeVar('Count', jax.Array, jax.Array | None)
Show = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Sequence(NamedTuple):
    """``slices``, weights of the losses (``mask``) and reset flags (``(T,)`` or ``(T, B)``), each
    with time in front.

    ``counts``: bool ``(T,)``, false where a weight is 0: such a loss and its derivative need not be
    numbers. None: all count. ``done``: how many steps the learner made before each, None
    where nothing asks. ``penalties``: weights of the penalties beside these losses; None: there
    are none, or each weight is 1. They count where a loss does not, so ``counts`` is None then.
    """

    slices: Any
    mask: jax.Array
    counts: jax.Array | None
    flags: jax.Array | None
    done: jax.Array | None = None
    penalties: jax.Array | None = None

    @classmethod
    def of(cls, slices, mask, flags, length: int, penalised: bool) -> Sequence:
        """A sequence with the weights that a user gave, or None."""
        weights = check_mask(mask, length)
        if mask is None:
            return cls(slices, weights, None, flags)
        if penalised:
            return cls(slices, weights, None, flags, penalties=jnp.ones_like(weights))
        return cls(slices, weights, weights != 0, flags)

    def penalised(self, reduction: str) -> Sequence:
        """With the weights of penalties whose mean counts beside the weighed mean of these steps'
        losses, by the divisor of which the gradient is divided.
        """
        if self.penalties is None or reduction == 'sum':
            return self
        weight = divisor(self.mask) / len(self.mask)
        return self._replace(penalties=jnp.full_like(self.mask, weight))

    def part(self, start: int, stop: int) -> Sequence:
        return jax.tree.map(lambda a: a[start:stop], self)

    def blocks(self, number: int, size: int) -> Sequence:
        return jax.tree.map(lambda a: a[: number * size].reshape(number, size, *a.shape[1:]), self)


class Observation(NamedTuple):
    """One observed step; ``world`` stands after it, ``direct`` are gradients that pass no op."""

    world: Any
    factors: Factors
    signals: Signals
    direct: Any
    loss: jax.Array
    aux: Any


class Together(NamedTuple):
    """Several steps under one pull-back: ``dy`` and ``lam`` are derivatives of the sum of their
    losses, by each y and by the hidden states before them. ``factors`` has time in front;
    ``trace``: one that moved inside, after them.
    """

    world: Any
    factors: Factors
    dy: dict[str, jax.Array]
    lam: dict[str, Vector]
    direct: Any
    losses: jax.Array
    aux: Any
    trace: Any


class Moment(NamedTuple):
    """A place in a run: the world of its step, the trace, and the count of trace steps.

    At both ends of a sequence ``trace`` may hold pending steps too, as a learner carries it between
    single steps.
    """

    world: Any
    trace: Any
    t: jax.Array


class Gradients(NamedTuple):
    """Gradients of some steps' losses, for the weights of ops and for weights that reach a loss
    otherwise.
    """

    ops: dict[str, dict[str, jax.Array]]
    direct: Any


class Result(NamedTuple):
    """``learnt`` (gradients, or weights and optimiser state) and the last moment of a run; losses
    and auxiliary outputs of all steps. ``stopped``: the exception that ended it before them.
    """

    learnt: Any
    end: Moment
    losses: jax.Array
    aux: Any
    stopped: BaseException | None = None


class GradientOptions(NamedTuple):
    """The arguments of ``sequence_grad``. ``keep``: whether a later call continues the trace;
    ``exact``: reverse mode without cuts inside a window.
    """

    window: Any = 'auto'
    memory_budget: int | None = None
    keep: bool = True
    reduction: str = 'mean'
    exact: bool = False


class UpdateOptions(NamedTuple):
    """Weights change after each ``every`` steps; ``delay`` updates share one write of the trace.
    ``exact``: reverse mode without cuts through the steps of an update.
    """

    optimizer: Any
    every: int
    delay: int
    reduction: str = 'mean'
    exact: bool = False


def counted(t: Count) -> Count:
    """The step count after one more step. The largest number stays: a count that wraps to 0 would
    empty the trace. None: nothing is counted.
    """
    return None if t is None else t + (t < jnp.iinfo(t.dtype).max).astype(t.dtype)


def counts_along(t: jax.Array, flags: jax.Array | None, length: int, begin=0) -> tuple:
    """The step counts before each of some steps, after its reset, and after the last one; ``t``
    stands before the step ``begin``.
    """
    k = (jnp.arange(length, dtype=t.dtype) - begin).reshape(-1, *[1] * t.ndim)
    counts = t[None] + jnp.minimum(k, jnp.iinfo(t.dtype).max - t[None])
    if flags is not None:
        flags = flags.reshape(*flags.shape, *[1] * (counts.ndim - flags.ndim))
        last = jax.lax.cummax(jnp.where(flags, k, -1))  # the latest reset
        counts = jnp.where(last < 0, counts, k - last)
    return counts, counted(counts[-1])
