"""From an :class:`ETraceGraph` to pure functions: the step with its signals' inputs, and the factors D and D_f."""
from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph, is_inexact
from .plan import EMPTY, make_d_plan, make_plan

__all__ = ['Executor', 'Factors', 'Probes', 'Signals', 'stopped']


class Factors(NamedTuple):
    """What a trace is made of at one step.

    ``x`` (op -> input), ``d`` (group -> ``(*shape, S, S)``, ``dh_s/dh'_r``), ``df`` (relation -> group -> ``(*coords, S)``).
    """
    x: dict[str, Any]
    d: dict[str, jax.Array]
    df: dict[str, dict[str, jax.Array]]


class Signals(NamedTuple):
    """What the loss of one step sends back.

    ``dy`` (op -> ``dL/dy`` with the old states held constant), ``c`` (group -> ``dL/dh'`` along position-wise paths,
    ``(*shape, S)``), ``l`` (group -> ``dL/dh``, ``(*shape, S)``).
    """
    dy: dict[str, jax.Array]
    c: dict[str, jax.Array]
    l: dict[str, jax.Array]  # noqa: E741


class Probes(NamedTuple):
    """Zeros whose cotangents are the signals: one on each owned op's y (with the axes of loops around it), one on each new state."""
    y: dict[str, jax.Array]
    h: dict[int, jax.Array]


def stopped(tree):
    """Every leaf as a constant; what several ops read stays one array, which a window keeps once."""
    leaves, treedef = jax.tree.flatten(tree)
    once = {id(x): jax.lax.stop_gradient(x) for x in leaves}
    return jax.tree.unflatten(treedef, [once[id(x)] for x in leaves])


