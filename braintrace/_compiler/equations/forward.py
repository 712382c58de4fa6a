"""Labels that go forward through an equation: which positions each element of its results reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from ... import _jax
from .equation import Equation, is_inexact
from .labels import Labels, has, identity, joined, many, merge, merge_axes
from .moves import moved, moved_operands


def forward(
    eqn: Equation,
    avals,
    labels: Sequence[Labels],
    known: Sequence,
    *,
    linear: bool,
    smooth: Callable[[Equation], bool] = lambda eqn: False,
) -> list[Labels]:
    """Labels of the results.

    ``known`` holds constant operands. ``linear``: a result that is not linear in the labelled
    operands gets ``MANY``. ``smooth`` tells which equations without a row act element by element.
    """
    outs, does = [avals[o].shape for o in eqn.outs], eqn.does
    arriving = [has(lab) for lab in labels]
    # no label arrives, or no gradient leaves
    if not any(arriving) or not does.gradient or not any(is_inexact(avals[o]) for o in eqn.outs):
        return [None] * len(outs)
    straight = not linear or does.linear is not None and does.linear(arriving)
    # element by element: an element reads what the same element of any operand reads
    if does.elementwise or smooth(eqn):
        return [_elementwise(labels, s) if straight else many(s) for s in outs]
    if does.passes:
        return list(labels)
    # a reduction reads everything along its axes
    if does.reduces and straight:
        return [merge_axes(labels[0], eqn.params['axes'])]
    # movement takes labels with it, if it is not the indices that are labelled
    operands = moved_operands(eqn)
    if operands and not any(a for k, a in enumerate(arriving) if k not in operands):
        found = moved(eqn, joined(labels, [avals[v].shape for v in eqn.ins]), known)
        if found is not None:
            return found
    # an update by constants leaves the positions of the array where they are
    if does.updates and straight and not arriving[2]:
        return [labels[0]]
    return [many(s) for s in outs]


def _elementwise(labels: Sequence[Labels], shape) -> Labels:
    merged = None
    for lab in labels:
        if lab is not None:
            merged = merge(merged, np.broadcast_to(lab, shape))
    return merged


def along(fn: Callable, primals: Sequence, tangent) -> list[Labels]:
    """Which elements of a tangent the results of ``fn(*primals, tangent)`` read; it is linear in
    it.
    """
    jaxpr, _ = _jax.trace(fn, *primals, tangent)
    return through_linear(jaxpr, [None] * len(primals) + [identity(tangent.shape)])


def through_linear(jaxpr, start: list[Labels], known: dict | None = None) -> list[Labels]:
    """Labels of the results of a jaxpr that is linear in its labelled inputs.

    ``known`` holds constant inputs, from which indices are computed.
    """
    env = dict(zip(jaxpr.invars, start, strict=True))
    chosen: set = set()  # integers and booleans made of labelled values
    known = {v: k for v, k in (known or {}).items() if k is not None}

    def read(atom) -> Labels:
        return None if isinstance(atom, _jax.Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        labels = [read(a) for a in eqn.invars]
        values = [a.val if isinstance(a, _jax.Literal) else known.get(a) for a in eqn.invars]
        discrete = any(a in chosen for a in eqn.invars if not isinstance(a, _jax.Literal))
        if discrete or any(map(has, labels)):
            # that a number is finite decides nothing between finite numbers
            if eqn.primitive.name != 'is_finite':
                chosen.update(o for o in eqn.outvars if not is_inexact(o.aval))
            outs = [many(o.aval.shape) for o in eqn.outvars]
            outs = outs if discrete else _step(eqn, labels, values)
            env.update(zip(eqn.outvars, outs, strict=True))
        else:
            known.update(zip(eqn.outvars, _indices(eqn, values), strict=False))
    return [read(a) for a in jaxpr.outvars]


def _step(eqn, labels: list[Labels], values: list) -> list[Labels]:
    """Labels through one equation; calls and loops are entered."""
    inner, loop = _jax.inlinable(eqn), _jax.while_parts(eqn)
    if inner is not None:
        body, _ = _jax.closed_jaxpr(inner)
        known = dict(zip(body.invars, values, strict=True))
        return through_linear(body, labels, known)
    if loop is not None:
        return _through_while(loop, labels)
    n, avals = len(labels), [v.aval for v in (*eqn.invars, *eqn.outvars)]
    ins, outs = tuple(range(n)), tuple(range(n, len(avals)))
    flat = Equation(eqn.primitive, eqn.params, eqn.ctx, ins, outs, '')
    return forward(flat, avals, labels, values, linear=True)


def _indices(eqn, values: Sequence) -> list:
    """The results of an integer equation of known values, else nothing."""
    plain = all(isinstance(v.aval.dtype, np.dtype) and not is_inexact(v.aval) for v in eqn.outvars)
    if not eqn.outvars or not plain or eqn.effects or any(v is None for v in values):
        return []
    with jax.ensure_compile_time_eval():
        return list(map(np.asarray, _jax.bind(eqn.primitive, eqn.params, eqn.ctx, *values)))


def _through_while(loop, labels: list[Labels]) -> list[Labels]:
    """Labels of a loop's carry, followed until nothing changes."""
    _, operands, carry = loop.split(labels)
    asked = {v for eqn in loop.cond.eqns for v in eqn.invars if not isinstance(v, _jax.Literal)}
    while True:
        turned = through_linear(loop.body, [*operands, *carry])
        new = [merge(a, b) for a, b in zip(carry, turned, strict=True)]
        if all(_same(a, b) for a, b in zip(carry, new, strict=True)):
            own = zip(loop.cond.invars[loop.cond_nconsts :], new, loop.body.outvars, strict=True)
            if any(v in asked and has(lab) for v, lab, _ in own):  # what is labelled ends the loop
                return [many(o.aval.shape) for o in loop.body.outvars]
            return new
        carry = new


def _same(a: Labels, b: Labels) -> bool:
    return a is b or a is not None and b is not None and bool((a == b).all())
