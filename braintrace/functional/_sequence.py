"""Sequences by windows: one scan that stacks factors and signals, one call of the rule for each window."""
from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import ETraceGraph, abstract, describe_aval, param_name
from .._errors import OptionError, StructureError
from .._executor import Factors, Signals, TracedStep
from .._rules import MOST_PENDING, Rule, Trace
from ._state import counted

__all__ = ['Observation', 'Run', 'Sequence', 'check_mask', 'check_opt_state', 'check_optimizer', 'check_updatable',
           'check_window', 'choose_delay', 'choose_window', 'length_of', 'optimised', 'run_updates', 'run_windows']

DEFAULT_BUDGET = 32 * 2 ** 20
LINES = 100                       # of progress, at most


class Observation(NamedTuple):
    """What one step shows: the world after it, factors, signals, gradients that pass no op, loss and auxiliary output."""
    world: Any
    factors: Factors
    signals: Signals
    direct: Any
    loss: jax.Array
    aux: Any


class Sequence(NamedTuple):
    """Slices, weights of the losses ``(T,)``, which of them count, and reset flags (``(T,)`` or ``(T, B)``), time in front.

    ``counts``: bool ``(T,)``, false where a weight is 0: what such a loss and its derivative are need not be numbers. None: all count.
    """
    slices: Any
    mask: jax.Array
    counts: jax.Array | None
    flags: jax.Array | None

    @classmethod
    def of(cls, slices, mask, flags, length: int) -> Sequence:
        """A sequence with the weights that a user gave, or None."""
        weights = check_mask(mask, length)
        return cls(slices, weights, None if mask is None else weights != 0, flags)

    def part(self, start: int, stop: int) -> Sequence:
        return jax.tree.map(lambda a: a[start:stop], self)

    def blocks(self, number: int, size: int) -> Sequence:
        return jax.tree.map(lambda a: a[:number * size].reshape(number, size, *a.shape[1:]), self)


def length_of(*trees) -> int:
    """The common length of axis 0 of every leaf."""
    leaves = [(jax.tree_util.keystr(p), jnp.shape(x)) for p, x in jax.tree_util.tree_flatten_with_path(trees)[0]]
    if not leaves:
        raise StructureError('there is no sequence: give at least one array with time in axis 0.')
    scalars = [name for name, shape in leaves if not shape]
    if scalars:
        raise StructureError(f'sequence leaf {scalars[0]} is a scalar; time must be axis 0 of every leaf.')
    lengths = {name: shape[0] for name, shape in leaves}
    if len(set(lengths.values())) > 1:
        raise StructureError(f'sequences have unequal lengths: {lengths}. Time is axis 0 of every leaf.')
    if leaves[0][1][0] == 0:
        raise StructureError('the sequences are empty (length 0); give at least one step.')
    return leaves[0][1][0]


def check_mask(mask, length: int) -> jax.Array:
    """The mask as an array ``(T,)``, ones where none is given."""
    if mask is None:
        return jnp.ones(length)
    mask = np.asarray(mask) if isinstance(mask, str) else jnp.asarray(mask)
    if mask.shape != (length,) or not (mask.dtype == bool or jnp.issubdtype(mask.dtype, jnp.number)):
        raise StructureError(f'mask is {mask.dtype}{list(mask.shape)}; give one weight for each of the {length} steps: [{length}].')
    return mask.astype(jnp.result_type(float))


def check_window(window, budget: int | None) -> None:
    """Refuse what is no size of a window or no budget."""
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, Integral) or budget < 1):
        raise OptionError(f'memory_budget is {budget!r}; give a number of bytes >= 1, or None.')
    named = window is None or (isinstance(window, str) and window == 'auto')
    if not named and (isinstance(window, bool) or not isinstance(window, Integral) or window < 1):
        raise OptionError(f"window is {window!r}; give an int >= 1, 'auto', or None for the whole sequence.")


