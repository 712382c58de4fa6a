"""Calls of a learner over a sequence: arguments checked, programs compiled, kept and run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .. import _jax
from .._executor import TracedStep
from .._windows import (
    CallOptions,
    Moment,
    Result,
    Run,
    RunInTurns,
    Sequence,
    Skipped,
    check_choice,
    check_mask,
    check_opt_state,
    check_updatable,
    first_order,
    in_chunks,
    length_of,
    run_updates,
    run_windows,
    signature,
    strong,
)
from ..errors import OptionError, StepFunctionError
from .environment import within
from .states import CARRY, Role, discover
from .step_functions import Bound, StepFunction, Touched, substituted


def check_still_compiled(bound: Bound) -> None:
    """Refuse to go on where a function of progress compiled the learner again."""
    if bound.owner._own() is not bound:
        raise StepFunctionError(
            'a function of progress compiled the learner again, so the call that it belongs to can '
            'not go on. Weights and states are those of the last update. Compile between two calls.'
        )


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

    def _run(self, threaded, constants, sequences, read):
        length = length_of(*sequences)

        def step(constants, values, slices):
            world = self.touched.now()
            with world.running({**values, **constants}):
                out = self._call(*slices)
                return world.read(Role.THREADED), (), out if self.keep else None, ()

        at = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), sequences)
        auto = self.learner.policy.at_once
        # constants of the step are hoisted out of the loop, as everywhere
        with within(read, length):
            traced = TracedStep(step, constants, threaded, at, differentiable=True, auto=auto)
            values, _, outputs, _ = traced.loop(constants, threaded, sequences, length)
        return values, outputs

    def __call__(self, sequences, read):
        world = self.touched.now()
        states = world.read(Role.THREADED), world.read(Role.CONSTANT)
        values, outputs = self.run(*states, sequences, read)
        world.write(values)
        return outputs


class SequenceProgram:
    """A compiled call over a sequence: the gradient of a step function, or updates by it, of which
    ``grads`` has the shapes. Updates run in turns, where there are several blocks of them.
    """

    def __init__(self, step: StepFunction, options: CallOptions, length: int, grads: dict):
        self.step, self.options, self.length, rows = step, options, length, None
        if (observe := options.observe) is not None:
            compiled, world = step.compiled, step.world()

            def of_state(grads, now: Moment):
                (leaves, _), *trace = now
                carry = jax.tree.unflatten(compiled.program.trees['carry'], leaves)
                return observe(grads, compiled.state(carry, *trace))

            self.options = options._replace(observe=of_state)
            now = Moment((jax.tree.leaves(world.read(*CARRY)), ()), **step.bound.owner.etrace.value)
            rows = jax.eval_shape(of_state, grads, now)
        self.touched = step.touched
        self.in_turns = RunInTurns(length, self.options, (*step.shown, rows))
        self.run = jax.jit(self._run, donate_argnums=(0, 1))
        self.run_inside = jax.jit(self._run)

    def _run(self, etrace, shown, world, learnt, values, sequence: Sequence, bounds=None) -> Result:
        """A run from these values on: ``learnt`` are the weights, for updates with the state of the
        optimiser; ``values`` the constants, what a reset puts back, what the step holds, and what
        the environment has around the loop.
        """
        *values, read = values
        with within(read, self.length):
            weights = learnt if self.options.optimizer is None else learnt[0]
            observer = self.step.observed(weights, world[0], *values)
            sequence = sequence.weighed(self.length, self.step.penalised)
            start = Moment(world, *etrace)
            run = Run(observer, start, sequence, weights, self.options, bounds)
            if self.options.optimizer is None:
                return run_windows(run)
            return run_updates(run, learnt[1], shown)

    def __call__(
        self, learnt, sequence: Sequence, read, write: Callable, again: Callable, progress
    ) -> Result:
        """Run from the present states on; all states that the step writes advance, and
        ``write(learnt)`` keeps what was learnt. ``read``: what the environment has for the step.
        ``again(learnt)``: the same with the weights as they are now. ``progress``: what the call
        was given.
        """
        bound = self.step.bound
        # between two turns a function of progress sees the learner, and may change it
        seen = callable(progress) and self.options.optimizer is not None
        carry = jax.tree.structure(self.step.world().read(*CARRY))

        def at_present(now: Result) -> Result:
            """The states as they are now: arrays that a program takes and gives back."""
            world = self.step.world()
            leaves = jax.tree.leaves(world.read(*CARRY))
            end = Moment((leaves, world.read(Role.THREADED)), **bound.owner.etrace.value)
            return now._replace(end=end)

        def beside() -> tuple:
            """What the step reads beside them."""
            return self.step.world().read(Role.CONSTANT), bound.initial(), bound.held(), read

        first, values = at_present(Result(learnt, None)), beside()
        if self.options.resets:
            first = first._replace(skipped=Skipped.none(first.end.t))

        def kept(result: Result) -> None:
            world, ((leaves, threaded), trace, t) = self.step.world(), result.end
            world.write(jax.tree.unflatten(carry, leaves))
            world.write(threaded)
            bound.owner.etrace.value = {'trace': trace, 't': t}
            write(result.learnt)

        def program(now: Result, bounds=None) -> Result:
            given = values
            if seen:
                check_still_compiled(bound)
                now = strong(at_present(now._replace(learnt=again(now.learnt))))
                given = beside()
            at, *trace = now.end
            shown = None if bounds is None else (now.losses, now.aux, now.observed)
            result = self.run(trace, shown, at, now.learnt, given, sequence, bounds)
            skipped = jax.tree.map(jnp.add, now.skipped, result.skipped)
            result = result._replace(skipped=skipped)
            if seen:
                kept(result)
            return result

        # inside of a transformation: one program of the surrounding trace, without turns
        if any(isinstance(x, _jax.Tracer) for x in jax.tree.leaves((first, values, sequence))):
            self.options.check_inside_of_transformation()
            at, *trace = first.end
            at, learnt, values = first_order((at, learnt, values))
            result = self.run_inside(trace, None, at, learnt, values, sequence)
            kept(result)
            return result
        turns = self.in_turns.turns
        try:
            # one block needs no turns, and its shapes may have weak types
            if turns.number == 1 and not progress:
                result, _, error = turns.run(lambda now, start, stop: program(now), first, kept)
                result = result._replace(stopped=error)
            else:
                place = first if turns.size else strong(first)
                last = (lambda result: None) if seen else kept
                result = self.in_turns.run(program, place, sequence.mask, progress, last)
        except BaseException as error:  # of any kind: it is raised again
            # it ran on the trace's own buffer, which a failure loses
            if any(x.is_deleted() for x in jax.tree.leaves(bound.owner.etrace.value)):
                bound.owner.etrace.value = bound.empty_trace()
                since = 'when progress was called last' if seen else 'before the call'
                error.add_note(
                    'The call failed while it ran on the eligibility trace, which is lost: it '
                    f'starts again, empty. Parameters and hidden states are those {since}.'
                )
            raise
        return result


def learn(
    bound: Bound,
    options: CallOptions,
    sequences: tuple,
    step_fn: Callable,
    mask=None,
    reset=None,
    weights=None,
    opt_state=None,
) -> Result:
    """The gradient of a sequence, like the weights of the call; or, with an optimizer, the weights
    advance along it, and ``learnt`` are they and the state of the optimiser.
    """
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
    length = length_of(*sequences)
    sequences = jax.tree.map(jnp.asarray, sequences)
    mask = None if mask is None else check_mask(mask, length)
    if reset is not None:
        reset = bound.core.first.checked_flags('reset is', reset, length)
    if options.progress and options.optimizer is None and _jax.is_outermost():
        keep = options.keep_trace or not options.exact
        whole = options._replace(progress=False, reduction='sum', keep_trace=keep)

        def chunk(_, part: slice, mask) -> Result:
            of_part = jax.tree.map(lambda a: a[part], (sequences, reset))
            found = learn(bound, whole, of_part[0], step_fn, mask, of_part[1], weights)
            return found._replace(end=None)

        result = in_chunks(chunk, length, options, mask, Result(None, None), lambda end: None)
        if not options.keep_trace:
            etrace = bound.owner.etrace
            etrace.value = {**etrace.value, 't': 0 * etrace.value['t']}
        return result
    of_model, weights = weights is None, bound.states.parameters() if weights is None else weights
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
    try:
        sorted(weights)
    except TypeError as error:
        raise OptionError(
            f'the keys of weights have no order, as a dict of arrays needs it: {error}. Use keys '
            "of one kind, such as ('extra',) beside the paths of `learner.param_states`."
        ) from error
    optimizer = options.optimizer
    values = {name: state.value for name, state in weights.items()}
    functions: tuple = (step_fn,)
    learnt: Any = values
    opened = None
    if optimizer is not None:
        check_updatable(values)
        functions = step_fn, optimizer, options.observe
        learnt = opened = values, optimizer.init(values) if opt_state is None else opt_state
        bound.tell_anew(optimizer, opened[1] if opt_state is None else None)

    def present() -> Mapping:
        """The weights, also where the model holds another object for one now."""
        return bound.states.parameters() if of_model else weights

    def write(learnt) -> None:
        if optimizer is not None:
            states = present()
            for name, value in learnt[0].items():
                states[name].value = value

    read = bound.states.environment.present()

    def again(learnt):
        return {name: state.value for name, state in present().items()}, learnt[1]

    # made once for each step function, shapes and options
    like = options._replace(progress=False)

    def make() -> SequenceProgram:
        if opened is not None:
            check_opt_state(optimizer, *opened)
        slices = _slices(sequences)
        with within(read, length):
            step = StepFunction(bound, step_fn, dict(weights), slices, options.has_aux)
        compiled = bound.core.first
        if options.resets:
            compiled.tell_of_batch(options.not_finite)
        return SequenceProgram(step, like.delayed(compiled.graph, compiled.rule), length, values)

    # the key: functions by identity, all else by value
    shapes = signature((sequences, reset, opened))
    key = like._replace(optimizer=None, observe=None), shapes, *weights.items()
    program = bound.program(functions, key, make)
    sequence = Sequence(sequences, mask, reset)
    result = program(learnt, sequence, read, write, again, options.progress)
    if result.stopped is None and options.not_finite == 'raise':
        result = result._replace(stopped=result.skipped.error(result.losses))
    return result


def evolve(bound: Bound, sequences, step_fn: Callable | None, keep: bool, trace: bool):
    """Outputs over time of a run without gradients; None where they are not to ``keep``."""
    check_choice('return_outputs', keep, (True, False))
    check_choice('trace', trace, (True, False))
    length = length_of(*sequences)
    sequences = jax.tree.map(jnp.asarray, sequences)
    learner, read = bound.owner, bound.states.environment.present()
    # without a trace the model itself answers the learner's calls
    instead = None if trace else bound.alone

    def make() -> ForwardProgram:
        with within(read, length):
            return ForwardProgram(learner, step_fn or learner, _slices(sequences), keep, instead)

    like = 'evolve', keep, trace, signature(sequences)
    return bound.program((step_fn,), like, make)(sequences, read)


def _slices(sequences):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), sequences)
