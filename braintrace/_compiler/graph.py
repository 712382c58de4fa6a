"""What the compiler found: hidden groups, relations, routes and diagnostics, as frozen records."""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .explain import explain
from .mermaid import to_mermaid
from .program import Program
from .recurrence import Groups
from .report import Report, make_report

__all__ = ['Coordinates', 'Diagnostic', 'ETraceGraph', 'HiddenGroup', 'OpUse', 'Relation', 'Route']


@dataclass(frozen=True)
class HiddenGroup:
    """``num_state`` hidden states of one shape, coupled position by position; ``states`` are positions in the carry."""
    name: str
    paths: tuple[str, ...]
    states: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any

    @property
    def num_state(self) -> int:
        return len(self.states)


@dataclass(frozen=True, eq=False)
class OpUse:
    """One application ``y = op(x, w...)`` of an ETP primitive in the step.

    ``trainable`` maps trainable names to value numbers, ``parameters`` the same names to positions of the parameters that
    each is a function of. ``owned``: the op's weights come from parameters alone, so its weight gradient is ``xy_to_dw``.
    ``repeats``: the lengths of the loops around it, leading axes of its x and y; ``conditional``: it stands in a branch.
    """
    key: str
    equation: int
    primitive: Any
    params: dict
    x: int | None
    y: int
    trainable: dict[str, int]
    parameters: dict[str, tuple[int, ...]]
    owned: bool
    where: str
    x_aval: Any
    y_aval: Any
    weight_avals: dict[str, Any]
    repeats: tuple[int, ...] = ()
    conditional: bool = False

    @property
    def pointwise(self) -> bool:
        """Whether y is the one weight, element by element, so that the rules hold for weights of any shape."""
        return self.x is None and self.primitive.gradient_enabled and self.primitive.original is None

    def impl(self, x, weights: dict):
        """y as a function of x and the weights."""
        slots = self.primitive.trainable_invars_fn(self.params)
        args: list = [None] * (len(slots) + (self.x is not None))
        for name, k in slots.items():
            args[k] = weights[name]
        if self.x is not None:
            args[self.primitive.x_invar_index] = x
        outs = self.primitive.impl_fn(*args, **self.params)
        return outs[self.primitive.y_outvar_index] if self.primitive.multiple_results else outs


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Where a relation's trace entries sit.

    ``shape`` is y's shape, or the group's where y lacks axes of the hidden state (``expanded``). ``positions`` gives each
    entry's flat position in the group, or None where entry and position are the same.
    """
    shape: tuple[int, ...]
    group_shape: tuple[int, ...]
    positions: np.ndarray | None
    expanded: bool = False

    def has_lanes(self, lanes: int | None) -> bool:
        """Whether axis 0 of the entries is that of the hidden group, ``lanes`` long (see :meth:`ETraceGraph.lanes_of`)."""
        if lanes is None or self.shape[:1] != (lanes,) or self.group_shape[:1] != (lanes,):
            return False
        if self.positions is None or not lanes:
            return True
        lane = self.positions.reshape(lanes, -1) // max(1, math.prod(self.group_shape[1:]))
        return bool((lane == np.arange(lanes)[:, None]).all())


@dataclass(frozen=True, eq=False)
class Relation:
    """One op and the hidden groups that its y reaches along position-wise paths within the step.

    ``only_through_groups``: y reaches nothing but by new states of these groups, so ``dL/dy = sum_s L_s D_f,s``.
    """
    op: OpUse
    groups: tuple[HiddenGroup, ...]
    coordinates: tuple[Coordinates, ...]
    paths: dict[str, tuple[str, ...]]
    only_through_groups: bool

    @property
    def key(self) -> str:
        return self.op.key

    @property
    def primitive(self):
        return self.op.primitive

    @property
    def trainable_vars(self) -> dict[str, int]:
        return self.op.trainable


@dataclass(frozen=True)
class Route:
    """Where a parameter's gradient comes from, and why.

    ``trace`` (reason: the primitive): history and same step. ``same-step``: this step only, for one of the reasons

    - ``no_hidden_state``: it reaches no hidden state, as a readout does; nothing is missing;
    - ``not_etp_op``: it reaches a hidden state by a plain operation; use a braintrace op;
    - ``weight_then_weight``: its op reaches the state only through another op or a mixing equation, as GRU's reset gate does;
    - ``mixing_tail``: its op's result reaches the state only through equations that mix its positions, such as a cumulative sum;
    - ``lost_relation``: its op's result is repeated, or broadcast inside, over a state's positions;
    - ``input_dependent_weight``: its op's weight changes from step to step;
    - ``opaque_call:<primitive>``: its op stands inside a function with a derivative rule of its own, which is kept;
    - ``not_hidden``: it reaches later steps through a part of the carry that is no hidden state;
    - ``unused``: it reaches nothing.

    ``frozen``: ``not_trainable`` or ``not_inexact``; its gradient is zero.
    """
    kind: str
    reason: str
    location: str = ''


@dataclass(frozen=True)
class Diagnostic:
    """Something the compiler did that changes or limits a gradient."""
    kind: str
    level: str
    message: str
    path: str = ''
    location: str = ''


@dataclass(frozen=True, eq=False)
class ETraceGraph:
    """The compiled structure of one step of a model.

    ``hidden_groups``, ``hidden_param_op_relations``, ``routes`` (path -> :class:`Route`), ``diagnostics``; ``report()`` shows
    them, ``explain(path)`` tells of one parameter, ``to_mermaid()`` draws them. ``rule``: the one that it was compiled for, or
    None. ``mixing`` maps equations that read another position to the reason, ``recurrent`` every cut equation to the groups that
    it leads to, ``laned`` the positions in the carry whose axis 0 is the batch, ``cut_reads`` each group to what reads it and
    leads to a hidden state without carrying its trace on: where that is empty, D_RTRL is exact for the group's traced weights.
    """
    program: Program
    hidden_groups: tuple[HiddenGroup, ...]
    ops: tuple[OpUse, ...]
    hidden_param_op_relations: tuple[Relation, ...]
    routes: dict[str, Route]
    diagnostics: tuple[Diagnostic, ...]
    mixing: dict[int, str]
    recurrent: dict[int, Groups]
    cut_reads: dict[str, tuple[str, ...]]
    direct: tuple[int, ...]
    colours: tuple[tuple[tuple[int, ...], ...], ...]
    lanes: int | None
    laned: frozenset[int]

    rule: Any = field(default=None, kw_only=True)

    def lanes_of(self, group: HiddenGroup) -> int | None:
        """The batch size, if axis 0 of the group's states is known to be the batch, else None."""
        return self.lanes if self.laned.issuperset(group.states) else None

    def __repr__(self) -> str:
        return (f'ETraceGraph({len(self.hidden_groups)} hidden groups, {len(self.hidden_param_op_relations)} relations, '
                f'{len(self.routes)} parameters; graph.report() shows them)')

    def report(self, rule: Any = None, batch_size: int | None = None) -> Report:
        """Groups, relations, routes, cuts, diagnostics, exactness, and the memory of the trace, which is not allocated for it.

        ``rule``: a value of :mod:`braintrace.rules`; default the one that the graph was compiled for (D_RTRL for
        ``compile_etrace_graph``). ``batch_size``: default the one that was compiled. Raises :class:`braintrace.OptionError`
        for another batch size where the step has no batch axis.

        >>> import brainstate, braintrace, jax.numpy as jnp
        >>> model = braintrace.nn.MiniGRU(2, 4)
        >>> _ = brainstate.nn.init_all_states(model, batch_size=3)
        >>> report = braintrace.compile_etrace_graph(model, jnp.zeros((3, 2))).report(batch_size=64)
        >>> print(str(report).splitlines()[1])
        trace memory: 6.0 KiB at batch size 64, 96 B for each further sample
        """
        return make_report(self, self.rule if rule is None else rule, batch_size)

    def explain(self, path: str | tuple) -> str:
        """One parameter in a few sentences: its route and why, its op and place, its trace, what is left out, what to change.

        ``path``: as printed in the report, the end of that where only one parameter or module has
        it, or a tuple of keys; one that leads to several parameters explains each. Raises
        :class:`braintrace.OptionError` with the nearest paths for an unknown one.

        >>> import brainstate, braintrace, jax.numpy as jnp
        >>> model = braintrace.nn.GRUCell(2, 4)
        >>> _ = brainstate.nn.init_all_states(model, batch_size=3)
        >>> graph = braintrace.compile_etrace_graph(model, jnp.zeros((3, 2)))
        >>> print(graph.explain('Wr/weight/bias'))
        Wr/weight/bias float32[4] has route same-step (weight_then_weight): ...
        """
        return explain(self, self.report(), path)

    def to_mermaid(self) -> str:
        """The graph as a Mermaid flowchart: parameters, ops, mixing equations, hidden groups; dashed where history is cut.

        >>> import brainstate, braintrace, jax.numpy as jnp
        >>> model = braintrace.nn.MiniGRU(2, 4)
        >>> _ = brainstate.nn.init_all_states(model, batch_size=3)
        >>> print(braintrace.compile_etrace_graph(model, jnp.zeros((3, 2))).to_mermaid())
        flowchart LR
          ...
        """
        return to_mermaid(self)
