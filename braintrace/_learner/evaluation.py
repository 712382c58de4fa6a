"""Evaluation: a model on whole sequences, where nothing is learnt and no state changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import brainstate
import jax

from .. import _jax
from .._errors import OptionError
from .._windows import length_of, signature
from .base import ETraceLearner
from .bound import Bound
from .lanes import Lanes
from .states import ModelStates
from .step_functions import Touched

__all__ = ['evaluate']


def evaluate(learner: ETraceLearner, xs, ys, metric: Callable) -> Any:
    """``metric(outputs, ys)`` of a learner's model on sequences of any batch size, each from the
    initial states on; neither the model nor the learner is changed.

    Time is axis 0 of ``xs``, ``ys`` and the outputs, the batch axis 1 of ``xs`` where the learner
    was compiled for one; a tuple ``xs`` goes to the model as ``*inputs``. The initial states are
    those of ``brainstate.nn.init_all_states`` for this batch, and ``fit`` is False in
    ``brainstate.environ``. The loop is compiled once for each shape of ``xs``; the metric is not.

    Raises :class:`braintrace.NotCompiledError` for a learner that is not compiled,
    :class:`braintrace.StructureError` for sequences of unequal lengths.

    >>> import braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((3, 2)), batch_size=3)
    >>> xs, ys = jnp.ones((7, 100, 2)), jnp.zeros((7, 100, 4))
    >>> error = braintrace.evaluate(learner, xs, ys, lambda out, y: jnp.mean((out - y) ** 2))
    >>> error.shape, model.h.value.shape
    ((), (3, 4))
    """
    if not isinstance(learner, ETraceLearner):
        raise OptionError(
            f'learner is {type(learner).__name__}; give what braintrace.compile returns.'
        )
    if not callable(metric):
        raise OptionError(f'metric is {metric!r}; give a function metric(outputs, ys).')
    length_of(xs, ys)
    bound = learner._compiled().in_time()
    first = _inputs(jax.tree.map(lambda a: a[0], xs))
    with _as_it_was(bound), brainstate.environ.context(fit=False):
        make = partial(Aside, bound, first)
        # states that are made inside a transformation end with it
        kept = _jax.is_outermost()
        aside = bound.program(('evaluate', signature(first)), make) if kept else make()
        outputs = aside.outputs(bound.states.values()[0], aside.states.values()[1], xs)
    return metric(outputs, ys)


class Aside:
    """A copy of a model, with states for another batch."""

    touched = Touched([])

    def __init__(self, bound: Bound, inputs: tuple):
        other, size = copy.deepcopy(bound.states.model), jax.tree.leaves(inputs)[0].shape[:1]
        if isinstance(other, Lanes):
            other.size, size = size[0], ()
        if bound.core.first.graph.lanes is None:
            size = ()
        brainstate.nn.init_all_states(other, **({'batch_size': size[0]} if size else {}))
        self.states = ModelStates(other, inputs)

        self.outputs = jax.jit(partial(along, self.states.cell()))


def along(cell: Callable, params, carry, xs):
    """The outputs of a cell at all steps."""

    def step(carry, x):
        outputs, carry = cell(params, carry, *_inputs(x))
        return carry, outputs

    return jax.lax.scan(step, carry, xs)[1]


@contextmanager
def _as_it_was(bound: Bound) -> Iterator[None]:
    """States beside the model, such as the generator of random numbers, are put back."""
    default = brainstate.random.DEFAULT
    before = [(state, state.value) for state in (default, *bound.states.outside.values())]
    try:
        yield
    finally:
        for state, value in before:
            state.value = value


def _inputs(x) -> tuple:
    return x if type(x) is tuple else (x,)
