"""A step's equations rewritten, with the same results: nothing is computed twice, and what depends
on the step's carry is apart from what does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _jax
from .._compiler import properties_of

__all__ = ['live_equations', 'rewritten']

CONSTANT, INPUT, CARRY = 0, 1, 2  # what a value depends on; bits


def live_equations(jaxpr) -> list:
    """The equations that a result needs, and those with an effect."""
    wanted, found = {v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)}, []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not wanted.isdisjoint(eqn.outvars):
            wanted.update(v for v in eqn.invars if not isinstance(v, _jax.Literal))
            found.append(eqn)
    return found[::-1]


def rewritten(
    jaxpr, consts: list, numbers: tuple[int, int], differentiable: bool
) -> tuple[Any, list]:
    """``(jaxpr, constants)`` of the same function of ``numbers`` of constants and carries, and of
    the inputs of a step.

    Unless it is to be ``differentiable``, functions with a derivative rule of their own are opened.

    - Equal equations are one. Additions of zero and products with one are gone.
    - A matrix product of things that stand beside each other is a sum of products, where these do
      not depend on the same: ``[x, h] @ W`` is ``x @ W_x + h @ W_h``.
    - A split of such a sum is a sum of splits, and a product of which a part is wanted makes that
      part only.
    """

    def run(*args):  # what it notes of the values under way ends with it
        return _Rewriter(jaxpr, numbers, differentiable).run(jaxpr, consts, *args)

    jaxpr, consts = _jax.closed_jaxpr(jax.make_jaxpr(run)(*(v.aval for v in jaxpr.invars)))
    return jaxpr.replace(eqns=live_equations(jaxpr)), consts


class _Made(NamedTuple):
    """The equation that made a value, on values."""

    primitive: Any
    params: dict
    ctx: Any
    ins: list

    def on(self, *ins) -> tuple:
        """The equation on other values."""
        return self.primitive, self.params, self.ctx, *ins


class _Rewriter:
    """One rewriting. Values under way are tracers, known by their identity."""

    def __init__(self, jaxpr, numbers: tuple[int, int], differentiable: bool):
        self.numbers, self.differentiable = numbers, differentiable
        self.held: list = []  # so that no identity is used twice
        self.kinds: dict[int, int] = {}
        self.made: dict[int, _Made] = {}
        self.uniform: dict[int, float] = {}  # values whose elements all are this number
        self.seen: dict[Hashable, list] = {}
        self.live = live_equations(jaxpr)
        wanted = [v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)]
        wanted += [v for eqn in self.live for v in eqn.invars if not isinstance(v, _jax.Literal)]
        self.readers = Counter(wanted)

    def run(self, jaxpr, consts, *args) -> list:
        constant, carry = self.numbers
        self.held.extend((*consts, *args))
        for k, x in enumerate(args):
            kind = CONSTANT if k < constant else CARRY if k < constant + carry else INPUT
            self.kinds[id(x)] = kind
        return self._evaluated(jaxpr, self.live, consts, args)

    def _evaluated(self, jaxpr, eqns, consts, args) -> list:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom):
            return _jax.literal(atom) if isinstance(atom, _jax.Literal) else env[atom]

        for eqn in eqns:
            outs = self._equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn, ins: list) -> list:
        name = eqn.primitive.name
        if eqn.effects:  # it happens as often as it is written
            return self._new(_Made(eqn.primitive, eqn.params, eqn.ctx, ins))
        if name == 'stop_gradient' and not self.differentiable:
            return ins
        if name == 'dot_general':
            return [self._product(eqn, *ins)]
        if name == 'split':
            return self._split(eqn, ins[0])
        implementation = getattr(eqn.primitive, 'impl_fn', None)
        if implementation is not None and not eqn.primitive.lowering:
            fn = partial(implementation, **eqn.params)
            body, consts = _jax.opened(lambda *a: jax.tree.leaves(fn(*a)), ins)
            return self._evaluated(body, body.eqns, consts, ins)
        if _jax.is_custom_call(eqn) and not self.differentiable:
            body, consts = _jax.closed_jaxpr(eqn.params['call_jaxpr'])
            return self._evaluated(body, body.eqns, consts, ins)
        return self._bound(eqn.primitive, eqn.params, eqn.ctx, *ins)

    # one equation, once ---------------------------------------------------------------------------

    def _bound(self, primitive, params: dict, ctx, *ins) -> list:
        key = self._key(primitive, params, ins)
        if key in self.seen:
            return self.seen[key]
        made = _Made(primitive, params, ctx, list(ins))
        does = properties_of(made)
        kept = self._neutral(does.neutral, ins)
        if kept is not None:
            return [kept]
        outs = self._new(made)
        if does.moves and len(ins) == 1 and (number := self._number(ins[0])) is not None:
            self.uniform[id(outs[0])] = number
        if key is not None:
            self.seen[key] = outs
        return outs

    def _new(self, made: _Made) -> list:
        """The results of an equation that is not there yet."""
        outs = _jax.bind(*made.on(*made.ins))
        self.held.extend((*outs, *made.ins))
        kind = CONSTANT
        for x in made.ins:
            kind |= self._kind(x)
        for x in outs:
            self.kinds[id(x)], self.made[id(x)] = kind, made
        return outs

    def _kind(self, x) -> int:
        return self.kinds.get(id(x), CONSTANT)

    def _number(self, x) -> float | None:
        """The number that all elements of a value are, if that is known."""
        if isinstance(x, _jax.Tracer):
            return self.uniform.get(id(x))
        one = np.ndim(x) == 0 and np.issubdtype(np.asarray(x).dtype, np.floating)
        return float(x) if one else None

    def _neutral(self, neutral: float | None, ins):
        """The operand that is the result, where the other one changes nothing."""
        if neutral is None or len(ins) != 2:
            return None
        for one, other in (ins, ins[::-1]):
            same = isinstance(one, _jax.Tracer) and (
                np.shape(other) in ((), one.shape) and one.dtype == jax.numpy.result_type(*ins)
            )
            if same and self._number(other) == neutral:
                return one
        return None

    def _key(self, primitive, params: dict, ins):
        """What makes two equations equal; None: they are not compared."""
        if primitive.name == 'rng_uniform':  # each draws numbers of its own
            return None
        try:
            key = primitive, tuple(sorted((k, _comparable(v)) for k, v in params.items()))
            values = tuple(map(_identity, ins))
            hash((key, values))
        except TypeError:
            return None
        return key, values

    # products and splits of what stands beside each other -----------------------------------------

    def _made_by(self, x, name: str) -> _Made | None:
        made = self.made.get(id(x))
        return made if made is not None and made.primitive.name == name else None

    def _product(self, eqn, *ins):
        """A product, as a sum over the pieces of an operand that are of several kinds."""
        (left, right), batch = eqn.params['dimension_numbers']
        for side, dims in enumerate((left, right)):
            made = self._made_by(ins[side], 'concatenate')
            axis = None if made is None else made.params['dimension']
            if made is None or axis not in dims or len(set(map(self._kind, made.ins))) < 2:
                continue
            along = (right, left)[side][dims.index(axis)]
            total, start = None, 0
            for piece in made.ins:
                stop = start + piece.shape[axis]
                pair = [None, None]
                pair[side], pair[1 - side] = (
                    piece,
                    self._part(eqn.ctx, ins[1 - side], along, start, stop),
                )
                term, start = self._product(eqn, *pair), stop
                total = term if total is None else self._sum(eqn.ctx, total, term)
            return total
        return self._bound(eqn.primitive, eqn.params, eqn.ctx, *ins)[0]

    def _sum(self, ctx, a, b):
        return self._bound(jax.lax.add_p, {}, ctx, a, b)[0]

    def _part(self, ctx, x, axis: int, start: int, stop: int):
        if start == 0 and stop == x.shape[axis]:
            return x
        low, high = [0] * x.ndim, list(x.shape)
        low[axis], high[axis] = start, stop
        params = {'start_indices': tuple(low), 'limit_indices': tuple(high), 'strides': None}
        made = self._made_by(x, 'slice')
        if made is not None and made.params['strides'] is None:  # a part of a part
            first = made.params['start_indices']
            params['start_indices'] = tuple(a + b for a, b in zip(first, low, strict=True))
            params['limit_indices'] = tuple(a + b for a, b in zip(first, high, strict=True))
            x = made.ins[0]
        return self._bound(jax.lax.slice_p, params, ctx, x)[0]

    def _split(self, eqn, x) -> list:
        """A split, made where the terms of a sum are of several kinds."""
        sizes, axis = eqn.params['sizes'], eqn.params['axis']
        made = self._made_by(x, 'add')
        if made is not None and len({self._kind(v) & CARRY for v in made.ins}) > 1:
            if all(np.shape(v) == x.shape for v in made.ins):
                terms = [self._split(eqn, v) for v in made.ins]
                return [
                    None if any(x is None for x in pair) else self._bound(*made.on(*pair))[0]
                    for pair in zip(*terms, strict=True)
                ]
        wanted = [self.readers[v] > 0 for v in eqn.outvars]
        made = self._made_by(x, 'dot_general')
        if made is None or self.readers[eqn.invars[0]] != 1 or all(wanted):
            return self._bound(eqn.primitive, eqn.params, eqn.ctx, x)
        side, along = _free_axis(made.params['dimension_numbers'], made.ins, axis)
        if side is None:
            return self._bound(eqn.primitive, eqn.params, eqn.ctx, x)
        outs, start = [], 0
        for size, there in zip(map(int, sizes), wanted, strict=True):
            pair = list(made.ins)
            pair[side] = self._part(eqn.ctx, pair[side], along, start, start + size)
            outs.append(self._bound(*made.on(*pair))[0] if there else None)
            start += size
        return outs


def _free_axis(numbers, ins: list, axis: int) -> tuple[int | None, int]:
    """The operand of a product and its axis that is this axis of the result."""
    contracted, batch = numbers
    at = len(batch[0])
    for side, x in enumerate(ins):
        free = [d for d in range(x.ndim) if d not in contracted[side] and d not in batch[side]]
        if at <= axis < at + len(free):
            return side, free[axis - at]
        at += len(free)
    return None, 0


def _comparable(value):
    """A parameter of an equation, in a form in which equal ones compare as equal."""
    if hasattr(value, 'eqns') or hasattr(value, 'jaxpr'):
        jaxpr, consts = _jax.closed_jaxpr(value)
        return str(jaxpr), tuple(map(id, consts))
    if isinstance(value, tuple | list):
        return tuple(map(_comparable, value))
    return (type(value), repr(value)) if isinstance(value, int | float) else value


def _identity(x) -> tuple:
    if isinstance(x, _jax.Tracer) or np.ndim(x):
        return id(x), None
    return np.asarray(x).tobytes(), str(jax.numpy.result_type(x))
