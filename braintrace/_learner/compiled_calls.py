"""Compiled programs of a learner over a sequence: forward, gradients, and updates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import brainstate
import jax

from .. import _jax
from .._executor import TracedStep
from .._windows import (
    Course,
    Moment,
    Result,
    Sequence,
    UpdateOptions,
    bootstrapped,
    first_order,
    length_of,
    run_updates,
    run_windows,
    show_progress,
    split_weights,
)
from .calls import substituted
from .step_functions import StepFunction, Touched, Values
from .world import CARRY, Role, discover

__all__ = ['CallOptions', 'Data', 'ForwardProgram', 'SequenceProgram']


class CallOptions(NamedTuple):
    """The static part of a call over a sequence; ``along`` are ``GradientOptions`` or
    ``UpdateOptions``. With a ``synthesizer`` weights are pairs with its parameters.
    """

    along: Any
    has_aux: bool
    progress: bool
    synthesizer: Callable | None = None


class Data(NamedTuple):
    """The arrays of a call over a sequence."""

    sequences: Any
    mask: jax.Array | None
    flags: jax.Array | None


class ForwardProgram:
    """A compiled loop over a step function, in which ``instead`` computes the learner's call (None:
    it runs).
    """

    def __init__(self, learner, step_fn: Callable, slices, keep: bool, instead: Callable | None):
        self.learner, self.step_fn, self.keep, self.instead = learner, step_fn, keep, instead
        self.touched = Touched(discover(self._call, *slices))
        self.run = jax.jit(self._run)

    def _call(self, *slices):
        with substituted(self.learner, self.instead):
            return self.step_fn(*slices)

    def _run(self, threaded, constants, sequences):
        def step(constants, values, slices):
            world = self.touched.now()
            with world.running({**values, **constants}):
                out = self._call(*slices)
                return world.read(Role.THREADED), (), out if self.keep else None, ()

        at = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), sequences)
        traced = TracedStep(
            step,
            constants,
            threaded,
            at,
            differentiable=True,
            associative=self.learner.policy.associative,
        )
        length = length_of(*sequences)
        values, _, outputs, _ = traced.loop(constants, threaded, sequences, length)
        return values, outputs

    def __call__(self, sequences):
        world = self.touched.now()
        values, outputs = self.run(world.read(Role.THREADED), world.read(Role.CONSTANT), sequences)
        world.write(values)
        return outputs


class SequenceProgram:
    """A compiled call over a sequence: the gradient of a step function, or updates by it."""

    def __init__(self, step: StepFunction, options: CallOptions):
        self.step, self.options = step, options
        self.touched = step.touched
        self.run = jax.jit(self._run, donate_argnums=0)
        self.run_inside = jax.jit(partial(self._run, alone=False))

    def _run(self, etrace, values: Values, learnt, data: Data, alone: bool = True) -> Result:
        """``learnt`` are the weights, for updates with the state of the optimiser."""
        length, along = length_of(data.sequences), self.options.along
        train, synthesizer = isinstance(along, UpdateOptions), self.options.synthesizer
        weights, _ = split_weights(learnt[0] if train else learnt, synthesizer)
        observed = self.step.observed(weights, values)
        sequence = Sequence.of(*data, length, self.step.penalised)
        if synthesizer is not None:
            observed, sequence = bootstrapped(observed, synthesizer, sequence)
        course = Course(
            observed,
            Moment((jax.tree.leaves(values.carry), values.threaded), **etrace),
            sequence,
            show_progress(length) if self.options.progress and alone else None,
        )
        return (run_updates if train else run_windows)(course, learnt, along)

    def __call__(self, learnt, data: Data) -> Result:
        """Run from the present states on; all states that the step writes advance."""
        world, owner = self.step.world(), self.step.bound.owner
        values = Values(
            world.read(Role.CONSTANT),
            world.read(*CARRY),
            world.read(Role.THREADED),
            self.step.bound.initial(),
            self.step.bound.held(),
        )
        result = self._donating(owner.etrace, values, learnt, data)
        (carry, threaded), trace, t = result.end
        world.write(jax.tree.unflatten(jax.tree.structure(values.carry), carry))
        world.write(threaded)
        owner.etrace.value = {'trace': trace, 't': t}
        return result

    def _donating(self, etrace: brainstate.State, values: Values, learnt, data: Data) -> Result:
        """Run on the trace's own buffer; inside a transformation, where buffers belong to others,
        on a copy and without progress.

        A failure while running loses that buffer: the trace is then empty, and says so.
        """
        trace = etrace.value
        if any(isinstance(x, _jax.Tracer) for x in jax.tree.leaves((trace, values, learnt, data))):
            return self.run_inside(trace, *first_order((values, learnt)), data)
        try:
            return self.run(trace, values, learnt, data)
        except Exception as error:  # of any kind: it is raised again
            if any(x.is_deleted() for x in jax.tree.leaves(trace)):
                etrace.value = self.step.bound.empty_trace()
                error.add_note(
                    'The call failed while it ran on the eligibility trace, which is lost: it '
                    'starts anew, empty. Parameters and hidden states are those before the call.'
                )
            raise
