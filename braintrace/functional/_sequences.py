"""``sequence_grad`` and ``sequence_update``: a cell and its loss as one observed step."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .. import _jax
from .._compiler import abstract, is_inexact
from .._executor import Axes, axes_of, each, in_shards, share, spread, summed_twice, varying
from .._signatures import does_not_fit, public
from .._windows import (
    AS_IT_IS,
    Around,
    Course,
    Gradient,
    GradientOptions,
    Lines,
    Moment,
    Observer,
    Penalised,
    Sequence,
    Trained,
    Turn,
    Turns,
    UpdateOptions,
    bounds,
    buffers,
    check_flags,
    check_loss,
    check_mask,
    check_opt_state,
    check_updatable,
    choose_delay,
    cut,
    first_order,
    length_of,
    number_of_blocks,
    optimised,
    penalty_of,
    run_updates,
    run_windows,
    show_progress,
    signature,
    steps_of,
    strong,
    task_loss,
    total_loss,
    with_so_far,
)
from ..errors import (
    NotFiniteError,
    NotSupportedError,
    OptionError,
    StepFunctionError,
    StructureError,
)
from ._compiled import Compiled
from ._places import in_automatic_axes, is_explicit, types_of
from ._state import OnlineState, check_carry0

RUNNING: ContextVar[Any] = ContextVar('learner whose loss runs', default=None)


def as_inputs(inputs) -> tuple:
    """A plain tuple is passed as ``*inputs``; any other pytree is one input."""
    return inputs if type(inputs) is tuple else (inputs,)


def checked_loss(learner, loss_fn: Callable) -> Callable:
    """``loss_fn(outputs, target)``, held to return a loss and not to step the learner."""
    if not callable(loss_fn):
        raise OptionError(f'loss_fn is {loss_fn!r}; give a function `loss(outputs, target)`.')
    if problem := does_not_fit(loss_fn, 2):
        raise OptionError(f'loss_fn is called as `loss(outputs, target)`: {problem}.')

    def loss(outputs, target):
        token = RUNNING.set(learner)
        try:
            _check_summed_once(loss_fn, outputs, target)
            return check_loss(loss_fn(outputs, target), 'loss_fn')
        finally:
            RUNNING.reset(token)

    return loss


def _check_summed_once(loss_fn: Callable, outputs, target) -> None:
    """Refuse a loss that is summed over shards where no type tells it, since its gradients, summed
    once more, would be as many times too large as there are shards.
    """
    axes = summed_twice(lambda *args: total_loss(loss_fn(*args)), outputs, target)
    if axes:
        raise StructureError(
            f'the loss is a sum over the shards of {axes}, in a `jax.shard_map` with '
            'check_vma=False, where the gradient of each shard is that of as many equal losses: '
            'summed over shards it would be too large. Return the loss of one shard and sum the '
            'gradients, or leave check_vma=True, where types tell it.'
        )


def check_outside_of_loss(learner) -> None:
    """Refuse a call of the learner from its own loss function."""
    if RUNNING.get() is learner:
        raise StepFunctionError(
            'the loss function called the learner, but it is given what the learner returned: '
            'here it is `loss(outputs, target) -> scalar`, such as `lambda y, target: ((y - '
            "target) ** 2).mean()`. A function of one step's slices that calls the learner is the "
            '`step_fn` of `learner.etrace_grad` and `etrace_train`.'
        )


class Data(NamedTuple):
    """The arrays of a call over a sequence, as given."""

    xs: Any
    ys: Any
    mask: Any
    reset: Any


def _after(state: OnlineState, end: Moment) -> OnlineState:
    """The state at the end of a run from ``state`` on."""
    (leaves, _), trace, t = end
    carry = jax.tree.unflatten(jax.tree.structure(state.carry), leaves)
    return state.replace(carry=carry, trace=trace, t=t)


@dataclass(frozen=True)
class SequenceCalls:
    """Calls of a learner over a sequence.

    ``find(params, state, inputs)`` is the compiled step; ``hidden`` says which leaves of the carry
    a reset puts back; ``loss(outputs, target)`` is the loss of one step; ``around`` stands around
    the observer.
    """

    find: Callable[[Any, OnlineState, tuple], Compiled]
    hidden: Callable
    loss: Callable
    progress: bool | Callable
    around: Around = AS_IT_IS
    not_finite: str = 'keep'
    observe: Callable | None = None

    def gradient(self, options: GradientOptions) -> Callable:
        """``(params, state, xs, ys, mask=None, reset=None) -> Gradient``."""
        raised: list[BaseException] = []

        def told(*args):
            try:
                self.progress(*args)
            except BaseException as error:
                raised.append(error)
                raise

        calls = replace(self, progress=told) if callable(self.progress) else self

        @public('learner.sequence_grad(loss_fn)')
        def run(params, state, xs, ys, mask=None, reset=None) -> Gradient:
            # what is computed op by op under explicit axes is typed by them, automatic or not
            call = program if is_explicit() else on_data
            raised.clear()
            try:
                found = call(params, state, Data(xs, ys, mask, reset))
                # what a function of progress raises comes where the losses are waited for
                found = jax.block_until_ready(found) if callable(self.progress) else found
            except jax.errors.JaxRuntimeError:
                if raised:
                    raise raised[0] from None
                raise
            grads, state, losses = found
            return Gradient(grads, losses, None, state)

        @partial(in_automatic_axes, types=lambda *args: (*types_of(args[:-1]), P()))
        def on_data(params, state, data: Data):
            params, state, xs = first_order((params, state, data.xs))
            return in_shards(body, params, state, data._replace(xs=xs))

        def body(axes: Axes, params, state, data: Data):
            course, of_loss = calls.course(axes, params, state, data)
            result = run_windows(course, params, options)
            new = _after(state, result.end)
            return (result.learnt, axes), (new, axes), (result.losses, of_loss)

        program = jax.jit(on_data)
        return run

    def update(
        self, optimizer, every: int, write_every: int | None, reduction: str, exact: bool
    ) -> Callable:
        """``(params, opt_state, state, xs, ys, mask=None, reset=None) -> Trained``."""

        def options_of(graph, rule, state: OnlineState) -> UpdateOptions:
            delay, observe = choose_delay(write_every, every, graph, rule), None
            if self.observe is not None:
                observe = lambda grads, now: self.observe(grads, _after(state, now))  # noqa: E731
            return UpdateOptions(
                optimizer, every, delay, reduction, exact, self.not_finite != 'keep', observe
            )

        in_turns = _UpdatesInTurns(self, options_of)

        @public('learner.sequence_update(loss_fn, optimizer)')
        def run(params, opt_state, state, xs, ys, mask=None, reset=None) -> Trained:
            return self.trained(*on_data(params, opt_state, state, Data(xs, ys, mask, reset)))

        def types(*args):
            more = (self.not_finite != 'keep') + (self.observe is not None)
            return *types_of(args[:-1]), P(), *[P()] * more

        @partial(in_automatic_axes, types=types)
        def on_data(params, opt_state, state, data: Data):
            if _jax.is_outermost():
                return in_turns((params, opt_state), state, data)
            of_args = varying((params, opt_state, state, data))
            self.check_surroundings(of_args)
            learnt = _axes_of_updates(optimizer, of_args, params, opt_state)
            params, state, xs = first_order((params, state, data.xs))
            data = data._replace(xs=xs)
            return in_shards(partial(body, learnt), params, opt_state, state, data)

        def body(of_learnt, axes: Axes, params, opt_state, state, data: Data):
            rows = every if self.observe is not None else None
            course, of_loss = self.course(axes, params, state, data, rows)
            options = options_of(course.observer.graph, course.observer.rule, state)
            _check_learnt(optimizer, params, opt_state)
            result = run_updates(course, (params, opt_state), options)
            new = _after(state, result.end)
            pairs = zip(result.learnt, of_learnt, strict=True)
            more = ((x, axes) for x in self.more(result.skipped, result.aux, every))
            return *pairs, (new, axes), (result.losses, of_loss), *more

        return run

    def trained(self, params, opt_state, state, losses, *more) -> Trained:
        """An answer, with what :meth:`more` gives."""
        rest = iter(more)
        skipped = None if self.not_finite == 'keep' else next(rest)
        return Trained(params, losses, None, state, opt_state, skipped, next(rest, None))

    def more(self, skipped, shown, every: int) -> list:
        """What is returned beside the losses; ``shown`` has a row for each step."""
        found = [] if self.not_finite == 'keep' else [skipped]
        if self.observe is not None:
            found.append(jax.tree.map(lambda rows: rows[::every], shown))
        return found

    def check_surroundings(self, axes: Axes) -> None:
        """Refuse what can not be done inside of a transformation."""
        if self.not_finite == 'raise':
            raise OptionError(
                "not_finite is 'raise' inside of a transformation, where nothing can be raised. "
                "Call the function as it is, without jax.jit, or give 'skip' and look at `skipped`."
            )
        if self.not_finite == 'skip' and axes:
            raise NotSupportedError(
                f"not_finite='skip' in a shard_map along {sorted(map(str, axes))}: shards that "
                'skip would leave the others waiting. Put jax.jit around arrays that are sharded.'
            )

    def compiled(self, params, state: OnlineState, data: Data) -> Compiled:
        """The compiled step for these arguments."""
        first = as_inputs(jax.tree.map(lambda a: a[0], data.xs))
        return self.find(self.around.own(params), state, first)

    def course(
        self, axes: Axes, params, state: OnlineState, data: Data, every: int | None = None
    ) -> tuple[Course, Axes]:
        """The cell and the loss under observation, and the axes of a surrounding
        ``shard_map`` along which the loss of a step may differ."""
        length, compiled = length_of(data.xs, data.ys), self.compiled(params, state, data)
        flags, fresh = _resets(data.reset, state, length)
        if self.not_finite != 'keep' and data.reset is None:
            raise OptionError(
                f'not_finite is {self.not_finite!r}, but reset= is left out, which has the carry '
                'from which a lane starts anew: a learner holds no arrays. Give reset=(None, '
                'carry0), or (flags, carry0).'
            )
        # shards may have the loss or the penalty in common: each has its part then
        example = _example(compiled, data.ys)
        of_loss = axes_of(lambda *args: task_loss(self.loss(*args)), axes, *example)
        of_penalty = axes_of(lambda *args: penalty_of(self.loss(*args)), axes, *example)
        leaves = jax.tree.leaves(self.around.own(params))
        observed: Observer = compiled.around(
            _step_of(compiled, self.loss),
            params=leaves,
            places=tuple(range(len(leaves))),
            direct=frozenset(compiled.graph.direct),
            restart=partial(compiled.restarted, fresh, self.hidden),
            held=spread(compiled.held, axes),
            shares=(share(axes, of_loss), share(axes, of_penalty)),
        )
        # under `vmap` each lane would print a line of progress
        mapped = any(map(_jax.mapped_axes, jax.tree.leaves((params, state, data))))
        show = None
        if self.progress and not mapped:
            show = show_progress(length, self.progress, every)
        penalised = data.mask is not None and isinstance(
            jax.eval_shape(self.loss, *example), Penalised
        )
        slices = (data.xs, data.ys) if self.not_finite == 'keep' else (data.xs, data.ys, None)
        sequence = Sequence.of(slices, data.mask, flags, length, penalised)
        observed, sequence = self.around.observed(observed, sequence)
        start = Moment((jax.tree.leaves(state.carry), ()), state.trace, state.t)
        return Course(observed, start, sequence, show), of_loss


class _UpdatesInTurns:
    """Updates where no transformation surrounds the call: compiled, and in turns."""

    def __init__(self, calls: SequenceCalls, options_of: Callable):
        self.calls, self.options_of = calls, options_of
        self.program = jax.jit(self._program, donate_argnums=(1, 2))
        self.kept: dict[tuple, tuple[Turns, Any]] = {}

    def _program(self, learnt, state: OnlineState, shown, skipped, data: Data, bounds):
        course, _ = self.calls.course(frozenset(), learnt[0], state, data)
        options = self.options_of(course.observer.graph, course.observer.rule, state)
        turn = Turn(bounds[0], bounds[1], shown)
        result = run_updates(course._replace(show=None), learnt, options, turn)
        skipped = jax.tree.map(jnp.add, skipped, result.skipped)
        return result.learnt, _after(state, result.end), (result.losses, result.aux), skipped

    def __call__(self, learnt, state: OnlineState, data: Data):
        length, compiled = length_of(data.xs, data.ys), self.calls.compiled(learnt[0], state, data)
        options = self.options_of(compiled.graph, compiled.rule, state)
        _check_learnt(options.optimizer, *learnt)
        flags, _ = _resets(data.reset, state, length)
        mask = None if data.mask is None else check_mask(data.mask, length)
        reset = None if data.reset is None else (flags, data.reset[1])
        data = Data(data.xs, data.ys, mask, reset)
        key = signature((learnt, state, data))
        if key not in self.kept:
            loss = jax.eval_shape(self.calls.loss, *_example(compiled, data.ys))
            turns = Turns(number_of_blocks(length, options))
            shown = None
            if self.calls.observe is not None:
                shown = jax.eval_shape(self.calls.observe, learnt[0], state)
            self.kept[key] = turns, (task_loss(loss), shown)
        turns, shapes = self.kept[key]
        show = None
        if self.calls.progress:
            rows = options.every if self.calls.observe is not None else None
            lines = Lines(length, mask, self.calls.progress, rows)
            show = lambda place, done: lines(place[2], steps(done))  # noqa: E731

        def steps(blocks: int) -> int:
            return length if blocks == turns.number else int(steps_of(length, options, blocks))

        def blocks(place, start, stop):
            return self.program(*place, data, bounds(start, stop))

        skipped = None if self.calls.not_finite == 'keep' else jnp.zeros_like(state.t)
        place = *strong((learnt, jax.tree.map(jnp.copy, state))), buffers(shapes, length), skipped
        stop = turns.run(blocks, place, lambda place: None, show)
        (params, opt_state), state, shown, skipped = stop.carry
        losses, shown = cut(shown, steps(stop.done))
        more = self.calls.more(skipped, shown, options.every)
        found = params, opt_state, state, losses, *more
        error = stop.error
        if error is None and self.calls.not_finite == 'raise' and skipped.any():
            error = _not_finite(losses, skipped)
        if error is not None:
            raise with_so_far(error, self.calls.trained(*found), len(losses), length)
        return found


def _not_finite(losses: jax.Array, skipped: jax.Array) -> NotFiniteError:
    counts = f'{skipped} steps'
    if skipped.ndim:
        lanes = jnp.flatnonzero(skipped).tolist()
        counts = ', '.join(f'{skipped[k]} steps of lane {k}' for k in lanes)
    # where to look first
    bad = jnp.flatnonzero(~jnp.isfinite(losses))
    first = f' The first loss that is not finite is that of step {int(bad[0])}.' if len(bad) else ''
    return NotFiniteError(
        f'an input, a target, a state or a gradient was not finite in {counts}.{first} They were '
        "left out, as not_finite='skip' does. Look at the data of these steps."
    )


def _check_learnt(optimizer, params, opt_state) -> None:
    """Refuse what an optimiser can not change, and a state that is not its own."""
    # integers, such as the places of sparse entries, stay as they are in updates
    integer = lambda p: jnp.issubdtype(jnp.result_type(p), jnp.integer)  # noqa: E731
    check_updatable(jax.tree.map(lambda p: None if integer(p) else p, params))
    check_opt_state(optimizer, params, opt_state)


def _step_of(compiled: Compiled, loss: Callable) -> Callable:
    """The step of a cell and a loss of its outputs, as :class:`ObservedStep` takes it."""

    def step(cell, params, world, x, y, sound=None):
        inputs = jax.tree.leaves(as_inputs(x))
        outputs, carry = cell(jax.tree.leaves(params), world[0], inputs)
        for k, out in enumerate(outputs):  # constants in the lanes that are not sound
            if sound is not None and out.shape[: sound.ndim] == sound.shape and is_inexact(out):
                flags = sound.reshape(*sound.shape, *[1] * (out.ndim - sound.ndim))
                outputs[k] = jnp.where(flags, out, jax.lax.stop_gradient(out))
        outputs = jax.tree.unflatten(compiled.program.trees['outputs'], outputs)
        return (loss(outputs, y), None), (carry, ())

    return step


def _resets(reset, state: OnlineState, length: int):
    """Flags ``(T, ...)`` or None, and the leaves of the carry that flagged lanes get."""
    if reset is None:
        return None, []
    if not (isinstance(reset, tuple) and len(reset) == 2):
        raise StructureError(f'reset is {type(reset).__name__}; give a pair (flags, carry0).')
    flags, carry0 = reset
    check_carry0(state.carry, carry0)
    if flags is not None:
        flags = check_flags('reset flags are', flags, length, state.t.shape)
    return flags, jax.tree.leaves(carry0)


def _example(compiled: Compiled, ys) -> tuple:
    """What the loss of a step takes, as shapes."""
    program = compiled.program
    outputs = [abstract(program.avals[v]) for v in program.outputs]
    outputs = jax.tree.unflatten(program.trees['outputs'], outputs)
    return outputs, jax.tree.map(lambda a: abstract(a[0]), ys)


def _axes_of_updates(optimizer, axes: Axes, params, opt_state) -> tuple:
    """The axes along which leaves of params and the optimiser's state may differ after updates."""
    # a fixed point: an update spreads axes from leaf to leaf, through the optimiser
    every = jax.tree.map(lambda _: True, params)

    def update(params, opt_state):
        return optimised(optimizer, (params, opt_state), spread(params, axes), every)

    found = each((params, opt_state))
    while axes:
        new = each(jax.eval_shape(update, *jax.tree.map(spread, (params, opt_state), found)))
        if new == found:
            break
        found = jax.tree.map(frozenset.union, found, new)
    return found
