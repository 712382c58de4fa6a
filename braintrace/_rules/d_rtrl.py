"""D-RTRL: ``e^t = D^t e^{t-1} + D_f^t (x) x^t``, gradient ``same-step + < dL/dh^{t-1}, e^{t-1} >``."""
from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from .._compiler import Coordinates, ETraceGraph, HiddenGroup, OpUse, Relation, depends
from .._errors import OptionError
from .._executor import Factors, Signals
from . import kernels as k
from .rule import OpGradients, Rule, Trace, Weights

__all__ = ['DRTRL']

CACHED = 2 ** 24                  # bytes that a processor's last cache may hold
SMALL = 2 ** 22                   # bytes of a trace that a single step may as well write
PENDING = '(pending)'             # beside the relations of a trace
PENDING_STEPS = 4                 # a write moves the trace twice, each pending step costs a contraction: see docs/performance.md


def pairs(graph: ETraceGraph):
    """Every relation with each of its groups and the coordinates between them."""
    for relation in graph.hidden_param_op_relations:
        for group, coords in zip(relation.groups, relation.coordinates, strict=True):
            yield relation, group, coords


def add_gradients(a: OpGradients, b: OpGradients) -> OpGradients:
    """Sum by op and name; an op of ``b`` must be in ``a``."""
    return {op: jax.tree.map(lambda x, y: (x + y).astype(x.dtype), g, b[op]) if op in b else g for op, g in a.items()}


def same_step(graph: ETraceGraph, xs: dict, ds: dict, weights: Weights, skip=frozenset()) -> OpGradients:
    """Weight gradients of every owned op but those in ``skip``, from cotangents of y stacked over time."""
    return {op.key: k.op_gradient(op, xs.get(op.key), ds[op.key], weights[op.key]) for op in graph.ops
            if op.owned and op.key not in skip}


def _for_rows(op: OpUse, coords: Coordinates, values: jax.Array, rank: int) -> jax.Array:
    """Values at a group's positions, at a relation's coordinates and with axes for rows and loops in front."""
    values = k.at_coordinates(coords, values, rank)
    return values.reshape((1,) * (1 + len(op.repeats)) + values.shape)


def _reads_weights(op: OpUse, coords: Coordinates) -> bool:
    """Whether an op's entry of one step is made with the weights."""
    alone = replace(op, repeats=())

    def one(values, x, d):
        entry = k.instant(alone, coords, x, d, dict(zip(op.weight_avals, values, strict=True)))
        return sum(e.sum() for e in jax.tree.leaves(entry))
    d = jax.ShapeDtypeStruct((*coords.shape, 1), op.y_aval.dtype)
    return any(depends(one, list(op.weight_avals.values()), op.x_aval, d))


def _apart(carried: dict) -> tuple[Trace, Steps | None]:
    """The trace of what is carried, and the steps that are pending beside it."""
    return {key: of_group for key, of_group in carried.items() if key != PENDING}, carried.get(PENDING)


def _dtypes(graph: ETraceGraph, group: HiddenGroup) -> list:
    """Those of a group's states, whose transition has the widest."""
    return [graph.program.avals[graph.program.carry[c]].dtype for c in group.states]


def _still(graph: ETraceGraph, group: HiddenGroup) -> jax.Array:
    """The transition of no step."""
    return jnp.eye(group.num_state, dtype=jnp.result_type(*_dtypes(graph, group)))


def _later(resets: jax.Array) -> jax.Array:
    """Whether a lane is reset at a later step, for each step."""
    return jnp.flip(jnp.cumsum(jnp.flip(resets, 0), 0), 0) - resets > 0


class Pending(NamedTuple):
    """Steps since the trace was written: ``e = p e_stored + sum of x (x) q`` over rows, ``e_stored`` of the lanes ``alive``."""
    alive: jax.Array
    p: dict[str, jax.Array]
    x: dict[str, jax.Array]
    q: dict[str, dict[str, jax.Array]]


class Steps(NamedTuple):
    """Single steps that are pending beside a trace: ``number`` of them, each in a row, the other rows are zero.

    """
    alive: jax.Array
    p: dict[str, jax.Array]
    x: dict[str, tuple[jax.Array, ...]]
    q: dict[str, dict[str, tuple[jax.Array, ...]]]
    number: jax.Array

    @property
    def rows(self) -> int:
        return len(next(rows for of_group in self.q.values() for rows in of_group.values()))

    @property
    def pending(self) -> Pending:
        x, q = jax.tree.map(jnp.stack, [self.x, self.q], is_leaf=lambda rows: isinstance(rows, tuple))
        return Pending(self.alive, self.p, x, q)


