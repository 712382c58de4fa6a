"""From an :class:`ETraceGraph` to pure functions: the step with its signals' inputs, and the
factors D and D_f.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import (
    Coordinates,
    ETraceGraph,
    HiddenGroup,
    Program,
    compressed,
    is_complex,
    is_inexact,
)
from .feedback import feedback_weights, moving_with, with_weights
from .plan import EMPTY, PROBE, make_d_plan, make_plan
from .positions import gathered
from .pull_backs import PullBack, Uncut, as_complex, completed

Vector = tuple[jax.Array | None, ...]  # one array for each state of a group


class Factors(NamedTuple):
    """The values of one step that make a trace.

    ``x`` (op -> input), ``d`` (group -> S rows of S arrays ``(*shape,)``: ``dh_s/dh'_r``), ``df``
    (relation -> group -> S arrays ``(*coords,)``: ``dh_s/dy``). None is a zero by structure.
    """

    x: dict[str, Any]
    d: dict[str, tuple[Vector, ...]]
    df: dict[str, dict[str, Vector]]


class Signals(NamedTuple):
    """Derivatives of the loss of one step.

    ``dy`` (op -> ``dL/dy`` with the old states held constant), ``c`` (group -> S arrays
    ``(*shape,)``: ``dL/dh'`` along position-wise paths; None is a zero by structure), ``l`` (group
    -> ``(*shape, S)``: ``dL/dh``).
    """

    dy: dict[str, jax.Array]
    c: dict[str, Vector]
    l: dict[str, jax.Array]  # noqa: E741


class Probes(NamedTuple):
    """Zeros whose cotangents are the signals: one on each owned op's y (with the axes of loops
    around it), one on each new state, and the old virtual states.
    """

    y: dict[str, jax.Array]
    h: dict[int, jax.Array]
    virtual: dict[int, jax.Array]


def stopped(tree):
    """Every leaf as a constant; an array that several ops read stays one, so a window keeps it
    once.
    """
    leaves, treedef = jax.tree.flatten(tree)
    constants: list = []
    for k, leaf in enumerate(leaves):
        first = next(j for j, other in enumerate(leaves) if other is leaf)
        constants.append(jax.lax.stop_gradient(leaf) if first == k else constants[first])
    return jax.tree.unflatten(treedef, constants)


class Executor:
    """Pure functions of one compiled step; params, carry and inputs are lists of the cell's leaves.

    Behind the parameters ``params`` may have arrays for the constants ``graph.held``.
    ``probes``: whether the rule needs ``dL/dh`` of the new states (:class:`Signals` field ``l``).
    """

    def __init__(self, graph: ETraceGraph, probes: bool = False):
        self.graph, self.program, self.probes = graph, graph.program, probes
        self.owned = {op.equation: op for op in graph.ops if op.owned}
        # slots of the owned ops, and the parameters behind any of their weights
        self.trainable = {op.key: op.trainable for op in self.owned.values()}
        self.structure = {op.key: op.structure for op in self.owned.values()}
        behind = [i for op in self.owned.values() for ps in op.parameters.values() for i in ps]
        self.behind_ops = sorted(set(behind))

    @cached_property
    def plan(self):
        return make_plan(self.graph, self.probes)

    @cached_property
    def whole_plan(self):
        """The two-sided pass in which nothing is cut."""
        return make_plan(self.graph, probes=False, whole=True)

    @cached_property
    def d_plan(self):
        return make_d_plan(self.graph)

    @cached_property
    def uncut_plan(self):
        """The D pass in which nothing is cut."""
        return make_d_plan(self.graph, cut=False)

    def _program(self, params: Sequence) -> Program:
        """The program with the held constants behind ``params``."""
        held = params[len(self.program.params) :]
        if not held:
            return self.program
        given = dict(zip(self.graph.held, held, strict=True))
        return replace(self.program, constants={**self.program.constants, **given})

    def _parameters(self, params: Sequence) -> dict[int, Any]:
        numbers = self.program.params
        return dict(zip(numbers, params[: len(numbers)], strict=True))

    # weights -------------------------------------------------------------------------------------

    def _slots(self, params: Sequence, slots: dict[str, dict[str, int]]) -> dict[str, dict]:
        """The values of these slots of ops, as functions of the parameters."""
        program, behind = self._program(params), []
        wanted = {v for names in slots.values() for v in names.values()}
        for eqn in reversed(program.equations):
            if not wanted.isdisjoint(eqn.outs):
                behind.append(eqn)
                wanted.update(eqn.ins)
        env = {**program.constants, **self._parameters(params)}
        for eqn in reversed(behind):
            outs = _jax.bind(eqn, *(env[v] for v in eqn.ins))
            env.update(zip(eqn.outs, outs, strict=True))
        return {key: {n: env[v] for n, v in names.items()} for key, names in slots.items()}

    def op_weights(self, params: Sequence) -> dict[str, dict[str, jax.Array]]:
        """The trainable inputs of every owned op, as functions of the parameters."""
        return self._slots(params, self.trainable)

    def bound_graph(self, params: Sequence) -> ETraceGraph:
        """The graph with the structures of its owned ops, as functions of the parameters."""
        if not any(self.structure.values()):
            return self.graph
        return self.graph.bound(self._slots(params, self.structure))

    def pull_back(
        self, params: Sequence, op_grads: dict[str, dict[str, jax.Array]]
    ) -> dict[int, jax.Array]:
        """Gradients of the ops' weights, pulled back to the trainable parameters behind them.

        Where an op in a branch has no gradient, its branch was not taken, and the function of its
        weights may have no derivative.
        """
        # whether the branch of a conditional op was taken at all
        used = {
            op.key: jnp.any(jnp.stack([jnp.any(g != 0) for g in op_grads[op.key].values()]))
            for op in self.owned.values()
            if op.conditional
        }

        def of(chosen):
            full = list(params)
            for i, p in zip(self.behind_ops, chosen, strict=True):
                full[i] = p
            weights = self.op_weights(full)
            for key, flag in used.items():
                gated = [
                    jax.lax.select_n(flag, jax.lax.stop_gradient(p), p) if is_inexact(p) else p
                    for p in full
                ]
                weights[key] = self.op_weights(gated)[key]
            return weights

        weights, pull = jax.vjp(of, [params[i] for i in self.behind_ops])
        cotangents = {
            k: {n: op_grads[k][n].astype(w.dtype) for n, w in ws.items()}
            for k, ws in weights.items()
        }
        return dict(zip(self.behind_ops, pull(cotangents)[0], strict=True))

    # old states ----------------------------------------------------------------------------------

    @cached_property
    def _states(self) -> list[int]:
        """The states that the cell has; the virtual ones are behind them in ``graph.states``."""
        return [c for c in self.graph.states if c not in self.program.virtual_states]

    def old_states(self, carry: Sequence) -> list:
        """The old states that signals and D are about, without the virtual ones."""
        parts = self.program.apart(carry)
        return [parts[c] for c in self._states]

    def with_states(self, carry: Sequence, states: Sequence) -> list:
        """The carry with other states. A derived one keeps its value: a first carry is not made by
        a step. Its derivative is that of the function which makes it.
        """
        program, derived = self.program, self.graph.derived
        parts = program.apart(carry)
        for c, h in zip(self._states, states, strict=True):
            parts[c] = h
        # derived states follow from the others; only their derivative is taken of it
        values = program.constants | {v: parts[c] for v, c in derived.reads.items()}
        for i in derived.equations:
            eqn = program.equations[i]
            outs = _jax.bind(eqn, *(values[v] for v in eqn.ins))
            values.update(zip(eqn.outs, outs, strict=True))
        for c in derived.states:
            parts[c] = moving_with(parts[c], values[program.new_carry[c]])
        return program.together(parts)

    # the two-sided pass --------------------------------------------------------------------------

    def zero_probes(self) -> Probes:
        def zeros(value: int, front=()):
            aval = self.program.avals[value]
            return jnp.zeros((*front, *aval.shape), aval.dtype)

        states = self.graph.states if self.probes else ()
        return Probes(
            {op.key: zeros(op.y, op.repeats) for op in self.owned.values()},
            {c: zeros(self.program.carry[c]) for c in states},
            {c: zeros(self.program.carry[c]) for c in self.program.virtual_states},
        )

    def _env(self, params, carry, inputs, probes: Probes) -> dict:
        parts = self.program.apart(carry)
        for c, h in probes.virtual.items():
            parts[c] = h
        values = [
            *self._parameters(params).items(),
            *zip(self.program.carry, parts, strict=True),
            *zip(self.program.inputs, inputs, strict=True),
        ]
        return {(v, EMPTY): x for v, x in values} | {
            (PROBE, i): probes.y[op.key] for i, op in self.owned.items()
        }

    def _evaluate_op(self, i: int, args: list, probe, weights, feedback=None) -> list:
        eqn, op = self.program.equations[i], self.owned.get(i)
        if op is None:
            return _jax.bind(eqn, *args)
        outs = _jax.bind(eqn, *with_weights(op, args, weights[op.key]))
        # the probe: its cotangent is the signal of y
        k = op.primitive.y_outvar_index
        if feedback is not None and op.key in feedback:
            sent_back = _jax.bind(eqn, *with_weights(op, args, feedback[op.key]))[k]
            outs[k] = moving_with(outs[k], sent_back)
        outs[k] = outs[k] + probe
        return outs

    def forward(
        self,
        params: Sequence,
        weights,
        carry: Sequence,
        inputs: Sequence,
        probes: Probes,
        whole: bool = False,
        count: jax.Array | None = None,
    ):
        """One step of the two-sided pass: ``(outputs, new_carry, x)``; op weights are read from
        ``weights`` as constants. ``whole``: nothing is cut. ``count``: of the steps since
        the learner's state was made.
        """
        plan, program = self.whole_plan if whole else self.plan, self._program(params)
        feedback = feedback_weights(self.graph, program.constants, weights, count)
        outputs, new_carry, xs = plan.run(
            program,
            self._env(params, carry, inputs, probes),
            partial(self._evaluate_op, weights=weights, feedback=feedback),
            probes.h,
        )
        new_carry = self.program.together(new_carry)
        return outputs, new_carry, stopped({self.owned[i].key: x for i, x in xs.items()})

    def signals(self, pull: Callable, cotangent, counts: jax.Array | None = None) -> tuple:
        """``(..., Signals)``: the results of a pull-back; its last two, cotangents of old hidden
        states and of probes, are sorted by group and op.

        An old state that the differentiated program does not read along a kept path has no signal
        (None). The program is asked, not the graph, since a loss may read an old state itself.
        ``counts``: see :class:`PullBack`.
        """
        traced = PullBack(pull, cotangent)
        *others, hidden, probes = traced(cotangent, counts)
        # states of the cell, then virtual ones, in the order of `graph.states`
        olds = [*hidden, *probes.virtual.values()]
        reads = [*traced.reads[-2], *traced.reads[-1].virtual.values()]
        of_state = {
            c: h if cotangents else None
            for c, h, cotangents in zip(self.graph.states, olds, reads, strict=True)
        }
        groups = self.graph.hidden_groups
        c = {g.name: tuple(of_state[s] for s in g.states) for g in groups}
        of_new = groups if self.probes else ()
        stacked = {g.name: jnp.stack([probes.h[s] for s in g.states], -1) for g in of_new}
        return *others, Signals(probes.y, c, stacked)

    # the D pass ----------------------------------------------------------------------------------

    def _new_states(self, params, weights, carry, inputs, hidden, probes, cut: bool = True) -> list:
        """New hidden states as a function of old ones and of the free y's."""
        own, plan = len(self._states), self.d_plan if cut else self.uncut_plan
        virtual = dict(zip(self.program.virtual_states, hidden[own:], strict=True))
        carry = self.with_states(carry, hidden[:own])
        return plan.run(
            self._program(params),
            self._env(params, carry, inputs, Probes(probes, {}, virtual)),
            partial(self._evaluate_op, weights=weights),
            {},
        )[1]

    def uncut(self, params: Sequence, weights, carry: Sequence, inputs: Sequence) -> Uncut:
        """The new hidden states as a function of the old ones and of every owned op's y, with
        nothing cut.
        """
        hidden, zeros = self.old_states(carry), self.zero_probes().y

        def new_states(hidden, y):
            return self._new_states(params, weights, carry, inputs, hidden, y, cut=False)

        along = partial(self._along, new_states, hidden, zeros)
        return Uncut(*jax.vjp(new_states, hidden, zeros), along)

    def d_factors(self, params: Sequence, weights, carry: Sequence, inputs: Sequence):
        """``(d, df)`` of :class:`Factors`: one VJP for each state index and set of independent
        groups.
        """
        graph, (zeros, _, virtual) = self.graph, self.zero_probes()
        related = {r.key for r in graph.hidden_param_op_relations}
        # ops without a relation keep their y; D_f is taken of the others alone
        fixed = {k: z for k, z in zeros.items() if k not in related}
        free = {k: z for k, z in zeros.items() if k in related}
        hidden = [*self.old_states(carry), *virtual.values()]

        def new_states(hidden, free):
            return self._new_states(params, weights, carry, inputs, hidden, {**free, **fixed})

        new, pull = jax.vjp(new_states, hidden, free)
        rows = self._rows(PullBack(pull, new), new)
        d = {g.name: tuple(rows[s][0] for s in g.states) for g in graph.hidden_groups}
        df: dict[str, dict[str, Vector]] = {r.key: {} for r in graph.hidden_param_op_relations}
        for rel in graph.hidden_param_op_relations:
            # elements of y that feed several positions: D_f entry by entry, forward in time
            wide = any(coords.added for coords in rel.coordinates)
            along = self._along(new_states, hidden, free, rel.key) if wide else None
            for g, coords in zip(rel.groups, rel.coordinates, strict=True):
                # position by position: the rows are D_f already
                of_group = [rows[s][1][rel.key] for s in g.states]
                if coords.added and along is not None:
                    of_group = self._at_entries(coords, g, along, of_group)
                df[rel.key][g.name] = tuple(of_group)
        return d, df

    def _at_entries(
        self, coords: Coordinates, group: HiddenGroup, along: Callable, of_group: list
    ) -> list:
        """D_f where an element of y feeds several positions: of each colour the derivative along
        ones in its elements, seen at the positions that they feed. It is zero by structure where
        ``of_group`` is.
        """
        axes = tuple(range(coords.axis, coords.axis + coords.added))
        colours: list = [None]
        if coords.colours is not None:
            number = coords.colours.max() + 1
            colours = [compressed(coords.colours == c) for c in range(number)]
        total: list = [None] * len(of_group)
        for mine in colours:
            found = along(None if mine is None else mine.any(axes))
            for k, s in enumerate(group.states):
                if of_group[k] is None:
                    continue
                x = gathered(coords, found[s])
                if mine is not None:  # an entry takes the derivative of its own colour
                    x = jnp.where(mine, x, jnp.zeros_like(x) if total[k] is None else total[k])
                total[k] = x
        return total

    def _rows(self, pull: PullBack, new: list) -> dict[int, tuple[Vector, dict]]:
        """The rows of D and D_f of every hidden state, by the old states of its group and by each
        related y, from ones on the new states of one index in a set of independent groups.
        """
        graph, slot = self.graph, {c: k for k, c in enumerate(self.graph.states)}
        old_reads, y_reads = pull.reads
        rows = {}
        for index, sets in enumerate(graph.colours):
            for members in sets:
                groups = [graph.hidden_groups[g] for g in members]
                chosen = {slot[g.states[index]] for g in groups}
                to_old, to_y = pull([jnp.full_like(h, k in chosen) for k, h in enumerate(new)])
                to_y = completed(pull, new, chosen, to_y)
                for group in groups:
                    here = slot[group.states[index]]
                    olds = [slot[c] for c in group.states]
                    of_old = tuple(
                        to_old[k] if there and here in old_reads[k] else None
                        for k, there in zip(olds, group.reads[index], strict=True)
                    )
                    of_y = {k: y if here in y_reads[k] else None for k, y in to_y.items()}
                    rows[group.states[index]] = of_old, of_y
        return rows

    def _along(self, new_states: Callable, hidden: list, ys: dict, key: str) -> Callable:
        """``fn(chosen)``: the derivative of every hidden state along ones in the chosen elements
        of an op's y (None: all), by two transpositions.
        """
        y = ys[key]
        new, pull = jax.vjp(lambda y: new_states(hidden, {**ys, key: y}), y)
        _, push = jax.vjp(lambda u: pull(u)[0], [jnp.zeros_like(h) for h in new])

        def along(chosen) -> dict[int, jax.Array]:
            ones = jnp.ones_like(y) * (1 if chosen is None else chosen)
            (found,) = push(ones)
            if is_complex(y):  # a real state moves by Re(D_f dy)
                (turned,) = push(-1j * ones)
                pairs = zip(found, turned, strict=True)
                found = [a if is_complex(a) else as_complex(a, b) for a, b in pairs]
            return dict(zip(self.graph.states, found, strict=True))

        return along
