"""The loss function of a step: ``loss(outputs, target) -> scalar``."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from .._errors import OptionError, StepFunctionError
from .._windows import check_loss

RUNNING: ContextVar[Any] = ContextVar('learner whose loss runs', default=None)


def as_inputs(inputs) -> tuple:
    """A plain tuple is passed as ``*inputs``; any other pytree is one input."""
    return inputs if type(inputs) is tuple else (inputs,)


def checked_loss(learner, loss_fn: Callable) -> Callable:
    """``loss_fn(outputs, target)``, held to return a loss and not to step the learner."""
    if not callable(loss_fn):
        raise OptionError(f'loss_fn is {loss_fn!r}; give a function `loss(outputs, target)`.')

    def loss(outputs, target):
        token = RUNNING.set(learner)
        try:
            return check_loss(loss_fn(outputs, target), 'loss_fn')
        finally:
            RUNNING.reset(token)

    return loss


def check_outside_of_loss(learner) -> None:
    """Refuse a call of the learner from its own loss function."""
    if RUNNING.get() is learner:
        raise StepFunctionError(
            'the loss function called the learner, but it is given what the learner returned: '
            'here it is `loss(outputs, target) -> scalar`, such as `lambda y, target: ((y - '
            "target) ** 2).mean()`. A function of one step's slices that calls the learner is the "
            '`step_fn` of `learner.etrace_grad` and `etrace_train`.'
        )
