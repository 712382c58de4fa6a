"""A step's equations rewritten, with the same results: nothing is computed twice, and what depends
on the step's carry is apart from what does not.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _jax
from .._compiler import PROPERTIES

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
    - An element-wise function of constants that are repeated, as a leak for all lanes, is repeated
      itself.
    """

    def run(*args):  # what it notes of the values under way ends with it
        return _Rewriter(jaxpr, numbers, differentiable).run(jaxpr, consts, *args)

    jaxpr, consts = _jax.closed_jaxpr(jax.make_jaxpr(run)(*(v.aval for v in jaxpr.invars)))
    return jaxpr.replace(eqns=live_equations(jaxpr)), consts


class _Maker(NamedTuple):
    """The equation that made a value."""

    primitive: Any
    params: dict
    ctx: Any
    ins: list[_Value]


@dataclass(eq=False)
class _Value:
    """A value under way: ``kind`` says what it depends on, ``made`` what made it; all its elements
    are ``number``, where that is known.
    """

    x: Any
    kind: int = CONSTANT
    made: _Maker | None = None
    number: float | None = None

    def made_by(self, name: str) -> _Maker | None:
        return self.made if self.made is not None and self.made.primitive.name == name else None


class _Rewriter:
    """One rewriting."""

    def __init__(self, jaxpr, numbers: tuple[int, int], differentiable: bool):
        self.numbers, self.differentiable = numbers, differentiable
        self.seen: dict[Hashable, list[_Value]] = {}
        self.live = live_equations(jaxpr)
        wanted = [v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)]
        wanted += [v for eqn in self.live for v in eqn.invars if not isinstance(v, _jax.Literal)]
        self.readers = Counter(wanted)

    def run(self, jaxpr, consts, *args) -> list:
        constant, carry = self.numbers
        kinds = [CONSTANT] * constant + [CARRY] * carry + [INPUT] * (len(args) - constant - carry)
        values = [_Value(x, kind) for x, kind in zip(args, kinds, strict=True)]
        return [v.x for v in self._evaluated(jaxpr, self.live, consts, values)]

    def _evaluated(self, jaxpr, eqns, consts, args: list[_Value]) -> list[_Value]:
        given = *map(_given, consts), *args
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))

        def read(atom) -> _Value:
            return _given(_jax.literal(atom)) if isinstance(atom, _jax.Literal) else env[atom]

        for eqn in eqns:
            outs = self._equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn, ins: list[_Value]) -> list:
        name = eqn.primitive.name
        if eqn.effects:  # it happens as often as it is written
            return self._new(_Maker(eqn.primitive, eqn.params, eqn.ctx, ins))
        if name == 'stop_gradient' and not self.differentiable:
            return ins
        if name == 'dot_general':
            return [self._product(eqn, *ins)]
        if name == 'split':
            return self._split(eqn, ins[0])
        # an ETP op becomes the equations of its implementation
        implementation = getattr(eqn.primitive, 'impl_fn', None)
        if implementation is not None and not eqn.primitive.lowering:
            fn = partial(implementation, **eqn.params)
            body, consts = _jax.opened(lambda *a: jax.tree.leaves(fn(*a)), [v.x for v in ins])
            return self._evaluated(body, body.eqns, consts, ins)
        if eqn.primitive.name in _jax.CUSTOM_CALLS and not self.differentiable:
            body, consts = _jax.closed_jaxpr(eqn.params['call_jaxpr'])
            return self._evaluated(body, body.eqns, consts, ins)
        return self._bound(eqn.primitive, eqn.params, eqn.ctx, *ins)

    # one equation, once ---------------------------------------------------------------------------

    def _bound(self, primitive, params: dict, ctx, *ins: _Value) -> list[_Value]:
        # an equation that is there already is not made again
        key = self._key(primitive, params, ins)
        if key in self.seen:
            return self.seen[key]
        if primitive.name == 'broadcast_in_dim' and _repeats(ins):  # of what is repeated, once
            once = ins[0].made_by('broadcast_in_dim')
            if once is not None and once.params['sharding'] is None is params['sharding']:
                inner, outer = (each['broadcast_dimensions'] for each in (once.params, params))
                params = {**params, 'broadcast_dimensions': tuple(outer[d] for d in inner)}
                return self._bound(primitive, params, ctx, *once.ins)
        made = _Maker(primitive, params, ctx, list(ins))
        does = PROPERTIES[made.primitive.name]
        # x + 0 and x * 1 are x
        kept = self._neutral(does.neutral, ins)
        if kept is not None:
            return [kept]
        # what is made of repeated constants alone is made once, then repeated
        outs = self._repeated(made) if does.elementwise and _repeats(ins) else self._new(made)
        if does.moves and len(ins) == 1:
            outs[0].number = ins[0].number
        if key is not None:
            self.seen[key] = outs
        return outs

    def _new(self, made: _Maker) -> list[_Value]:
        """The results of an equation that is not there yet."""
        # it depends on all that its operands depend on
        kind = functools.reduce(operator.or_, (v.kind for v in made.ins), CONSTANT)
        outs = _jax.bind(made, *(v.x for v in made.ins))
        return [_Value(x, kind, made) for x in outs]

    def _repeated(self, made: _Maker) -> list[_Value]:
        """An element-wise equation of constants that are all repeated in one way, or numbers: made
        of what is repeated, and then repeated.
        """
        sources = [v.made_by('broadcast_in_dim') for v in made.ins]
        # the operands have to be repeated in one way: the same shape along the same axes
        ways = {
            (np.shape(source.ins[0].x), source.params['broadcast_dimensions'])
            for source in sources
            if source is not None and np.ndim(source.ins[0].x)
        }
        alone = any(s is None and np.ndim(v.x) for s, v in zip(sources, made.ins, strict=True))
        makers = [made, *filter(None, sources)]
        placed = any(maker.params.get('sharding') is not None for maker in makers)
        if alone or placed or len(ways) > 1 or len(makers) == 1:
            return self._new(made)
        shape, dims = ways.pop() if ways else ((), ())
        whole = np.broadcast_shapes(*(np.shape(v.x) for v in made.ins))

        def repeated(value: _Value, shape: tuple, dims: tuple) -> _Value:
            params = {'shape': shape, 'broadcast_dimensions': dims, 'sharding': None}
            return self._bound(jax.lax.broadcast_in_dim_p, params, made.ctx, value)[0]

        # the operands before they were repeated
        small = []
        for value, source in zip(made.ins, sources, strict=True):
            once = value if source is None else source.ins[0]
            small.append(once if np.ndim(once.x) or not shape else repeated(once, shape, ()))
        outs = self._bound(made.primitive, made.params, made.ctx, *small)
        return [repeated(v, whole, dims) for v in outs]

    def _neutral(self, neutral: float | None, ins: Sequence[_Value]) -> _Value | None:
        """The operand that is the result, where the other one changes nothing."""
        if neutral is None or len(ins) != 2:
            return None
        for one, other in (ins, ins[::-1]):
            same = isinstance(one.x, _jax.Tracer) and (
                np.shape(other.x) in ((), one.x.shape)
                and one.x.dtype == jax.numpy.result_type(*(v.x for v in ins))
            )
            if same and other.number == neutral:
                return one
        return None

    def _key(self, primitive, params: dict, ins: Sequence[_Value]):
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

    def _product(self, eqn, *ins: _Value) -> _Value:
        """A product, as a sum over the pieces of an operand that are of several kinds."""
        (left, right), batch = eqn.params['dimension_numbers']
        for side, dims in enumerate((left, right)):
            made = ins[side].made_by('concatenate')
            axis = None if made is None else made.params['dimension']
            if made is None or axis not in dims or len({v.kind for v in made.ins}) < 2:
                continue
            # [x, h] @ W: the other operand is cut where the pieces meet
            along = (right, left)[side][dims.index(axis)]
            total, start = None, 0
            for piece in made.ins:
                stop = start + piece.x.shape[axis]
                part = self._part(eqn.ctx, ins[1 - side], along, start, stop)
                term = self._product(eqn, *((piece, part) if side == 0 else (part, piece)))
                total, start = term if total is None else self._sum(eqn.ctx, total, term), stop
            if total is not None:
                return total
        return self._bound(eqn.primitive, eqn.params, eqn.ctx, *ins)[0]

    def _sum(self, ctx, a: _Value, b: _Value) -> _Value:
        return self._bound(jax.lax.add_p, {}, ctx, a, b)[0]

    def _part(self, ctx, value: _Value, axis: int, start: int, stop: int) -> _Value:
        if start == 0 and stop == value.x.shape[axis]:
            return value
        low, high = [0] * value.x.ndim, list(value.x.shape)
        low[axis], high[axis] = start, stop
        params = {'start_indices': tuple(low), 'limit_indices': tuple(high), 'strides': None}
        made = value.made_by('slice')
        if made is not None and made.params['strides'] is None:  # a part of a part
            first = made.params['start_indices']
            params['start_indices'] = tuple(a + b for a, b in zip(first, low, strict=True))
            params['limit_indices'] = tuple(a + b for a, b in zip(first, high, strict=True))
            value = made.ins[0]
        return self._bound(jax.lax.slice_p, params, ctx, value)[0]

    def _split(self, eqn, value: _Value) -> list:
        """A split, made where the terms of a sum are of several kinds."""
        # split(a + b) is split(a) + split(b), where one of them waits for the carry
        sizes, axis = eqn.params['sizes'], eqn.params['axis']
        made = value.made_by('add')
        if made is not None and len({v.kind & CARRY for v in made.ins}) > 1:
            if all(np.shape(v.x) == value.x.shape for v in made.ins):
                terms = [self._split(eqn, v) for v in made.ins]
                return [
                    None
                    if any(v is None for v in pair)
                    else self._bound(made.primitive, made.params, made.ctx, *pair)[0]
                    for pair in zip(*terms, strict=True)
                ]
        # split(x @ W) with parts that nobody reads makes only the other ones
        wanted = [self.readers[v] > 0 for v in eqn.outvars]
        made = value.made_by('dot_general')
        if made is None or self.readers[eqn.invars[0]] != 1 or all(wanted):
            return self._bound(eqn.primitive, eqn.params, eqn.ctx, value)
        shapes = [v.x.shape for v in made.ins]
        side, along = _free_axis(made.params['dimension_numbers'], shapes, axis)
        if side is None:
            return self._bound(eqn.primitive, eqn.params, eqn.ctx, value)
        outs, start = [], 0
        for size, there in zip(map(int, sizes), wanted, strict=True):
            pair = list(made.ins)
            pair[side] = self._part(eqn.ctx, pair[side], along, start, start + size)
            product = made.primitive, made.params, made.ctx
            outs.append(self._bound(*product, *pair)[0] if there else None)
            start += size
        return outs


