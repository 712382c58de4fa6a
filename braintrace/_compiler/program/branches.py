"""Branches of a ``cond`` behind gates, so that no gradient meets the values of a branch not taken.

A gate passes a value on. Where the branch was not taken, it drops the cotangent that comes back, so
that a zero is not multiplied by an infinity that the branch may have made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from ... import _jax
from ..equations.equation import Equation, is_inexact
from .builder import Branch, Builder, Place
from .marking import marked_at_border


def _gate(taken, x):
    """x, with a zero cotangent where the branch is not taken."""
    return jax.lax.select_n(taken, jax.lax.stop_gradient(x), x)


def _zero_unless(taken, x):
    return jax.lax.select_n(taken, jnp.zeros_like(x), x)


def selected(build: Builder, branches: list, ins: list[int], place: Place) -> list[int]:
    """Every branch, each behind gates, then a select."""
    index, operands = ins[0], ins[1:]
    results = []
    for k, (body, consts) in enumerate(branches):
        around = [b.taken for b in build.branches[-1:]]

        def is_taken(i, *outer, k=k):
            return jnp.logical_and(i == k, *outer) if outer else i == k

        build.branches.append(Branch(build.plain(is_taken, [index, *around], place.where)))
        outs = build.call(body, consts, operands, place)
        outs = [marked_at_border(build, v, place.where, 'cond') for v in outs]
        results.append([gated(build, v) for v in outs])
        build.branches.pop()
    # equal rows are one value: a state that is an output as well stays that state
    rows = list(zip(*results, strict=True))
    made = {
        cases: build.traced(jax.lax.select_n, [index, *cases], place.where)[0]
        if len(set(cases)) > 1
        else cases[0]
        for cases in dict.fromkeys(rows)
    }
    return [made[cases] for cases in rows]


def guarded(build: Builder, eqn: Equation, op: bool) -> Equation:
    """An equation that reads its operands behind the gates of the innermost branch.

    An op keeps its pure weights, so that they stay functions of parameters alone. If its branch is
    not taken, its x is zero.
    """
    if not op:
        ins = [gated(build, v) for v in eqn.ins]
        return replace(eqn, ins=tuple(ins), conditional=True)
    weights = set(eqn.primitive.trainable_invars_fn(eqn.params).values())
    ins = [
        v if k in weights and v in build.pure else gated(build, v) for k, v in enumerate(eqn.ins)
    ]
    x = eqn.primitive.x_invar_index
    if x is not None:
        ins[x] = build.plain(_zero_unless, [build.branches[-1].taken, ins[x]], eqn.where)
    return replace(eqn, ins=tuple(ins), conditional=True)


def result_of_op(build: Builder, y: int, where: str) -> int:
    """An op's y for the branch: nothing comes back if the branch is not taken."""
    out = build.plain(_gate, [build.branches[-1].taken, y], where)
    build.inside([out])
    return out


def gated(build: Builder, value: int) -> int:
    """A value as the innermost branch reads it."""
    branch = build.branches[-1]
    inside = value in branch.inside or value in build.constants
    if inside or not is_inexact(build.avals[value]):
        return value
    if value not in branch.gated:
        made = next((b.made[value] for b in build.branches if value in b.made), None)
        if made is None:
            keys: tuple[int, ...] = (value,)
            outs = [build.plain(_gate, [branch.taken, value], '')]
        else:
            # a function of parameters made in this branch: it is made once more, of gated ones
            keys = made.outs
            again = replace(made, ins=tuple(gated(build, v) for v in made.ins), conditional=True)
            outs = build.append(again, [build.avals[o] for o in keys])
        build.inside(outs)
        branch.gated.update(zip(keys, outs, strict=True))
    return branch.gated[value]


def while_taken(parts: _jax.WhileParts) -> Callable:
    """A ``while`` as a function ``(taken, *operands)``: if not taken, it might never end."""

    def run(taken, *args):
        cond_args, body_args, init = parts.split(list(args))

        def lanes(carry):  # one flag for each lane of a loop under vmap
            return _jax.evaluate(parts.cond, parts.cond_consts, [*cond_args, *carry])[0]

        def go_on(carry):
            return jnp.logical_and(taken, jnp.any(lanes(carry)))

        def body(carry):
            flags = lanes(carry)
            new = _jax.evaluate(parts.body, parts.body_consts, [*body_args, *carry])
            return tuple(_where(flags, n, o) for n, o in zip(new, carry, strict=True))

        return list(jax.lax.while_loop(go_on, body, tuple(init)))

    return run


def _where(flags, new, old):
    """The new carry in the lanes that go on."""
    if not flags.ndim:
        return new
    return jnp.where(flags.reshape(flags.shape + (1,) * (new.ndim - flags.ndim)), new, old)
