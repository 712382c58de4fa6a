"""The compiler's findings as records of plain data; ``_report`` makes sentences of them."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import closed_jaxpr
from .equations import is_inexact
from .kinds import Kind, kind_of
from .policy import Policy
from .program.dataflow import Groups, bits, forward, members, over_steps, union
from .program.program import Program


@dataclass(frozen=True, eq=False)
class Kept:
    """The hidden numbers that entries of a trace keep; those of all hidden states of a lane (of the
    whole step, where states have no lanes) are counted in the order of ``graph.states``.

    ``numbers``: those of the states that are kept together. ``rows`` ``(*y, K)``: which K of them
    each element of y, in one lane, keeps, -1 where a place is empty; None: all ``numbers``.
    """

    numbers: np.ndarray
    rows: np.ndarray | None = None

    @property
    def size(self) -> int:
        """K."""
        return len(self.numbers) if self.rows is None else self.rows.shape[-1]


@dataclass(frozen=True)
class HiddenGroup:
    """Hidden states of one shape, coupled position by position.

    - ``name``, ``paths``: as the report names it, and the paths of its states
    - ``shape``, ``dtype``: those of each state
    - ``states``: their positions in the carry
    - ``derived``: states that are functions of the new ones of ``states``, and no part of a trace
    - ``reads[s][r]``: whether new state s may read old state r; where not, that D is zero
    - ``kept``: what the entries of a wide trace keep of it, which may be states of any shapes then

    >>> import braintrace, jax.numpy as jnp
    >>> model, x = braintrace.nn.GRUCell(2, 4), jnp.zeros((3, 2))
    >>> graph = braintrace.compile(model, 'D_RTRL', x, batch_size=3).graph
    >>> [(group.name, group.shape, group.num_state) for group in graph.hidden_groups]
    [('h', (3, 4), 1)]
    """

    name: str
    paths: tuple[str, ...]
    states: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    derived: tuple[int, ...]
    reads: tuple[tuple[bool, ...], ...]
    kept: Kept | None = None

    @property
    def num_state(self) -> int:
        """The numbers of an entry of a trace."""
        return len(self.states) if self.kept is None else self.kept.size

    @property
    def carried(self) -> tuple[int, ...]:
        """All its states, with the derived ones."""
        return self.states + self.derived


@dataclass(frozen=True, eq=False)
class Derived:
    """Hidden states that are functions of the new states of their group, as a stored spike is.

    ``states``: positions in the carry; ``equations`` make their new values. ``reads``: each value
    of the new carry that these read -> its position in the carry.
    """

    states: tuple[int, ...]
    equations: tuple[int, ...]
    reads: dict[int, int]


@dataclass(frozen=True, eq=False)
class OpUse:
    """One application ``y = op(x, w...)`` of an ETP primitive in the step.

    Each trainable has its place among the operands in ``slots``, its value number in ``trainable``,
    and in ``parameters`` the positions of the parameters that it is a function of. ``owned``: the
    weights come from parameters alone, so their gradient is ``xy_to_dw``. ``repeats``: the lengths
    of the loops around the op, leading axes of its x and y. ``structure``: the value numbers of the
    operands that are neither x nor trained, ``fixed_structure``: whether they are the same at each
    step and in each lane; :meth:`bound` puts their arrays among ``params``.
    """

    key: str
    equation: int
    primitive: Any
    params: dict
    x: int | None
    y: int
    slots: dict[str, int]
    trainable: dict[str, int]
    parameters: dict[str, tuple[int, ...]]
    owned: bool
    where: str
    x_aval: Any
    y_aval: Any
    weight_avals: dict[str, Any]
    repeats: tuple[int, ...] = ()
    conditional: bool = False
    structure: dict[str, int] = field(default_factory=dict)
    structure_avals: dict[str, Any] = field(default_factory=dict)
    fixed_structure: bool = True

    def bound(self, structure: dict[str, Any]) -> OpUse:
        """The op with the arrays of its structure among its parameters, where its rules find
        them.
        """
        return replace(self, params={**self.params, **structure}) if structure else self

    def empty(self) -> OpUse:
        """The op bound to zeros, where only shapes are asked for."""
        zeros = {n: jnp.zeros(a.shape, a.dtype) for n, a in self.structure_avals.items()}
        return self.bound(zeros)

    @cached_property
    def is_its_weight(self) -> bool:
        """Whether y is the weight, number by number: that of a bias that was broadcast to y's
        shape before it became an op.
        """
        if self.x is not None or self.repeats or self.structure or len(self.slots) != 1:
            return False
        traced = jax.make_jaxpr(lambda weights: self.impl(None, weights))(self.weight_avals)
        body, _ = closed_jaxpr(traced)
        return not body.eqns and list(body.outvars) == list(body.invars)

    def impl(self, x, weights: dict):
        args: list = [None] * (len(self.slots) + (self.x is not None))
        for name, k in self.slots.items():
            args[k] = weights[name]
        if self.x is not None:
            args[self.primitive.x_invar_index] = x
        static = dict(self.params)
        args += [static.pop(name) for name in self.primitive.structure]
        outs = self.primitive.impl_fn(*args, **static)
        return outs[self.primitive.y_outvar_index] if self.primitive.multiple_results else outs


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Where a relation's trace entries sit.

    ``shape`` is y's shape. Where an element of y feeds several positions, so many axes are
    ``added`` in front of y's axis ``axis``, with an entry for each of them. ``positions``: each
    entry's flat position in the group; None where every entry sits at its own. ``colours``: no
    position reads two elements of y of one colour; -1 where an entry belongs to no position; None
    where all are of one colour.
    """

    shape: tuple[int, ...]
    group_shape: tuple[int, ...]
    positions: np.ndarray | None
    added: int = 0
    axis: int = 0
    colours: np.ndarray | None = None

    @property
    def layout(self) -> tuple[int, int]:
        """The number of added axes, and where they begin."""
        return self.added, self.axis

    def along(self, axis: int) -> np.ndarray:
        """The index of each entry's position along an axis of the group; of size 1 along the axes
        of entries on which it does not depend.
        """
        if self.positions is None:
            shape = [n if k == axis else 1 for k, n in enumerate(self.shape)]
            return np.arange(self.shape[axis]).reshape(shape)
        behind = max(1, math.prod(self.group_shape[axis + 1 :]))
        return compressed(self.positions // behind % max(1, self.group_shape[axis]))

    def leads(self, axis: int) -> bool:
        """Whether axis 0 of the entries is this axis of the group, index by index."""
        if not self.shape or self.shape[0] != self.group_shape[axis]:
            return False
        index = self.along(axis)
        return bool(index.size == len(index) and (index.reshape(-1) == np.arange(len(index))).all())


def compressed(a: np.ndarray) -> np.ndarray:
    """The array with size 1 along axes on which it does not depend."""
    for axis in range(a.ndim):
        if a.shape[axis] and (a == a.take([0], axis)).all():
            a = a.take([0], axis)
    return a


@dataclass(frozen=True, eq=False)
class Relation:
    """One op and the hidden groups that its y reaches along position-wise paths within the step.

    - ``op``: the application of the op; ``paths``: of each trainable the parameters behind it
    - ``groups``: the hidden groups; ``coordinates``: where the entries of a trace sit in each;
      ``feeds``: of each whether y reaches each of its new states within the step; ``traced``: of
      which of its states a rule keeps entries. Empty: all
    - ``only_through_groups``: every path from y leads through new states of these groups, so
      ``dL/dy = sum_s L_s D_f,s``

    >>> import braintrace, jax.numpy as jnp
    >>> model, x = braintrace.nn.GRUCell(2, 4), jnp.zeros((3, 2))
    >>> graph = braintrace.compile(model, 'D_RTRL', x, batch_size=3).graph
    >>> [(r.key, r.primitive.name) for r in graph.hidden_param_op_relations]
    [('Wz/weight/weight', 'etp_mm'), ('Wh/weight/weight', 'etp_mm')]
    """

    op: OpUse
    groups: tuple[HiddenGroup, ...]
    coordinates: tuple[Coordinates, ...]
    paths: dict[str, tuple[str, ...]]
    only_through_groups: bool
    feeds: tuple[tuple[bool, ...], ...] = ()
    traced: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def key(self) -> str:
        """The name of its op, as the report has it."""
        return self.op.key

    @property
    def primitive(self):
        """The :class:`braintrace.ETPPrimitive` of its op."""
        return self.op.primitive

    @property
    def trainable_vars(self) -> dict[str, int]:
        """The number of the value that each trainable is, by its name."""
        return self.op.trainable


@dataclass(frozen=True)
class Route:
    """Where a parameter's gradient comes from, its ``kind``, and why; ``location``: in which line.

    ``trace`` (reason: the primitive): history and same step. ``same-step``: this step only, because

    - ``no_hidden_state``: it reaches no hidden state, as a readout does; nothing is missing;
    - ``not_etp_op``: it reaches a hidden state by a plain operation; use a braintrace op;
    - ``weight_then_weight``: its op reaches the state only through another op or a mixing equation,
      as GRU's reset gate does;
    - ``mixing_tail``: its op reaches the state only through equations that mix positions, such as a
      cumulative sum;
    - ``lost_relation``: elements of its op's result feed several positions of a state, each of
      which reads many of them;
    - ``input_dependent_weight``: its op's weight changes from step to step;
    - ``opaque_call:<primitive>``: its op is inside a function with a derivative rule of its
      own;
    - ``not_hidden``: it reaches later steps through a part of the carry that is no hidden state;
    - ``unused``: it reaches nothing.

    ``frozen`` (``not_trainable`` or ``not_inexact``): its gradient is zero.

    >>> import braintrace, jax.numpy as jnp
    >>> model, x = braintrace.nn.GRUCell(2, 4), jnp.zeros((3, 2))
    >>> graph = braintrace.compile(model, 'D_RTRL', x, batch_size=3).graph
    >>> route = graph.routes['Wr/weight/weight']
    >>> route.kind, route.reason
    ('same-step', 'weight_then_weight')
    """

    kind: str
    reason: str
    location: str = ''


@dataclass(frozen=True)
class Diagnostic:
    """One finding: where a parameter's gradient comes from, what a trace leaves out, or what the
    compiler did that changes or limits a gradient. ``report.diagnostics`` has in words those that
    are told.

    ``kind``: a row of ``_compiler/kinds.py``. ``path``: the parameter, op, group or state;
    ``location``: the line in the user's code. ``equations``: positions in
    ``graph.program.equations``, a reduction before the broadcast that spreads it. ``reason`` tells
    apart the sentences of one kind. Some kinds name the ``group`` that reads or is not reached, the
    weight's ``slot`` in its op, ``states`` of the carry.

    >>> import braintrace, jax.numpy as jnp
    >>> cell = lambda p, h, x: (h, jnp.tanh(h + x @ p['W']))
    >>> learner = braintrace.functional.online(cell, mark='auto')
    >>> state = learner.init({'W': jnp.ones((2, 4))}, jnp.zeros((3, 4)), jnp.ones((3, 2)))
    >>> [(found.kind, found.path, found.level) for found in learner.graph.diagnostics]
    [('marked', 'W', 'info')]
    """

    kind: str
    path: str = ''
    location: str = ''
    equations: tuple[int, ...] = ()
    reason: str = ''
    group: str = ''
    slot: str = ''
    states: tuple[str, ...] = ()

    @property
    def row(self) -> Kind:
        """What is known of its kind."""
        return kind_of(self.kind, self.reason)

    @property
    def level(self) -> str:
        """``warning``, or ``info`` where the user need not mend anything; empty where nothing is
        told beside the tables of the report.
        """
        return self.row.level


@dataclass(frozen=True, eq=False)
class ETraceGraph:
    """The compiled structure of one step; :func:`braintrace.report` shows it in words.

    - ``hidden_groups``: each :class:`braintrace.HiddenGroup`
    - ``hidden_param_op_relations``: a :class:`braintrace.Relation` for each op that has a trace
    - ``findings``: all that is known of gradients, each a :class:`braintrace.Diagnostic`;
      ``routes`` and ``diagnostics`` are parts of it, ``found(kind)`` are those of one kind
    - ``routes``: path of each parameter -> :class:`braintrace.Route`
    - ``diagnostics``: those :class:`braintrace.Diagnostic` that are told
    - ``program``, ``ops``, ``derived``: the flat equations of the step, every op in them, and the
      states that are made of others
    - ``mixing``: the reason for each cut of an equation in which one position reads another
    - ``recurrent``: the groups that each cut equation leads to
    - ``direct``: parameters that reach a result otherwise than as the weight of an owned op
    - ``colours``: for each state index, sets of groups that one VJP serves
    - ``lanes``: the batch size; ``batch_axes``: position in the carry -> the axis that is known to
      be the batch; ``laned``: the positions where it is axis 0
    - ``policy``: how it was compiled
    - ``feedback``: for ops that send their error back through other weights B: the numbers of the
      constants that are B, or with ``fading`` B less the op's own weights; these shrink by
      ``1 - fading`` at each step
    - ``scope``: what a rule that follows every path knows of it, with ``text`` for the report
    - ``seen``: the rule that sees it so, and the step as it was compiled; None: as compiled

    >>> import braintrace, jax.numpy as jnp
    >>> model, x = braintrace.nn.GRUCell(2, 4), jnp.zeros((3, 2))
    >>> graph = braintrace.compile(model, 'D_RTRL', x, batch_size=3).graph
    >>> graph
    ETraceGraph(1 hidden groups, 2 relations, 6 parameters; braintrace.report(graph) shows them)
    """

    program: Program
    hidden_groups: tuple[HiddenGroup, ...]
    derived: Derived
    ops: tuple[OpUse, ...]
    hidden_param_op_relations: tuple[Relation, ...]
    findings: tuple[Diagnostic, ...]
    mixing: dict[int, str]
    recurrent: dict[int, Groups]
    direct: tuple[int, ...]
    colours: tuple[tuple[tuple[int, ...], ...], ...]
    lanes: int | None
    batch_axes: dict[int, int]
    policy: Policy
    feedback: dict[str, dict[str, int]] = field(default_factory=dict)
    fading: float | None = None
    scope: Any = None
    seen: tuple[Any, ETraceGraph] | None = field(default=None, compare=False)

    def found(self, *kinds: str) -> list[Diagnostic]:
        """The findings of some kinds."""
        return [d for d in self.findings if d.kind in kinds]

    @cached_property
    def routes(self) -> dict[str, Route]:
        found = {}
        for d in self.findings:
            if d.row.route:
                # the reason of a trace is its primitive, else the kind
                name = d.row.reason or d.kind.replace('-', '_')
                parts = [d.reason] if d.kind == 'traced' else [name, d.reason]
                found[d.path] = Route(d.row.route, ':'.join(filter(None, parts)), d.location)
        return found

    @cached_property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        # of a parameter that is not marked somewhere, the plain operation is told there
        told = {d.path for d in self.found('unmarked')}
        return tuple(
            d for d in self.findings if d.level and not (d.kind == 'not-etp-op' and d.path in told)
        )

    @cached_property
    def states(self) -> tuple[int, ...]:
        """The hidden states, by position in the carry, without the derived ones."""
        return tuple(c for c in self.program.hidden if c not in self.derived.states)

    @cached_property
    def laned(self) -> frozenset[int]:
        return frozenset(c for c, axis in self.batch_axes.items() if axis == 0)

    @cached_property
    def pairs(self) -> tuple[tuple, ...]:
        """Each relation with each of its groups: where the entries of their trace sit, of which
        states of the group they are kept, whether axis 0 of them is the batch, and the sample whose
        state each is for (see :meth:`Coordinates.along`; None: not known).
        """

        def pair(relation: Relation, k: int) -> tuple:
            group, coords = relation.groups[k], relation.coordinates[k]
            states = relation.traced[k] if relation.traced else range(group.num_state)
            found, axis = (relation, group, coords, tuple(states)), self.batch_axis(group)
            if axis is None:
                return *found, False, None
            # an entry has the batch of the op in front, or that of a weight which is y itself, or
            # axes that are added there; what a wide trace keeps is in its own lane
            front = relation.primitive.batched or relation.op.is_its_weight
            front = front or (coords.added > 0 and coords.axis == 0) or group.kept is not None
            return *found, front and coords.leads(axis), coords.along(axis)

        relations = self.hidden_param_op_relations
        return tuple(
            pair(relation, k) for relation in relations for k in range(len(relation.groups))
        )

    @cached_property
    def read_later(self) -> frozenset[int]:
        """The old hidden states, by position in the carry, that a result of the step reads along
        paths that are not cut.
        """
        program, derived = self.program, set(self.derived.states)
        group_of = {c: g for g in self.hidden_groups for c in g.carried}
        # one that is made of others is read as these
        start = {
            program.carry[c]: bits(group_of[c].states if c in derived else [c]) for c in group_of
        }
        of_groups = [bits(group.states) for group in self.hidden_groups]

        def kept(i: int, found: int) -> int:
            cut = union(of_groups, members(self.recurrent.get(i, 0)))
            return 0 if i in program.blocks else found & ~cut

        facts = forward(program, start, kept)
        results = (*program.outputs, *program.new_carry)
        found = union(facts, (v for v in results if is_inexact(program.avals[v])))
        return frozenset(members(found))

    @cached_property
    def op_at(self) -> dict[int, OpUse]:
        return {op.equation: op for op in self.ops}

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The constants that are structures or feedback weights of ops: a compiled step takes them
        as arguments, since literals of millions of numbers make a program slow to compile.
        """
        read = {v for op in self.ops for v in op.structure.values()}
        read |= {v for of_op in self.feedback.values() for v in of_op.values()}
        return tuple(sorted(read.intersection(self.program.constants)))

    def bound(self, structures: dict[str, dict[str, Any]]) -> ETraceGraph:
        """The graph with the arrays of its ops' structures, for the ops' rules."""
        if not any(structures.values()):
            return self
        ops = {op.key: op.bound(structures.get(op.key, {})) for op in self.ops}
        relations = self.hidden_param_op_relations
        return replace(
            self,
            ops=tuple(ops.values()),
            hidden_param_op_relations=tuple(replace(r, op=ops[r.key]) for r in relations),
        )

    def restricted(self, keys: Set[str]) -> ETraceGraph:
        """The graph with these ops and their relations alone."""
        relations = self.hidden_param_op_relations
        return replace(
            self,
            ops=tuple(op for op in self.ops if op.key in keys),
            hidden_param_op_relations=tuple(r for r in relations if r.key in keys),
        )

    def batch_axis(self, group: HiddenGroup) -> int | None:
        """The axis of the group's states that is known to be the batch."""
        axis, *others = {self.batch_axes.get(c) for c in group.states}
        # a rule's own group may join states of other shapes
        known = axis is not None and group.shape[axis : axis + 1] == (self.lanes,)
        return axis if known and not others else None

    def __repr__(self) -> str:
        return (
            f'ETraceGraph({len(self.hidden_groups)} hidden groups, '
            f'{len(self.hidden_param_op_relations)} relations, '
            f'{len(self.routes)} parameters; braintrace.report(graph) shows them)'
        )


def readouts(graph: ETraceGraph) -> tuple[OpUse, ...]:
    """The owned ops that read, as floats, what another op made, and whose own result no op reads,
    in the step or through a state.
    """
    program = graph.program
    # which ops are behind a value, by any number of steps
    start = {op.y: 1 << k for k, op in enumerate(graph.ops)}
    facts = over_steps(program, start, range(len(program.carry)))
    read = union(facts, (v for i in program.ops for v in program.equations[i].ins))
    last = (op for k, op in enumerate(graph.ops) if op.owned and not read >> k & 1)
    return tuple(op for op in last if op.x is not None and is_inexact(op.x_aval) and facts[op.x])