class Executor:
    """Pure functions of one compiled step; params, carry and inputs are lists of the cell's leaves.

    ``probes``: whether the rule needs ``dL/dh`` of the new states (:class:`Signals` field ``l``).
    """

    def __init__(self, graph: ETraceGraph, probes: bool = False):
        self.graph, self.program, self.probes = graph, graph.program, probes
        self.owned = {op.equation: op for op in graph.ops if op.owned}

    @cached_property
    def plan(self):
        return make_plan(self.graph, self.probes)

    @cached_property
    def d_plan(self):
        return make_d_plan(self.graph)

    # weights -------------------------------------------------------------------------------------

    @cached_property
    def _weight_equations(self) -> list[int]:
        wanted = {v for op in self.owned.values() for v in op.trainable.values()}
        found = []
        for i in range(len(self.program.equations) - 1, -1, -1):
            if not wanted.isdisjoint(self.program.equations[i].outs):
                found.append(i)
                wanted.update(self.program.equations[i].ins)
        return found[::-1]

    def op_weights(self, params: Sequence) -> dict[str, dict[str, jax.Array]]:
        """The trainable inputs of every owned op, as functions of the parameters."""
        env = {**self.program.constants, **dict(zip(self.program.params, params, strict=True))}
        for i in self._weight_equations:
            eqn = self.program.equations[i]
            env.update(zip(eqn.outs, eqn.evaluate([env[v] for v in eqn.ins]), strict=True))
        return {op.key: {n: env[v] for n, v in op.trainable.items()} for op in self.owned.values()}

    def pull_back(self, params: Sequence, op_grads: dict[str, dict[str, jax.Array]]) -> dict[int, jax.Array]:
        """Gradients of the ops' weights pulled back to the trainable parameters that they are functions of.

        Where an op in a branch has no gradient, its branch was not taken, and the function of its weights may have no derivative.
        """
        needed = sorted({i for op in self.owned.values() for ps in op.parameters.values() for i in ps})

        used = {op.key: jnp.any(jnp.stack([jnp.any(g != 0) for g in op_grads[op.key].values()]))
                for op in self.owned.values() if op.conditional}

        def of(chosen):
            full = list(params)
            for i, p in zip(needed, chosen, strict=True):
                full[i] = p
            weights = self.op_weights(full)
            for key, flag in used.items():
                gated = [jax.lax.select_n(flag, jax.lax.stop_gradient(p), p) if is_inexact(p) else p for p in full]
                weights[key] = self.op_weights(gated)[key]
            return weights

        weights, pull = jax.vjp(of, [params[i] for i in needed])
        cotangents = {k: {n: op_grads[k][n].astype(w.dtype) for n, w in ws.items()} for k, ws in weights.items()}
        return dict(zip(needed, pull(cotangents)[0], strict=True))

    # the two-sided pass --------------------------------------------------------------------------

    def zero_probes(self) -> Probes:
        avals = self.program.avals
        y = {op.key: jnp.zeros((*op.repeats, *avals[op.y].shape), avals[op.y].dtype) for op in self.owned.values()}
        h = {c: jnp.zeros(avals[self.program.carry[c]].shape, avals[self.program.carry[c]].dtype)
             for c in self.program.hidden} if self.probes else {}
        return Probes(y, h)

    def _env(self, params, carry, inputs, probes: dict[str, jax.Array]) -> dict:
        values = [*zip(self.program.params, params, strict=True),
                  *zip(self.program.carry, self.program.apart(carry), strict=True),
                  *zip(self.program.inputs, inputs, strict=True)]
        return {(v, EMPTY): x for v, x in values} | {('y', i): probes[op.key] for i, op in self.owned.items()}

    def _evaluate_op(self, i: int, args: list, probe, weights) -> list:
        eqn, op = self.program.equations[i], self.owned.get(i)
        if op is None:
            return eqn.evaluate(args)
        for name, k in op.primitive.trainable_invars_fn(op.params).items():
            args[k] = jax.lax.stop_gradient(weights[op.key][name])
        outs = eqn.evaluate(args)
        k = op.primitive.y_outvar_index
        outs[k] = outs[k] + probe
        return outs

    def forward(self, params: Sequence, weights, carry: Sequence, inputs: Sequence, probes: Probes):
        """One step of the two-sided pass: ``(outputs, new_carry, x)``; op weights are read from ``weights`` as constants."""
        outputs, new_carry, xs = self.plan.run(self.program, self._env(params, carry, inputs, probes.y), partial(
            self._evaluate_op, weights=weights), probes.h)
        new_carry = self.program.together(new_carry)
        return outputs, new_carry, stopped({self.owned[i].key: x for i, x in xs.items()})

    def signals(self, probe_cotangents: Probes, hidden_cotangents: dict[int, jax.Array]) -> Signals:
        """Cotangents of probes and of old hidden states, sorted by op and group."""
        def stack(by_state, group):
            return jnp.stack([by_state[c] for c in group.states], axis=-1)
        groups = self.graph.hidden_groups
        return Signals(probe_cotangents.y, {g.name: stack(hidden_cotangents, g) for g in groups},
                       {g.name: stack(probe_cotangents.h, g) for g in groups} if self.probes else {})

    # the D pass ----------------------------------------------------------------------------------

    def _new_states(self, params, weights, carry, inputs, hidden, probes) -> list:
        """New hidden states as a function of old ones and of the free y's."""
        carry = self.program.with_states(carry, hidden)
        return self.d_plan.run(self.program, self._env(params, carry, inputs, probes), partial(self._evaluate_op, weights=weights), {})[1]

    def d_factors(self, params: Sequence, weights, carry: Sequence, inputs: Sequence):
        """``(d, df)`` of :class:`Factors`: one VJP for each state index and set of independent groups."""
        graph, program = self.graph, self.program
        related = {r.key for r in graph.hidden_param_op_relations}
        zeros = self.zero_probes().y
        fixed = {k: z for k, z in zeros.items() if k not in related}
        free = {k: z for k, z in zeros.items() if k in related}
        hidden = program.old_states(carry)

        def new_states(hidden, free):
            return self._new_states(params, weights, carry, inputs, hidden, {**free, **fixed})

        new, pull = jax.vjp(new_states, hidden, free)
        slot = {c: k for k, c in enumerate(program.hidden)}
        d: dict[str, list] = {g.name: [] for g in graph.hidden_groups}
        df: dict[str, dict[str, list]] = {r.key: {g.name: [] for g in r.groups} for r in graph.hidden_param_op_relations}
        for index, sets in enumerate(graph.colours):
            for members in sets:
                chosen = {slot[graph.hidden_groups[g].states[index]] for g in members}
                to_old, to_y = pull([jnp.ones_like(h) if k in chosen else jnp.zeros_like(h) for k, h in enumerate(new)])
                for g in members:
                    group = graph.hidden_groups[g]
                    d[group.name].append(jnp.stack([to_old[slot[c]] for c in group.states], -1))
                    for rel in graph.hidden_param_op_relations:
                        for k, other in enumerate(rel.groups):
                            if other is group and not rel.coordinates[k].expanded:
                                df[rel.key][group.name].append(to_y[rel.key])
        factors_df = {k: {g: jnp.stack(v, -1) for g, v in by.items() if v} for k, by in df.items()}
        self._expanded_factors(lambda free: new_states(hidden, free), free, slot, factors_df)
        return {k: jnp.stack(v, -2) for k, v in d.items()}, factors_df

    def _expanded_factors(self, new_states, free, slot, df) -> None:
        """D_f at the group's positions, where y lacks axes of the state: a derivative along ones in y, by two transpositions."""
        for rel in self.graph.hidden_param_op_relations:
            wide = [g for g, c in zip(rel.groups, rel.coordinates, strict=True) if c.expanded]
            if not wide:
                continue

            def of_y(y, rel=rel):
                return new_states({**free, rel.key: y})

            new, pull = jax.vjp(of_y, free[rel.key])
            _, push = jax.vjp(lambda u, pull=pull: pull(u)[0], [jnp.zeros_like(h) for h in new])
            along, = push(jnp.ones_like(free[rel.key]))
            for g in wide:
                df[rel.key][g.name] = jnp.stack([along[slot[c]] for c in g.states], -1)
