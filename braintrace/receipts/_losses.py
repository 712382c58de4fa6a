"""The losses of one step, lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..errors import OptionError, StructureError


def _half_mse(outputs, targets):
    return 0.5 * jnp.sum((outputs - targets) ** 2, -1)


def _softmax_ce(outputs, targets):
    return -jnp.sum(targets * jax.nn.log_softmax(outputs), -1)


LANES: dict[str, Callable] = {'half_mse': _half_mse, 'softmax_ce': _softmax_ce}
REDUCTIONS = ('mean', 'sum')


@dataclass(frozen=True)
class Loss:
    """``sum_b mask_b L_b / divisor`` of a loss that has a name, or a function of the user's."""

    name: str
    reduction: str
    own: Callable | None = None

    def total(self, outputs, wanted):
        """The loss of a step; ``wanted`` is a pair of the targets and the mask."""
        targets, mask = wanted
        if self.own is not None:
            return self.own(outputs, targets)
        if outputs.shape != targets.shape or outputs.ndim != 2:
            raise StructureError(
                f'outputs are {list(outputs.shape)} and targets {list(targets.shape)}; a receipt '
                'has both as (lanes, outputs). For softmax_ce give one-hot targets.'
            )
        total = jnp.sum(mask * LANES[self.name](outputs, targets))
        return total / self.divisor(mask)

    def divisor(self, mask):
        """The sum of the mask for a mean, 1 for a sum and where no lane counts."""
        whole = jnp.sum(mask)
        return jnp.where(whole == 0, 1, whole) if self.reduction == 'mean' else jnp.ones_like(whole)

    def lanes(self, outputs, targets, total):
        """The loss of each lane; of a function of the user's an equal part of the total."""
        if self.own is None:
            return LANES[self.name](outputs, targets)
        return jnp.full(outputs.shape[:1], total / len(outputs))

    def probabilities(self, outputs):
        """The probabilities that softmax gives; None for a loss without them."""
        return jax.nn.softmax(outputs) if self.name == 'softmax_ce' else None


def loss_of(loss, reduction: str) -> Loss:
    """The loss of that name, or of that function of outputs and targets."""
    if reduction not in REDUCTIONS:
        raise OptionError(f"reduction is {reduction!r}; choose 'mean' or 'sum'.")
    if callable(loss):
        name = getattr(loss, '__name__', type(loss).__name__)
        return Loss(f'{name} (own)', 'sum', loss)
    if loss not in LANES:
        raise OptionError(
            f"loss is {loss!r}; choose 'half_mse' or 'softmax_ce', or give a function "
            '`loss(outputs, targets)`, which no verifier can derive.'
        )
    return Loss(loss, reduction)
