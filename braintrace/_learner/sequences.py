"""Calls of a learner over a sequence: arguments checked, programs found or made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp

from .._errors import OptionError, StepFunctionError
from .._windows import (
    REDUCTIONS,
    Result,
    check_choice,
    check_flags,
    check_mask,
    check_opt_state,
    check_updatable,
    length_of,
    signature,
    split_weights,
)
from .bound import Bound
from .compiled_calls import CallOptions, Data, ForwardProgram, SequenceProgram
from .step_functions import StepFunction


class Arguments(NamedTuple):
    """The user's arguments that gradients and updates share."""

    sequences: tuple
    step_fn: Callable
    mask: Any
    reset: Any
    weights: Any


def gradient(bound: Bound, given: Arguments, options: CallOptions) -> Result:
    """The gradient of a sequence, a dict like the weights; with a synthesizer a pair with its
    own.
    """
    data, weights = _checked(bound, given, options)
    program = _program(bound, given.step_fn, options, data, weights)
    return program(_values(bound, weights, options), data, lambda grads: None)


def train(bound: Bound, given: Arguments, options: CallOptions, opt_state) -> Result:
    """Learn along a sequence: the weights advance; ``learnt`` are they and the state of the
    optimiser.
    """
    data, weights = _checked(bound, given, options)
    optimizer, values = options.along.optimizer, _values(bound, weights, options)
    check_updatable(values)
    learnt = values, optimizer.init(values) if opt_state is None else opt_state

    def write(learnt) -> None:
        new, synthetic = split_weights(learnt[0], options.synthesizer)
        for name, value in new.items():
            weights[name].value = value
        if synthetic is not None:
            bound.owner.synthetic.value = synthetic

    return _program(bound, given.step_fn, options, data, weights, learnt)(learnt, data, write)


def _values(bound: Bound, weights: dict, options: CallOptions):
    """The values of the weights, with a synthesizer those of its parameters too."""
    values = {name: state.value for name, state in weights.items()}
    return values if options.synthesizer is None else (values, bound.owner.synthetic.value)


def evolve(bound: Bound, sequences, step_fn: Callable | None, keep: bool, trace: bool):
    """Outputs over time of a run without gradients; None where they are not to ``keep``."""
    check_choice('return_outputs', keep, (True, False))
    check_choice('trace', trace, (True, False))
    length_of(*sequences)
    sequences = jax.tree.map(jnp.asarray, sequences)
    learner = bound.owner
    instead = None if trace else learner.model

    def make() -> ForwardProgram:
        return ForwardProgram(learner, step_fn or learner, _slices(sequences), keep, instead)

    key = 'evolve', step_fn, keep, trace, signature(sequences)
    return bound.program(key, make)(sequences)


def _checked(bound: Bound, given: Arguments, options: CallOptions) -> tuple[Data, dict]:
    """The arrays and the weights of a call; an error for what can not be run."""
    check_choice('reduction', options.along.reduction, REDUCTIONS)
    check_choice('has_aux', options.has_aux, (True, False))
    check_choice('progress', options.progress, (True, False))
    _check_step_fn(given.step_fn, bound.owner)
    length = length_of(*given.sequences)
    sequences = jax.tree.map(jnp.asarray, given.sequences)
    mask = None if given.mask is None else check_mask(given.mask, length)
    flags = given.reset
    if flags is not None:
        flags = check_flags('reset is', flags, length, bound.owner.etrace.value['t'].shape)
    weights = bound.owner.param_states if given.weights is None else given.weights
    if not isinstance(weights, Mapping):
        raise OptionError(f'weights is {type(weights).__name__}; give a dict path -> ParamState.')
    if wrong := [k for k, s in weights.items() if not isinstance(s, brainstate.ParamState)]:
        raise OptionError(
            f'weights {wrong} are not ParamStates; weights is a dict path -> ParamState.'
        )
    return Data(sequences, mask, flags), dict(weights)


def _check_step_fn(step_fn, learner) -> None:
    if not callable(step_fn):
        raise OptionError(
            f"step_fn is {step_fn!r}; give a function of one step's slices that calls the "
            'learner once.'
        )
    if step_fn is learner:
        raise StepFunctionError(
            'step_fn is the learner; give a function that computes a loss from its output, '
            'such as `lambda x, target: jnp.mean((learner(x) - target) ** 2)`.'
        )


def _program(
    bound: Bound, step_fn: Callable, options: CallOptions, data: Data, weights: dict, learnt=None
) -> SequenceProgram:
    """The compiled program for a call, made once for each step function, shapes and options."""

    def make() -> SequenceProgram:
        if learnt is not None:
            check_opt_state(options.along.optimizer, *learnt)
        slices, length = _slices(data.sequences), length_of(data.sequences)
        step = StepFunction(bound, step_fn, weights, slices, options.has_aux)
        return SequenceProgram(step, options, length)

    shapes = signature((data.sequences, data.flags, learnt))
    return bound.program((step_fn, options, shapes, *weights.items()), make)


def _slices(sequences):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), sequences)
