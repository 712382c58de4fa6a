"""The function that computes the call of a learner: its own, the model, or an observed step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from .. import _jax
from .._errors import StepFunctionError
from .bound import Bound
from .world import CARRY, Role

# Pairs of a learner and the function that computes its call (None: it runs), the innermost last.
SUBSTITUTES: ContextVar[tuple[tuple[Any, Callable | None], ...]] = ContextVar(
    'functions in the place of learners', default=()
)


@contextmanager
def substituted(learner, call: Callable | None) -> Iterator[None]:
    """Compute calls of ``learner`` by ``call(*inputs)`` inside the block; None: run them."""
    token = SUBSTITUTES.set((*SUBSTITUTES.get(), (learner, call)))
    try:
        yield
    finally:
        SUBSTITUTES.reset(token)


def substitute(learner) -> Callable | None:
    """The function in the place of this learner here; None: it runs."""
    return next((call for of, call in reversed(SUBSTITUTES.get()) if of is learner), None)


class ObservedCall:
    """The one call of a learner in an observed step: the model's states go through ``cell(params,
    carry, inputs) -> (outputs, carry)``, on lists of leaves.
    """

    def __init__(self, bound: Bound, cell: Callable):
        self.bound, self.cell, self.made = bound, cell, False
        self.trace = _jax.current_trace()

    def __call__(self, *inputs):
        if _jax.current_trace() is not self.trace:
            raise StepFunctionError(
                'step_fn calls the learner inside a transformation (jit, grad, vmap, cond, scan, '
                'checkpoint, ...) of its own, out of which the factors of the step can not be '
                'read. Call `y = learner(x)` in step_fn itself, and transform what stands before '
                'and after it. (Samples are the batch of the model, several steps a longer '
                'sequence; `mask` leaves the loss of a step out.)'
            )
        if self.made:
            raise StepFunctionError(
                'step_fn called the learner twice in one step. Call it once, and use its output as '
                'often as you like.'
            )
        world = self.bound.states.now()
        params, carry = world.read(Role.WEIGHT), world.read(*CARRY)
        trees = self.bound.core.compiled(params, carry, inputs).program.trees
        outputs, new = self.cell(*map(jax.tree.leaves, (params, carry, inputs)))
        self.made = True
        world.write(jax.tree.unflatten(trees['carry'], new))
        return jax.tree.unflatten(trees['outputs'], outputs)
