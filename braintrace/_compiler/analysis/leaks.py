"""Readouts that leak: what of a state that keeps an op's result is left after a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ... import _jax
from ..graph import ETraceGraph, OpUse, readouts
from ..program import dataflow as flow
from ..program.tracing import depends

MOVES, UNKNOWN = 1, 2  # of a value that changes from step to step, or is made of parameters


class Leak(NamedTuple):
    """A readout, the position in the carry of a state that keeps its result, and the share of that
    state which is left after a step: an array of its shape, None where it depends on parameters.
    """

    op: OpUse
    state: int
    share: np.ndarray | None

    @property
    def number(self) -> float | None:
        """The share, if it is one real number."""
        if self.share is None:
            return None
        found = np.unique(self.share)
        return float(found[0].real) if len(found) == 1 and not found[0].imag else None


def leaks(graph: ETraceGraph) -> Iterator[Leak]:
    """The readouts that leak: a state keeps their result, and a share of it, the same at each step,
    is left after a step.
    """
    program = graph.program
    for op in readouts(graph):
        reached = flow.forward(program, {op.y: 1}, flow.gradients(program))
        for c in program.hidden:
            if reached[program.new_carry[c]]:
                constant, share = _share(graph, c)
                if constant:
                    yield Leak(op, c, share)


def _share(graph: ETraceGraph, c: int) -> tuple[bool, np.ndarray | None]:
    """Whether the derivative of a new state by its old one is position by position, the same at
    each step, and not zero; and its value, if it is made of constants.
    """
    program, old, new = graph.program, graph.program.carry[c], graph.program.new_carry[c]
    equations = program.equations
    made = flow.slice_behind(program, [new], lambda i: i not in program.op_set)
    follows = flow.forward(program, {old: 1})
    passed = {i for i in made if flow.union(follows, equations[i].ins)}
    bodies = any(equations[i].loop or _jax.sub_jaxprs(equations[i].params) for i in passed)
    if not passed or bodies or not graph.mixing.keys().isdisjoint(made):
        return False, None
    # what changes from step to step, and what else is not known before the first one
    traced = (v for v, array in program.constants.items() if isinstance(array, _jax.Tracer))
    start = dict.fromkeys((*program.params, *traced), UNKNOWN)
    start |= dict.fromkeys((*program.carry, *program.inputs), MOVES)
    facts = flow.forward(
        program, start, lambda i, found: found | MOVES if equations[i].effects else found
    )
    # evaluated is what the old state passes and what is made of constants; the rest is given
    own = [
        equations[i]
        for i in made
        if i in passed
        or not (equations[i].loop or equations[i].effects or flow.union(facts, equations[i].ins))
    ]
    results = {old, *(v for eqn in own for v in eqn.outs)}
    read = list(dict.fromkeys(v for eqn in own for v in eqn.ins if v not in results))
    known = {v: program.constants[v] for v in read if v in program.constants and not facts[v]}
    given = [old, *(v for v in read if v not in known)]

    def share(values):
        def step(h):
            env = {**known, **dict(zip(given, values, strict=True)), old: h}
            for eqn in own:
                env.update(zip(eqn.outs, eqn.evaluate([env[v] for v in eqn.ins]), strict=True))
            return env[new]

        return jax.vjp(step, values[0])[1](jnp.ones_like(values[0]))[0]

    avals = [program.avals[v] for v in given]
    needed = [facts[v] for v, needs in zip(given, depends(share, avals), strict=True) if needs]
    if any(fact & MOVES for fact in needed):
        return False, None
    if needed:
        return True, None
    with jax.ensure_compile_time_eval():
        found = np.asarray(share([jnp.zeros(a.shape, a.dtype) for a in avals]))
    return bool(found.any()), found
