"""An equation of the flat program, and the regions (loops, checkpoints) that equations stand in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ... import _jax
from ..._etrace_op import is_etp_primitive
from .. import primitives


@dataclass(frozen=True, eq=False)
class Remat:
    """A region that is recomputed in the backward pass, as ``jax.checkpoint`` asks."""

    policy: Any
    prevent_cse: Any


@dataclass(frozen=True, eq=False)
class Loop:
    """A region that runs ``length`` times.

    Two marker equations enclose it, slot by slot: ``BEGIN`` maps (initial carry, sequences) to
    (carry, slices), ``END`` maps (new carry, slices) to (last carry, sequences).
    """

    length: int
    reverse: bool
    unroll: Any
    num_carry: int
    where: str
    origin: Any


Region = Remat | Loop


@dataclass(frozen=True)
class Marker:
    """The primitive of a marker equation."""

    name: str


BEGIN, END = Marker('loop_begin'), Marker('loop_end')


@dataclass(frozen=True)
class Equation:
    """One primitive application; ``ins`` and ``outs`` are value numbers.

    ``scope``: the regions around it, outermost first. ``loop``: set on the two markers of a loop.
    ``conditional``: it stands in a branch. ``origin``: the jaxpr's equation. ``marked``: the name
    of the primitive in whose place this op was put automatically; ``unmarked``: why no op was put
    here, where a function of parameters to mark meets a value that changes. ``extra``: it makes a
    path of the trace beside those of the step; its value changes nothing, and in a pass in which
    nothing is cut, where it would count a path twice, it reads constants.
    """

    primitive: Any
    params: dict
    ctx: Any
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    where: str
    effects: bool = False
    scope: tuple[Region, ...] = ()
    loop: Loop | None = None
    conditional: bool = False
    origin: Any = None
    marked: str = ''
    unmarked: str = ''
    extra: bool = False

    @property
    def does(self) -> primitives.Properties:
        return primitives.of(self)

    def evaluate(self, args: Sequence) -> list:
        return _jax.bind(self.primitive, self.params, self.ctx, *args)

    def holds_op(self) -> bool:
        return any(map(holds_op, _jax.sub_jaxprs(self.params)))

    @property
    def repeats(self) -> tuple[int, ...]:
        return tuple(r.length for r in self.scope if isinstance(r, Loop))


def holds_op(jaxpr) -> bool:
    """Whether an ETP op stands in a jaxpr, at any depth."""
    jaxpr = getattr(jaxpr, 'jaxpr', jaxpr)
    return any(
        is_etp_primitive(e.primitive) or any(map(holds_op, _jax.sub_jaxprs(e.params)))
        for e in jaxpr.eqns
    )


def is_inexact(aval) -> bool:
    """Whether gradients exist for a value's dtype."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def is_complex(aval) -> bool:
    """Whether an array or its description has complex numbers."""
    return jnp.issubdtype(aval.dtype, jnp.complexfloating)