@dataclass(frozen=True)
class DRTRL(Rule):
    """D-RTRL with a trace of the parameter's size for each sample (see :func:`braintrace.rules.d_rtrl`)."""
    trace_dtype: Any = None
    write_every: int | None = None
    name: ClassVar[str] = 'D_RTRL'
    approximation = ''
    required: ClassVar[tuple[str, ...]] = ('yw_to_w', 'xy_to_dw', 'init_drtrl')
    probes: ClassVar[bool] = False

    def init(self, graph: ETraceGraph) -> Trace:
        trace: Trace = {r.key: {} for r in graph.hidden_param_op_relations}
        for rel, group, coords in pairs(graph):
            entry = k.apart(k.zeros(rel.op, coords, group.num_state))
            trace[rel.key][group.name] = jax.tree.map(lambda e: e.astype(self._stored_in(e.dtype)), entry)
        return trace

    def _stored_in(self, dtype):
        return dtype if self.trace_dtype is None or jnp.issubdtype(dtype, jnp.complexfloating) else k.stored_dtype(self.trace_dtype)

    def carried(self, graph, trace, t):
        rows = self._rows(graph, trace)
        if rows == 1:
            return trace

        none = (0 * t).sum()              # mapped, if t is: all of a state must be

        def empty(shape, *dtypes):
            return tuple(jnp.zeros(shape, jnp.result_type(*dtypes)) + none.astype(jnp.result_type(*dtypes)) for _ in range(rows))
        p = {g.name: empty((*g.shape, g.num_state, g.num_state), *_dtypes(graph, g))[0] + _still(graph, g) for g in graph.hidden_groups}
        x, q = {}, {r.key: {} for r in graph.hidden_param_op_relations}
        for rel, group, coords in pairs(graph):
            if rel.op.x is not None:
                x[rel.key] = empty((*rel.op.repeats, *rel.op.x_aval.shape), rel.op.x_aval.dtype)
            q[rel.key][group.name] = empty((*rel.op.repeats, *coords.shape, group.num_state), rel.op.y_aval.dtype, *_dtypes(graph, group))
        return {**trace, PENDING: Steps(t > 0, p, x, q, none)}

    def _rows(self, graph: ETraceGraph, trace: Trace) -> int:
        """How many single steps stay pending: few enough to gain from, and none for a trace that is read at once."""
        size = sum(e.size * e.dtype.itemsize for e in jax.tree.leaves(trace))
        return 1 if not size or (self.write_every is None and size < SMALL) else self.delay(graph, 1, self.write_every)

    def written(self, graph, carried, weights, t):
        trace, steps = _apart(carried)
        if steps is None:
            return trace
        return jax.lax.cond(steps.number > 0, lambda e: self._with_steps(graph, e, steps, weights, t), lambda e: e, trace)

    def _with_steps(self, graph, trace: Trace, steps: Steps, weights, t) -> Trace:
        return self.close(graph, trace, self._without(graph, steps.pending, t == 0), weights, t, ())

    def _with_room(self, graph, steps: Steps, t) -> tuple[jax.Array, Pending, jax.Array]:
        """Whether the trace must be written before this step, and then what is pending and its number of steps."""
        pending, full = self._without(graph, steps.pending, t == 0), steps.number == steps.rows
        x, q = jax.tree.map(lambda rows: jnp.where(full, 0, rows), (pending.x, pending.q))
        p = {g.name: jnp.where(full, _still(graph, g), pending.p[g.name]) for g in graph.hidden_groups}
        return full, Pending(jnp.where(full, t > 0, pending.alive), p, x, q), jnp.where(full, 0, steps.number)

    def update(self, graph, carried, factors, weights, t):
        q = jax.tree.map(lambda a: a[None], factors.df)
        trace, steps = _apart(carried)
        if steps is None:
            return self.close(graph, trace, Pending(t > 0, factors.d, jax.tree.map(lambda a: a[None], factors.x), q), weights, t, ())
        full, pending, number = self._with_room(graph, steps, t)
        trace = jax.lax.cond(full, lambda e: self._with_steps(graph, e, steps, weights, t), lambda e: e, trace)

        def placed(rows, new):
            return tuple(jnp.where(number == i, new.astype(row.dtype), row) for i, row in enumerate(rows))

        def kept(new, old):
            return new.astype(old.dtype)
        rows: dict[str, dict] = {r.key: {} for r in graph.hidden_param_op_relations}
        for rel, group, coords in pairs(graph):
            d, old = _for_rows(rel.op, coords, factors.d[group.name], 2), pending.q[rel.key][group.name]
            rows[rel.key][group.name] = placed(kept((d * old[..., None, :]).sum(-1), old), factors.df[rel.key][group.name])
        p = {g: kept((d[..., :, :, None] * pending.p[g][..., None, :, :]).sum(-2), pending.p[g]) for g, d in factors.d.items()}
        x = {key: placed(old, factors.x[key]) for key, old in pending.x.items()}
        return {**trace, PENDING: Steps(pending.alive, p, x, rows, number + 1)}

    def gradient(self, graph, before, after, factors, signals, weights, t):
        trace, steps = _apart(before)
        if steps is not None:
            step = jax.tree.map(lambda a: a[None], (factors, signals))
            return self.window(graph, _apart(after)[0], self._with_room(graph, steps, t)[1], *step, weights, t[None], None, False)[0]
        grads = same_step(graph, *jax.tree.map(lambda a: a[None], (factors.x, signals.dy)), weights)
        return add_gradients(grads, self._history(graph, trace, signals.c, weights, t > 0))

    def _old(self, graph, trace, rel: Relation, group: HiddenGroup, coords: Coordinates, alive) -> k.Old:
        return k.Old(trace[rel.key][group.name], alive if coords.has_lanes(graph.lanes_of(group)) else alive.any(), rel.op.y_aval.dtype)

    def _history(self, graph, trace, signal: dict, weights: Weights, alive) -> OpGradients:
        """``< dL/dh', e' >`` for every relation, skipped while no lane has a past."""
        def of_trace():
            total: OpGradients = {}
            for rel, group, coords in pairs(graph):
                c = k.at_coordinates(coords, signal[group.name], 1)
                got = k.solve(rel.op, coords, c, self._old(graph, trace, rel, group, coords, alive), weights[rel.key])
                total[rel.key] = got if rel.key not in total else jax.tree.map(operator.add, total[rel.key], got)
            return {key: {n: g.astype(weights[key][n].dtype) for n, g in got.items()} for key, got in total.items()}
        zeros = {rel.key: jax.tree.map(jnp.zeros_like, weights[rel.key]) for rel in graph.hidden_param_op_relations}
        return jax.lax.cond(jnp.any(alive), of_trace, lambda: zeros)

    def window(self, graph, trace, pending, factors, signals, weights, t, resets, keep):
        (lam, p), (deltas, pushes) = self._backwards(graph, factors, signals, resets, keep)
        xs, rows, kept = factors.x, factors.x, pending
        if resets is not None:
            rows = {r.key: self._living_rows(graph, r.op, rows[r.key], _later(resets)) for r in graph.hidden_param_op_relations
                    if r.op.x is not None}
            if pending is not None:          # what losses may still reach, and what lasts
                pending, kept = (self._without(graph, pending, dead) for dead in (resets[0], resets.any(0)))
        alive = t[0] > 0 if pending is None else pending.alive
        if pending is not None:
            older = {r.key: [] for r in graph.hidden_param_op_relations}
            for rel, group, coords in pairs(graph):
                q = pending.q[rel.key][group.name]
                credit = (_for_rows(rel.op, coords, lam[group.name], 1) * q).sum(-1)
                older[rel.key].append(jax.vmap(functools.partial(k.to_y, rel.op, coords))(credit))
                if keep:
                    moved = (_for_rows(rel.op, coords, p[group.name], 2) * kept.q[rel.key][group.name][..., None, :]).sum(-1)
                    pushes[rel.key][group.name] = jnp.concatenate([moved, pushes[rel.key][group.name]])
            xs = xs | {key: jnp.concatenate([x, xs[key]]) for key, x in pending.x.items()}
            rows = {key: jnp.concatenate([x, rows[key]]) for key, x in kept.x.items()}
            deltas = deltas | {key: jnp.concatenate([sum(parts), deltas[key]]) for key, parts in older.items()}
            lam = {g: (s[..., :, None] * pending.p[g]).sum(-2) for g, s in lam.items()}
            p = {g: (s[..., :, :, None] * kept.p[g][..., None, :, :]).sum(-2) for g, s in p.items()}
        grads = add_gradients(same_step(graph, xs, {**signals.dy, **deltas}, weights), self._history(graph, trace, lam, weights, alive))
        if not keep:
            return grads, None
        related = {r.key for r in graph.hidden_param_op_relations}
        alive = alive if resets is None else alive & ~resets.any(0)
        return grads, Pending(alive, p, {key: x for key, x in rows.items() if key in related}, pushes)

    def _living_rows(self, graph, op: OpUse, rows: jax.Array, dead: jax.Array):
        """Rows of x, zero where a lane is reset later: what is dead need not be a number. ``dead`` has rows, or is one for all."""
        laned = op.primitive.batched and op.x_aval.shape[:1] == (graph.lanes,)
        dead = jnp.broadcast_to(dead, (len(rows), *dead.shape[1:]))
        return jax.vmap(lambda flags, x: k.where_lanes(~flags, laned, x, len(op.repeats)))(dead, rows)

    def _without(self, graph, pending: Pending, dead: jax.Array) -> Pending:
        """What is pending, of the lanes that are not reset."""
        laned = {g.name: graph.lanes_of(g) is not None for g in graph.hidden_groups}
        ops = {r.key: r.op for r in graph.hidden_param_op_relations}
        x = {key: self._living_rows(graph, ops[key], rows, dead[None]) for key, rows in pending.x.items()}
        q: dict[str, dict[str, jax.Array]] = {r.key: {} for r in graph.hidden_param_op_relations}
        for rel, group, coords in pairs(graph):
            q[rel.key][group.name] = k.where_lanes(~dead, coords.has_lanes(graph.lanes_of(group)), pending.q[rel.key][group.name],
                                                   1 + len(rel.op.repeats))
        return Pending(pending.alive & ~dead, {g: k.where_lanes(~dead, laned[g], p) for g, p in pending.p.items()}, x, q)

    def close(self, graph, trace, pending, weights, t, read):
        new: Trace = {r.key: {} for r in graph.hidden_param_op_relations}
        move = k.after(read, t, pending.p)
        for rel, group, coords in pairs(graph):
            old = self._old(graph, trace, rel, group, coords, pending.alive)
            p, q = k.at_coordinates(coords, move[group.name], 2), pending.q[rel.key][group.name]
            new[rel.key][group.name] = k.renewed(rel.op, coords, p, old, pending.x.get(rel.key), q, weights[rel.key])
        return new

    def delay(self, graph, every, asked):
        bound = [rel.op for rel, _, coords in pairs(graph) if _reads_weights(rel.op, coords)]
        if asked is not None:
            if bound and asked > 1:
                raise OptionError(f'write_every: the trace of {bound[0].where} ({bound[0].primitive.name}) depends on the weights at each '
                                  'step, so its steps can not stay pending over an update. Leave write_every out.')
            return asked
        size = sum(e.size * e.dtype.itemsize for e in jax.tree.leaves(jax.eval_shape(lambda: self.init(graph))))
        at_once = bound or any(k.has_kernel(rel.op, coords) for rel, _, coords in pairs(graph))
        return 1 if at_once else max(1, (PENDING_STEPS if size > CACHED else 2) // every)

    def _backwards(self, graph, factors: Factors, signals: Signals, resets, keep: bool):
        """The light reverse scan: ``lam_t`` is the credit that later losses send to h_t, ``p_t`` carries h_t to the end."""
        laned = {g.name: graph.lanes_of(g) is not None for g in graph.hidden_groups}

        def back(state, at):
            lam, p, dead = state
            d, df, dy, c, reset = at
            deltas, pushes = {}, {r.key: {} for r in graph.hidden_param_op_relations}
            for rel, group, coords in pairs(graph):
                f = df[rel.key][group.name]
                credit = (k.at_coordinates(coords, lam[group.name], 1) * f).sum(-1)
                deltas[rel.key] = deltas.get(rel.key, dy[rel.key]) + k.to_y(rel.op, coords, credit)
                if keep:
                    push = (k.at_coordinates(coords, p[group.name], 2) * f[..., None, :]).sum(-1)
                    pushes[rel.key][group.name] = push if dead is None else k.where_lanes(
                        ~dead, coords.has_lanes(graph.lanes_of(group)), push, len(rel.op.repeats))
            lam = {g: c[g] + (s[..., :, None] * d[g]).sum(-2) for g, s in lam.items()}
            p = {g: (s[..., :, :, None] * d[g][..., None, :, :]).sum(-2) for g, s in p.items()}
            if reset is not None:
                dead = dead | reset
                lam = {g: k.where_lanes(~reset, laned[g], s) for g, s in lam.items()}
                p = {g: k.where_lanes(~dead, laned[g], s) for g, s in p.items()}
            return (lam, p, dead), (deltas, pushes)

        lam = {g: jnp.zeros(c.shape[1:], c.dtype) for g, c in signals.c.items()}
        p = {g: jnp.broadcast_to(jnp.eye(d.shape[-1], dtype=d.dtype), d.shape[1:]) for g, d in factors.d.items()} if keep else {}
        dead = None if resets is None else jnp.zeros_like(resets[0])
        (lam, p, _), made = jax.lax.scan(back, (lam, p, dead), (factors.d, factors.df, signals.dy, signals.c, resets), reverse=True)
        return (lam, p), made
