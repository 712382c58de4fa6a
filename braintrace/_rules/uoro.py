"""UORO: the whole influence as one product of a vector of states and one of weights, mixed by
random signs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph, OpUse, Relation, is_complex, jointly
from .._errors import NotSupportedError
from .._executor import lanes_meet
from .contraction import add_gradients, op_gradient, outside_loops
from .inside import KEY, Inside, balance, norms
from .lanes import where_lanes

STATES = '(states)'  # beside a trace's relations: the vector s, by path of the hidden state


@dataclass(frozen=True, repr=False)
class OneProduct(Inside):
    """UORO (see :func:`braintrace.rules.uoro`).

    s^t = r0 J^t s^{t-1} + r1 v^t        m^t = m^{t-1} / r0 + (v^t D_f^t (x) x^t) / r1
    """

    pair: str = 'sample'
    seed: int = 0
    name: ClassVar[str] = 'UORO'
    made_by: ClassVar[str] = 'uoro'
    required: ClassVar[tuple[str, ...]] = ('xy_to_dw',)
    credit = 'whole'
    approximation = 'nothing on average: the trace is a random estimate, unbiased'

    def widened(self, graph):
        for group in graph.hidden_groups:
            if is_complex(group):
                raise NotSupportedError(
                    f'hidden state {group.paths[0]} is complex, and UORO follows real ones. Keep '
                    'its real and its imaginary part as two states.'
                )
        if self.lanes(graph) is not None:
            _check_lanes(graph)
        return jointly(graph)

    def lanes(self, graph: ETraceGraph) -> int | None:
        """The number of pairs, one for each lane; None: one pair for all."""
        return graph.lanes if self.pair == 'sample' else None

    # the trace ------------------------------------------------------------------------------------

    def init(self, graph):
        program, lanes = graph.program, self.lanes(graph)
        avals = {program.carry_names[c]: program.avals[program.carry[c]] for c in graph.states}
        front = () if lanes is None else (lanes,)

        def zeros(rel: Relation) -> dict:
            return {
                n: jnp.zeros((*front, *w.shape), w.dtype) for n, w in rel.op.weight_avals.items()
            }

        m = {r.key: {r.groups[0].name: zeros(r)} for r in graph.hidden_param_op_relations}
        s = {name: jnp.zeros(a.shape, a.dtype) for name, a in avals.items()}
        return {**m, STATES: s, KEY: jax.random.key(self.seed)}

    def _alive(
        self, graph: ETraceGraph, carried: dict[str, Any], t: jax.Array
    ) -> tuple[list, dict]:
        """``s`` in the order of the states, and ``m`` by op; zero where there is no past."""
        names, past = graph.program.carry_names, t > 0
        s = [where_lanes(past, c in graph.laned, carried[STATES][names[c]]) for c in graph.states]
        laned = self.lanes(graph) is not None
        m = {}
        for r in graph.hidden_param_op_relations:
            own = carried[r.key][r.groups[0].name]
            m[r.key] = {n: where_lanes(past, laned, e) for n, e in own.items()}
        return s, m

    # a step ---------------------------------------------------------------------------------------

    def factors(self, executor, at, carried):
        trace, t = carried
        graph = executor.graph
        s, _ = self._alive(graph, trace, t)
        _, fresh = jax.random.split(jax.random.clone(trace[KEY]))  # `update` splits it too
        signs = [
            jax.random.rademacher(jax.random.fold_in(fresh, k), e.shape, e.dtype)
            for k, e in enumerate(s)
        ]
        uncut = executor.uncut(*at)
        _, sent = uncut.pull(signs)
        lanes = self.lanes(graph)
        apart = [op.key for op in _traced(graph) if lanes is not None and not leads(op, lanes)]
        if apart:

            def of_lane(b):
                flags = jnp.arange(lanes) == b
                only = [where_lanes(flags, True, v) for v in signs]
                _, sent = uncut.pull(only)
                return {key: sent[key] for key in apart}

            sent = {**sent, **jax.vmap(of_lane)(jnp.arange(lanes))}
        return {'moved': uncut.push(s), 'signs': signs}, sent

    def update(self, network, carried, factors, t):
        graph, (x, made, sent) = network.graph, factors
        lanes = self.lanes(graph)
        key, _ = jax.random.split(carried[KEY])
        _, m = self._alive(graph, carried, t)
        new = {
            op.key: _by_lane(op, lanes, x.get(op.key), sent[op.key], network.weights[op.key])
            for op in _traced(graph)
        }
        moved, signs = made['moved'], made['signs']
        norm = partial(norms, lanes=None if lanes is None else 0)
        r0, over_r0 = balance(norm(moved), norm(jax.tree.leaves(m)))
        r1, over_r1 = balance(norm(signs), norm(jax.tree.leaves(new)))

        def mixed(a, e, b, q):
            a, b = (c.reshape(c.shape + (1,) * (e.ndim - c.ndim)) for c in (a, b))
            return (a * e + b * q).astype(e.dtype)

        names = graph.program.carry_names
        s = {
            names[c]: mixed(r0, e, r1, v)
            for c, e, v in zip(graph.states, moved, signs, strict=True)
        }
        m = jax.tree.map(lambda e, q: mixed(over_r0, e, over_r1, q), m, new)
        groups = {r.key: r.groups[0].name for r in graph.hidden_param_op_relations}
        return {**{k: {groups[k]: e} for k, e in m.items()}, STATES: s, KEY: key}

    def history(self, network, grads, carried, lam, t):
        """``grads + < lam , s > m``."""
        graph, lanes = network.graph, self.lanes(network.graph)
        of_state = {
            c: x for g in graph.hidden_groups for c, x in zip(g.states, lam[g.name], strict=True)
        }
        s, m = self._alive(graph, carried, t)
        products = [
            (of_state[c] * e).reshape(1 if lanes is None else lanes, -1).sum(1)
            for c, e in zip(graph.states, s, strict=True)
            if of_state[c] is not None
        ]
        if not products:
            return grads
        total = sum(products)
        total = total[0] if lanes is None else total

        def history(e):
            return (total * e) if lanes is None else jnp.tensordot(total.astype(e.dtype), e, 1)

        return add_gradients(grads, jax.tree.map(history, m))


def _check_lanes(graph: ETraceGraph) -> None:
    """Refuse a pair for each lane where lanes read one another."""
    shared = [c for c in graph.states if c not in graph.laned]
    if shared:
        what = (
            f'axis 0 of hidden state {graph.program.carry_names[shared[0]]} is not known to be the '
            'batch'
        )
    elif where := lanes_meet(graph):
        what = f'the lanes of a batch {where}'
    else:
        return
    raise NotSupportedError(
        f"{what}, and UORO has a pair for each sample. Use one for all: uoro(pair='batch')."
    )


def _traced(graph: ETraceGraph) -> list[OpUse]:
    return [r.op for r in graph.hidden_param_op_relations]


def leads(op: OpUse, lanes: int) -> bool:
    """Whether the lanes are axis 0 of an op's x and y, and the op acts lane by lane."""
    fold = op.primitive.fold_axes
    leading = op.primitive.batched and op.x is not None
    leading = leading and (fold is None or fold(op.params) == (0, 0))
    return leading and op.x_aval.shape[:1] == op.y_aval.shape[:1] == (lanes,)


def _by_lane(op: OpUse, lanes: int | None, x, d: jax.Array, weights: dict) -> dict[str, Any]:
    """``d (x) x`` in the layout of the weights, for each lane."""
    if lanes is None:
        return op_gradient(op, None if x is None else x[None], d[None], weights)
    if not leads(op, lanes):  # d has the lanes in front
        return jax.vmap(
            lambda d: op_gradient(op, None if x is None else x[None], d[None], weights)
        )(d)
    axis = len(op.repeats)

    def one(x, d):  # a lane as a batch of one, the turns of loops around the op as steps
        x, d = (a.reshape(-1, 1, *a.shape[axis:]) for a in (x, d))
        return op_gradient(outside_loops(op), x, d, weights)

    return jax.vmap(one, (axis, axis))(x, d)
