"""What the compiler found: hidden groups, relations, routes and diagnostics, as frozen records."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .program import Program, describe_aval
from .recurrence import Groups

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
        """Whether axis 0 of the entries is the batch of the hidden group."""
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
    - ``input_dependent_weight``: its op's weight changes from step to step;
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

    ``hidden_groups``, ``hidden_param_op_relations``, ``routes`` (path -> :class:`Route`), ``diagnostics``; ``report()`` prints
    them. ``mixing`` maps equations that read another position to the reason, ``recurrent`` every cut equation to the groups that
    it leads to, ``cut_reads`` each group to what reads it and leads to a hidden state without carrying its trace on: where
    that is empty, D_RTRL is exact for the group's traced weights.
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

    def report(self) -> str:
        """Groups, relations, routes and diagnostics as text."""
        lines = ['hidden groups']
        for g in self.hidden_groups:
            cuts = self.cut_reads[g.name]
            lines.append(f'  {g.name}: shape {list(g.shape)}, {g.num_state} state(s); ' + (
                'D_RTRL is exact for its traced weights' if not cuts else 'D_RTRL leaves out what passes ' + ', '.join(cuts)))
        lines.append('relations')
        for rel in self.hidden_param_op_relations:
            weights = ', '.join(f'{n} <- {" + ".join(p)}' for n, p in rel.paths.items())
            lines.append(f'  {rel.primitive.name} ({weights}) -> {"; ".join(g.name for g in rel.groups)}  [{rel.op.where}]')
        lines.append('parameters')
        for path, route in self.routes.items():
            aval = self.program.avals[self.program.params[self.program.param_names.index(path)]]
            place = f'  [{route.location}]' if route.location else ''
            lines.append(f'  {path} {describe_aval(aval)}: {route.kind} ({route.reason}){place}')
        if self.diagnostics:
            lines.append('diagnostics')
            lines += [f'  {d.level}: {d.message}' + (f'  [{d.location}]' if d.location else '') for d in self.diagnostics]
        return '\n'.join(lines)
