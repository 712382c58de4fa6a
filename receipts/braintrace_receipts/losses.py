"""Losses by name: their value for each lane, and the error that they send to the outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .bounds import Num, exact


class Loss(NamedTuple):
    """``per_lane(outputs, targets)``, and ``slope(outputs, targets)``, its derivative."""

    per_lane: Callable[[Num, Num], Num]
    slope: Callable[[Num, Num], Num]


def softmax(outputs: Num) -> Num:
    """Probabilities along the last axis."""
    shifted = outputs - exact(outputs.value.max(-1, keepdims=True), outputs.floor)
    size = shifted.map(np.exp, np.exp)
    below = size.sum(-1)
    return size / below.reshape((*below.shape, 1))


def _half_mse(outputs: Num, targets: Num) -> Num:
    distance = outputs - targets
    return 0.5 * (distance * distance).sum(-1)


def _cross_entropy(outputs: Num, targets: Num) -> Num:
    top = exact(outputs.value.max(-1, keepdims=True), outputs.floor)
    below = (outputs - top).map(np.exp, np.exp).sum(-1)
    log = below.map(np.log, lambda x: 1 / x)
    logits = outputs - top - log.reshape((*log.shape, 1))
    return -(targets * logits).sum(-1)


def _softmax_slope(outputs: Num, targets: Num) -> Num:
    mass = targets.sum(-1)
    return softmax(outputs) * mass.reshape((*mass.shape, 1)) - targets


LOSSES = {
    'half_mse': Loss(_half_mse, lambda outputs, targets: outputs - targets),
    'softmax_ce': Loss(_cross_entropy, _softmax_slope),
}


def divisor_of(mask: Num, reduction: str) -> Num:
    """The sum of the mask for a mean, 1 for a sum and where no lane counts."""
    whole = mask.sum()
    return whole if reduction == 'mean' and whole.value != 0 else exact(1.0, mask.floor)
