"""Calls of a learner over a sequence: arguments checked, programs compiled, kept and run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp

from .. import _jax
from .._executor import TracedStep
from .._windows import (
    AS_IT_IS,
    REDUCTIONS,
    Around,
    Course,
    Lines,
    Moment,
    Result,
    Sequence,
    Stop,
    Told,
    Turn,
    Turns,
    UpdateOptions,
    bounds,
    buffers,
    check_choice,
    check_flags,
    check_mask,
    check_opt_state,
    check_progress,
    check_updatable,
    cut,
    first_order,
    length_of,
    number_of_blocks,
    run_updates,
    run_windows,
    show_progress,
    signature,
    steps_of,
    strong,
)
from ..errors import OptionError, StepFunctionError
from .states import CARRY, Role, discover
from .step_functions import Bound, StepFunction, Touched, Values, substituted

CALLED = 'called'


class CallOptions(NamedTuple):
    """The static part of a call over a sequence; ``along`` are ``GradientOptions`` or
    ``UpdateOptions``. ``progress`` is :data:`CALLED` in the place of a function, which is given at
    each call of the program. ``around`` stands around the observer of the step.
    """

    along: Any
    has_aux: bool
    progress: bool | Callable | str
    around: Around = AS_IT_IS


class Arrays(NamedTuple):
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
        auto = self.learner.policy.at_once
        # constants of the step are hoisted out of the loop, as everywhere
        traced = TracedStep(step, constants, threaded, at, differentiable=True, auto=auto)
        length = length_of(*sequences)
        values, _, outputs, _ = traced.loop(constants, threaded, sequences, length)
        return values, outputs

    def __call__(self, sequences):
        world = self.touched.now()
        values, outputs = self.run(world.read(Role.THREADED), world.read(Role.CONSTANT), sequences)
        world.write(values)
        return outputs


class Standing(NamedTuple):
    """A place in a call: the trace, the values of the world, what was learnt, what steps showed."""

    etrace: dict[str, Any]
    values: Values
    learnt: Any
    shown: Any

    def after(self, result: Result) -> Standing:
        """The place at the end of a result."""
        # the world at the end is the carry of the cell and what is threaded beside it
        (leaves, threaded), trace, t = result.end
        carry = jax.tree.unflatten(jax.tree.structure(self.values.carry), leaves)
        values = self.values._replace(carry=carry, threaded=threaded)
        shown = result.losses, result.aux
        return Standing({'trace': trace, 't': t}, values, result.learnt, shown)


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

    def _run(self, etrace, values: Values, learnt, data: Arrays, alone: bool = True) -> Result:
        """``learnt`` are the weights, for updates with the state of the optimiser."""
        show = None
        if self.options.progress and alone:
            told = lambda *args: self.told(*args)  # noqa: E731
            show = show_progress(self.length, told if self.options.progress == CALLED else True)
        course = self._course(etrace, values, learnt, data)._replace(show=show)
        return (run_updates if self.train else run_windows)(course, learnt, self.options.along)

    def _run_turn(self, etrace, shown, values, learnt, data: Arrays, bounds) -> Result:
        course, turn = self._course(etrace, values, learnt, data), Turn(bounds[0], bounds[1], shown)
        return run_updates(course, learnt, self.options.along, turn)

    def _course(self, etrace, values: Values, learnt, data: Arrays) -> Course:
        around = self.options.around
        step = self.step.observed(around.own(learnt[0] if self.train else learnt), values)
        sequence = Sequence.of(*data, self.length, self.step.penalised)
        observed, sequence = around.observed(step, sequence)
        start = Moment((jax.tree.leaves(values.carry), values.threaded), **etrace)
        return Course(observed, start, sequence, None)

    def __call__(self, learnt, data: Arrays, write: Callable, progress=None) -> Result:
        """Run from the present states on; all states that the step writes advance, and
        ``write(learnt)`` keeps what was learnt. ``progress``: a function of it.
        """
        # the states as they are now: arrays that a program takes and gives back
        self.told = Told(progress)
        world, owner = self.step.world(), self.step.bound.owner
        values = Values(
            world.read(Role.CONSTANT),
            world.read(*CARRY),
            world.read(Role.THREADED),
            self.step.bound.initial(),
            self.step.bound.held(),
        )

        def kept(place: Standing) -> Standing:
            world.write(place.values.carry)
            world.write(place.values.threaded)
            owner.etrace.value = place.etrace
            write(place.learnt)
            return place

        # inside of a transformation: one program of the surrounding trace, without turns
        place = Standing(owner.etrace.value, values, learnt, None)
        if any(isinstance(x, _jax.Tracer) for x in jax.tree.leaves((place, data))):
            given = first_order((values, learnt))
            end = kept(place.after(self.run_inside(place.etrace, *given, data)))
            return Result(end.learnt, None, *end.shown)
        stop = self._in_turns(owner.etrace, place, data, kept)
        losses, aux = cut(stop.carry.shown, self._steps(stop.done))
        if callable(progress):
            jax.effects_barrier()
        return Result(stop.carry.learnt, None, losses, aux, stop.error or self.told.error)

    def _steps(self, blocks: int) -> int:
        """The number of steps in the first blocks."""
        if blocks == self.turns.number:
            return self.length
        return int(steps_of(self.length, self.options.along, blocks))

    def _in_turns(
        self, etrace: brainstate.State, place: Standing, data: Arrays, kept: Callable
    ) -> Stop:
        """Run on the trace's own buffer.

        A failure while running loses that buffer: the trace is then empty, and says so.
        """

        def block(place: Standing, start, stop) -> Standing:
            return place.after(self.run(*place[:3], data))

        def blocks(place: Standing, start, stop) -> Standing:
            given = place.etrace, place.shown, place.values, place.learnt
            return place.after(self.run_turn(*given, data, bounds(start, stop)))

        # one block needs no turns, and its shapes may have weak types
        trace, alone = place.etrace, self.turns.number == 1
        show = None
        if not alone:
            place = place if self.turns.size else strong(place)
            place = place._replace(shown=buffers(self.step.shown, self.length))
            if self.options.progress:
                called = self.options.progress == CALLED
                lines = Lines(self.length, data.mask, self.told.function if called else True)
                show = lambda place, done: lines(place.shown, self._steps(done))  # noqa: E731
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


class Arguments(NamedTuple):
    """The user's arguments that gradients and updates share."""

    sequences: tuple
    step_fn: Callable
    mask: Any
    reset: Any
    weights: Any


