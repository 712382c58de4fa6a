"""What the values of a jaxpr depend on, and which carries of a loop need each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .. import _jax

Reads = frozenset[int]  # the numbers of inputs that a value depends on
NONE: Reads = frozenset()


def variables(atoms: Iterable) -> list:
    """The atoms that are no literals."""
    return [v for v in atoms if not isinstance(v, _jax.Literal)]


def live_equations(jaxpr) -> list:
    """The equations that a result needs, and those with an effect."""
    wanted, found = set(variables(jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not wanted.isdisjoint(eqn.outvars):
            wanted.update(variables(eqn.invars))
            found.append(eqn)
    return found[::-1]


def body_of(eqn) -> tuple[Any, list] | None:
    """The body of a call and its constants; most equations hold no jaxpr that could be one."""
    return _jax.call_body(eqn) if 'jaxpr' in eqn.params else None


def dependence(
    jaxpr, of_inputs: Sequence[Reads], effect: Reads = NONE, inside: bool = False
) -> Callable[[Any], Reads]:
    """For each value of a jaxpr the union of the sets of the inputs that it depends on.

    ``effect``: on what the results of an equation with an effect depend too. ``inside``: whether
    the results of a call are followed one by one; else each depends on all that the call reads.
    """
    found = dict(zip(jaxpr.invars, of_inputs, strict=True))

    def of(v) -> Reads:
        return NONE if isinstance(v, _jax.Literal) else found.get(v, NONE)

    for eqn in jaxpr.eqns:
        ins = [of(v) for v in eqn.invars]
        call = body_of(eqn) if inside else None
        if call is not None:
            body, _ = call
            outs = list(map(dependence(body, ins, effect, inside), body.outvars))
        else:
            every = (effect if eqn.effects else NONE).union(*ins)
            outs = [every] * len(eqn.outvars)
        found.update(zip(eqn.outvars, outs, strict=True))
    return of


def coupled(reads: Sequence[Iterable[int]]) -> list[frozenset[int]]:
    """The sets of carries that need each other, each behind those that it needs; the new value of
    carry k reads the old ones ``reads[k]``.
    """
    # transitive closure of which carry reads which
    reach = [set(of_one) for of_one in reads]
    for via in range(len(reach)):
        for found in reach:
            if via in found:
                found |= reach[via]
    sets = {frozenset([k, *(j for j in r if k in reach[j])]) for k, r in enumerate(reach)}
    return sorted(sets, key=lambda s: (len(reach[min(s)] | s), min(s)))
