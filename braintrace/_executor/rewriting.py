"""A step's equations rewritten, with the same results: nothing is computed twice, and what depends
on the step's carry is apart from what does not.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from .. import _jax
from .._compiler import PROPERTIES
from .dataflow import live_equations

CONSTANT, INPUT, CARRY = 0, 1, 2  # what a value depends on; bits


def rewritten(
    jaxpr, consts: list, numbers: tuple[int, int], differentiable: bool
) -> tuple[Any, list]:
    """``(jaxpr, constants)`` of the same function of ``numbers`` of constants and carries, and of
    the inputs of a step.

    Unless it is to be ``differentiable``, functions with a derivative rule of their own are opened.

    - Equal equations are one. Additions of zero and products with one are gone.
    - A matrix product of things that are beside each other is a sum of products, where these do
      not depend on the same: ``[x, h] @ W`` is ``x @ W_x + h @ W_h``.
    - An element-wise function of constants that are repeated, as a leak for all lanes, is repeated
      itself.
    """
    live, (constant, carry) = live_equations(jaxpr), numbers

    def run(*args):  # what a rewriter notes of the values under way ends with it
        kinds = [CONSTANT] * constant + [CARRY] * carry + [INPUT] * (len(args) - constant - carry)
        values = [_Value(x, kind) for x, kind in zip(args, kinds, strict=True)]
        return [v.x for v in _Rewriter(differentiable).evaluated(jaxpr, live, consts, values)]

    made = jax.make_jaxpr(run)(*(v.aval for v in jaxpr.invars))
    jaxpr, consts = _jax.closed_jaxpr(made)
    return jaxpr.replace(eqns=live_equations(jaxpr)), consts


@dataclass(eq=False)
class _Value:
    """A value under way: ``kind`` says what it depends on; an equation like ``made`` made it of
    ``ins``; all its elements are ``number``. None: that is not known.
    """

    x: Any
    kind: int = CONSTANT
    made: Any = None
    ins: Sequence[_Value] = ()
    number: float | None = None

    def made_by(self, name: str) -> bool:
        return self.made is not None and self.made.primitive.name == name


class _Rewriter:
    """One rewriting of some equations, and what it has made so far."""

    def __init__(self, differentiable: bool):
        self.differentiable = differentiable
        self.seen: dict[Hashable, list[_Value]] = {}

    def evaluated(self, jaxpr, eqns, consts, args: list[_Value]) -> list[_Value]:
        given = *map(_given, consts), *args
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))

        def read(atom) -> _Value:
            return _given(_jax.literal(atom)) if isinstance(atom, _jax.Literal) else env[atom]

        for eqn in eqns:
            outs = self._equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn, ins: list[_Value]) -> list[_Value]:
        name = eqn.primitive.name
        if eqn.effects:  # it happens as often as it is written
            return self._new(eqn, ins)
        if name == 'stop_gradient' and not self.differentiable:
            return ins
        if name == 'dot_general':
            return [self._product(eqn, *ins)]
        # an ETP op becomes the equations of its implementation
        implementation = getattr(eqn.primitive, 'impl_fn', None)
        if implementation is not None and not eqn.primitive.lowering:
            fn = partial(implementation, **eqn.params)
            body, consts, _ = _jax.opened(fn, [v.x for v in ins])
            return self.evaluated(body, body.eqns, consts, ins)
        if eqn.primitive.name in _jax.CUSTOM_CALLS and not self.differentiable:
            body, consts = _jax.closed_jaxpr(eqn.params['call_jaxpr'])
            return self.evaluated(body, body.eqns, consts, ins)
        return self._bound(eqn, *ins)

    # one equation, once ---------------------------------------------------------------------------

    def _bound(self, eqn, *ins: _Value) -> list[_Value]:
        """The results of an equation like this one."""
        # an equation that is there already is not made again
        key = self._key(eqn, ins)
        if key in self.seen:
            return self.seen[key]
        if eqn.primitive.name == 'broadcast_in_dim' and _repeats(ins):  # of what is repeated, once
            once = ins[0]
            if once.made_by('broadcast_in_dim') and (
                once.made.params['sharding'] is None is eqn.params['sharding']
            ):
                inner, outer = (each.params['broadcast_dimensions'] for each in (once.made, eqn))
                dims = tuple(outer[d] for d in inner)
                params = {**eqn.params, 'broadcast_dimensions': dims}
                return self._bound(eqn.replace(params=params), *once.ins)
        does = PROPERTIES[eqn.primitive.name]
        # x + 0 and x * 1 are x
        kept = self._neutral(does.neutral, ins)
        if kept is not None:
            return [kept]
        # what is made of repeated constants alone is made once, then repeated
        repeats = does.elementwise and _repeats(ins)
        outs = self._repeated(eqn, ins) if repeats else self._new(eqn, ins)
        if does.moves and len(ins) == 1:
            outs[0].number = ins[0].number
        if key is not None:
            self.seen[key] = outs
        return outs

    def _new(self, eqn, ins: Sequence[_Value]) -> list[_Value]:
        """The results of an equation that is not there yet."""
        # it depends on all that its operands depend on
        kind = functools.reduce(operator.or_, (v.kind for v in ins), CONSTANT)
        outs = _jax.bind(eqn, *(v.x for v in ins))
        return [_Value(x, kind, eqn, ins) for x in outs]

    def _repeated(self, eqn, ins: Sequence[_Value]) -> list[_Value]:
        """An element-wise equation of constants that are all repeated in one way, or numbers: made
        of what is repeated, and then repeated.
        """
        repeated = [v for v in ins if v.made_by('broadcast_in_dim')]
        # the operands have to be repeated in one way: the same shape along the same axes
        ways = {
            (np.shape(v.ins[0].x), v.made.params['broadcast_dimensions'])
            for v in repeated
            if np.ndim(v.ins[0].x)
        }
        alone = any(np.ndim(v.x) and v not in repeated for v in ins)
        makers = [eqn, *(v.made for v in repeated)]
        placed = any(maker.params.get('sharding') is not None for maker in makers)
        if alone or placed or len(ways) > 1 or not repeated:
            return self._new(eqn, ins)
        shape, dims = ways.pop() if ways else ((), ())
        whole = np.broadcast_shapes(*(np.shape(v.x) for v in ins))

        def repeat(value: _Value, shape: tuple, dims: tuple) -> _Value:
            params = {'shape': shape, 'broadcast_dimensions': dims, 'sharding': None}
            return self._like(eqn, jax.lax.broadcast_in_dim_p, params, value)

        # the operands before they were repeated
        small = []
        for value in ins:
            once = value.ins[0] if value in repeated else value
            small.append(once if np.ndim(once.x) or not shape else repeat(once, shape, ()))
        return [repeat(v, whole, dims) for v in self._bound(eqn, *small)]

    def _like(self, eqn, primitive, params: dict, *ins: _Value) -> _Value:
        """The result of another primitive, in the context of an equation."""
        return self._bound(eqn.replace(primitive=primitive, params=params), *ins)[0]

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

    def _key(self, eqn, ins: Sequence[_Value]):
        """What makes two equations equal; None: they are not compared."""
        if eqn.primitive.name == 'rng_uniform':  # each draws numbers of its own
            return None
        try:
            params = sorted((k, _comparable(v)) for k, v in eqn.params.items())
            key = eqn.primitive, tuple(params)
            values = tuple(map(_identity, ins))
            hash((key, values))
        except TypeError:
            return None
        return key, values

    # products of what is beside each other ----------------------------------------------------

    def _product(self, eqn, *ins: _Value) -> _Value:
        """A product, as a sum over the pieces of an operand that are of several kinds."""
        (left, right), _ = eqn.params['dimension_numbers']
        for side, dims in enumerate((left, right)):
            joined = ins[side]
            if not joined.made_by('concatenate') or len({v.kind for v in joined.ins}) < 2:
                continue
            axis = joined.made.params['dimension']
            if axis not in dims:
                continue
            # [x, h] @ W: the other operand is cut where the pieces meet
            along, other = (right, left)[side][dims.index(axis)], ins[1 - side]
            terms, low, high = [], [0] * other.x.ndim, list(other.x.shape)
            for piece in joined.ins:
                high[along] = low[along] + piece.x.shape[axis]
                bounds = {'start_indices': tuple(low), 'limit_indices': tuple(high)}
                part = self._like(eqn, jax.lax.slice_p, {**bounds, 'strides': None}, other)
                terms.append(self._product(eqn, *((piece, part) if side == 0 else (part, piece))))
                low[along] = high[along]
            return functools.reduce(partial(self._like, eqn, jax.lax.add_p, {}), terms)
        return self._bound(eqn, *ins)[0]


def _repeats(ins: Sequence[_Value]) -> bool:
    return bool(ins) and all(v.kind == CONSTANT for v in ins)


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