def gradient(bound: Bound, given: Arguments, options: CallOptions) -> Result:
    """The gradient of a sequence, like the weights of the call."""
    data, weights = _checked(bound, given, options)
    program = _program(bound, given.step_fn, options, data, weights)
    values = options.around.with_own({name: state.value for name, state in weights.items()})
    return program(values, data, lambda grads: None, options.progress)


def train(bound: Bound, given: Arguments, options: CallOptions, opt_state) -> Result:
    """Learn along a sequence: the weights advance; ``learnt`` are they and the state of the
    optimiser.
    """
    data, weights = _checked(bound, given, options)
    optimizer, around = options.along.optimizer, options.around
    values = around.with_own({name: state.value for name, state in weights.items()})
    check_updatable(values)
    learnt = values, optimizer.init(values) if opt_state is None else opt_state

    def write(learnt) -> None:
        for name, value in around.kept(learnt[0]).items():
            weights[name].value = value

    program = _program(bound, given.step_fn, options, data, weights, learnt)
    return program(learnt, data, write, options.progress)


def evolve(bound: Bound, sequences, step_fn: Callable | None, keep: bool, trace: bool):
    """Outputs over time of a run without gradients; None where they are not to ``keep``."""
    check_choice('return_outputs', keep, (True, False))
    check_choice('trace', trace, (True, False))
    length_of(*sequences)
    sequences = jax.tree.map(jnp.asarray, sequences)
    learner = bound.owner
    # without a trace the model itself answers the learner's calls
    instead = None if trace else learner.model

    def make() -> ForwardProgram:
        return ForwardProgram(learner, step_fn or learner, _slices(sequences), keep, instead)

    like = 'evolve', keep, trace, signature(sequences)
    return bound.program((step_fn,), like, make)(sequences)


def _checked(bound: Bound, given: Arguments, options: CallOptions) -> tuple[Arrays, dict]:
    """The arrays and the weights of a call; an error for what can not be run."""
    check_choice('reduction', options.along.reduction, REDUCTIONS)
    check_choice('has_aux', options.has_aux, (True, False))
    check_progress(options.progress)
    step_fn = given.step_fn
    if not callable(step_fn):
        raise OptionError(
            f"step_fn is {step_fn!r}; give a function of one step's slices that calls the "
            'learner once.'
        )
    if step_fn is bound.owner:
        raise StepFunctionError(
            'step_fn is the learner; give a function that computes a loss from its output, '
            'such as `lambda x, target: jnp.mean((learner(x) - target) ** 2)`.'
        )
    length = length_of(*given.sequences)
    sequences = jax.tree.map(jnp.asarray, given.sequences)
    mask = None if given.mask is None else check_mask(given.mask, length)
    flags = given.reset
    if flags is not None:
        flags = check_flags('reset is', flags, length, bound.owner.etrace.value['t'].shape)
    weights = bound.states.parameters() if given.weights is None else given.weights
    if not isinstance(weights, Mapping):
        raise OptionError(f'weights is {type(weights).__name__}; give a dict path -> ParamState.')
    if not weights:
        raise OptionError(
            'weights is empty: nothing would be learnt. Give a dict path -> ParamState with one '
            'entry at least, or leave weights out for all of the model.'
        )
    if wrong := [k for k, s in weights.items() if not isinstance(s, brainstate.ParamState)]:
        raise OptionError(
            f'weights {wrong} are not ParamStates; weights is a dict path -> ParamState.'
        )
    return Arrays(sequences, mask, flags), dict(weights)


def _program(
    bound: Bound, step_fn: Callable, options: CallOptions, data: Arrays, weights: dict, learnt=None
) -> SequenceProgram:
    """The compiled program for a call, made once for each step function, shapes and options."""

    if callable(options.progress):
        options = options._replace(progress=CALLED)

    def make() -> SequenceProgram:
        if learnt is not None:
            check_opt_state(options.along.optimizer, *learnt)
        slices, length = _slices(data.sequences), length_of(data.sequences)
        step = StepFunction(bound, step_fn, weights, slices, options.has_aux)
        return SequenceProgram(step, options, length)

    # the key: functions by identity, all else by value
    shapes = signature((data.sequences, data.flags, learnt))
    along, functions = options.along, [step_fn]
    if isinstance(along, UpdateOptions):
        functions.append(along.optimizer)
        along = along._replace(optimizer=None)
    like = options._replace(along=along), shapes, *weights.items()
    return bound.program(tuple(functions), like, make)


def _slices(sequences):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), sequences)
