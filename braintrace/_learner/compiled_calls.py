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
    Lines,
    Moment,
    Result,
    Sequence,
    Stop,
    Turn,
    Turns,
    UpdateOptions,
    bootstrapped,
    bounds,
    buffers,
    cut,
    first_order,
    length_of,
    number_of_blocks,
    run_updates,
    run_windows,
    show_progress,
    split_weights,
    steps_of,
    strong,
)
from .calls import substituted
from .step_functions import StepFunction, Touched, Values
from .world import CARRY, Role, discover


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


class Place(NamedTuple):
    """A place in a call: the trace, the values of the world, what was learnt, what steps showed."""

    etrace: dict[str, Any]
    values: Values
    learnt: Any
    shown: Any

    def after(self, result: Result) -> Place:
        """The place at the end of a result."""
        (leaves, threaded), trace, t = result.end
        carry = jax.tree.unflatten(jax.tree.structure(self.values.carry), leaves)
        values = self.values._replace(carry=carry, threaded=threaded)
        shown = result.losses, result.aux
        return Place({'trace': trace, 't': t}, values, result.learnt, shown)


class SequenceProgram:
    """A compiled call over a sequence: the gradient of a step function, or updates by it. Updates
    run in turns, where there are several blocks of them.
    """

    def __init__(self, step: StepFunction, options: CallOptions, length: int):
        self.step, self.options, self.length = step, options, length
        self.touched = step.touched
        self.train = isinstance(options.along, UpdateOptions)
        self.turns = Turns(number_of_blocks(length, options.along) if self.train else 1)
        self.run = jax.jit(self._run, donate_argnums=0)
        self.run_turn = jax.jit(self._run_turn, donate_argnums=(0, 1))
        self.run_inside = jax.jit(partial(self._run, alone=False))

    def _run(self, etrace, values: Values, learnt, data: Data, alone: bool = True) -> Result:
        """``learnt`` are the weights, for updates with the state of the optimiser."""
        show = show_progress(self.length) if self.options.progress and alone else None
        course = self._course(etrace, values, learnt, data)._replace(show=show)
        return (run_updates if self.train else run_windows)(course, learnt, self.options.along)

    def _run_turn(self, etrace, shown, values, learnt, data: Data, bounds) -> Result:
        course, turn = self._course(etrace, values, learnt, data), Turn(bounds[0], bounds[1], shown)
        return run_updates(course, learnt, self.options.along, turn)

    def _course(self, etrace, values: Values, learnt, data: Data) -> Course:
        synthesizer = self.options.synthesizer
        weights, _ = split_weights(learnt[0] if self.train else learnt, synthesizer)
        observed = self.step.observed(weights, values)
        sequence = Sequence.of(*data, self.length, self.step.penalised)
        if synthesizer is not None:
            observed, sequence = bootstrapped(observed, synthesizer, sequence)
        start = Moment((jax.tree.leaves(values.carry), values.threaded), **etrace)
        return Course(observed, start, sequence, None)

    def __call__(self, learnt, data: Data, write: Callable) -> Result:
        """Run from the present states on; all states that the step writes advance, and
        ``write(learnt)`` keeps what was learnt.
        """
        world, owner = self.step.world(), self.step.bound.owner
        values = Values(
            world.read(Role.CONSTANT),
            world.read(*CARRY),
            world.read(Role.THREADED),
            self.step.bound.initial(),
            self.step.bound.held(),
        )

        def kept(place: Place) -> Place:
            world.write(place.values.carry)
            world.write(place.values.threaded)
            owner.etrace.value = place.etrace
            write(place.learnt)
            return place

        place = Place(owner.etrace.value, values, learnt, None)
        if any(isinstance(x, _jax.Tracer) for x in jax.tree.leaves((place, data))):
            given = first_order((values, learnt))
            end = kept(place.after(self.run_inside(place.etrace, *given, data)))
            return Result(end.learnt, None, *end.shown)
        stop = self._in_turns(owner.etrace, place, data, kept)
        losses, aux = cut(stop.carry.shown, self._steps(stop.done))
        return Result(stop.carry.learnt, None, losses, aux, stop.error)

    def _steps(self, blocks: int) -> int:
        """The number of steps in the first blocks."""
        if blocks == self.turns.number:
            return self.length
        return int(steps_of(self.length, self.options.along, blocks))

    def _in_turns(self, etrace: brainstate.State, place: Place, data: Data, kept: Callable) -> Stop:
        """Run on the trace's own buffer.

        A failure while running loses that buffer: the trace is then empty, and says so.
        """

        def block(place: Place, start, stop) -> Place:
            return place.after(self.run(*place[:3], data))

        def blocks(place: Place, start, stop) -> Place:
            given = place.etrace, place.shown, place.values, place.learnt
            return place.after(self.run_turn(*given, data, bounds(start, stop)))

        trace, alone = place.etrace, self.turns.number == 1
        show = None
        if not alone:
            place = place if self.turns.size else strong(place)
            place = place._replace(shown=buffers(self.step.shown, self.length))
            if self.options.progress:
                lines = Lines(self.length, data.mask)
                show = lambda place, done: lines(place.shown[0], self._steps(done))  # noqa: E731
        try:
            return self.turns.run(block if alone else blocks, place, kept, show)
        except BaseException as error:  # of any kind: it is raised again
            if any(x.is_deleted() for x in jax.tree.leaves(trace)):
                etrace.value = self.step.bound.empty_trace()
                error.add_note(
                    'The call failed while it ran on the eligibility trace, which is lost: it '
                    'starts anew, empty. Parameters and hidden states are those before the call.'
                )
            raise