def _repeats(ins: Sequence[_Value]) -> bool:
    """Whether only constants are read."""
    return bool(ins) and all(v.kind == CONSTANT for v in ins)


def _free_axis(numbers, shapes: list, axis: int) -> tuple[int | None, int]:
    """The operand of a product and its axis that is this axis of the result."""
    contracted, batch = numbers
    at = len(batch[0])
    for side, shape in enumerate(shapes):
        free = [d for d in range(len(shape)) if d not in contracted[side] and d not in batch[side]]
        if at <= axis < at + len(free):
            return side, free[axis - at]
        at += len(free)
    return None, 0


def _comparable(value):
    """A parameter of an equation, in a form in which equal ones compare as equal."""
    if hasattr(value, 'eqns') or hasattr(value, 'jaxpr'):
        jaxpr, consts = _jax.closed_jaxpr(value)
        # the text of a jaxpr does not tell two derivative rules of one name apart
        return value if consts or any(map(_jax.holds_call, jaxpr.eqns)) else str(jaxpr)
    if isinstance(value, tuple | list):
        return tuple(map(_comparable, value))
    return (type(value), repr(value)) if isinstance(value, int | float) else value


def _identity(value: _Value):
    """Values of their own are told apart as objects, numbers by what they are."""
    if isinstance(value.x, _jax.Tracer) or np.ndim(value.x):
        return value
    return np.asarray(value.x).tobytes(), str(jax.numpy.result_type(value.x))


def _given(x) -> _Value:
    """A constant or a literal."""
    known = not isinstance(x, _jax.Tracer) and np.ndim(x) == 0
    real = known and jax.numpy.issubdtype(jax.typeof(x).dtype, np.floating)
    return _Value(x, number=float(x) if real else None)
