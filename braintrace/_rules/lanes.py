"""Arrays with zeros in the lanes (samples of a batch) that a flag leaves out."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import ETraceGraph, OpUse
from .coordinates import Pair, by_pair, pairs


@jax.custom_batching.custom_vmap
def anywhere(flags: jax.Array) -> jax.Array:
    """Whether any flag is set, also in another lane of a surrounding ``vmap``: a ``lax.cond`` that
    asks this stays one there, where a flag of each lane makes it run both branches.
    """
    return flags.any()


@anywhere.def_vmap
def _anywhere_mapped(axis_size, in_batched, flags):
    return anywhere(flags), False


def gathered_once(graph: ETraceGraph, flags: jax.Array, values: dict[str, dict]) -> dict[str, dict]:
    """Values by pair, which may be zeros where no flag is set: the gathered ones are computed once,
    where XLA would gather them for each number of a trace. On a CPU, where XLA drops a barrier
    before it fuses, a branch does it whose flag XLA does not know.
    """
    moved = {
        (pair.relation.key, pair.group.name)
        for pair in pairs(graph)
        if pair.coords.positions is not None
    }
    chosen = {at: values[at[0]][at[1]] for at in moved}
    if not chosen:
        return values

    def branch(flags, chosen):
        none = lambda: jax.tree.map(jnp.zeros_like, chosen)  # noqa: E731
        return jax.lax.cond(anywhere(flags), lambda: chosen, none)

    def barrier(flags, chosen):
        return jax.lax.optimization_barrier(chosen)

    made = _jax.platform_dependent(flags, chosen, cpu=branch, default=barrier)
    return by_pair(
        graph,
        lambda pair: made.get((pair.relation.key, pair.group.name), pair.of(values)),
    )


def where_lanes(flags: jax.Array, laned: bool, x: jax.Array, axis: int = 0) -> jax.Array:
    """``x`` where a lane's flag is set and zero elsewhere, lanes in ``axis``; without lanes, where
    any flag is set.
    """
    flags = flags if laned or flags.ndim == 0 else flags.any()
    if flags.ndim:
        flags = flags.reshape((1,) * axis + flags.shape + (1,) * (x.ndim - axis - flags.ndim))
    return jnp.where(flags, x, jnp.zeros((), x.dtype))


def of_groups(graph: ETraceGraph, flags: jax.Array, by_group: dict) -> dict:
    """Vectors or transitions by group, in the flagged lanes."""
    laned = {g.name: graph.lanes_of(g) is not None for g in graph.hidden_groups}
    return {
        name: jax.tree.map(lambda a, name=name: where_lanes(flags, laned[name], a), tree)
        for name, tree in by_group.items()
    }


def of_pairs(graph: ETraceGraph, flags: jax.Array, by_relation: dict, rows: bool = False) -> dict:
    """Vectors of every pair, in the flagged lanes; ``rows``: rows stand in their first axis."""

    def one(pair: Pair):
        axis = rows + len(pair.op.repeats)
        return jax.tree.map(lambda a: where_lanes(flags, pair.laned, a, axis), pair.of(by_relation))

    return by_pair(graph, one)


def of_rows(graph: ETraceGraph, op: OpUse, flags: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of an op's x, in the flagged lanes; ``flags`` has rows, or one row for all.

    It selects, and does not multiply: in the other lanes x need not be a number.
    """
    laned = op.primitive.batched and op.x_aval.shape[:1] == (graph.lanes,)
    flags = jnp.broadcast_to(flags, (len(rows), *flags.shape[1:]))
    return jax.vmap(lambda f, x: where_lanes(f, laned, x, len(op.repeats)))(flags, rows)
