"""A ``shard_map`` as a plain function: its body under ``jax.vmap`` over the axes of the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import EXPANDED, PROPERTIES
from ..errors import NotSupportedError


def unsharded(eqn, where: str = 'an unknown place') -> Callable[..., list]:
    """A ``shard_map`` equation as a function of global arrays.

    An axis of the mesh becomes an axis of ``jax.vmap``: an op whose weights are replicated is the
    batched op of all blocks. Where an ``out_spec`` leaves out an axis of the mesh, all blocks along
    it have the same result, and the first block's is taken.
    """
    parts = _jax.shard_map_parts(eqn)
    if parts is None:
        raise NotSupportedError(f'{where}: {eqn.primitive.name} is no shard_map.')
    _check(parts, where)
    body = _Body(parts, where)

    def run(*operands) -> list:
        blocks = [_split(x, spec, parts.sizes) for x, spec in zip(operands, parts.in_specs)]
        kept = _result_axes(body, blocks)
        results = _mapped(body.results, body, kept)(*blocks)
        return [
            _join(y, spec, axes, parts.sizes)
            for y, spec, axes in zip(results, parts.out_specs, kept)
        ]

    return run


def _check(parts: _jax.ShardMapParts, where: str) -> None:
    """Refuse anything but a map over blocks."""
    automatic = [axis for axis in parts.mesh.axis_names if axis not in parts.manual_axes]
    if automatic:
        raise NotSupportedError(
            f'the shard_map at {where} maps {sorted(parts.manual_axes)} and leaves {automatic} of '
            'its mesh to the compiler. Map every axis of the mesh: leave `axis_names` out, or use '
            'a mesh without the other axes.'
        )
    partial = [
        spec for spec in (*parts.in_specs, *parts.out_specs) if spec.unreduced or spec.reduced
    ]
    if partial:
        raise NotSupportedError(
            f'the shard_map at {where} has the spec {partial[0]}, whose values are sums that are '
            'still to be taken. Take the sum in its body, with `jax.lax.psum`.'
        )


# ---- layout: axes of the mesh lead, in the order of the mesh ----


def _dims(spec, rank: int) -> list[tuple[str, ...]]:
    """The axes of the mesh that cut each dimension, the outermost first."""
    entries = [*spec, *[None] * (rank - len(spec))]
    return [
        entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        for entry in entries
    ]


def _names(spec) -> set[str]:
    return {axis for names in _dims(spec, len(spec)) for axis in names}


def _split(x, spec, sizes: dict[str, int]):
    """A global array as its blocks, the axes that cut it in front."""
    shape: list[int] = []
    position, rest = {}, []
    for size, names in zip(jnp.shape(x), _dims(spec, jnp.ndim(x))):
        position.update({axis: len(shape) + i for i, axis in enumerate(names)})
        rest.append(len(shape) + len(names))
        shape += [
            *(sizes[axis] for axis in names),
            size // math.prod(sizes[axis] for axis in names),
        ]
    front = [position[axis] for axis in sizes if axis in position]
    return jnp.transpose(jnp.reshape(x, shape), front + rest)


def _join(y, spec, kept: set[str], sizes: dict[str, int]):
    """A global array from its blocks, which have the ``kept`` axes in front.

    Of an axis that is not in ``spec`` the first block is taken.
    """
    wanted = _names(spec)
    y = y[tuple(slice(None) if axis in wanted else 0 for axis in sizes if axis in kept)]
    front = [axis for axis in sizes if axis in wanted]
    order, shape = [], []
    for i, names in enumerate(_dims(spec, y.ndim - len(front))):
        dims = [*(front.index(axis) for axis in names), len(front) + i]
        order += dims
        shape.append(math.prod(y.shape[d] for d in dims))
    return jnp.reshape(jnp.transpose(y, order), shape)


def _mapped(fn: Callable, body: _Body, kept: Sequence[set[str]]) -> Callable:
    """``fn`` of one block as a function of all; ``kept``: the axes in front of each result."""
    inside = [_names(spec) for spec in body.parts.in_specs]
    for axis, size in reversed(body.parts.sizes.items()):
        in_axes = tuple(0 if axis in names else None for names in inside)
        out_axes = [0 if axis in names else None for names in kept]
        fn = jax.vmap(fn, in_axes, out_axes, axis_name=axis, axis_size=size)
    return fn


def _result_axes(body: _Body, blocks: Sequence) -> list[set[str]]:
    """The axes along which each result is stacked: its spec's, and others that it varies along."""
    every = set(body.parts.sizes)
    specs = [_names(spec) for spec in body.parts.out_specs]
    if all(names == every for names in specs):
        return specs
    # a spec may leave out an axis that the result varies along, but `vmap` needs it
    found: list[set[str]] = []

    def probe(*args):
        results = body.results(*args)
        found.extend(_jax.mapped_axes(y) for y in results)
        return results

    jax.eval_shape(_mapped(probe, body, [every] * len(specs)), *blocks)
    return [names | varies for names, varies in zip(specs, found)]


# ---- the body of one block ----


# what jax.vmap raises for a collective that it has no rule for, or a rule that does not fit
UNMAPPED = (AssertionError, NotImplementedError, TypeError, ValueError)


