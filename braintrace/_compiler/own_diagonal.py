"""What an element of y reads, through its own op, of the position that it feeds: the op's own
diagonal, put into the step as paths that D follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import NotSupportedError
from .analyse import analyse_again
from .analysis.d_pass import DPass
from .analysis.following import Following
from .equations import labels as lb
from .equations.equation import is_inexact
from .graph import Coordinates, ETraceGraph, OpUse
from .program.splicing import Splicing
from .program.tracing import depends

MOST_RUNS = 16  # slices in place of a gather


def with_own_diagonal(graph: ETraceGraph) -> ETraceGraph:
    """The step in which element q of a traced op's y reads the elements k of x that come from the
    position which q feeds: ``y_q + dy_q/dx_k (x_k - stop(x_k))``, which is ``y_q``.
    """
    d_pass, edit = DPass(graph.program), Splicing(graph.program)
    d_pass.mixing.update(graph.mixing)
    following, found = Following(d_pass), False
    for relation in graph.hidden_param_op_relations:
        op, y = relation.op, relation.op.y
        if op.x is None or op.repeats or op.conditional or not is_inexact(op.x_aval):
            continue
        for group, coords in zip(relation.groups, relation.coordinates, strict=True):
            values = (graph.program.carry[c] for c in group.carried)
            sources = {v: lb.identity(group.shape) for v in values}
            for places in _own_places(following.follow(sources, op.x), coords):
                _check(op)
                ins = op.x, *op.trainable.values(), *op.structure.values()
                (zero,) = edit.put(op.equation + 1, _own_read(op, places), ins, extra=True)
                (y,) = edit.put(op.equation + 1, jnp.add, (y, zero))
                found = True
        if y != op.y:
            edit.rename(op.equation + 1, op.y, y)
    return analyse_again(graph, edit.result()) if found else graph


def _own_places(labels: lb.Labels, coords: Coordinates) -> Iterator[np.ndarray]:
    """For each element of y the flat place in x of an element that comes from its position, -1
    where there is none; an array for each such element.
    """
    if coords.added or not lb.has(labels):
        return
    fed = lb.identity(coords.shape) if coords.positions is None else coords.positions
    fed = np.asarray(fed).reshape(-1)
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
    each = np.where(places < 0, -1, places - _starts(*of_x, places.ndim)).reshape(of_y)
    diagonal = _of_a_batch if op.primitive.original is None else _of_all
    if not (op.primitive.batched and (each == each[:1]).all()):
        diagonal = _of_all

    def read(x, *operands):
        values = dict(zip(names, jax.lax.stop_gradient(operands), strict=True))
        bound = op.bound({n: values[n] for n in op.structure})
        own = diagonal(bound, {n: values[n] for n in op.trainable}, each)
        there = jnp.concatenate(list(_parts(x.reshape(of_x), each)), 1)
        return (own * (there - jax.lax.stop_gradient(there))).reshape(places.shape)

    return read


def _starts(lanes: int, size: int, ndim: int) -> np.ndarray:
    """The flat place of each lane's first element, along axis 0."""
    return (np.arange(lanes) * size).reshape(-1, *[1] * (ndim - 1))


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
    empty = op.empty()

    def along(at, x, weights):
        return _linear(empty, weights, x, at[0])

    if any(depends(along, [op.x_aval], op.x_aval, op.weight_avals)):
        raise NotSupportedError(
            f'{op.where}: {op.primitive.name} is not linear in its input, so it has no diagonal of '
            "its own that the weights alone give. Use d_rtrl(), or windows with inside='exact'."
        )
