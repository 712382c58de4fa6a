"""Sequences by windows: one scan that stacks factors and signals, one call of the rule for each window."""
from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import ETraceGraph
from .._errors import OptionError
from .._executor import Factors, Signals
from .._rules import Rule, Trace

__all__ = ['Observation', 'Sequence', 'check_mask', 'choose_window', 'length_of', 'run_windows']

DEFAULT_BUDGET = 32 * 2 ** 20


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


class _Total(NamedTuple):
    world: Any
    trace: Trace
    t: jax.Array
    ops: Any
    direct: Any


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
        return min(length, max(1, int(allowed // max(step_bytes(graph), 1))))
    if isinstance(window, bool) or not isinstance(window, Integral) or window < 1:
        raise OptionError(f"window is {window!r}; give an int >= 1, 'auto', or None for the whole sequence.")
    return min(int(window), length)


def step_bytes(graph: ETraceGraph) -> int:
    """Bytes that one step adds to a window: x, D, D_f, dy, c and the delta and push made of them."""
    def size(shape, aval) -> int:
        return math.prod(shape) * jnp.dtype(aval.dtype).itemsize
    total = 0
    for op in graph.ops:
        if op.owned:
            total += (0 if op.x is None else size(op.x_aval.shape, op.x_aval)) + 2 * size(op.y_aval.shape, op.y_aval)
    for group in graph.hidden_groups:
        total += size(group.shape, group) * (group.num_state ** 2 + group.num_state)
    for rel in graph.hidden_param_op_relations:
        for group, coords in zip(rel.groups, rel.coordinates, strict=True):
            total += 2 * size(coords.shape, rel.op.y_aval) * group.num_state
    return total


def run_windows(graph: ETraceGraph, rule: Rule, weights, observe: Callable, reset: Callable, world, trace: Trace, t: jax.Array,
                sequence: Sequence, length: int, window: int, keep: bool):
    """Run a sequence: ``(world, trace, t, op gradients, direct gradients, losses, aux)``.

    ``observe(world, slice, weight) -> Observation``; ``reset(world, flags) -> world``. Weights are constant during the call.
    """
    def step(state, at):
        world, t, direct = state
        slice_, weight, flags = at
        if flags is not None:
            world, t = reset(world, flags), jnp.where(flags, 0, t)
        seen = observe(world, slice_, weight)
        direct = seen.direct if direct is None else jax.tree.map(jnp.add, direct, seen.direct)
        return (seen.world, t + 1, direct), (seen.factors, seen.signals, t, seen.loss, seen.aux)

    def one_window(total: _Total, part: Sequence, keep: bool):
        (world, t, direct), (factors, signals, ts, losses, aux) = jax.lax.scan(step, (total.world, total.t, total.direct), part)
        ops, trace = rule.window(graph, total.trace, factors, signals, weights, ts, part.flags, keep)
        return _Total(world, trace, t, jax.tree.map(jnp.add, total.ops, ops), direct), (losses, aux)

    first = jax.tree.map(lambda a: a[0], sequence)
    shapes = jax.eval_shape(lambda w, s: observe(w, s.slices, s.mask).direct, world, first)
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    op_zeros = {op.key: jax.tree.map(jnp.zeros_like, weights[op.key]) for op in graph.ops if op.owned}
    total, shown = _Total(world, trace, t, op_zeros, zeros), []
    whole, rest = divmod(length, window)
    scanned = whole if keep or rest else whole - 1
    if scanned > 1:
        total, got = jax.lax.scan(lambda c, part: one_window(c, part, True), total, sequence.blocks(scanned, window))
        shown.append(jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), got))
    elif scanned == 1:
        total, got = one_window(total, sequence.part(0, window), True)
        shown.append(got)
    if scanned * window < length:
        total, got = one_window(total, sequence.part(scanned * window, length), keep)
        shown.append(got)
    losses, aux = jax.tree.map(lambda *parts: jnp.concatenate(parts), *shown) if len(shown) > 1 else shown[0]
    return total.world, total.trace, total.t, total.ops, total.direct, losses, aux