class _Body(NamedTuple):
    """The body of a ``shard_map``, evaluated under ``jax.vmap`` over its axes."""

    parts: _jax.ShardMapParts
    where: str

    def results(self, *args) -> list:
        return self.evaluate(self.parts.body, self.parts.consts, args)

    def evaluate(self, body, consts: Sequence, args: Sequence) -> list:
        return _jax.walk(body, consts, args, self._apply)

    def _apply(self, eqn, args: list) -> list:
        inner = _jax.inlinable(eqn)
        if inner is not None:
            return self.evaluate(*_jax.closed_jaxpr(inner), args)
        if PROPERTIES[eqn.primitive.name].retypes:
            return args  # there is no mesh any more that a type could speak of
        try:
            with _jax.at_location(eqn.source_info):
                if eqn.primitive.name in COLLECTIVES and not eqn.params.get('axis_index_groups'):
                    return [COLLECTIVES[eqn.primitive.name](x, eqn.params) for x in args]
                params = _jax.with_bodies(eqn, self.parts, self.evaluate)
                plain = partial(_jax.bind, eqn, params=params, ctx=_jax.WithoutMesh(eqn.ctx))
                return _in_one_axis(eqn, plain, args)(*args)
        except NotSupportedError:
            raise
        except UNMAPPED as error:
            names = ', '.join(sorted(self._collectives(eqn)))
            if not names:
                raise
            raise NotSupportedError(
                f'the shard_map at {self.where} holds {names} at {_jax.location(eqn.source_info)}, '
                f'which has no form under jax.vmap ({type(error).__name__}: {error}). Write it '
                'with psum, pmax, pmin, all_gather, psum_scatter, ppermute or all_to_all, without '
                'axis_index_groups; ppermute along one axis.'
            ) from error

    def _collectives(self, eqn) -> set[str]:
        inner = [e for body in _jax.sub_jaxprs(eqn.params) for e in _jax.closed_jaxpr(body)[0].eqns]
        named = {
            a for key in ('axes', 'axis_name') for a in _tuple(eqn.params.get(key, ()))
        } & self.parts.manual_axes
        return {name for e in inner for name in self._collectives(e)} | (
            {eqn.primitive.name} if named else set()
        )


# ---- products and lookups with what all blocks share ----


def _in_one_axis(eqn, plain: Callable, args: list) -> Callable:
    """``plain``, the equation of one block, so that under ``jax.vmap`` over the mesh it is the
    equation of the whole array: the blocks of one operand are joined along the axis that cuts it,
    where the other operand is the same for all. So the batch stays the batch.
    """
    joined = _joined_axis(eqn, [_jax.mapped_axes(x) for x in args])
    if joined is None:
        return plain
    side, axis, at = joined

    def folding(inner: Callable) -> Callable:
        run = jax.custom_batching.custom_vmap(inner)

        @run.def_vmap
        def rule(size, batched, *args):
            whole, x = list(args), jnp.moveaxis(args[side], 0, axis)
            whole[side] = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
            (y,) = inner(*whole)
            y = y.reshape(*y.shape[:at], size, -1, *y.shape[at + 1 :])
            return [jnp.moveaxis(y, at, 0)], [True]

        return run

    for _ in _jax.mapped_axes(args[side]):
        plain = folding(plain)
    return plain


def _joined_axis(eqn, mapped: list[set]) -> tuple[int, int, int] | None:
    """The operand whose blocks are joined, its axis, and the axis of the result that this is."""
    kind, params = PROPERTIES[eqn.primitive.name].op, eqn.params
    sides = [k for k, axes in enumerate(mapped) if axes]
    if len(sides) != 1 or kind not in ('product', 'rows') or 0 in eqn.invars[sides[0]].aval.shape:
        return None
    (side,), ranks = sides, [v.aval.ndim for v in eqn.invars]
    if kind == 'product':
        free = [
            [k for k in range(rank) if k not in contracted and k not in batch]
            for rank, contracted, batch in zip(ranks, *params['dimension_numbers'], strict=True)
        ]
        first = len(params['dimension_numbers'][1][0])
        return (side, free[side][0], first + side * len(free[0])) if free[side] else None
    numbers = params.get('dimension_numbers')
    if side != 1 or numbers is None or ranks[1] < 2 or numbers.operand_batching_dims:
        return None
    places = range(eqn.outvars[0].aval.ndim)
    return side, 0, next(k for k in places if k not in numbers.offset_dims)


def _tuple(names: Any) -> tuple:
    return tuple(names) if isinstance(names, tuple | list | set | frozenset) else (names,)


def _psum(x, params: dict):
    return jax.lax.psum(x, params['axes'])


def _all_gather(x, params: dict):
    """One axis after the other, because ``jax.vmap`` gathers along one only."""
    dim = params['all_gather_dimension']
    x = x if params['tiled'] else jnp.expand_dims(x, dim)
    for axis in reversed(_tuple(params['axis_name'])):
        x = jax.lax.all_gather(x, axis, axis=dim, tiled=True)
    return x


def _psum_scatter(x, params: dict):
    dim = params['scatter_dimension']
    for axis in _tuple(params['axis_name']):
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return x if params['tiled'] else jnp.squeeze(x, dim)


def _ppermute(x, params: dict):
    """``jax.vmap`` needs a permutation of all blocks; blocks that receive nothing become zero."""
    (axis,) = _tuple(params['axis_name'])
    size = jax.lax.axis_size(axis)
    sources, targets = (list(i) for i in zip(*params['perm'])) if params['perm'] else ([], [])
    idle = zip(
        (i for i in range(size) if i not in sources), (i for i in range(size) if i not in targets)
    )
    y = jax.lax.ppermute(x, axis, [*params['perm'], *idle])
    received = jnp.array([i in targets for i in range(size)])[jax.lax.axis_index(axis)]
    return y if len(targets) == size else jnp.where(received, y, jnp.zeros_like(y))


# Collectives that are another primitive under other types of the body, or that jax.vmap knows in
# part only.
COLLECTIVES = {
    'psum_invariant': _psum,
    'all_gather': _all_gather,
    'all_gather_invariant': _all_gather,
    'reduce_scatter': _psum_scatter,
    'ppermute': _ppermute,
}


EXPANDED['vmap'] = unsharded
