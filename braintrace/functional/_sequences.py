"""``sequence_grad`` and ``sequence_update``: a cell and its loss as one observed step."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .. import _jax
from .._compiler import abstract
from .._executor import Axes, axes_of, each, in_shards, share, spread, summed_twice, varying
from .._signatures import does_not_fit, public
from .._windows import (
    CallOptions,
    Gradient,
    Moment,
    Penalised,
    Result,
    Run,
    RunInTurns,
    Sequence,
    Skipped,
    Trained,
    check_loss,
    check_mask,
    check_opt_state,
    check_updatable,
    first_order,
    in_chunks,
    length_of,
    optimised,
    penalty_of,
    run_updates,
    run_windows,
    signature,
    strong,
    task_loss,
    total_loss,
    with_so_far,
)
from ..errors import (
    NotSupportedError,
    OptionError,
    StepFunctionError,
    StructureError,
)
from ._compiled import Compiled
from ._places import in_automatic_axes, is_explicit, types_of
from ._state import OnlineState, check_carry0

RUNNING: ContextVar[Any] = ContextVar('learner whose loss runs', default=None)


def checked_loss(learner, loss_fn: Callable) -> Callable:
    """``loss_fn(outputs, target)``, held to return a loss and not to step the learner."""
    loss = _loss_and_aux(learner, loss_fn, False)
    return lambda outputs, target: loss(outputs, target)[0]


def _loss_and_aux(learner, loss_fn: Callable, has_aux: bool) -> Callable:
    """``(outputs, target) -> (loss, aux)`` of a checked ``loss_fn``; ``aux`` is None where it has
    none.
    """
    if not callable(loss_fn):
        raise OptionError(f'loss_fn is {loss_fn!r}; give a function `loss(outputs, target)`.')
    if problem := does_not_fit(loss_fn, 2):
        raise OptionError(f'loss_fn is called as `loss(outputs, target)`: {problem}.')

    def call(outputs, target):
        result = loss_fn(outputs, target)
        if not has_aux:
            return result, None
        if not (isinstance(result, tuple) and len(result) == 2):
            raise StepFunctionError(
                f'has_aux=True, but loss_fn returned {type(result).__name__}; return (loss, aux).'
            )
        return result

    def loss(outputs, target):
        token = RUNNING.set(learner)
        try:
            # a sum over shards that no type tells: its gradients, summed once more, would be as
            # many times too large as there are shards
            axes = summed_twice(lambda *args: total_loss(call(*args)[0]), outputs, target)
            if axes:
                raise StructureError(
                    f'the loss is a sum over the shards of {axes}, in a `jax.shard_map` with '
                    'check_vma=False, where the gradient of each shard is that of as many equal '
                    'losses: summed over shards it would be too large. Return the loss of one '
                    'shard and sum the gradients, or leave check_vma=True, where types tell it.'
                )
            value, aux = call(outputs, target)
            return check_loss(value, 'loss_fn'), aux
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


def _after(state: OnlineState, end: Moment) -> OnlineState:
    """The state at the end of a run from ``state`` on."""
    (leaves, _), trace, t = end
    carry = jax.tree.unflatten(jax.tree.structure(state.carry), leaves)
    return state.replace(carry=carry, trace=trace, t=t)


class SequenceCalls:
    """Calls of a learner over a sequence, for a ``loss(outputs, target)`` of one step. The arrays
    of a call, ``data``, are ``(xs, ys, mask, reset)`` as given.
    """

    def __init__(self, learner, loss_fn: Callable, options: CallOptions):
        self.learner, self.options = learner, options
        self.loss_fn, self.shown = loss_fn, _loss_and_aux(learner, loss_fn, options.has_aux)
        self.kept: dict[tuple, RunInTurns] = {}
        self.chunked: Callable | None = None  # of a gradient whose progress is told
        self.turn = jax.jit(self._turn, donate_argnums=(0, 1))

    def loss(self, outputs, target):
        """The loss of a step, without what is beside it."""
        return self.shown(outputs, target)[0]

    @property
    def of_aux(self) -> Any:
        """The spec of ``aux``, where it is asked for."""
        return P() if self.options.has_aux else None

    def gradient(self) -> Callable:
        """``(params, state, xs, ys, mask=None, reset=None) -> Gradient``."""
        options = self.options

        @public('learner.sequence_grad(loss_fn)')
        def run(params, state, xs, ys, mask=None, reset=None) -> Gradient:
            if options.progress:
                return self._in_chunks(params, state, (xs, ys, mask, reset))
            # what is computed op by op under explicit axes is typed by them, automatic or not
            call = program if is_explicit() else on_data
            return call(params, state, (xs, ys, mask, reset))

        def types(params, state, data) -> Gradient:
            return Gradient._make((types_of(params), P(), self.of_aux, types_of(state)))

        @partial(in_automatic_axes, types=types)
        def on_data(params, state, data) -> Gradient:
            params, state, xs = first_order((params, state, data[0]))
            return Gradient(*in_shards(body, params, state, (xs, *data[1:])))

        def body(axes: Axes, params, state, data):
            run, of_loss = self.run_of(axes, options, params, state, data)
            result = run_windows(run)
            new = _after(state, result.end)
            return (result.learnt, axes), (result.losses, of_loss), (result.aux, axes), (new, axes)

        program = jax.jit(on_data)
        return run

    def _check_told(self) -> None:
        if self.options.progress and not _jax.is_outermost():
            raise OptionError(
                'progress is given inside of a transformation, and it is told between the parts of '
                'a loop in Python. Call the function as it is, without jax.jit: it compiles itself.'
            )

    def _in_chunks(self, params, state: OnlineState, data) -> Gradient:
        """The gradient where progress is told."""
        self._check_told()
        (xs, ys, mask, reset), options = data, self.options
        length = length_of(xs, ys)
        mask = None if mask is None else check_mask(mask, length)
        if reset is not None:
            flags, fresh = reset
            flags = self.compiled(params, state, xs).checked_flags('reset flags are', flags, length)
        keep = options.keep_trace or not options.exact
        whole = options._replace(progress=False, reduction='sum', keep_trace=keep)
        if self.chunked is None:
            calls = SequenceCalls(self.learner, self.loss_fn, whole)
            self.chunked = jax.jit(calls.gradient())
        gradient = self.chunked

        def chunk(state, part: slice, mask) -> Result:
            xs_, ys_ = jax.tree.map(lambda a: a[part], (xs, ys))
            of_part = None if reset is None else (flags[part], fresh)
            grads, losses, aux, new = gradient(params, state, xs_, ys_, mask, of_part)
            return Result(grads, new, losses, aux)

        found = in_chunks(chunk, length, options, mask, Result(None, state), lambda end: None)
        new = found.end if options.keep_trace else found.end.replace(t=0 * found.end.t)
        given = Gradient(found.learnt, found.losses, found.aux, new)
        if found.stopped is not None:
            raise with_so_far(found.stopped, given, len(found.losses), length)
        return given

    def update(self) -> Callable:
        """``(params, opt_state, state, xs, ys, mask=None, reset=None) -> Trained``."""
        options = self.options

        @public('learner.sequence_update(loss_fn, optimizer)')
        def run(params, opt_state, state, xs, ys, mask=None, reset=None) -> Trained:
            return on_data(params, opt_state, state, (xs, ys, mask, reset))

        def types(params, opt_state, state, data) -> tuple:
            of_params, of_opt_state, of_state = types_of((params, opt_state, state))
            skipped = P() if options.resets else None
            observed = None if options.observe is None else P()
            shown = P(), self.of_aux
            return Trained._make((of_params, *shown, of_state, of_opt_state, skipped, observed))

        @partial(in_automatic_axes, types=types)
        def on_data(params, opt_state, state, data) -> Trained:
            if _jax.is_outermost():
                return self._in_turns((params, opt_state), state, data)
            self._check_told()
            options.check_inside_of_transformation()
            of_args = varying((params, opt_state, state, data))
            if options.resets and of_args:
                raise NotSupportedError(
                    f"not_finite='reset' in a shard_map along {sorted(map(str, of_args))}: each "
                    'shard would leave out updates of its own. Put jax.jit around arrays that are '
                    'sharded.'
                )
            of_learnt = _axes_of_updates(options.optimizer, of_args, params, opt_state)
            params, state, xs = first_order((params, state, data[0]))
            found = in_shards(partial(body, of_learnt), params, opt_state, state, (xs, *data[1:]))
            return Trained(*found)

        def body(of_learnt, axes: Axes, params, opt_state, state, data):
            run, of_loss = self.run_of(axes, options, params, state, data)
            check_learnt(options.optimizer, params, opt_state)
            result = run_updates(run, opt_state)
            found = self._trained(result._replace(end=_after(state, result.end)))
            of_params, of_opt_state = of_learnt
            return tuple(zip(found, (of_params, of_loss, axes, axes, of_opt_state, axes, axes)))

        return run

    def _trained(self, result: Result) -> Trained:
        """The answer, of a result that ends with a state."""
        params, opt_state = result.learnt
        shown = result.losses, result.aux
        return Trained(params, *shown, result.end, opt_state, result.skipped, result.observed)

    def compiled(self, params, state: OnlineState, xs) -> Compiled:
        """The compiled step for these arguments."""
        first = self.learner.taken(jax.tree.map(lambda a: a[0], xs))
        return self.learner.matching(params, state, first)

    def run_of(
        self, axes: Axes, options: CallOptions, params, state: OnlineState, data, bounds=None
    ) -> tuple[Run, Axes]:
        """The cell and the loss under observation along a sequence, and the axes of a surrounding
        ``shard_map`` along which the loss of a step may differ."""
        xs, ys, mask, reset = data
        length, compiled = length_of(xs, ys), self.compiled(params, state, xs)
        flags, fresh = _resets(compiled, reset, state, length)
        if options.resets and reset is None:
            raise OptionError(
                f'not_finite is {options.not_finite!r}, but reset= is left out, which has the '
                'carry from which a lane starts again: a learner holds no arrays. Give '
                'reset=(None, carry0), or (flags, carry0).'
            )
        if options.resets:
            compiled.tell_of_batch(options.not_finite)
        # shards may have the loss or the penalty in common: each has its part then
        example = _example(compiled, ys)
        of_loss = axes_of(lambda *args: task_loss(self.loss(*args)), axes, *example)
        of_penalty = axes_of(lambda *args: penalty_of(self.loss(*args)), axes, *example)
        leaves = jax.tree.leaves(params)
        observer = compiled.around(
            _step_of(compiled, self.shown),
            params=leaves,
            places=tuple(range(len(leaves))),
            direct=frozenset(compiled.graph.direct),
            restart=partial(compiled.restarted, fresh, self.learner.hidden),
            held=spread(compiled.held, axes),
            shares=(share(axes, of_loss), share(axes, of_penalty)),
        )
        options = options.delayed(compiled.graph, compiled.rule)
        if (observe := options.observe) is not None:
            of_state = lambda grads, now: observe(grads, _after(state, now))  # noqa: E731
            options = options._replace(observe=of_state)
        penalised = mask is not None and isinstance(jax.eval_shape(self.loss, *example), Penalised)
        sequence = Sequence((xs, ys), mask, flags).weighed(length, penalised)
        start = Moment((jax.tree.leaves(state.carry), ()), state.trace, state.t)
        return Run(observer, start, sequence, params, options, bounds), of_loss

    def _turn(self, state: OnlineState, shown, learnt, skipped, data, bounds) -> Result:
        """Some blocks of updates from a state on; all steps have ``shown`` this so far."""
        run, _ = self.run_of(frozenset(), self.options, learnt[0], state, data, bounds)
        result = run_updates(run, learnt[1], shown)
        skipped = jax.tree.map(jnp.add, skipped, result.skipped)
        return result._replace(end=_after(state, result.end), skipped=skipped)

    def _in_turns(self, learnt, state: OnlineState, data) -> Trained:
        """Updates where no transformation surrounds the call: compiled, and in turns."""
        (xs, ys, mask, reset), options = data, self.options
        length, compiled = length_of(xs, ys), self.compiled(learnt[0], state, xs)
        check_learnt(options.optimizer, *learnt)
        flags, _ = _resets(compiled, reset, state, length)
        mask = None if mask is None else check_mask(mask, length)
        data = xs, ys, mask, None if reset is None else (flags, reset[1])
        if (key := signature((learnt, state, data))) not in self.kept:
            (loss, aux), rows = jax.eval_shape(self.shown, *_example(compiled, ys)), None
            if options.observe is not None:
                rows = jax.eval_shape(options.observe, learnt[0], state)
            delayed = options.delayed(compiled.graph, compiled.rule)
            self.kept[key] = RunInTurns(length, delayed, (task_loss(loss), aux, rows))

        def turn(now: Result, bounds) -> Result:
            shown = now.losses, now.aux, now.observed
            return self.turn(now.end, shown, now.learnt, now.skipped, data, bounds)

        skipped = Skipped.none(state.t) if options.resets else None
        # the program takes the buffers of its state: the caller keeps his own
        learnt, state = strong((learnt, jax.tree.map(jnp.copy, state)))
        first = Result(learnt, state, skipped=skipped)
        result = self.kept[key].run(turn, first, mask, options.progress, lambda end: None)
        found, error = self._trained(result), result.stopped
        if error is None and options.not_finite == 'raise' and result.skipped is not None:
            error = result.skipped.error(found.losses)
        if error is not None:
            raise with_so_far(error, found, len(found.losses), length)
        return found


def check_learnt(optimizer, params, opt_state) -> None:
    """Refuse what an optimiser can not change, and a state that is not its own."""
    # integers, such as the places of sparse entries, stay as they are in updates
    integer = lambda p: jnp.issubdtype(jnp.result_type(p), jnp.integer)  # noqa: E731
    check_updatable(jax.tree.map(lambda p: None if integer(p) else p, params))
    check_opt_state(optimizer, params, opt_state)


def _step_of(compiled: Compiled, shown: Callable) -> Callable:
    """The step of a cell and ``shown(outputs, target) -> (loss, aux)``, as :class:`ObservedStep`
    takes it.
    """

    def step(cell, params, world, x, y):
        inputs = jax.tree.leaves(x)
        outputs, carry = cell(jax.tree.leaves(params), world[0], inputs)
        outputs = jax.tree.unflatten(compiled.program.trees['outputs'], outputs)
        return shown(outputs, y), (carry, ())

    return step


def _resets(compiled: Compiled, reset, state: OnlineState, length: int):
    """Flags ``(T, ...)`` or None, and the leaves of the carry that flagged lanes get."""
    if reset is None:
        return None, []
    if not (isinstance(reset, tuple) and len(reset) == 2):
        raise StructureError(f'reset is {type(reset).__name__}; give a pair (flags, carry0).')
    flags, carry0 = reset
    check_carry0(state.carry, carry0)
    if flags is not None:
        flags = compiled.checked_flags('reset flags are', flags, length)
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
        return optimised(optimizer, (params, opt_state), spread(params, axes), every, 0.0)

    found = each((params, opt_state))
    while axes:
        new = each(jax.eval_shape(update, *jax.tree.map(spread, (params, opt_state), found)))
        if new == found:
            break
        found = jax.tree.map(frozenset.union, found, new)
    return found
