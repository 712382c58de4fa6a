"""Scope ``'own'``: the own diagonal of each op, put into the step as paths that D follows.

The own diagonal of an op is what an element of y reads, through that op, of the position that it
feeds: its own recurrent weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import (
    Coordinates,
    DPass,
    ETraceGraph,
    OpUse,
    Splicing,
    analyse_again,
    depends,
    is_inexact,
    read_positions,
)
from .._rules import VIEWS
from ..errors import NotSupportedError

MOST_RUNS = 16  # slices in place of a gather


def with_own_diagonal(graph: ETraceGraph, scope: str) -> ETraceGraph:
    """The step in which element q of a traced op's y reads the elements k of x that come from the
    position which q feeds: ``y_q + dy_q/dx_k (x_k - stop(x_k))``, which is ``y_q``. With another
    scope than ``'own'``, and where it reads them already, the step itself.
    """
    if scope != 'own' or any(eqn.extra for eqn in graph.program.equations):
        return graph
    d_pass, edit = DPass(graph.program), Splicing(graph.program)
    d_pass.mixing.update(graph.mixing)
    found = False
    for relation in graph.hidden_param_op_relations:
        op, y = relation.op, relation.op.y
        if op.x is None or op.repeats or op.conditional or not is_inexact(op.x_aval):
            continue
        for group, coords in zip(relation.groups, relation.coordinates, strict=True):
            # the position of the group that each element of x comes from
            old = [graph.program.carry[c] for c in group.carried]
            for places in _own_places(read_positions(d_pass, op.x, old), coords):
                _check(op)
                ins = op.x, *op.trainable.values(), *op.structure.values()
                (zero,) = edit.put(op.equation + 1, _own_read(op, places), ins, extra=True)
                (y,) = edit.put(op.equation + 1, jnp.add, (y, zero))
                found = True
        if y != op.y:
            edit.rename(op.equation + 1, op.y, y)
    return analyse_again(graph, edit.result()) if found else graph


def _own_places(labels: np.ndarray | None, coords: Coordinates) -> Iterator[np.ndarray]:
    """For each element of y the flat place in x of an element that comes from its position, -1
    where there is none; an array for each such element.
    """
    if coords.added or labels is None:
        return
    size = np.prod(coords.shape, dtype=int)
    fed = np.arange(size) if coords.positions is None else np.asarray(coords.positions).reshape(-1)
    # the places in x, sorted by the position that they come from
    places = np.flatnonzero(labels.reshape(-1) >= 0)
    of_place = labels.reshape(-1)[places]
    order = np.argsort(of_place, kind='stable')
    places, of_place = places[order], of_place[order]
    first, last = (np.searchsorted(of_place, fed, side) for side in ('left', 'right'))
    for n in range(int((last - first).max(initial=0))):
        there = first + n < last
        yield np.where(there, places[np.minimum(first + n, len(places) - 1)], -1).reshape(
            coords.shape
        )


def _own_read(op: OpUse, places: np.ndarray) -> Callable:
    """``fn(x, *weights, *structure)``: zeros like y that read its own places in x."""
    names = *op.trainable, *op.structure
    lanes = places.shape[0] if op.primitive.batched else 1
    of_x, of_y = (lanes, op.x_aval.size // lanes), (lanes, places.size // lanes)
    # places within a lane: less the flat place of each lane's first element
    starts = (np.arange(lanes) * of_x[1]).reshape(-1, *[1] * (places.ndim - 1))
    each = np.where(places < 0, -1, places - starts).reshape(of_y)
    alike = op.primitive.batched and (each == each[:1]).all()
    diagonal = _of_a_batch if alike and op.primitive.original is None else _of_all

    def read(x, *operands):
        values = dict(zip(names, jax.lax.stop_gradient(operands), strict=True))
        bound = op.bound({n: values[n] for n in op.structure})
        own = diagonal(bound, {n: values[n] for n in op.trainable}, each)
        there = jnp.concatenate(list(_parts(x.reshape(of_x), each)), 1)
        return (own * (there - jax.lax.stop_gradient(there))).reshape(places.shape)

    return read


def _parts(x: jax.Array, each: np.ndarray) -> Iterator[jax.Array]:
    """``x[lane, each[lane]]``, runs of places as slices."""
    same = (each == each[:1]).all()
    runs = np.split(each[0], np.flatnonzero(np.diff(each[0]) != 1) + 1) if same else []
    if not same or len(runs) > MOST_RUNS or (each < 0).any():
        yield x.at[np.arange(len(x))[:, None], np.maximum(each, 0)].get(mode='promise_in_bounds')
        return
    for run in runs:
        yield jax.lax.slice_in_dim(x, int(run[0]), int(run[-1]) + 1, axis=1)


def _of_a_batch(op: OpUse, weights: dict, each: np.ndarray) -> jax.Array:
    """``dy_q/dx_k(q)`` of an op that is linear in x: a batch with one such place in each sample."""
    shape = len(each[0]), *op.x_aval.shape[1:]
    ones = jax.nn.one_hot(each[0], op.x_aval.size // len(each), dtype=op.x_aval.dtype)
    return jnp.diagonal(_linear(op, weights, ones.reshape(shape)).reshape(len(ones), -1))[None]


def _of_all(op: OpUse, weights: dict, each: np.ndarray) -> jax.Array:
    """The same for any op, one place of every lane after the other."""
    size = op.x_aval.size // len(each)

    def at(q):
        ones = jax.nn.one_hot(jnp.asarray(each)[:, q], size, dtype=op.x_aval.dtype)
        return _linear(op, weights, ones.reshape(op.x_aval.shape)).reshape(len(each), -1)[:, q]

    return jax.vmap(at, out_axes=1)(jnp.arange(len(each[0])))


def _linear(op: OpUse, weights: dict, x: jax.Array, at=None) -> jax.Array:
    """The derivative of y along x."""
    at = jnp.zeros_like(x) if at is None else at
    return jax.jvp(lambda x: op.impl(x, weights), (at,), (x,))[1]


def _check(op: OpUse) -> None:
    """Refuse an op whose derivative along x depends on where in x it is taken."""
    empty = op.empty()

    def along(at, x, weights):
        return _linear(empty, weights, x, at[0])

    if any(depends(along, [op.x_aval], op.x_aval, op.weight_avals)):
        raise NotSupportedError(
            f'{op.where}: {op.primitive.name} is not linear in its input, so it has no diagonal of '
            "its own that the weights alone give. Use d_rtrl(), or windows with inside='exact'."
        )


VIEWS['scope'] = with_own_diagonal
