"""The parts of control flow equations, by name. A function returns None for other equations."""

from __future__ import annotations

from typing import Any, NamedTuple

from .evaluation import closed_jaxpr, inlinable


class ScanParts(NamedTuple):
    """A ``scan``: operands ``[*consts, *init, *xs]``, results ``[*carry, *ys]``; its body has the
    same order.
    """

    body: Any
    consts: list
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int | bool

    def split(self, operands: list) -> tuple[list, list, list]:
        """Constants, carry and sequences."""
        start = self.num_consts + self.num_carry
        return operands[: self.num_consts], operands[self.num_consts : start], operands[start:]


def scan_parts(eqn) -> ScanParts | None:
    if eqn.primitive.name != 'scan':
        return None
    params = eqn.params
    if 'ft_in' in params:
        num_consts, num_carry, _ = map(len, params['ft_in'].unpack())
    else:
        num_consts, num_carry = params['num_consts'], params['num_carry']
    return ScanParts(
        *closed_jaxpr(params['jaxpr']),
        num_consts,
        num_carry,
        params['length'],
        params['reverse'],
        params['unroll'],
    )


class WhileParts(NamedTuple):
    """A ``while``: operands ``[*cond consts, *body consts, *carry]``; each inner jaxpr reads its
    own consts, then the carry.
    """

    cond: Any
    cond_consts: list
    cond_nconsts: int
    body: Any
    body_consts: list
    body_nconsts: int

    def split(self, operands: list) -> tuple[list, list, list]:
        """The constants of the condition and of the body, and the carry."""
        start = self.cond_nconsts + self.body_nconsts
        return operands[: self.cond_nconsts], operands[self.cond_nconsts : start], operands[start:]


def while_parts(eqn) -> WhileParts | None:
    if eqn.primitive.name != 'while':
        return None
    params = eqn.params
    return WhileParts(
        *closed_jaxpr(params['cond_jaxpr']),
        params['cond_nconsts'],
        *closed_jaxpr(params['body_jaxpr']),
        params['body_nconsts'],
    )


def cond_branches(eqn) -> list[tuple[Any, list]] | None:
    """The branches ``(jaxpr, consts)`` of a ``cond`` or ``switch``, whose operands are ``[index,
    *ops]``.

    Every branch reads all of ``ops``.
    """
    return list(map(closed_jaxpr, eqn.params['branches'])) if eqn.primitive.name == 'cond' else None


def recomputed(eqn) -> tuple[Any, Any] | None:
    """``(policy, prevent_cse)`` of a ``jax.checkpoint``."""
    if eqn.primitive.name != 'remat2':
        return None
    return eqn.params['policy'], eqn.params['prevent_cse']


def call_body(eqn) -> tuple[Any, list] | None:
    """The body ``(jaxpr, consts)`` of a call, of a ``jax.checkpoint``, or of a ``custom_vmap`` that
    no ``vmap`` surrounds; its operands are the body's invars.
    """
    own = {'remat2': 'jaxpr', 'custom_vmap_call': 'call'}.get(eqn.primitive.name)
    body = eqn.params[own] if own else inlinable(eqn)
    return None if body is None else closed_jaxpr(body)
