"""A step along a sequence: windows with constant weights, or updates of the weights.

One scan stacks factors and signals of a window; one call of the rule turns them into gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import ETraceGraph, is_inexact
from .._executor import Factors, Signals, Steps, TracedStep, even, varying
from .._rules import (
    Network,
    Rule,
    Stepwise,
    Window,
    Windowed,
    add_gradients,
    anywhere,
    counting,
    same_step,
    tree_bytes,
    uncounted,
)
from ..errors import OptionError
from .options import (
    NOT_FINITE,
    REDUCTIONS,
    Skipped,
    check_choice,
    check_inside,
    check_mask,
    check_observe,
    check_progress,
    check_updates,
    check_window,
    divisor,
    first_order,
    signature,
    takes_value,
)
from .turns import Progress, Turns, bounds, buffers, cut

Count = TypeVar('Count', jax.Array, jax.Array | None)


class Sequence(NamedTuple):
    """``slices``, weights of the losses (``mask``) and reset flags (``(T,)`` or ``(T, B)``), each
    with time in front. A user's mask may be None (:meth:`weighed`).

    ``counts``: bool ``(T,)``, false where a weight is 0: such a loss and its derivative need not be
    numbers. None: all count. ``done``: how many steps the learner made before each, None
    where nothing asks. ``penalties``: weights of the penalties beside these losses; None: there
    are none, or each weight is 1. They count where a loss does not, so ``counts`` is None then.
    """

    slices: Any
    mask: Any
    flags: jax.Array | None = None
    counts: jax.Array | None = None
    done: jax.Array | None = None
    penalties: jax.Array | None = None

    def weighed(self, length: int, penalised: bool) -> Sequence:
        """With a weight for each step; ``penalised``: whether penalties are beside the losses."""
        weights = check_mask(self.mask, length)
        if self.mask is None:
            return self._replace(mask=weights)
        if penalised:
            return self._replace(mask=weights, penalties=jnp.ones_like(weights))
        return self._replace(mask=weights, counts=weights != 0)

    def penalised(self, reduction: str) -> Sequence:
        """With the weights of penalties whose mean counts beside the weighed mean of these steps'
        losses, by the divisor of which the gradient is divided.
        """
        if self.penalties is None or reduction == 'sum':
            return self
        weight = divisor(self.mask) / len(self.mask)
        return self._replace(penalties=jnp.full_like(self.mask, weight))

    def part(self, start: int, stop: int) -> Sequence:
        return jax.tree.map(lambda a: a[start:stop], self)

    def blocks(self, number: int, size: int) -> Sequence:
        return jax.tree.map(lambda a: a[: number * size].reshape(number, size, *a.shape[1:]), self)


class Observation(NamedTuple):
    """One observed step; ``world`` is after it, ``direct`` are gradients that pass no op.

    Of several steps under one pull-back, factors, losses and ``aux`` have time in front, and the
    signals are derivatives of the sum of the losses: by each y, and by the hidden states before
    these steps (``c``). ``trace``: one that moved inside, after them.
    """

    world: Any
    factors: Factors
    signals: Signals
    direct: Any
    loss: jax.Array
    aux: Any
    trace: Any = None


class Moment(NamedTuple):
    """A place in a run: the world of its step, the trace, and the count of trace steps."""

    world: Any
    trace: Any
    t: jax.Array


class Gradients(NamedTuple):
    """Gradients of some steps' losses, for the weights of ops and for weights that reach a loss
    otherwise.
    """

    ops: dict[str, dict[str, jax.Array]]
    direct: Any


class Result(NamedTuple):
    """How far a run is: what is ``learnt`` (gradients, or weights and optimiser state), the last
    moment, losses and auxiliary outputs of all steps, what was ``observed`` after each update.
    ``skipped``: what was left out and started again; None where nothing may be. ``stopped``: the
    exception that ended it before its end.
    """

    learnt: Any
    end: Any
    losses: Any = None
    aux: Any = None
    observed: Any = None
    skipped: Skipped | None = None
    stopped: BaseException | None = None


def counted(t: Count) -> Count:
    """The step count after one more step. The largest number stays: a count that wraps to 0 would
    empty the trace. None: nothing is counted.
    """
    return None if t is None else t + (t < jnp.iinfo(t.dtype).max).astype(t.dtype)


def counts_along(t: jax.Array, flags: jax.Array | None, length: int, begin=0) -> tuple:
    """The step counts before each of some steps, after its reset, and after the last one; ``t``
    is before the step ``begin``.
    """
    k = (jnp.arange(length, dtype=t.dtype) - begin).reshape(-1, *[1] * t.ndim)
    counts = t[None] + jnp.minimum(k, jnp.iinfo(t.dtype).max - t[None])
    if flags is not None:
        flags = flags.reshape(*flags.shape, *[1] * (counts.ndim - flags.ndim))
        last = jax.lax.cummax(jnp.where(flags, k, -1))  # the latest reset
        counts = jnp.where(last < 0, counts, k - last)
    return counts, counted(counts[-1])


def first_count(t: jax.Array, flags: jax.Array | None) -> jax.Array:
    """The first of these counts."""
    return t if flags is None else jnp.where(flags[0], 0, t)


# Bytes that are stored of a window. XLA needs a third more beside them, and from 32 MiB on glibc
# maps memory again at each call.
WHOLE = 24 * 2**20  # in one window for the whole sequence
EACH = 8 * 2**20  # in each of several
MANY = 4  # windows: to compile two programs takes longer than to write a trace once more


class Walk:
    """A sequence, block after block: ``body(state, part) -> state, (losses, aux)``, of updates
    ``(losses, aux, observed)``; blocks of one kind in a scan.

    ``bounds``: of the blocks that are walked alone; ``shown`` is then what all steps have shown so
    far. Each ``every`` steps have one row of what is observed.
    """

    def __init__(self, sequence: Sequence, state, bounds=None, shown=None, every: int = 1):
        self.sequence, self.state, self.bounds, self.every = sequence, state, bounds, every
        self.done = self.number = 0  # steps and blocks
        self.shown: list = [] if bounds is None else [shown]

    def blocks(self, body: Callable, number: int, size: int) -> None:
        """The next ``number`` blocks of ``size`` steps."""
        if not number or not size:
            return
        first = self.done
        self.done += number * size
        if self.bounds is None:
            part = self.sequence.part(first, self.done)
            if number == 1:
                self.state, got = body(self.state, part)
            else:
                self.state, got = jax.lax.scan(body, self.state, part.blocks(number, size))
                flat = lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:])
                got = jax.tree.map(flat, got)
            self.shown.append(got)
            return

        def block(k, now):
            state, shown = now
            at = first + k * size
            part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, at, size), self.sequence)
            state, got = body(state, part)

            def put(at, rows, new):
                put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=at, axis=0)
                return jax.tree.map(put, rows, new)

            return state, tuple(map(put, (at, at, at // self.every), shown, got))

        # those that are between the bounds, in a loop whose length no shape tells
        start, stop = (jnp.clip(x - self.number, 0, number) for x in self.bounds)
        now = self.state, self.shown[0]
        self.state, self.shown[0] = jax.lax.fori_loop(start, stop, block, now)
        self.number += number

    @property
    def results(self):
        """What all steps have shown."""
        if len(self.shown) == 1:
            return self.shown[0]
        return jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *self.shown)


def choose_window(options: CallOptions, length: int, trace_bytes: int, per_step: int) -> int:
    """The number of steps in a window: as asked, or the whole sequence where what is stored of it
    is little, else as many steps as the trace has bytes, since each window moves the trace.
    """
    if options.window == 'auto':
        # a trace that is dropped is written only if there are several windows, by one product
        # more: more expensive than to map a few times its bytes
        whole = WHOLE if options.keep_trace else WHOLE + 2 * trace_bytes
        budget = whole if per_step * length <= whole else max(trace_bytes, EACH)
        return even(length, max(1, int(budget // max(per_step, 1))))
    return length if options.window is None else min(int(options.window), length)


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

    def observe_together(self, weights, world, part: Sequence, keep: bool, carried) -> Observation:
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

    def spoiled(self, moment: Moment, pending: Any) -> jax.Array:
        """Which lanes have a state, or a trace that counts, with a number that is not finite."""


class CallOptions(NamedTuple):
    """The options of a call over a sequence, by the names of users' arguments: those of a gradient,
    and those of updates, which have an ``optimizer``.

    ``exact``: reverse mode without cuts inside a window, or through the steps of an update.
    ``delay``: how many updates share one write of the trace, which the compiled step tells
    (:meth:`delayed`).
    """

    reduction: str
    progress: Any
    has_aux: bool = False
    exact: bool = False
    window: Any = 'auto'
    keep_trace: bool = True
    optimizer: Any = None
    update_every: int = 1
    delay: int = 1
    not_finite: str = 'keep'
    observe: Callable | None = None

    @classmethod
    def checked(cls, inside: str, **given) -> CallOptions:
        """The options that are given, if they go together."""
        options = cls(**given)
        check_choice('reduction', options.reduction, REDUCTIONS)
        check_choice('keep_trace', options.keep_trace, (True, False))
        check_choice('has_aux', options.has_aux, (True, False))
        check_choice('not_finite', options.not_finite, NOT_FINITE)
        check_observe(options.observe)
        check_progress(options.progress, options.observe is not None)
        check_window(options.window)
        exact = check_inside(inside, options.window if options.optimizer is None else None)
        if options.optimizer is not None:
            check_updates(options.update_every)
        return options._replace(exact=exact, update_every=int(options.update_every))

    @property
    def row_steps(self) -> int:
        """The number of steps that have one row of what is observed."""
        return 1 if self.observe is None else self.update_every

    @property
    def resets(self) -> bool:
        """Whether updates that are not finite are left out, and such lanes start again."""
        return self.not_finite != 'keep'

    def check_inside_of_transformation(self) -> None:
        """Refuse to raise where nothing can be raised."""
        if self.not_finite == 'raise':
            raise OptionError(
                "not_finite is 'raise' inside of a transformation, where nothing can be raised. "
                "Call it as it is, without jit, or give 'reset' and look at `skipped`."
            )

    def delayed(self, graph: ETraceGraph, rule: Rule) -> CallOptions:
        """With the number of updates between two writes of the trace."""
        if self.optimizer is None:
            return self
        return self._replace(delay=rule.delay(graph, self.update_every))


class Run:
    """A step under observation, a moment to start from, and a sequence, which it walks in windows.

    ``bounds``: of the blocks of updates that are walked alone, from the moment before them; None:
    all are.
    """

    def __init__(
        self,
        observer: Observer,
        start: Moment,
        sequence: Sequence,
        weights,
        options: CallOptions,
        bounds=None,
    ):
        self.observer, self.weights, self.options = observer, weights, options
        self.graph = observer.graph
        self.rule = cast(Stepwise | Windowed, observer.rule)
        self.length = self.steps = len(sequence.mask)
        self.bounds, self.begin = bounds, 0
        if bounds is not None:
            self.begin, stop = (steps_of(self.length, options, at) for at in bounds)
            self.steps = stop - self.begin
        # the count of all steps that the learner made, where the trace has one
        trace, self.made = uncounted(start.trace)
        if self.made is not None:
            done, _ = counts_along(self.made, None, self.length, self.begin)
            sequence = sequence._replace(done=done)
        self.start, self.sequence = start._replace(trace=trace), sequence
        self._traced: dict[tuple, TracedStep] = {}

    def _seen(self, weights, world, at: Sequence, carried=None) -> Observation:
        """One step under observation; where its loss does not count, its signals are zero."""
        if at.flags is not None:
            world = self.observer.reset(world, at.flags)
        seen = self.observer.observe(weights, world, at, carried)
        if (counts := at.counts) is None:
            return seen
        signals = jax.tree.map(lambda s: jnp.where(counts, s, jnp.zeros((), s.dtype)), seen.signals)
        return seen._replace(signals=signals)

    def traced(self, sequence: Sequence) -> TracedStep:
        """The step, traced once for sequences of the same slices, flags and weights."""
        at = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), sequence)
        if (key := signature(at)) in self._traced:
            return self._traced[key]

        def step(weights, world, at: Sequence):
            seen = self._seen(weights, world, at)
            (x, d, df), dy = seen.factors, seen.signals.dy
            without_x = [op.key for op in self.graph.ops if op.x is None and op.key in dy]
            sums = {key: dy[key].astype(_jax.wide(dy[key].dtype)) for key in without_x}
            return seen.world, (seen.direct, sums), (x, seen.loss, seen.aux), (d, df, seen.signals)

        def moving_step(weights, state, at):
            """A step inside which the trace moves; its gradients are summed over the steps."""
            (world, trace), (part, t) = state, at
            seen = self._seen(weights, world, part, (trace, t))
            network = self.observer.network(weights)
            new = self.rule.update(network, trace, seen.factors, t)
            window = Window.of_step(seen.factors, seen.signals, t)
            ops = self.rule.gradient(network, trace, new, window)
            return (seen.world, new), Gradients(ops, seen.direct), (seen.loss, seen.aux), ()

        auto, (world, trace, t) = self.graph.policy.at_once, self.start
        if isinstance(self.rule, Stepwise):
            traced = TracedStep(moving_step, self.weights, (world, trace), (at, t), auto=auto)
        else:
            traced = TracedStep(step, self.weights, world, at, auto=auto)
        self._traced[key] = traced
        return traced

    def step_bytes(self, keep: bool) -> int:
        """Bytes that a window stores of each step, and that its reverse scan makes of it: what it
        sends to each y, and with ``keep`` what h owes to each y.
        """
        if self.options.exact or isinstance(self.rule, Stepwise):
            return 0
        total = self.traced(self.sequence).row_bytes
        for op in self.graph.ops:
            if op.owned:
                total += math.prod(op.y_aval.shape) * jnp.dtype(op.y_aval.dtype).itemsize
        for rel, _, coords, states, *_ in self.graph.pairs:
            if keep and rel.op.x is not None:
                owed = math.prod(coords.shape) * len(states)
                total += owed * jnp.dtype(rel.op.y_aval.dtype).itemsize
        return total

    def closed(self, end: Moment) -> Moment:
        """The last moment, with the count of all steps."""
        count = self.made
        if count is not None:
            count += jnp.minimum(self.steps, jnp.iinfo(count.dtype).max - count).astype(count.dtype)
        return end._replace(trace=counting(end.trace, count))

    def window(self, weights, now: Moment, pending, part: Sequence, keep: bool):
        """``(moment, pending, gradients, (losses, aux))`` after some steps; their factors are
        pending, the trace is as it was.
        """
        if self.options.exact:
            return self._exact(weights, now, pending, part, keep)
        length, traced = len(part.mask), self.traced(part)
        ts, t = counts_along(now.t, part.flags, length)
        first = first_count(now.t, part.flags)
        if isinstance(self.rule, Stepwise):
            state, at = (now.world, now.trace), (part, ts)
            (world, trace), gradients, shown, _ = traced.loop(
                weights, state, at, length, part.counts
            )
            return Moment(world, trace, t), None, gradients, shown
        world, (direct, sums), (x, losses, aux), steps = traced.loop(
            weights, now.world, part, length, part.counts
        )
        window = Window(x, steps, ts, first, part.flags, sums)
        ops, pending = self.rule.window(
            self.observer.network(weights), now.trace, pending, window, keep
        )
        return Moment(world, now.trace, t), pending, Gradients(ops, direct), (losses, aux)

    def _exact(self, weights, now: Moment, pending, part: Sequence, keep: bool):
        """:meth:`window` by reverse mode; without ``keep`` there is no history before it."""
        ts, t = counts_along(now.t, part.flags, len(part.mask))
        first = first_count(now.t, part.flags)
        inside = keep and isinstance(self.rule, Stepwise)
        carried = (now.trace, ts) if inside else None
        seen = self.observer.observe_together(weights, now.world, part, keep, carried)
        network, (x, d, df) = self.observer.network(weights), seen.factors
        dy, lam, _ = seen.signals
        ops = same_step(network.graph, x, dy, network.weights)
        if isinstance(self.rule, Stepwise):
            if keep:
                ops = add_gradients(ops, self.rule.history(network, now.trace, lam, first))
        elif keep and self.rule.traces:
            reset = None if part.flags is None else part.flags[0]
            before = now.trace, pending, lam, first, reset
            ops = self.rule.with_history(network, ops, *before)
            # a window opens to the factors of each step, and to no signals
            groups = self.graph.hidden_groups
            none = Signals({}, {g.name: (None,) * g.num_state for g in groups}, {})
            steps = Steps((d, df), lambda row: (*row, none))
            window = Window(x, steps, ts, first, part.flags)
            pending = self.rule.advance(network, now.trace, pending, window)
        end = Moment(seen.world, seen.trace if inside else now.trace, t)
        return end, pending, Gradients(ops, seen.direct), (seen.loss, seen.aux)

    def mended(self, now: Moment, pending, known: jax.Array) -> tuple[Moment, Any, jax.Array]:
        """The moment and the pending steps, in which lanes that are not finite have started again,
        and their flags. They are looked for where a state is not finite, or the gradient was not
        (``known``): a trace that is not finite makes the next gradient so.
        """
        bad = ~(known & all_finite(now.world[0]))
        look = partial(self.observer.spoiled, now, pending)
        none = lambda: jnp.zeros(jax.eval_shape(look).shape, bool)
        flags = bad & jax.lax.cond(anywhere(bad), look, none)
        world, t = self.observer.reset(now.world, flags), jnp.where(flags, 0, now.t)
        if isinstance(self.rule, Windowed):
            pending = self.rule.restarted(self.graph, pending, flags)
        return now._replace(world=world, t=t), pending, flags

    def write(self, weights, now: Moment, pending, read: Gradients) -> Moment:
        """The moment with all pending steps written into the trace, after ``read`` was made."""
        network = self.observer.network(weights)
        if isinstance(self.rule, Stepwise):
            return now
        trace = self.rule.close(network, now.trace, pending, now.t, read.ops)
        return now._replace(trace=trace)


def run_windows(run: Run) -> Result:
    """The gradient of a sequence, weights constant; ``learnt`` is a tree like the weights."""
    options, weights, start, length = run.options, run.weights, run.start, run.length
    sequence, keep_trace = run.sequence.penalised(options.reduction), options.keep_trace
    size = choose_window(options, length, tree_bytes(start.trace), run.step_bytes(keep_trace))
    # of one window the trace is read alone
    dropped = not keep_trace and (size >= length or options.exact)

    def window(state, part: Sequence, keep: bool = not dropped):
        now, total = state
        now, pending, gradients, shown = run.window(weights, now, None, part, keep)
        if keep:
            now = run.write(weights, now, pending, gradients)
        return (now, jax.tree.map(jnp.add, total, gradients)), shown

    walk = Walk(sequence, (start, run.observer.zeros(weights)))
    whole, rest = divmod(length, size)
    # The last of few windows stands apart where its trace is dropped: then it is not written. Of
    # many it is one more turn of their loop, which writes in vain but halves the program.
    alike = rest or keep_trace or whole >= MANY
    walk.blocks(window, whole if alike else whole - 1, size)
    walk.blocks(partial(window, keep=keep_trace), 1, length - walk.done)
    now, total = walk.state
    end = run.closed(now)
    grads = scaled(run.observer.total(weights, total), sequence.mask, options.reduction)
    return Result(grads, end if keep_trace else end._replace(t=0 * end.t), *walk.results)


def blocks_of(length: int, options: CallOptions) -> list[tuple[int, int, int]]:
    """The blocks of a run, kind after kind: how many there are, the steps of each, and the steps
    of an update in it. A gradient is one block.
    """
    if options.optimizer is None:
        return [(1, length, length)]
    every, size = options.update_every, options.update_every * options.delay
    whole, rest = divmod(length, size)
    left = rest % every
    return [
        (whole, size, every),
        (int(rest >= every), rest - left, every),
        (int(left > 0), left, left),
    ]


def steps_of(length: int, options: CallOptions, blocks) -> Any:
    """The number of steps in the first blocks of :func:`run_updates`."""
    steps: Any = 0
    for number, size, _ in blocks_of(length, options):
        steps += jnp.clip(blocks, 0, number) * size
        blocks = blocks - number
    return steps


def run_updates(run: Run, opt_state, shown=None) -> Result:
    """Train on a sequence: an update after each ``update_every`` steps, and one after the steps
    that are left. ``learnt`` are the weights and the state of the optimiser.

    Between two writes of the trace the steps stay pending. ``shown``: what all steps have shown so
    far, where blocks are walked alone.
    """
    options, observer = run.options, run.observer

    def block(state, part: Sequence, size: int):
        """Updates after each ``size`` steps, then one write of the trace."""
        (learnt, now, skipped), pending, pieces = state, None, []
        for i in range(0, len(part.mask), size):
            steps, before = part.part(i, i + size).penalised(options.reduction), learnt
            if options.exact:  # what moved the weights has no derivative through exact windows
                before = first_order(before[0]), before[1]
            now, pending, gradients, shown = run.window(before[0], now, pending, steps, True)
            grads = observer.total(before[0], gradients)
            grads = scaled(grads, steps.mask, options.reduction)
            # the weights move; the trace waits for the last update of the block
            value = loss_of_update(shown[0], steps.mask, options.reduction)
            moves = observer.moves(before[0])
            learnt = optimised(options.optimizer, before, grads, moves, value)
            if i + size == len(part.mask):
                now, pending = run.write(before[0], now, pending, gradients), None
            if options.resets:
                known = all_finite(grads) & stays_finite(learnt, before)
                learnt = jax.tree.map(partial(kept_finite, known), learnt, before)
                now, pending, flags = run.mended(now, pending, known)
                skipped = Skipped(skipped.updates + ~known, skipped.samples + flags)
            seen = None if options.observe is None else options.observe(grads, now)
            pieces.append((*shown, jax.tree.map(lambda a: a[None], seen)))
        shown = jax.tree.map(lambda *each: jnp.concatenate(each), *pieces)
        return (learnt, now, skipped), shown

    skipped = Skipped.none(run.start.t) if options.resets else None
    start = (run.weights, opt_state), run.start, skipped
    walk = Walk(run.sequence, start, run.bounds, shown, options.row_steps)
    for number, size, every in blocks_of(run.length, options):
        walk.blocks(partial(block, size=every), number, size)
    (learnt, now, skipped), (losses, aux, observed) = walk.state, walk.results
    return Result(learnt, run.closed(now), losses, aux, observed, skipped)


class RunInTurns:
    """The blocks of a run in :class:`Turns`; ``shapes`` are those of what a step shows."""

    def __init__(self, length: int, options: CallOptions, shapes):
        self.length, self.options, self.shapes = length, options, shapes
        self.turns = Turns(sum(number for number, _, _ in blocks_of(length, options)))

    def steps(self, blocks: int) -> int:
        """The number of steps in the first blocks."""
        if blocks == self.turns.number:
            return self.length
        return int(steps_of(self.length, self.options, blocks))

    def run(self, program: Callable, first: Result, mask, progress: Any, write: Callable) -> Result:
        """How far ``program(result, bounds) -> result`` comes from the ``first`` place on, in steps
        with such a mask; ``progress`` as users give it.
        """
        (loss, aux, rows), every = self.shapes, self.options.row_steps
        told = Progress(self.length, progress, mask, self.options.observe and every)

        def show(now: Result, done: int) -> None:
            told.between((now.losses, now.observed), self.steps(done))

        steps, rows = buffers((loss, aux), self.length), buffers(rows, -(-self.length // every))
        place, done, error = self.turns.run(
            lambda now, start, stop: program(now, bounds(start, stop)),
            first._replace(losses=steps[0], aux=steps[1], observed=rows),
            write,
            show if progress else None,
        )
        steps = self.steps(done)
        losses, aux = cut((place.losses, place.aux), steps)
        rows = cut(place.observed, -(-steps // every))
        return place._replace(losses=losses, aux=aux, observed=rows, stopped=error)


CHUNKS = 50  # of a gradient whose progress is told, of two steps at least


def in_chunks(
    call: Callable, length: int, options: CallOptions, mask, first: Result, write: Callable
) -> Result:
    """The gradient of a sequence as a sum over chunks of it, between which ``options.progress`` is
    told: ``call(end, part, mask) -> Result`` for the sum of some steps' losses. ``write(result)``
    keeps how far it came.
    """
    size, mean = max(-(-length // CHUNKS), 2), options.reduction == 'mean'
    if options.exact:  # windows stay where they are
        window = length if options.window is None else int(options.window)
        size = -(-size // window) * window
    number, weights = -(-length // size), mask
    total = float(length)
    if mask is not None and mean:
        # so that penalties, which no mask weighs, are divided by the number of steps
        weights = mask * (length / divisor(mask))
    pieces: list = []

    def program(now: Result, start: int, stop: int) -> Result:
        for k in range(start, stop):
            part = slice(k * size, min((k + 1) * size, length))
            found = call(now.end, part, None if weights is None else weights[part])
            pieces.append((found.losses, found.aux))
            grads = found.learnt
            if now.learnt is not None:
                grads = jax.tree.map(_added, now.learnt, grads)
            now = now._replace(learnt=grads, end=found.end)
        return now

    def shown() -> tuple:
        return jax.tree.map(lambda *each: jnp.concatenate(each), *pieces)

    told = Progress(length, options.progress, mask)

    def show(now: Result, done: int) -> None:
        told.between(shown() if done else (), min(done * size, length))

    now, done, error = Turns(number).run(program, first, write, show)
    if error is not None and not done:
        raise error
    grads, (losses, aux) = now.learnt, shown()
    if mean:
        grads = jax.tree.map(lambda g: g if _is_zero(g) else g / total, grads)
    return now._replace(learnt=grads, losses=losses, aux=aux, stopped=error)


def _added(a, b):
    return a if _is_zero(a) else a + b


def _is_zero(g) -> bool:
    """Whether it is the gradient of an integer."""
    return g.dtype == jax.dtypes.float0


def all_finite(tree) -> jax.Array:
    """Whether every number of a tree is finite."""
    found = []
    for x in jax.tree.leaves(tree):
        if is_inexact(x) and x.size:
            # a product, since XLA would make a gradient once more for a sum that reads it
            rows = x.reshape(-1, *(x.shape[-1:] or (1,)))
            small = jnp.full(rows.shape[1:], jnp.finfo(x.dtype).tiny, x.dtype)
            wide = jnp.promote_types(x.dtype, jnp.float32)
            total = jnp.matmul(rows, small, preferred_element_type=wide)
            found.append(jnp.isfinite(total).all())
    return jnp.array(found, bool).all()


def stays_finite(new, old) -> jax.Array:
    """Whether every number of a tree is finite that was so before."""

    def of_finite(x, before):
        return jnp.where(jnp.isfinite(before), x, 0) if is_inexact(x) else x

    # the old numbers are read only where a new one is not finite
    fine = all_finite(new)
    look = lambda: all_finite(jax.tree.map(of_finite, new, old))
    return jax.lax.cond(anywhere(~fine), look, lambda: fine)


def kept_finite(known: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """The new numbers of the weights or of the optimiser, if the update was ``known``; one that is
    not finite before and after stays.
    """
    if is_inexact(new):
        known &= jnp.isfinite(new)
    return jnp.where(known, new, old)


def scaled(grads, mask: jax.Array, reduction: str):
    """Gradients divided by the sum of the mask for ``'mean'``."""
    if reduction == 'sum':
        return grads
    total = divisor(mask)
    return jax.tree.map(
        lambda g: g if g.dtype == jax.dtypes.float0 else g / total.astype(g.dtype), grads
    )


def loss_of_update(losses: jax.Array, mask: jax.Array, reduction: str) -> jax.Array:
    """The loss that an update descends, of the losses of its steps: of all shards together."""
    value = jnp.where(mask == 0, 0, mask.astype(losses.dtype) * losses).sum()
    if axes := varying(value):
        value = jax.lax.psum(value, tuple(axes))
    return value if reduction == 'sum' else value / divisor(mask).astype(value.dtype)


def optimised(optimizer, learnt, grads, moves, value):
    """``learnt``, a pair ``(values, opt_state)``, after one update.

    ``moves``: a tree of bool like the values; leaves where it is false stay as they are. ``value``:
    the loss, for an optimizer that takes it (``optax.contrib.reduce_on_plateau``).
    """
    values, opt_state = learnt
    none = jax.dtypes.float0  # of an integer, which stays
    grads = jax.tree.map(lambda g: jnp.zeros(g.shape) if g.dtype == none else g, grads)
    given = {'value': value} if takes_value(optimizer) else {}
    updates, new = optimizer.update(grads, opt_state, values, **given)
    new = jax.tree.map(lambda a, old: jnp.asarray(a, jnp.result_type(old)), new, opt_state)
    values = jax.tree.map(
        lambda p, u, m: (p + u).astype(jnp.result_type(p)) if m else p, values, updates, moves
    )
    return values, new
