"""A step along a sequence: windows with constant weights, or updates of the weights.

One scan stacks factors and signals of a window; one call of the rule turns them into gradients.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph
from .._executor import Signals, Steps, TracedStep
from .._rules import Network, Rule, Start, Window, counting, same_step, uncounted
from .arguments import divisor
from .leaves import tree_bytes
from .records import (
    GradientOptions,
    Gradients,
    Moment,
    Observation,
    Result,
    Sequence,
    Show,
    Together,
    UpdateOptions,
    counts_along,
)
from .turns import Turn
from .walk import Walk, choose_window, step_bytes


class Observer(Protocol):
    """A step under observation, for a rule. ``weights`` stay constant during a window."""

    @property
    def graph(self) -> ETraceGraph: ...

    @property
    def rule(self) -> Rule: ...

    def network(self, weights) -> Network:
        """The graph and these weights of its ops, for the rule."""

    def observe(self, weights, world, at: Sequence, carried=None) -> Observation:
        """One step, its loss weighed by the mask; ``carried``: see ``Rule.factors``."""

    def observe_together(self, weights, world, part: Sequence, keep: bool, carried) -> Together:
        """Some steps under one pull-back, without cuts; ``keep``: with their factors. ``carried``:
        the trace that moves inside, and the step counts before each step; None: none does.
        """

    def zeros(self, weights) -> Gradients:
        """The gradients before the first step."""

    def reset(self, world, flags: jax.Array):
        """The world with flagged lanes put back."""

    def total(self, weights, gradients: Gradients):
        """Gradients as a tree like the weights."""

    def moves(self, weights):
        """Whether each leaf of the weights may change, as a tree of bool."""


class Course(NamedTuple):
    """A step under observation, a moment to start from, and a sequence; ``show`` reports the
    progress. ``made``: how many steps the learner made before that moment, where the rule asks.
    """

    observer: Observer
    start: Moment
    sequence: Sequence
    show: Show | None
    made: jax.Array | None = None

    @property
    def length(self) -> int:
        return len(self.sequence.mask)

    def counted(self, begin=0) -> Course:
        """With the count of all steps in the sequence, where the trace has one; it starts before
        the step ``begin``.
        """
        trace, count = uncounted(self.start.trace)
        if count is None:
            return self
        sequence = self.sequence._replace(done=counts_along(count, None, self.length, begin)[0])
        start = self.start._replace(trace=trace)
        return self._replace(start=start, sequence=sequence, made=count)

    def ended(self, end: Moment, steps) -> Moment:
        """The last moment, with the count after so many steps."""
        count = self.made
        if count is not None:
            count += jnp.minimum(steps, jnp.iinfo(count.dtype).max - count).astype(count.dtype)
        return end._replace(trace=counting(end.trace, count))


class Run:
    """The windows of a course. ``exact``: reverse mode without cuts inside each."""

    def __init__(self, course: Course, weights, exact: bool):
        self.course, self.weights, self.exact = course, weights, exact
        self.observer = course.observer
        self.graph, self.rule = self.observer.graph, self.observer.rule

    @cached_property
    def traced(self) -> TracedStep:
        """The step, traced once."""
        start, sequence = self.course.start, self.course.sequence
        at = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), sequence)
        step, state = self._step, start.world
        if self.rule.inside:
            step, state, at = self._moving_step, (start.world, start.trace), (at, start.t)
        associative = self.graph.policy.associative
        return TracedStep(step, self.weights, state, at, associative=associative)

    def _seen(self, weights, world, at: Sequence, carried=None) -> Observation:
        """One step under observation; where its loss does not count, its signals are zero."""
        if at.flags is not None:
            world = self.observer.reset(world, at.flags)
        seen = self.observer.observe(weights, world, at, carried)
        if at.counts is None:
            return seen
        signals = jax.tree.map(
            lambda s: jnp.where(at.counts, s, jnp.zeros((), s.dtype)), seen.signals
        )
        return seen._replace(signals=signals)

    def _step(self, weights, world, at: Sequence):
        seen = self._seen(weights, world, at)
        x, d, df = seen.factors
        return seen.world, seen.direct, (x, seen.loss, seen.aux), (d, df, seen.signals)

    def _moving_step(self, weights, state, at):
        """A step inside which the trace moves; its gradients are summed over the steps."""
        (world, trace), (part, t) = state, at
        seen, network = self._seen(weights, world, part, (trace, t)), self.observer.network(weights)
        new = self.rule.update(network, trace, seen.factors, t)
        step = Window.of_step(seen.factors, seen.signals, t)
        ops = self.rule.gradient(network, trace, new, step)
        return (seen.world, new), Gradients(ops, seen.direct), (seen.loss, seen.aux), ()

    def step_bytes(self, keep: bool) -> int:
        """Bytes that a window stores of each step."""
        if self.exact or self.rule.inside:
            return 0
        return step_bytes(self.graph, keep) + self.traced.row_bytes

    def opened(self, weights, start: Moment) -> Moment:
        """The moment, the pending steps of its trace written out."""
        graph = self.observer.network(weights).graph
        return start._replace(trace=self.rule.written(graph, start.trace, start.t))

    def closed(self, end: Moment) -> Moment:
        """The inverse of :meth:`opened`."""
        return end._replace(trace=self.rule.carried(self.graph, end.trace, end.t))

    def window(self, weights, now: Moment, pending, part: Sequence, keep: bool):
        """``(moment, pending, gradients, (losses, aux))`` after some steps; their factors are
        pending, the trace is as it was.
        """
        if self.exact:
            return self._exact(weights, now, pending, part, keep)
        length = len(part.mask)
        ts, t = counts_along(now.t, part.flags, length)
        if self.rule.inside:
            state, at = (now.world, now.trace), (part, ts)
            (world, trace), gradients, shown, _ = self.traced.loop(
                weights, state, at, length, part.counts
            )
            return Moment(world, trace, t), None, gradients, shown
        world, direct, (x, losses, aux), steps = self.traced.loop(
            weights, now.world, part, length, part.counts
        )
        window = Window(x, steps, ts, part.flags)
        ops, pending = self.rule.window(
            self.observer.network(weights), now.trace, pending, window, keep
        )
        return Moment(world, now.trace, t), pending, Gradients(ops, direct), (losses, aux)

    def _exact(self, weights, now: Moment, pending, part: Sequence, keep: bool):
        """:meth:`window` by reverse mode; without ``keep`` there is no history before it."""
        ts, t = counts_along(now.t, part.flags, len(part.mask))
        inside = keep and self.rule.inside
        carried = (now.trace, ts) if inside else None
        seen = self.observer.observe_together(weights, now.world, part, keep, carried)
        network, (x, d, df) = self.observer.network(weights), seen.factors
        ops = same_step(network.graph, x, seen.dy, network.weights)
        if keep and self.rule.traces:
            reset = None if part.flags is None else part.flags[0]
            start = Start(ts[0], reset)
            ops = self.rule.with_history(network, ops, now.trace, pending, seen.lam, start)
        if keep and self.rule.traces and not inside:
            steps = Steps((d, df), partial(_without_signals, self.graph))
            window = Window(x, steps, ts, part.flags)
            pending = self.rule.advance(network, now.trace, pending, window)
        end = Moment(seen.world, seen.trace if inside else now.trace, t)
        return end, pending, Gradients(ops, seen.direct), (seen.losses, seen.aux)

    def write(self, weights, now: Moment, pending, read: Gradients) -> Moment:
        """The moment with all pending steps written into the trace, after ``read`` was made."""
        network = self.observer.network(weights)
        trace = self.rule.close(network, now.trace, pending, now.t, read.ops)
        return now._replace(trace=trace)


def _without_signals(graph: ETraceGraph, row) -> tuple:
    """The factors of a step, as a window opens them, and no signals."""
    return *row, Signals({}, {g.name: (None,) * g.num_state for g in graph.hidden_groups}, {})


def run_windows(course: Course, weights, options: GradientOptions) -> Result:
    """The gradient of a sequence, weights constant; ``learnt`` is a tree like the weights."""
    course = course.counted()
    course = course._replace(sequence=course.sequence.penalised(options.reduction))
    run, start, length = Run(course, weights, options.exact), course.start, course.length
    size = choose_window(options, length, tree_bytes(start.trace), run.step_bytes(options.keep))
    # of one window the trace is read as it is carried
    dropped = not options.keep and (size >= length or options.exact)

    def window(state, part: Sequence, keep: bool = not dropped):
        now, total = state
        now, pending, gradients, shown = run.window(weights, now, None, part, keep)
        if keep:
            now = run.write(weights, now, pending, gradients)
        return (now, jax.tree.map(jnp.add, total, gradients)), shown

    first = start if dropped else run.opened(weights, start)
    walk = Walk(course.sequence, (first, course.observer.zeros(weights)), course.show)
    whole, rest = divmod(length, size)
    # The last window stands apart: where its trace is dropped, it is not written.
    walk.blocks(window, whole if rest else whole - 1, size)
    walk.blocks(partial(window, keep=options.keep), 1, length - walk.done)
    now, total = walk.state
    end = course.ended(now if dropped else run.closed(now), length)
    grads = course.observer.total(weights, total)
    grads = scaled(grads, course.sequence.mask, options.reduction)
    return Result(grads, end if options.keep else end._replace(t=0 * end.t), *walk.results)


def blocks_of(length: int, options: UpdateOptions) -> list[tuple[int, int, int]]:
    """The blocks of :func:`run_updates`, kind after kind: how many there are, the steps of each,
    and the steps of an update in it.
    """
    every, size = options.every, options.every * options.delay
    whole, rest = divmod(length, size)
    left = rest % every
    return [
        (whole, size, every),
        (int(rest >= every), rest - left, every),
        (int(left > 0), left, left),
    ]


def number_of_blocks(length: int, options: UpdateOptions) -> int:
    """The number of blocks that :func:`run_updates` walks."""
    return sum(number for number, _, _ in blocks_of(length, options))


def steps_of(length: int, options: UpdateOptions, blocks) -> Any:
    """The number of steps in the first blocks of :func:`run_updates`."""
    steps: Any = 0
    for number, size, _ in blocks_of(length, options):
        steps += jnp.clip(blocks, 0, number) * size
        blocks = blocks - number
    return steps


def run_updates(
    course: Course, learnt: tuple[Any, Any], options: UpdateOptions, turn: Turn | None = None
) -> Result:
    """Train on a sequence: an update each ``every`` steps, and one after the steps that are left.

    ``learnt`` are the weights and the state of the optimiser. Between two writes of the trace the
    steps stay pending. A ``turn`` takes some of the blocks alone, from the moment before them.
    """
    length: int = course.length
    begin: Any = 0
    steps: Any = length
    if turn is not None:
        begin, stop = (steps_of(length, options, at) for at in (turn.start, turn.stop))
        steps = stop - begin
    course = course.counted(begin)
    observer, run = course.observer, Run(course, learnt[0], options.exact)

    def block(state, part: Sequence, size: int):
        """Updates after each ``size`` steps, then one write of the trace."""
        (learnt, now), pending, pieces = state, None, []
        for i in range(0, len(part.mask), size):
            steps, before = part.part(i, i + size).penalised(options.reduction), learnt[0]
            now, pending, gradients, shown = run.window(before, now, pending, steps, True)
            grads = scaled(observer.total(before, gradients), steps.mask, options.reduction)
            learnt = optimised(options.optimizer, learnt, grads, observer.moves(before))
            pieces.append(shown)
        shown = jax.tree.map(lambda *each: jnp.concatenate(each), *pieces)
        return (learnt, run.write(before, now, pending, gradients)), shown

    walk = Walk(course.sequence, (learnt, run.opened(learnt[0], course.start)), course.show, turn)
    for number, size, every in blocks_of(length, options):
        walk.blocks(partial(block, size=every), number, size)
    learnt, end = walk.state
    return Result(learnt, course.ended(run.closed(end), steps), *walk.results)


def scaled(grads, mask: jax.Array, reduction: str):
    """Gradients divided by the sum of the mask for ``'mean'``."""
    if reduction == 'sum':
        return grads
    total = divisor(mask)
    return jax.tree.map(
        lambda g: g if g.dtype == jax.dtypes.float0 else g / total.astype(g.dtype), grads
    )


def optimised(optimizer, learnt, grads, moves):
    """``learnt``, a pair ``(values, opt_state)``, after one update.

    ``moves``: a tree of bool like the values; leaves where it is false stay as they are.
    """
    values, opt_state = learnt
    none = jax.dtypes.float0  # of an integer, which stays
    grads = jax.tree.map(lambda g: jnp.zeros(g.shape) if g.dtype == none else g, grads)
    updates, new = optimizer.update(grads, opt_state, values)
    new = jax.tree.map(lambda a, old: jnp.asarray(a, jnp.result_type(old)), new, opt_state)
    values = jax.tree.map(
        lambda p, u, m: (p + u).astype(jnp.result_type(p)) if m else p, values, updates, moves
    )
    return values, new
