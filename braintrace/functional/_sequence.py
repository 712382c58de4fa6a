"""Sequences by windows: one scan that stacks factors and signals, one call of the rule for each window."""
from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import ETraceGraph, abstract, describe_aval, path_key, path_name
from .._errors import OptionError, StructureError
from .._executor import Factors, Signals
from .._rules import Rule, Trace

__all__ = ['Observation', 'Run', 'Sequence', 'check_mask', 'check_opt_state', 'check_optimizer', 'check_updatable',
           'choose_delay', 'choose_window', 'length_of', 'optimised', 'run_updates', 'run_windows']

DEFAULT_BUDGET = 32 * 2 ** 20
MOST_PENDING = 64                 # updates between two writes of the trace: each is compiled by itself


class Observation(NamedTuple):
    """What one step shows: the world after it, factors, signals, gradients that pass no op, loss and auxiliary output."""
    world: Any
    factors: Factors
    signals: Signals
    direct: Any
    loss: jax.Array
    aux: Any


class Sequence(NamedTuple):
    """Slices, weights of the losses ``(T,)`` and reset flags (``(T,)``, ``(T, B)`` or None), time in front."""
    slices: Any
    mask: jax.Array
    flags: jax.Array | None

    def part(self, start: int, stop: int) -> Sequence:
        return jax.tree.map(lambda a: a[start:stop], self)

    def blocks(self, number: int, size: int) -> Sequence:
        return jax.tree.map(lambda a: a[:number * size].reshape(number, size, *a.shape[1:]), self)


def length_of(*trees) -> int:
    """The common length of axis 0 of every leaf."""
    leaves = [(jax.tree_util.keystr(p), jnp.shape(x)) for p, x in jax.tree_util.tree_flatten_with_path(trees)[0]]
    if not leaves:
        raise ValueError('there is no sequence: give at least one array with time in axis 0.')
    scalars = [name for name, shape in leaves if not shape]
    if scalars:
        raise ValueError(f'sequence leaf {scalars[0]} is a scalar; time must be axis 0 of every leaf.')
    lengths = {name: shape[0] for name, shape in leaves}
    if len(set(lengths.values())) > 1:
        raise ValueError(f'sequences have unequal lengths: {lengths}. Time is axis 0 of every leaf.')
    if leaves[0][1][0] == 0:
        raise ValueError('the sequences are empty (length 0); give at least one step.')
    return leaves[0][1][0]


def check_mask(mask, length: int) -> jax.Array:
    """The mask as an array ``(T,)``, ones where none is given."""
    if mask is None:
        return jnp.ones(length)
    mask = np.asarray(mask) if isinstance(mask, str) else jnp.asarray(mask)
    if mask.shape != (length,) or not (mask.dtype == bool or jnp.issubdtype(mask.dtype, jnp.number)):
        raise ValueError(f'mask is {mask.dtype}{list(mask.shape)}; give one weight for each of the {length} steps: [{length}].')
    return mask.astype(jnp.result_type(float))


