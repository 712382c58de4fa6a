"""A live look at what a learner's gradients are made of, for any cell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import functional
from .._tables import Table, as_html, as_text
from ..verify import bptt_gradients, hidden_jacobians
from ._capture import Record, capture

AGREES = 1e-9  # of float64, relative to the largest entry


class GroupRow(NamedTuple):
    """One hidden group: the error of the observed D beside reverse mode through the step, relative
    to its largest entry, and the share of the squared Jacobian that D leaves out.
    """

    group: str
    d_error: float
    dropped: float


class RelationRow(NamedTuple):
    """One op and group: the distance of ``D_f (x) x`` from the derivative of the new states by the
    op's weight, relative to the largest entry of that; None for an op that is no matrix product.
    """

    relation: str
    group: str
    df_error: float | None


class ParameterRow(NamedTuple):
    """One parameter: the cosine of the angle between its online gradient and that of BPTT, and the
    ratio of their norms.
    """

    path: str
    cosine: float
    norm_ratio: float


@dataclass(frozen=True, repr=False)
class Audit:
    """The result of :func:`audit`; it prints as tables. ``ok``: every observed D agrees with the
    step of the ``rule``. ``groups``, ``relations``, ``parameters``: a row for each, the worst of
    all ``steps``.

    >>> group = GroupRow('h', d_error=0.2, dropped=0.0)
    >>> Audit('d_rtrl()', 1, (group,), (), ()).ok
    False
    """

    rule: str
    steps: int
    groups: tuple[GroupRow, ...]
    relations: tuple[RelationRow, ...]
    parameters: tuple[ParameterRow, ...]

    @property
    def ok(self) -> bool:
        """Whether every D is that of the cell as it is written."""
        return all(row.d_error <= AGREES for row in self.groups)

    def _tables(self) -> tuple[list[str], list[Table]]:
        head = 'D is that of the cell' if self.ok else 'D is NOT that of the cell'
        groups = [(r.group, f'{r.d_error:.1e}', f'{r.dropped:.1%}') for r in self.groups]
        relations = [
            (r.relation, r.group, 'no formula' if r.df_error is None else f'{r.df_error:.1e}')
            for r in self.relations
        ]
        params = [(r.path, f'{r.cosine:.4f}', f'{r.norm_ratio:.3f}') for r in self.parameters]
        return [f'{self.rule}, {self.steps} steps in float64: {head}.'], [
            Table('Hidden groups', ('group', 'error of D', 'Jacobian left out'), groups),
            Table('Relations', ('op', 'group', 'dh/dw beside D_f (x) x'), relations),
            Table('Gradients beside BPTT', ('parameter', 'cosine', 'norm ratio'), params),
        ]

    def __repr__(self) -> str:
        return as_text(*self._tables())

    def _repr_html_(self) -> str:
        return as_html(*self._tables())


def audit(learner, params, state, xs, ys, loss='half_mse', *, reduction: str = 'mean') -> Audit:
    """Compare what the learner's trace is made of with reverse mode through its cell, in float64.

    ``xs`` and ``ys`` have time in axis 0, as for :meth:`Recording.sequence_grad`;
    ``loss`` and ``reduction`` as for :func:`capture`. From ``params``, the carry of ``state`` and
    an empty trace, at each step D is compared with :func:`braintrace.verify.hidden_jacobians`, and
    at the end the gradient with that of BPTT. Nothing changes; memory grows with the square of all
    hidden numbers. Raises what :func:`capture` does.

    >>> import jax, jax.numpy as jnp, braintrace
    >>> cell = braintrace.receipts.Cell.rnn(0.5)
    >>> learner = braintrace.functional.online(cell)
    >>> params, xs = cell.init(jax.random.key(0), 2, 3, 1), jnp.ones((4, 2, 2))
    >>> state = learner.init(params, cell.carry(params, 2), xs[0])
    >>> found = audit(learner, params, state, xs, jnp.ones((4, 2, 1)))
    >>> found.ok, 0 < found.groups[0].dropped < 1
    (True, True)
    """
    with jax.enable_x64(True):
        params, carry, xs, ys = jax.tree.map(_double, (params, state.carry, xs, ys))
        recording = capture(_fresh(learner), loss, reduction=reduction)
        online = recording.learner
        start = online.init(params, carry, xs[0])
        (grads, *_), run = jax.jit(recording.sequence_grad)(params, start, xs, ys)
        ones = jnp.ones(xs.shape[1:2], xs.dtype)
        total = bptt_gradients(
            online.cell, params, carry, xs, ys, lambda o, y: recording.loss.total(o, (y, ones))
        )
        groups, relations = [], []
        for k, x in enumerate(xs):
            record = jax.tree.map(lambda a, k=k: a[k], run.steps)
            groups.append(_groups(online, params, record, x))
            relations.append(_relations(online, params, record, x))
        rows = _worst(GroupRow, groups), _worst(RelationRow, relations)
        return Audit(str(online.rule), len(xs), *rows, _parameters(online, grads, total, len(xs)))


def _fresh(learner) -> functional.OnlineLearner:
    """The same learner, with nothing compiled."""
    made = capture(learner).learner
    return functional.online(
        made.cell, made.rule, trainable=made.trainable, hidden=made.hidden, policy=made.policy
    )


def _double(leaf):
    leaf = np.asarray(leaf)
    return jnp.asarray(leaf, jnp.float64 if leaf.dtype.kind == 'f' else leaf.dtype)


def _groups(learner, params, record: Record, x) -> list[GroupRow]:
    """The D of one observed step beside reverse mode through the step."""
    graph, rows = learner.graph, []
    whole, kept = hidden_jacobians(learner, params, record.carry_before, x)
    compiled = graph if graph.seen is None else graph.seen[1]  # the step without a filter
    for group in graph.hidden_groups:
        name = next(g.name for g in compiled.hidden_groups if g.states[0] in group.states)
        block, observed = np.asarray(kept[name][name]), record.observed.d[group.name]
        *shape, states = block.shape[: block.ndim // 2]
        units = math.prod(shape)
        # Of the Jacobian of a group the blocks of each unit by itself: by unit, new and old state.
        wanted = np.einsum('nsnr->nsr', block.reshape(units, states, units, states))
        got = np.zeros_like(wanted)
        for s, r in np.ndindex(states, states):
            if (d := observed[s][r]) is not None:
                got[:, s, r] = np.broadcast_to(d, shape).ravel()
        mass = sum(float(jnp.sum(whole[name][old] ** 2)) for old in whole[name])
        left = sum(float(jnp.sum((whole[name][old] - kept[name][old]) ** 2)) for old in whole[name])
        error = float(np.abs(got - wanted).max()) / max(float(np.abs(wanted).max()), 1e-300)
        rows.append(GroupRow(group.name, error, left / mass if mass else 0.0))
    return rows


def _relations(learner, params, record: Record, x) -> list[RelationRow]:
    rows = []
    for relation in learner.graph.hidden_param_op_relations:
        paths = relation.paths.get('weight', ())
        plain = relation.primitive.name == 'etp_mm' and len(paths) == 1
        for group in relation.groups:
            of = learner, params, record, x, relation, group
            error = _of_weight(*of, paths[0]) if plain else None
            rows.append(RelationRow(relation.key, group.name, error))
    return rows


def _of_weight(learner, params, record: Record, x, relation, group, path: str) -> float:
    """The distance of ``D_f (x) x`` from the derivative of the new states by the weight."""
    leaves, tree = jax.tree.flatten(params)
    place, program = list(learner.routes).index(path), learner.graph.program
    own = {i: s for i, s in enumerate(group.states) if s not in program.virtual_states}

    def new(weight):
        changed = jax.tree.unflatten(tree, [*leaves[:place], weight, *leaves[place + 1 :]])
        carry = learner.cell(changed, record.carry_before, x)[1]
        states = program.apart(jax.tree.leaves(carry))
        return {i: states[s] for i, s in own.items()}

    read, df = record.observed.x[relation.key], record.observed.df[relation.key][group.name]
    worst = size = 0.0
    for i, want in jax.jit(jax.jacrev(new))(leaves[place]).items():
        if want.ndim != 4 or want.shape[2:] != (read.shape[1], want.shape[1]):
            return float('nan')
        d = jnp.zeros(want.shape[:2]) if df[i] is None else df[i]
        got = jnp.einsum('bi,bn,nm->bnim', read, d, jnp.eye(want.shape[1]))
        worst = max(worst, float(jnp.abs(got - want).max()))
        size = max(size, float(jnp.abs(want).max()))
    return worst / size if size else worst


def _worst(kind, steps: list) -> tuple:
    """Of each row the largest numbers of all steps."""
    found = []
    for rows in zip(*steps, strict=True):
        columns = list(zip(*rows, strict=True))
        found.append(kind(*(c[0] if isinstance(c[0], str | None) else max(c) for c in columns)))
    return tuple(found)


def _parameters(online, grads, total, steps: int) -> tuple[ParameterRow, ...]:
    """The mean gradient of the steps beside that of BPTT of their sum."""
    rows = []
    for path, g, w in zip(online.routes, *map(jax.tree.leaves, (grads, total)), strict=True):
        if g.dtype != jax.dtypes.float0:
            g, w = np.ravel(g) * steps, np.ravel(w)
            a, b = float(np.linalg.norm(g)), float(np.linalg.norm(w))
            cosine = float(g @ w) / (a * b) if a and b else float(a == b)
            ratio = a / b if b else math.inf if a else 1.0
            rows.append(ParameterRow(path, cosine, ratio))
    return tuple(rows)
