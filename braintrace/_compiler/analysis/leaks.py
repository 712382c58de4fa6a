"""Readouts that leak: what of a state that keeps an op's result is left after a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ... import _jax
from ..equations import is_inexact
from ..graph import ETraceGraph, OpUse, readouts
from ..program import dataflow as flow
from ..program.tracing import depends


class Leak(NamedTuple):
    """A readout, the position in the carry of a state that keeps its result, and the share of that
    state which is left after a step: an array of its shape, None where it depends on parameters.
    """

    op: OpUse
    state: int
    share: np.ndarray | None

    @property
    def number(self) -> float | None:
        """The share, if it is one number."""
        found = () if self.share is None else np.unique(self.share)
        return float(found[0]) if len(found) == 1 else None


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
    made = flow.slice_behind(program, [new], lambda i: i not in program.op_set)
    follows = flow.forward(program, {old: 1})
    own = [program.equations[i] for i in made]
    passed = [eqn for eqn in own if flow.union(follows, eqn.ins)]
    plain = not any(eqn.loop or _jax.sub_jaxprs(eqn.params) for eqn in passed)
    if not passed or not plain or not graph.mixing.keys().isdisjoint(made):
        return False, None
    known = {v for eqn in own for v in eqn.outs} | {old, *program.constants}
    free = list(dict.fromkeys(v for eqn in own for v in eqn.ins if v not in known))
    aval, avals = program.avals[old], [program.avals[v] for v in free]
    if not is_inexact(aval):
        return False, None

    def share(values, h):
        def step(h):
            env = {**program.constants, **dict(zip(free, values, strict=True)), old: h}
            for eqn in own:
                env.update(zip(eqn.outs, eqn.evaluate([env[v] for v in eqn.ins]), strict=True))
            return env[new]

        return jax.vjp(step, h)[1](jnp.ones(aval.shape, aval.dtype))[0]

    moves = depends(lambda values: share(values[1:], values[0]), [aval, *avals])
    if any(m for v, m in zip([old, *free], moves) if v not in program.params):
        return False, None
    if any(moves):
        return True, None
    zeros = [jnp.zeros(a.shape, a.dtype) for a in avals]
    with jax.ensure_compile_time_eval():
        found = np.asarray(share(zeros, jnp.zeros(aval.shape, aval.dtype)))
    return bool(found.any()), found