def choose_window(window, length: int, run: Run, trace_bytes: int, budget: int | None) -> int:
    """The number of steps in a window: as asked, or the most whose stacked factors stay within the budget."""
    if window == 'auto':
        allowed = budget if budget is not None else max(trace_bytes, DEFAULT_BUDGET)
        return _even(length, max(1, int(allowed // max(step_bytes(run.graph) + run.traced.operand_bytes, 1))))
    return length if window is None else min(int(window), length)


def _even(length: int, most: int) -> int:
    """A window of at most so many steps that divides the length, where that takes at most twice as many windows: one kind to compile."""
    fewest = -(-length // most)
    return next((length // n for n in range(fewest, min(2 * fewest, length) + 1) if length % n == 0), -(-length // fewest))


def choose_delay(write_every, every, graph: ETraceGraph, rule: Rule) -> int:
    """The number of updates between two writes of the trace: as asked (in steps), or what the rule makes of the shapes."""
    for name, value in (('update_every', every), ('write_every', write_every)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
            raise OptionError(f'{name} is {value!r}; give a number of steps >= 1.')
    if write_every is not None and (write_every % every or write_every // every > MOST_PENDING):
        raise OptionError(f'write_every is {write_every}; give a multiple of the {every} steps between updates, at most {MOST_PENDING} '
                          'times as many.')
    return rule.delay(graph, int(every), None if write_every is None else int(write_every // every))


def check_optimizer(optimizer) -> None:
    """Refuse what is no ``optax.GradientTransformation``."""
    callables = callable(getattr(optimizer, 'init', None)) and callable(getattr(optimizer, 'update', None))
    if not (callables and isinstance(optimizer, Hashable)):
        raise OptionError(f'optimizer is a {type(optimizer).__name__}; give an optax.GradientTransformation, such as optax.adam(1e-3).')


def check_updatable(params) -> None:
    """Refuse leaves that no optimiser can change."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise StructureError(f'parameter {param_name(path)} is {describe_aval(abstract(leaf))}, which no optimiser can '
                                 'change. Keep it out of the parameters: pass it with the inputs, or close over it.')


def check_opt_state(optimizer, values, opt_state) -> None:
    """Refuse the state of another optimiser or of other weights."""
    if _shapes(jax.eval_shape(optimizer.init, values)) != _shapes(opt_state):
        raise StructureError('opt_state does not belong to this optimizer and these weights. Pass what an earlier call returned, or '
                             '`optimizer.init` of the weights.')


def _shapes(tree) -> tuple:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [jnp.shape(x) for x in leaves]


def optimised(optimizer, values, opt_state, grads, moves):
    """``(values, opt_state)`` after one update of the leaves where ``moves`` (a tree of bool); others stay as they are."""
    updates, new = optimizer.update(grads, opt_state, values)
    new = jax.tree.map(lambda a, old: jnp.asarray(a, jnp.result_type(old)), new, opt_state)
    return jax.tree.map(lambda p, u, m: (p + u).astype(jnp.result_type(p)) if m else p, values, updates, moves), new


def step_bytes(graph: ETraceGraph) -> int:
    """Bytes that one step adds to a window: x, D, D_f, dy, c and the delta and push made of them."""
    def size(shape, aval) -> int:
        return math.prod(shape) * jnp.dtype(aval.dtype).itemsize
    owned = [op for op in graph.ops if op.owned]
    total = sum({op.x: size(op.x_aval.shape, op.x_aval) for op in owned if op.x is not None}.values())
    total += sum(2 * size(op.y_aval.shape, op.y_aval) for op in owned)
    for group in graph.hidden_groups:
        total += size(group.shape, group) * (group.num_state ** 2 + group.num_state)
    for rel in graph.hidden_param_op_relations:
        for group, coords in zip(rel.groups, rel.coordinates, strict=True):
            total += 2 * size(coords.shape, rel.op.y_aval) * group.num_state
    return total


class Run:
    """A cell and a rule along sequences like ``sequence``; its step is traced once.

    ``weights(kept)`` are those of the ops (op -> name -> array), ``observe(kept, world, slice, weight) -> Observation``,
    ``reset(world, flags) -> world``; ``kept`` is what stays constant during a window.
    """

    def __init__(self, graph: ETraceGraph, rule: Rule, weights: Callable, observe: Callable, reset: Callable, kept, world, t, sequence):
        self.graph, self.rule, self.weights, self.observe, self.reset = graph, rule, weights, observe, reset
        at = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), sequence)
        self.traced = TracedStep(self._step, kept, (world, t), at)

    def _step(self, kept, state, at):
        world, t = state
        slice_, weight, counts, flags = at
        if flags is not None:
            world, t = self.reset(world, flags), jnp.where(flags, 0, t)
        seen = self.observe(kept, world, slice_, weight)
        signals = seen.signals
        if counts is not None:
            signals = jax.tree.map(lambda s: jnp.where(counts, s, jnp.zeros((), s.dtype)), signals)
        return (seen.world, counted(t)), seen.direct, (seen.factors, signals, t, seen.loss, seen.aux)

    def zeros(self, kept):
        """Op gradients and direct gradients before the first step."""
        weights = self.weights(kept)
        return {op.key: jax.tree.map(jnp.zeros_like, weights[op.key]) for op in self.graph.ops if op.owned}, self.traced.zeros()

    def window(self, kept, world, trace: Trace, t: jax.Array, pending, part: Sequence, keep: bool):
        """``(world, t, pending, op gradients, direct gradients, losses, aux)`` after some steps."""
        (world, t), direct, shown = self.traced.loop(kept, (world, t), part, len(part.mask), part.counts)
        factors, signals, ts, losses, aux = shown
        ops, pending = self.rule.window(self.graph, trace, pending, factors, signals, self.weights(kept), ts, part.flags, keep)
        return world, t, pending, ops, direct, losses, aux

    def close(self, kept, trace: Trace, pending, t: jax.Array, read) -> Trace:
        """The trace with all that is pending written into it."""
        return self.rule.close(self.graph, trace, pending, self.weights(kept), t, read)


class Walk:
    """A sequence, block after block: ``body(state, part) -> state, (losses, aux)``; blocks of one kind in a scan.

    ``show(due, done, loss) -> due`` reports between blocks, about a hundred times at most; None: not at all.
    """

    def __init__(self, sequence: Sequence, state, show: Callable | None):
        self.sequence, self.state, self.show = sequence, state, show
        self.done, self.shown = 0, []
        self.due = jnp.int32(0) if show is None else show(jnp.int32(0), jnp.int32(0), jnp.zeros(()))

    def blocks(self, body: Callable, number: int, size: int) -> None:
        """The next ``number`` blocks of ``size`` steps."""
        most = number if self.show is None else _even(number, -(-number // LINES)) if number else 1
        for chunks, blocks in ((number // max(most, 1), most), (1, number % max(most, 1))):
            if chunks and blocks and size:
                self._chunks(body, chunks, blocks, size)

    def _chunks(self, body: Callable, chunks: int, blocks: int, size: int) -> None:
        """Some chunks of blocks, and a report after each."""
        def chunk(carry, part: Sequence):
            state, due, done = carry
            if blocks == 1:
                state, got = body(state, part)
            else:
                state, got = jax.lax.scan(body, state, part.blocks(blocks, size))
                got = _flat(got)
            done += blocks * size
            return (state, due if self.show is None else self.show(due, done, got[0].mean()), done), got

        carry = self.state, self.due, jnp.int32(self.done)
        steps = chunks * blocks * size
        part = self.sequence.part(self.done, self.done + steps)
        if chunks == 1:
            (self.state, self.due, _), got = chunk(carry, part)
        else:
            (self.state, self.due, _), got = jax.lax.scan(chunk, carry, part.blocks(chunks, blocks * size))
            got = _flat(got)
        self.shown.append(got)
        self.done += steps

    @property
    def results(self):
        """Losses and auxiliary outputs of all steps."""
        return jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *self.shown) if len(self.shown) > 1 else self.shown[0]


def _flat(stacked):
    return jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), stacked)


def run_windows(run: Run, kept, world, carried, t: jax.Array, sequence: Sequence, window: int, keep: bool, show=None):
    """The gradient of a sequence, weights constant: ``(world, carried, t, op gradients, direct gradients, losses, aux)``.

    ``carried``: what the rule carries between single steps, a trace and perhaps more.
    """
    def one_window(state, part: Sequence, keep: bool = True):
        world, trace, t, total = state
        world, t, pending, *grads, losses, aux = run.window(kept, world, trace, t, None, part, keep)
        if keep:
            trace = run.close(kept, trace, pending, t, grads)
        return (world, trace, t, jax.tree.map(jnp.add, total, tuple(grads))), (losses, aux)

    trace = run.rule.written(run.graph, carried, run.weights(kept), t)
    walk = Walk(sequence, (world, trace, t, run.zeros(kept)), show)
    whole, rest = divmod(len(sequence.mask), window)
    walk.blocks(one_window, whole if keep or rest else whole - 1, window)
    walk.blocks(partial(one_window, keep=keep), 1, len(sequence.mask) - walk.done)
    world, trace, t, grads = walk.state
    return world, run.rule.carried(run.graph, trace, t), t, *grads, *walk.results


def run_updates(run: Run, update: Callable, kept, rest, world, carried, t: jax.Array, sequence: Sequence, every: int, delay: int,
                show=None):
    """Train on a sequence: ``(kept, rest, world, carried, t, losses, aux)``; an update each ``every`` steps, and one after what is left.

    ``update(kept, rest, op gradients, direct gradients, mask) -> kept, rest``, where ``rest`` is what an optimiser remembers. The trace
    is written once in ``delay`` updates; between two writes the steps stay pending.
    """
    def block(state, part: Sequence, size: int = every):
        """Updates after each ``size`` steps, then one write of the trace."""
        (kept, rest, world, trace, t), pending, shown = state, None, []
        for i in range(0, len(part.mask), size):
            now, before = part.part(i, i + size), kept
            world, t, pending, ops, direct, *seen = run.window(kept, world, trace, t, pending, now, True)
            kept, rest = update(kept, rest, ops, direct, now.mask)
            shown.append(tuple(seen))
        losses = jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *shown)
        return (kept, rest, world, run.close(before, trace, pending, t, ops), t), losses

    trace = run.rule.written(run.graph, carried, run.weights(kept), t)
    walk, length = Walk(sequence, (kept, rest, world, trace, t), show), len(sequence.mask)
    walk.blocks(block, length // (every * delay), every * delay)
    walk.blocks(block, 1, (length - walk.done) // every * every)
    walk.blocks(partial(block, size=max(length - walk.done, 1)), 1, length - walk.done)
    kept, rest, world, trace, t = walk.state
    return kept, rest, world, run.rule.carried(run.graph, trace, t), t, *walk.results
