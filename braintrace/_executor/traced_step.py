"""A step that is traced once and run in a loop over time, each equation where it costs least (see
:mod:`.partition`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .blocks import Blocks
from .partition import Dataflow, Partition, nbytes
from .rewriting import rewritten
from .sums import terms_of


class Steps(NamedTuple):
    """Steps of a loop: ``open(row)`` makes of one row of ``rows`` (time in front) the values of its
    step.
    """

    rows: Any
    open: Callable[[Any], Any]

    def at(self, k: int):
        """The values of one step."""
        return self.open(jax.tree.map(lambda a: a[k], self.rows))

    @property
    def all(self):
        """The values of all steps, time in front."""
        return jax.vmap(self.open)(self.rows)

    @property
    def like(self):
        """The shapes of the values of a step."""
        return jax.eval_shape(lambda: self.at(0))


class TracedStep:
    """``step(constant, state, at) -> (state, terms, shown, opened)`` on pytrees, traced for the
    shapes of these arguments.

    ``terms`` are summed over the steps of a loop, ``shown`` is stored for each step, and ``opened``
    follows from what is. Only a ``differentiable`` loop keeps derivative rules of functions.
    """

    def __init__(
        self,
        step: Callable,
        constant,
        state,
        at,
        *,
        differentiable: bool = False,
    ):
        avals, treedef = jax.tree.flatten((constant, state, at))
        trees = []

        def flat(*args):
            parts = [jax.tree.flatten(part) for part in step(*jax.tree.unflatten(treedef, args))]
            trees[:] = [tree for _, tree in parts]
            return [leaf for leaves, _ in parts for leaf in leaves]

        numbers = len(jax.tree.leaves(constant)), len(jax.tree.leaves(state))
        jaxpr, self._consts = rewritten(*_jax.opened(flat, avals), numbers, differentiable)
        self._trees, results = trees, iter(jaxpr.outvars)
        _, terms, self._shown, self._opened = (
            list(itertools.islice(results, t.num_leaves)) for t in trees
        )
        self._term_avals = [v.aval for v in terms]
        flow = Dataflow(jaxpr, numbers)
        self._sums = [terms_of(v, flow) for v in terms]
        summed = [v for term in self._sums for part in term for v in part.wanted]
        self.parts = Partition(jaxpr, numbers, self._shown, summed, self._opened)

    @property
    def row_bytes(self) -> int:
        """Bytes that are stored for each step, beside its inputs."""
        return sum(nbytes(v) for v in self.parts.rows if v not in self.parts.inputs)

    def zeros(self):
        """Terms before the first step."""
        return jax.tree.unflatten(
            self._trees[1], [jnp.zeros(a.shape, a.dtype) for a in self._term_avals]
        )

    def loop(self, constant, state, xs, length: int, counts: jax.Array | None = None):
        """``(state, sums of terms, shown, opened)`` after some steps; ``xs`` and ``shown`` have
        time as first axis, ``opened`` are :class:`Steps`.

        ``counts``: bool ``(length,)``, the steps whose terms are summed; at the others a term need
        not be a number. None: all.
        """
        state, at = jax.tree.leaves(state), jax.tree.leaves(xs)
        blocks = Blocks(self.parts, self._consts, jax.tree.leaves(constant), state)
        zeros = jax.tree.leaves(self.zeros())
        state, terms, rows = blocks.run(state, at, length, counts, self._sums, zeros)
        shown = [blocks.each(v, rows, length) for v in self._shown]
        steps = Steps(
            [rows[v] for v in self.parts.rows],
            lambda row: jax.tree.unflatten(self._trees[3], blocks.opened(row, self._opened)),
        )
        of_state, of_terms, of_shown, _ = self._trees
        return (
            jax.tree.unflatten(of_state, state),
            jax.tree.unflatten(of_terms, terms),
            jax.tree.unflatten(of_shown, shown),
            steps,
        )
