"""Evaluation: a model on whole sequences, where nothing is learnt and no state changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .. import _jax
from .._signatures import does_not_fit, public
from .._windows import Turns, bounds, buffers, length_of, signature, strong
from ..errors import OptionError, StructureError
from .base import ETraceLearner
from .environment import STEP, clock, remedy
from .learners import Lanes
from .states import ModelStates, as_path
from .step_functions import Bound, Touched


@public('braintrace.evaluate')
def evaluate(learner: ETraceLearner, xs, ys, metric: Callable) -> Any:
    """``metric(outputs, ys)`` of a learner's model on sequences of any batch size, each from the
    initial states on; neither the model nor the learner is changed.

    Time is axis 0 of ``xs``, ``ys`` and the outputs, the batch axis 1 of ``xs`` where the learner
    was compiled for one; a tuple ``xs`` goes to the model as ``*inputs``, unless it was compiled
    for a tuple as one input. The initial states are
    those of ``brainstate.nn.init_all_states`` for this batch, from the parameters and statistics as
    they are now, and ``fit`` is False in ``brainstate.environ``, where ``i`` counts the steps and
    ``t`` goes on by ``dt``, from the values that are set there or zero. The loop is compiled once
    for each shape of ``xs``; the metric is not.

    Raises :class:`braintrace.errors.NotCompiledError` for a learner that is not compiled,
    :class:`braintrace.errors.StructureError` for sequences of unequal lengths and for inputs unlike
    those that were compiled, :class:`braintrace.errors.OptionError` for another ``learner`` or a
    ``metric`` that is no function.

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
    if problem := does_not_fit(metric, 2):
        raise OptionError(f'metric is called as metric(outputs, ys): {problem}.')
    length_of(xs, ys)
    bound = learner._compiled()
    environment = bound.states.environment
    xs = bound.states.taken(xs)
    environment.check(STEP)
    environment.present()  # refuses what fits no input
    size = _batch_of(bound, xs)
    with jax.transfer_guard('allow'):  # of the number 0
        first = jax.tree.map(lambda a: a[0], xs)
    with _as_it_was(bound), environment.completed(fit=False):
        times = clock()

        def make() -> Aside:
            with brainstate.environ.context(**times):
                return Aside(bound, size, first)

        # states that are made inside a transformation end with it
        kept = _jax.is_outermost()
        with _as_it_was(bound):  # each call has the numbers of the first one
            aside = bound.program((), ('evaluate', signature(first)), make) if kept else make()
        outputs = aside.outputs(bound, xs)
    return metric(outputs, ys)


def _batch_of(bound: Bound, inputs: tuple) -> int | None:
    """The batch size of sequences of inputs, None without a batch; one step of them has to look
    like the example that was compiled, but for the batch size.
    """
    example, lanes = bound.states.example, bound.core.graph.lanes
    shapes = [leaf.shape for leaf in jax.tree.leaves(example)]
    wanted: Any = jax.tree.structure(example)
    same, sizes = jax.tree.structure(inputs) == wanted, []
    for leaf, shape in zip(jax.tree.leaves(inputs), shapes):
        now, skip = jnp.shape(leaf)[1:], int(lanes is not None and shape[:1] == (lanes,))
        same = same and len(now) == len(shape) and now[skip:] == shape[skip:]
        sizes += now[:skip]
    if not same:
        found = [list(jnp.shape(leaf)) for leaf in jax.tree.leaves(inputs)]
        raise StructureError(
            f'xs has the shapes {found}, and a step was compiled for {[list(s) for s in shapes]}: '
            'give sequences of such inputs, with time in axis 0 and any batch size in axis 1 where '
            'the learner was compiled for one.'
        )
    return sizes[0] if sizes else None


class Aside:
    """A copy of a model, with states for another batch; between two calls it holds no values."""

    touched = Touched([])

    def __init__(self, bound: Bound, size: int | None, inputs: tuple):
        other, self.options = _copied(bound.states), {}
        if isinstance(other, Lanes):
            other.size = other.size if size is None else size
        elif size is not None:
            self.options = {'batch_size': size}
        brainstate.nn.init_all_states(other, **self.options)
        self.states = ModelStates(other, inputs, remedy)
        self.cell = self.states.cell()
        read = self.states.environment.inputs
        of_cell = [read] if read else []
        self.shown, _ = jax.eval_shape(self.cell, *self.states.values(), *inputs, *of_cell)
        self.run = jax.jit(partial(along, self.cell), donate_argnums=1)
        self.turns: dict[int, Turns] = {}

    def outputs(self, bound: Bound, xs):
        """The outputs at all steps, of the learner's values as they are now."""
        params, carry = bound.states.values()
        model, inside = self.states.model, self.states.lookup().keys()
        values = {**params, **carry, **bound.initial()}
        try:
            self.states.now().write({path: values[path] for path in inside & values.keys()})
            brainstate.nn.init_all_states(model, **self.options)
            return self._along(*self.states.values(), xs)
        finally:
            for state in self.states.lookup().values():
                state.value = None

    def _along(self, params, carry, xs):
        length = length_of(xs)
        read, times = self.states.environment.along(length)
        xs = xs, times
        now = strong(carry), buffers(self.shown, length)
        if not _jax.is_outermost():
            return along(self.cell, *now, params, read, xs, 0, length)[1]

        def steps(now, start, stop):
            return self.run(*now, params, read, xs, *bounds(start, stop))

        turns = self.turns.setdefault(length, Turns(length))
        (_, outputs), _, error = turns.run(steps, now, lambda now: None)
        if error is not None:
            raise error
        return outputs


def _copied(states: ModelStates) -> brainstate.nn.Module:
    """A copy of a model whose states share their values with the model's."""
    own = states.lookup()
    values = {path: state.value for path, state in own.items()}
    try:
        for state in own.values():
            state.value = None
        other = copy.deepcopy(states.model)
    finally:
        for path, state in own.items():
            state.value = values[path]
    for path, state in other.states().items():
        state.value = values[as_path(path)]
    return other


def along(cell: Callable, carry, shown, params, read: dict, xs, start, stop):
    """The carry and the outputs of a cell after the steps from ``start`` to ``stop``. ``read``:
    what it reads of the environment, of which ``xs`` have what varies beside the inputs.
    """

    def step(k, now):
        at = partial(jax.lax.dynamic_index_in_dim, index=k, keepdims=False)
        x, times = jax.tree.map(at, xs)
        outputs, carry = cell(params, now[0], *x, *([{**read, **times}] if read or times else []))
        put = partial(jax.lax.dynamic_update_index_in_dim, index=k, axis=0)
        return carry, jax.tree.map(put, now[1], outputs)

    return jax.lax.fori_loop(start, stop, step, (carry, shown))


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
