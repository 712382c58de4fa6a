"""The silent and the saturated units of hidden groups, by their spikes if the step makes any, else
by their states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import ETraceGraph, HiddenGroup
from ._sequence import first_values

STILL = 1e-6  # a silent state stays this close to zero, in units of its root mean square
BOUND = 0.99  # a state between -1 and 1 is saturated beyond this
TRIED, MOST = 256, 64  # random numbers for each state, and the most runs in which a step tries them
NEAR = 1e-3  # the largest distance of a number that counts as 0 or 1
# The results of these equations do not belong to one unit any more.
WHOLE = {'dot_general', 'conv_general_dilated', 'scan', 'while', 'cond'}


def root_mean_square(states: np.ndarray) -> float:
    """The unit in which a hidden state is measured: its root mean square over the window, or 1 if
    that is zero or not finite.
    """
    size = float(np.sqrt(np.mean(np.abs(states).astype(float) ** 2)))
    return size if 0 < size < np.inf else 1.0


def activity(
    graph: ETraceGraph, params, carry, xs, hidden: dict[int, np.ndarray]
) -> dict[str, tuple[str, np.ndarray, np.ndarray]]:
    """For each group: ``spikes`` or ``states``, by which its activity shows; the silent units; the
    saturated units.
    """
    rates, found = _rates(graph, params, carry, xs), {}
    for group in graph.hidden_groups:
        if group.name in rates:
            rate = rates[group.name]
            found[group.name] = 'spikes', rate == 0, rate > 0.5
        else:
            states = [
                (_by_unit(graph, np.abs(hidden[c])), root_mean_square(hidden[c]))
                for c in group.carried
            ]
            silent = np.all([(h <= STILL * unit).all(0) for h, unit in states], 0)
            saturated = np.any(
                [
                    (h >= BOUND).mean(0) > 0.5 if h.max(initial=0) <= 1 else (h < 0).any(0)
                    for h, _ in states
                ],
                0,
            )
            found[group.name] = 'states', silent, saturated
    return found


def _by_unit(graph: ETraceGraph, a: np.ndarray) -> np.ndarray:
    """Reshape values over time to (times and samples, units)."""
    samples = a.shape[1] if a.shape[1:2] == (graph.lanes,) else 1
    return a.reshape(len(a) * samples, -1)


def _rates(graph: ETraceGraph, params, carry, xs) -> dict[str, np.ndarray]:
    """The rate at which each unit spikes, for the groups that spike; empty if a loop hides the
    equations.
    """
    program = graph.program
    if not graph.hidden_groups or any(e.loop is not None for e in program.equations):
        return {}

    def values(carry, x) -> dict[int, Any]:
        found = first_values(program, params, carry, x)
        for eqn in program.equations:
            found.update(zip(eqn.outs, eqn.evaluate([found[v] for v in eqn.ins]), strict=True))
        return found

    first = program.apart(jax.tree.leaves(carry))
    whole = {
        v
        for v, a in enumerate(program.avals)
        if not (jnp.issubdtype(a.dtype, jnp.bool_) or jnp.issubdtype(a.dtype, jnp.inexact))
    }
    exact = jax.jit(lambda carry, x: {v: a for v, a in values(carry, x).items() if v in whole})(
        first, jax.tree.map(lambda a: a[0], xs)
    )
    functions = _StepFunctions(graph, first, exact)
    spikes = {
        group.name: v for group in graph.hidden_groups if (v := functions.spike(group)) is not None
    }

    def step(carry, x):
        found = values(carry, x)
        return [found[v] for v in program.new_carry], {
            name: found[v] > 0.5 for name, v in spikes.items()
        }

    found = jax.jit(lambda first, xs: jax.lax.scan(step, first, xs)[1])(first, xs) if spikes else {}
    return {name: _by_unit(graph, np.asarray(fired)).mean(0) for name, fired in found.items()}


class _StepFunctions:
    """The values of a step that are zeros and ones for all numbers in it.

    The step is run on random numbers of any size, drawn for the carry, the parameters, the inputs,
    and for the result of every equation in which units meet. A hidden state is drawn as zeros and
    ones if it starts so and every run keeps it so. A *source* makes zeros and ones of other
    numbers, as a comparison or a spike with a surrogate gradient does. ``implied[v]`` are the
    sources that are 1 wherever v is 1: ``1 - z`` has none, and ``z * mask`` has the sources of z.

    Args:
        graph: the compiled step.
        carry: the leaves of its first carry.
        exact: the integers and keys of one step, by value number; every run uses them unchanged.
    """

    def __init__(self, graph: ETraceGraph, carry: list, exact: dict[int, Any]):
        self.program = program = graph.program
        # Local equations are computed in every run. Units meet in all others, whose results are
        # drawn, as are the hidden states; integers and keys keep their exact values.
        meet = {op.equation for op in graph.ops} | set(graph.mixing)
        self.local = [
            e
            for i, e in enumerate(program.equations)
            if not (i in meet or e.effects or e.primitive.name in WHOLE)
        ]
        made = {v for e in self.local for v in e.outs}
        self.fixed = {v: a for v, a in {**program.constants, **exact}.items() if v not in made}
        self.free = sorted(
            {
                v
                for e in program.equations
                for v in (*e.ins, *e.outs)
                if v not in made and v not in self.fixed
            }
            | {program.carry[c] for c in program.hidden}
        )
        self.tries = max(
            min(MOST, -(-TRIED // max(1, int(np.prod(g.shape))))) for g in graph.hidden_groups
        )
        # Start with all hidden states that hold zeros and ones, and drop a state that a run changes
        # to other numbers, until none is dropped.
        run = jax.jit(self._run)
        kept = {c for c in program.hidden if bool(jnp.all((carry[c] == 0) | (carry[c] == 1)))}
        while True:
            self.binary, below = self._look(run, {program.carry[c] for c in kept})
            now = {c for c in kept if program.new_carry[c] in self.binary}
            if now == kept:
                break
            kept = now
        self.sources, self.implied = self._trace(below)

    def _run(self, drawn: dict[int, Any]) -> tuple[dict, dict]:
        """For each value: is it 0 or 1 where finite, is it ever 1, is it ever 0? For each result
        and operand: is the operand 1 wherever the result is?
        """
        values, avals, below, kinds = self.fixed | drawn, self.program.avals, {}, {}
        for eqn in self.local:
            values.update(zip(eqn.outs, eqn.evaluate([values[v] for v in eqn.ins]), strict=True))
            for o in filter(self._is_real, eqn.outs):
                below[o] = {
                    v: jnp.all((values[o] < 0.5) | (values[v] > 0.5))
                    for v in eqn.ins
                    if self._is_real(v) and avals[v].shape == avals[o].shape
                }
        for v in filter(self._is_real, values):
            a = jnp.asarray(values[v], float)
            zero, one = abs(a) < NEAR, abs(a - 1) < NEAR
            kinds[v] = jnp.stack([jnp.all(zero | one | ~jnp.isfinite(a)), one.any(), zero.any()])
        return kinds, below

    def _is_real(self, v: int) -> bool:
        dtype = self.program.avals[v].dtype
        return jnp.issubdtype(dtype, jnp.bool_) or jnp.issubdtype(dtype, jnp.floating)

    def _look(self, run: Callable, bits: set[int]) -> tuple[set[int], dict]:
        """The values that are zeros and ones in all runs, and for each result the operands that
        were 1 wherever it was.
        """
        rng, runs = np.random.default_rng(0), []
        for _ in range(self.tries):
            drawn = {}
            for v in self.free:
                shape, dtype = self.program.avals[v].shape, self.program.avals[v].dtype
                wide = rng.choice([-1.0, 1.0], shape) * 10 ** rng.uniform(-3, 3, shape)
                drawn[v] = (
                    rng.integers(0, 2, shape) if v in bits or dtype == np.bool_ else wide
                ).astype(dtype)
            runs.append(jax.device_get(run(drawn)))
        kinds, below = jax.tree.map(lambda *each: np.stack(each), *runs)
        binary = {v for v, k in kinds.items() if k[:, 0].all() and k[:, 1:].any(0).all()}
        return binary, {o: {v for v, b in under.items() if b.all()} for o, under in below.items()}

    def _trace(self, below: dict[int, set[int]]) -> tuple[list[int], dict[int, frozenset[int]]]:
        """The sources in order, and the sources that each value implies. A value that is made of
        zeros and ones alone is no source.
        """
        sources, implied, numbers = [], {}, set(self.free) - self.binary
        for eqn in self.local:
            for o in eqn.outs:
                if o in self.binary:
                    implied[o] = frozenset().union(
                        *(implied.get(v, ()) for v in below[o] if v in self.binary)
                    )
                if not numbers.isdisjoint(eqn.ins):
                    if o in self.binary:
                        sources.append(o)
                        implied[o] |= {o}
                    else:
                        numbers.add(o)
        return sources, implied

    def spike(self, group: HiddenGroup) -> int | None:
        """The spike of a group: a value that implies a source of the group's states. A value with a
        surrogate gradient goes first, then a value that a state holds.

        If several values imply one source, such as a spike before and after a refractory mask, the
        last of them is the spike.
        """
        program, found = self.program, []
        new, mine = [program.new_carry[c] for c in group.carried], self._made_of(group)
        for source in self.sources:
            chain = [
                v
                for v, under in self.implied.items()
                if source in under
                and program.avals[v].shape == group.shape
                and jnp.issubdtype(program.avals[v].dtype, jnp.floating)
            ]
            states = [v for v in new if v in chain]
            if states or (chain and source in mine):
                found.append(
                    (
                        not jnp.issubdtype(program.avals[source].dtype, jnp.floating),
                        not states,
                        (states or chain[-1:])[0],
                    )
                )
        return min(found, key=lambda f: f[:2])[2] if found else None

    def _made_of(self, group: HiddenGroup) -> set[int]:
        """The values that are made of a group's states, unit by unit."""
        reached = {
            values[c]
            for values in (self.program.carry, self.program.new_carry)
            for c in group.carried
        }
        for eqn in self.local:
            if not reached.isdisjoint(eqn.ins):
                reached.update(eqn.outs)
        return reached
