"""A sequence divided into windows, and walked block after block with reports of the progress."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph
from .._executor import even
from .progress import LINES, shown_loss
from .records import GradientOptions, Sequence, Show
from .turns import Turn

# Bytes that are stored of a window: more, and the system maps its memory anew at each call.
WHOLE = 48 * 2**20  # in one window for the whole sequence
EACH = 8 * 2**20  # in each of several


class Walk:
    """A sequence, block after block: ``body(state, part) -> state, (losses, aux)``; blocks of one
    kind in a scan.

    ``show(due, done, loss) -> due`` reports between blocks, about a hundred times at most; None:
    not at all. A ``turn`` walks its blocks alone.
    """

    def __init__(self, sequence: Sequence, state, show: Show | None, turn: Turn | None = None):
        self.sequence, self.state, self.show, self.turn = sequence, state, show, turn
        self.done = self.number = 0  # steps and blocks
        self.shown: list = [] if turn is None else [turn.shown]
        self.due = jnp.int32(0) if show is None else show(jnp.int32(0), jnp.int32(0), jnp.zeros(()))

    def blocks(self, body: Callable, number: int, size: int) -> None:
        """The next ``number`` blocks of ``size`` steps."""
        if self.turn is not None:
            if number:
                self._of_turn(self.turn, body, number, size)
            return
        most = number if self.show is None else even(number, -(-number // LINES)) if number else 1
        for chunks, blocks in ((number // max(most, 1), most), (1, number % max(most, 1))):
            if chunks and blocks and size:
                self._chunks(body, chunks, blocks, size)

    def _of_turn(self, turn: Turn, body: Callable, number: int, size: int) -> None:
        """Those of the next blocks that belong to the turn."""
        first = self.done

        def block(k, now):
            state, shown = now
            at = first + k * size
            part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, at, size), self.sequence)
            state, got = body(state, part)
            put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=at, axis=0)
            return state, jax.tree.map(put, shown, got)

        start, stop = (jnp.clip(x - self.number, 0, number) for x in (turn.start, turn.stop))
        self.state, self.shown[0] = jax.lax.fori_loop(
            start, stop, block, (self.state, self.shown[0])
        )
        self.number += number
        self.done += number * size

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
            if self.show is not None:
                due = self.show(due, done, shown_loss(got[0], part.mask))
            return (state, due, done), got

        carry = self.state, self.due, jnp.int32(self.done)
        steps = chunks * blocks * size
        part = self.sequence.part(self.done, self.done + steps)
        if chunks == 1:
            (self.state, self.due, _), got = chunk(carry, part)
        else:
            parts = part.blocks(chunks, blocks * size)
            (self.state, self.due, _), got = jax.lax.scan(chunk, carry, parts)
            got = _flat(got)
        self.shown.append(got)
        self.done += steps

    @property
    def results(self):
        """Losses and auxiliary outputs of all steps."""
        if len(self.shown) == 1:
            return self.shown[0]
        return jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *self.shown)


def _flat(stacked):
    return jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]), stacked)


def choose_window(options: GradientOptions, length: int, trace_bytes: int, per_step: int) -> int:
    """The number of steps in a window: as asked, or the whole sequence where what is stored of it
    is little, else as many steps as the trace has bytes, since each window moves the trace.
    """
    if options.window == 'auto':
        budget = options.memory_budget
        if budget is None:
            budget = WHOLE if per_step * length <= WHOLE else max(trace_bytes, EACH)
        return even(length, max(1, int(budget // max(per_step, 1))))
    return length if options.window is None else min(int(options.window), length)


def step_bytes(graph: ETraceGraph, keep: bool) -> int:
    """Bytes that the reverse scan over a window makes of each step: what it sends to each y, and
    with ``keep`` what h owes to each y. An associative scan makes a tree of D and signals too.
    """

    def size(shape, aval) -> int:
        return math.prod(shape) * jnp.dtype(aval.dtype).itemsize

    total = sum(size(op.y_aval.shape, op.y_aval) for op in graph.ops if op.owned)
    for rel in graph.hidden_param_op_relations:
        for group, coords in zip(rel.groups, rel.coordinates, strict=True):
            if keep and rel.op.x is not None:
                total += size(coords.shape, rel.op.y_aval) * group.num_state
    if graph.policy.associative:
        for group in graph.hidden_groups:
            total += 2 * size(group.shape, group) * group.num_state * (group.num_state + 1)
    return total
