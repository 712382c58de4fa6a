"""A ``scan`` in a flat program: unrolled, or as a region between two markers."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from ... import _jax
from ..equations.equation import BEGIN, END, Equation, Loop
from .branches import gated
from .builder import Builder, Place
from .marking import marked_at_border


def _row(build: Builder, value: int, at: int, where: str) -> int:
    (row,) = build.traced(lambda a: jax.lax.index_in_dim(a, at, keepdims=False), [value], where)
    return row


def unrolled(build: Builder, parts: _jax.ScanParts, ins: list[int], place: Place) -> list[int]:
    """Every iteration by itself."""
    consts, carry, xs = parts.split(ins)
    rows: dict[int, list[int]] = {}
    for t in reversed(range(parts.length)) if parts.reverse else range(parts.length):
        slices = [_row(build, x, t, place.where) for x in xs]
        outs = build.call(parts.body, parts.consts, [*consts, *carry, *slices], place)
        carry, rows[t] = outs[: parts.num_carry], outs[parts.num_carry :]
    if not rows:
        empty = [v.aval for v in parts.body.outvars[parts.num_carry :]]
        return [*carry, *(build.constant(jnp.zeros((0, *a.shape), a.dtype)) for a in empty)]
    columns = zip(*(rows[t] for t in range(parts.length)), strict=True)

    def stack(*rows):
        return jnp.stack(rows)

    return [*carry, *(build.traced(stack, column, place.where)[0] for column in columns)]


def peeled(build: Builder, eqn, parts, ins: list[int], place: Place) -> list[int]:
    """A loop and then its last iteration, so that readers of the last carry read the new state."""
    consts, init, xs = parts.split(ins)
    n, first = parts.length - 1, int(parts.reverse)

    def most(rows):
        return jax.lax.slice_in_dim(rows, first, first + n)

    rest = [build.traced(most, [x], place.where)[0] for x in xs]
    last = [_row(build, x, 0 if first else n, place.where) for x in xs]
    outs = descended(build, eqn, parts._replace(length=n), [*consts, *init, *rest], place)
    carry = outs[: parts.num_carry]
    ends = build.call(parts.body, parts.consts, [*consts, *carry, *last], place)

    def join(rows, row):
        return jnp.concatenate([row[None], rows] if first else [rows, row[None]])

    rows = zip(outs[parts.num_carry :], ends[parts.num_carry :], strict=True)
    return [*ends[: parts.num_carry], *(build.traced(join, pair, place.where)[0] for pair in rows)]


def descended(build: Builder, eqn, parts, ins: list[int], place: Place) -> list[int]:
    """The loop as a region between two markers."""
    consts, init, xs = parts.split(ins)
    init = [marked_at_border(build, v, place.where, eqn.primitive.name) for v in init]
    if build.branches:
        init, xs = ([gated(build, v) for v in values] for values in (init, xs))
    # the body, one loop deeper, on a carry and slices of its own
    inner = [build.new(v.aval, len(build.bodies)) for v in parts.body.invars[len(consts) :]]
    build.inside(inner)
    # rows of a function of parameters are functions of parameters
    for sequence, row in zip(xs, inner[len(init) :], strict=True):
        build.pure.update([row] if sequence in build.pure else [])
        build.owned.update({row: build.owned[sequence]} if sequence in build.owned else {})
    region = Loop(parts.length, parts.reverse, parts.unroll, len(init), place.where, eqn)
    build.bodies.append([])
    with build.within(region):
        outs = build.call(parts.body, parts.consts, [*consts, *inner], place)
        outs = [marked_at_border(build, v, place.where, eqn.primitive.name) for v in outs]
        if build.branches:
            outs = [gated(build, v) for v in outs]
    body = build.bodies.pop()
    # its results: the last carry, and sequences of the iterations' results
    results = [
        build.new(v.aval if k < len(init) else v.aval.update(shape=(parts.length, *v.aval.shape)))
        for k, v in enumerate(parts.body.outvars)
    ]
    build.inside(results)
    marker = Equation(BEGIN, {}, None, (), (), place.where, scope=build.scope, loop=region)
    build.bodies[-1] += [
        replace(marker, ins=(*init, *xs), outs=tuple(inner)),
        *body,
        replace(marker, primitive=END, ins=tuple(outs), outs=tuple(results)),
    ]
    return _with_last_rows(build, region, outs, results)


def _with_last_rows(build: Builder, region: Loop, outs: list[int], results: list[int]) -> list[int]:
    """Readers of the last row of a carry's sequence read the new state, as if unrolled."""
    carry = dict(zip(outs[: region.num_carry], results, strict=False))

    def put(rows, last):
        parts = [last[None], rows[1:]] if region.reverse else [rows[:-1], last[None]]
        return jnp.concatenate(parts)

    return [
        build.traced(put, [r, carry[o]], region.where)[0]
        if k >= region.num_carry and o in carry
        else r
        for k, (o, r) in enumerate(zip(outs, results, strict=True))
    ]