def choose_window(window, length: int, graph: ETraceGraph, trace_bytes: int, budget: int | None) -> int:
    """The number of steps in a window: as asked, or the most whose stacked factors stay within the budget."""
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, Integral) or budget < 1):
        raise OptionError(f'memory_budget is {budget!r}; give a number of bytes >= 1, or None.')
    if window is None:
        return length
    if isinstance(window, str) and window == 'auto':
        allowed = budget if budget is not None else max(trace_bytes, DEFAULT_BUDGET)
        return _even(length, max(1, int(allowed // max(step_bytes(graph), 1))))
    if isinstance(window, bool) or not isinstance(window, Integral) or window < 1:
        raise OptionError(f"window is {window!r}; give an int >= 1, 'auto', or None for the whole sequence.")
    return min(int(window), length)


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
        raise OptionError(f'optimizer is {optimizer!r}; give an optax.GradientTransformation, such as optax.adam(1e-3).')


def check_updatable(params) -> None:
    """Refuse leaves that no optimiser can change."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise StructureError(f'parameter {path_name(path_key(path))} is {describe_aval(abstract(leaf))}, which no optimiser can '
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


class Run(NamedTuple):
    """What a window needs of its caller: ``observe(world, slice, weight) -> Observation``, ``reset(world, flags) -> world``.

    ``weights`` (op -> name -> array) are constant during the window.
    """
    graph: ETraceGraph
    rule: Rule
    weights: Any
    observe: Callable
    reset: Callable

    def zeros(self, world, sequence: Sequence):
        """Op gradients and direct gradients before the first step."""
        at = jax.tree.map(lambda a: a[0], sequence)
        shapes = jax.eval_shape(lambda w, s: self.observe(w, s.slices, s.mask).direct, world, at)
        ops = {op.key: jax.tree.map(jnp.zeros_like, self.weights[op.key]) for op in self.graph.ops if op.owned}
        return ops, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)

    def window(self, world, trace: Trace, t: jax.Array, pending, part: Sequence, keep: bool, zeros=None):
        """``(world, t, pending, op gradients, direct gradients, losses, aux)`` after some steps; ``zeros``: of direct gradients."""
        structure = []

        def step(state, at):
            world, t = state
            slice_, weight, flags = at
            if flags is not None:
                world, t = self.reset(world, flags), jnp.where(flags, 0, t)
            seen = self.observe(world, slice_, weight)
            leaves, treedef = jax.tree.flatten((seen.factors, seen.signals, t, seen.loss, seen.aux))
            once = {id(x): x for x in leaves}
            structure[:] = [treedef, [list(once).index(id(x)) for x in leaves]]
            return (seen.world, t + 1), (seen.direct, list(once.values()))

        def add(state, at):
            inner, total = state
            inner, (direct, shown) = step(inner, at)
            return (inner, jax.tree.map(jnp.add, total, direct)), shown

        if len(part.mask) == 1:
            (world, t), (direct, shown) = step((world, t), jax.tree.map(lambda a: a[0], part))
            shown = jax.tree.map(lambda a: a[None], shown)
        else:
            zeros = self.zeros(world, part)[1] if zeros is None else zeros
            ((world, t), direct), shown = jax.lax.scan(add, ((world, t), zeros), part)
        treedef, places = structure
        factors, signals, ts, losses, aux = jax.tree.unflatten(treedef, [shown[i] for i in places])
        ops, pending = self.rule.window(self.graph, trace, pending, factors, signals, self.weights, ts, part.flags, keep)
        return world, t, pending, ops, direct, losses, aux


def run_windows(run: Run, world, trace: Trace, t: jax.Array, sequence: Sequence, length: int, window: int, keep: bool):
    """The gradient of a sequence, weights constant: ``(world, trace, t, op gradients, direct gradients, losses, aux)``."""
    def one_window(state, part: Sequence, keep: bool):
        world, trace, t, total = state
        world, t, pending, *grads, losses, aux = run.window(world, trace, t, None, part, keep, zeros[1])
        if keep:
            trace = run.rule.close(run.graph, trace, pending, run.weights, t, grads)
        return (world, trace, t, jax.tree.map(jnp.add, total, tuple(grads))), (losses, aux)

    whole, rest = divmod(length, window)
    scanned = whole if keep or rest else whole - 1
    zeros = run.zeros(world, sequence)
    state, shown = (world, trace, t, zeros), []
    if scanned > 1:
        state, got = jax.lax.scan(lambda s, part: one_window(s, part, True), state, sequence.blocks(scanned, window))
        shown.append(jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), got))
    elif scanned == 1:
        state, got = one_window(state, sequence.part(0, window), True)
        shown.append(got)
    if scanned * window < length:
        state, got = one_window(state, sequence.part(scanned * window, length), keep)
        shown.append(got)
    losses, aux = _joined(shown)
    world, trace, t, grads = state
    return world, trace, t, *grads, losses, aux


def run_updates(rule: Rule, make: Callable[[Any], Run], update: Callable, weights, world, trace: Trace, t: jax.Array,
                sequence: Sequence, length: int, every: int, delay: int):
    """Train on a sequence: ``(weights, world, trace, t, losses, aux)``; an update each ``every`` steps, and one after what is left.

    ``make(weights) -> Run``; ``update(weights, op gradients, direct gradients, mask) -> weights``, where ``weights`` holds whatever an
    update changes. The trace is written once in ``delay`` updates; between two writes the steps stay pending.
    """
    def block(state, part: Sequence, updates: int):
        """Some updates, then one write of the trace."""
        (weights, world, trace, t), pending, shown = state, None, []
        for i in range(updates):
            now = part.part(i * every, (i + 1) * every)
            run = make(weights)
            world, t, pending, ops, direct, *seen = run.window(world, trace, t, pending, now, True)
            weights = update(weights, ops, direct, now.mask)
            shown.append(tuple(seen))
        return (weights, world, rule.close(run.graph, trace, pending, run.weights, t, ops), t), _joined(shown)

    state, shown, done = (weights, world, trace, t), [], 0
    blocks, rest = divmod(length // every, delay)
    if blocks > 1:
        state, got = jax.lax.scan(lambda s, part: block(s, part, delay), state, sequence.blocks(blocks, delay * every))
        shown.append(jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), got))
        done = blocks * delay * every
    first = delay if blocks == 1 else 0
    for updates, size in ((first, first * every), (rest, rest * every), (1, length % every)):
        if size:
            state, got = block(state, sequence.part(done, done + size), updates)
            shown.append(got)
            done += size
    weights, world, trace, t = state
    return weights, world, trace, t, *_joined(shown)


def _joined(parts: list):
    """Results of parts of a sequence, put together along time."""
    return jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *parts) if len(parts) > 1 else parts[0]
