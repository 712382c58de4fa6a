"""Whether a jaxpr is linear in some of its inputs, by what the table knows of each equation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ... import _jax
from .. import primitives
from .equation import is_inexact


class Bent(Exception):
    """An equation is not linear, or not known to be."""


# what a value is, if the flagged inputs are changed: a number of its own, zero, linear in them
CONSTANT, ZERO, LINEAR = range(3)


def is_linear(jaxpr, flags: Sequence[bool]) -> bool:
    """Whether the results are linear in the flagged inputs together: zero where these are."""
    try:
        kinds = _through(jaxpr, [LINEAR if flag else CONSTANT for flag in flags])
    except Bent:
        return False
    return not any(
        kind == CONSTANT and is_inexact(v.aval)
        for kind, v in zip(kinds, jaxpr.outvars, strict=True)
    )


def _through(jaxpr, kinds: Sequence[int]) -> list[int]:
    """The kinds of the results."""
    found = dict(zip(jaxpr.invars, kinds, strict=True))

    def read(atom) -> int:
        if isinstance(atom, _jax.Literal):
            zero = is_inexact(atom.aval) and not np.any(_jax.literal(atom))
            return ZERO if zero else CONSTANT
        return found.get(atom, CONSTANT)

    for eqn in jaxpr.eqns:
        found.update(zip(eqn.outvars, _equation(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def _equation(eqn, ins: list[int]) -> list[int]:
    body, remat, scan = _jax.inlinable(eqn), _jax.remat_parts(eqn), _jax.scan_parts(eqn)
    branches = _jax.cond_branches(eqn)
    if _jax.is_custom_call(eqn):
        body = eqn.params['call_jaxpr']
    if body is not None:
        return _through(_jax.closed_jaxpr(body)[0], ins)
    if remat is not None:
        return _through(remat.body, ins)
    if scan is not None:
        return _turned(scan, ins)
    if branches is not None and ins[0] != LINEAR:
        each = [_through(branch, ins[1:]) for branch, _ in branches]
        avals = [v.aval for v in eqn.outvars]
        return [_either(*kinds) for kinds in zip(avals, *each, strict=True)]
    if primitives.of(eqn).passes:
        return ins
    return [_kind(eqn, ins)] * len(eqn.outvars)


def _kind(eqn, ins: list[int]) -> int:
    """What the results of an equation without a body are."""
    smooth = any(is_inexact(v.aval) for v in eqn.outvars)
    varying, zero = [k == LINEAR for k in ins], [k == ZERO for k in ins]
    if not any(varying):
        return ZERO if smooth and any(zero) and _straight(eqn, zero, zero) else CONSTANT
    # that a number is finite decides nothing between finite numbers
    if eqn.primitive.name == 'is_finite':
        return CONSTANT
    # a choice between numbers, made of what was flagged
    if smooth and (not _straight(eqn, varying, zero) or _chooses(eqn, varying)):
        raise Bent
    return LINEAR


def _turned(scan: _jax.ScanParts, ins: list[int]) -> list[int]:
    """A loop, until what its carry is stays."""
    consts, carry, xs = scan.split(ins)
    avals = [v.aval for v in scan.body.outvars]
    while True:
        outs = _through(scan.body, [*consts, *carry, *xs])
        new = [_either(*kinds) for kinds in zip(avals, carry, outs)]
        if new == carry:
            return [*carry, *outs[scan.num_carry :]]
        carry = new


def _either(aval, *kinds: int) -> int:
    """What a value is that is one of several."""
    if LINEAR in kinds and CONSTANT in kinds and is_inexact(aval):
        raise Bent
    return LINEAR if LINEAR in kinds else min(kinds)


def _straight(eqn, varying: list[bool], zero: list[bool]) -> bool:
    """Whether the results are linear in the varying operands, and nothing is added to these but
    zeros.
    """

    def together(varying: list[bool]) -> bool:
        does = primitives.of(eqn)
        if does.linear is not None:
            return does.linear(varying)
        operands = None if does.moves is None else does.moves.operands
        moved = range(len(ins)) if operands is None else operands
        only_moved = all(k in moved for k, flag in enumerate(varying) if flag)
        return does.retypes or does.moves is not None and only_moved

    ins = eqn.invars
    others = [k for k, v in enumerate(ins) if is_inexact(v.aval) and not varying[k]]
    # a function that is linear in one more operand as well is a sum of both
    added = (k for k in others if not zero[k])
    return together(varying) and not any(
        together([*varying[:k], True, *varying[k + 1 :]]) for k in added
    )


def _chooses(eqn, varying: list[bool]) -> bool:
    return any(flag and not is_inexact(v.aval) for v, flag in zip(eqn.invars, varying, strict=True))
