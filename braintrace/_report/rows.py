"""The rows of a report as plain data, and findings in sentences."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from .._compiler import WINDOWS, Diagnostic, ETraceGraph, OpUse, leaks

# warnings and errors ------------------------------------------------------------------------------
#
# The findings of the compiler in sentences: the words of ``_compiler/kinds.py``, filled in.


# of a traced parameter under a rule that remembers nothing
FORGETS = (
    'its trace remembers no earlier step under this rule: its gradient holds the current step only',
    'Give ES_D_RTRL a decay above 0 (a rank above 1), or use D_RTRL.',
)

# of a traced parameter whose trace has no entries, for a later step reads them through cuts alone,
# or not at all
UNREAD = (
    'later steps read what it feeds only through places that are cut, so its trace has no entries: '
    'its gradient holds the current step only',
    f'Let each unit read itself from step to step, as a leak does, or take {WINDOWS}.',
)
UNUSED = 'no later step reads what it feeds, so the current step is its whole gradient', ''

# what to do where the op in question reads the hidden state itself, as the reset gate of a GRU does
GATE = (
    'Apply its result after the other op, as in h = tanh(op1(x) + gate * op2(h)), '
    f'take {WINDOWS}, or accept this.'
)


def message(graph: ETraceGraph, found: Diagnostic) -> str:
    """A finding in words, without its place and the full stop."""
    return found.row.says.format(**_words(graph, found))


def constant_text(graph: ETraceGraph, found: Diagnostic) -> str:
    """Which weight of an op nothing trains."""
    return found.row.meaning.format(**_words(graph, found))


def placed(text: str, location: str) -> str:
    return f'{text} [{location}]' if location else text


def op_text(op: OpUse) -> str:
    return f'{op.primitive.name} ({op.key})'


def chain_text(graph: ETraceGraph, found: Diagnostic) -> str:
    """The mixing equations as the user wrote them: one, or a reduction and the broadcast of its
    result.
    """
    names = [graph.program.equations[i].primitive.name for i in found.equations]
    return ', spread by '.join(names)


def _words(graph: ETraceGraph, found: Diagnostic) -> dict[str, str]:
    """What is put in the braces of a sentence."""
    states = ', '.join(found.states)
    words = {
        'path': found.path,
        'group': found.group,
        'slot': found.slot,
        'states': states,
        'reason': found.reason,
        'made': f'state {states}, which is no ParamState and not among the parameters'
        if states
        else 'a constant: no ParamState, and not among the parameters',
    }
    op = graph.op_at.get(found.equations[0]) if found.equations else None
    if found.equations:
        eqn = graph.program.equations[found.equations[0]]
        name = eqn.primitive.name
        words |= {'name': name, 'where': eqn.where, 'what': name if op is None else op_text(op)}
        words['chain'] = chain_text(graph, found)
    if found.kind == 'lost-relation' and op is not None:
        shape = next(g.shape for g in graph.hidden_groups if g.name == found.group)
        words |= {'y': str(list(op.y_aval.shape)), 'shape': str(list(shape))}
    if found.kind == 'leaky-readout':
        shares = [leak.share for leak in leaks(graph) if leak.op.key == found.path]
        words['share'] = ', '.join(f'{s.mean():.4g}' for s in shares if s is not None)
    if found.kind == 'partial-trace':
        own = [d for d in graph.found('use') if d.path == found.path and d.reason]
        words['uses'] = ' and '.join(dict.fromkeys(message(graph, use) for use in own))
    if found.kind == 'marked' and op is not None:
        of = [r for r in graph.hidden_param_op_relations if r.op.equation == found.equations[0]]
        groups = ', '.join(group.name for rel in of for group in rel.groups)
        words['op'] = op.primitive.name
        words['trace'] = f'with a trace to {groups}' if groups else 'without a trace'
    return words


# rows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupRow:
    """A hidden group; ``left_out``: the places where its past is cut.

    ``derived``: states that are functions of the members, and no part of a trace.
    """

    name: str
    members: tuple[str, ...]
    num_state: int
    shape: tuple[int, ...]
    dtype: str
    left_out: tuple[str, ...]
    derived: tuple[str, ...] = ()


@dataclass(frozen=True)
class TraceRow:
    """One array of the trace; ``batch_axis`` is None where it does not grow with the batch.
    ``rounds``: the dtype of its states and weights, where that is wider than its own.
    """

    group: str
    slot: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    batch_axis: int | None
    rounds: str = ''

    def at(self, batch_size: int) -> TraceRow:
        if self.batch_axis is None:
            return self
        shape = (*self.shape[: self.batch_axis], batch_size, *self.shape[self.batch_axis + 1 :])
        size = math.prod(shape) * jnp.dtype(self.dtype).itemsize
        return dataclasses.replace(self, shape=shape, bytes=size)


@dataclass(frozen=True)
class RelationRow:
    """An op, the parameters that make each of its weights, the groups that it feeds, and its trace.

    ``repeats``: lengths of the loops inside the step around the op.
    """

    key: str
    op: str
    parameters: dict[str, tuple[str, ...]]
    groups: tuple[str, ...]
    repeats: tuple[int, ...]
    trace: tuple[TraceRow, ...]
    location: str

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.trace)


@dataclass(frozen=True)
class LeftOut:
    """A part of a parameter's history that its gradient lacks, in words.

    ``cut``: the past of a group that is cut somewhere; ``use``: a use of the parameter without a
    trace; ``lost``: a way to a later step on which the trace is lost; ``rule``: the approximation
    of the rule.
    """

    kind: Literal['cut', 'use', 'lost', 'rule']
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ParameterRow:
    """A parameter's route, and how much of its history the gradient holds.

    ``history``: ``whole``, ``part`` or ``none``; ``not needed`` where the current step is the whole
    gradient. ``left_out``: the ways on which it is lost.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    route: str
    reason: str
    meaning: str
    advice: str
    history: str
    left_out: tuple[LeftOut, ...]
    location: str


@dataclass(frozen=True)
class CutRow:
    """Equations of one kind at one place where history ends.

    ``primitive``, ``op``: the primitive and the key of an op, else empty. ``reads``: groups whose
    past ends there; ``reaches``: groups whose new states the result leads to.
    """

    what: str
    reason: str
    reads: tuple[str, ...]
    reaches: tuple[str, ...]
    location: str
    primitive: str = ''
    op: str = ''

    def __str__(self) -> str:
        return placed(self.what, self.location)


@dataclass(frozen=True)
class DiagnosticRow:
    """A :class:`braintrace.Diagnostic` in words."""

    kind: str
    level: str
    message: str
    path: str
    location: str


@dataclass(frozen=True)
class Share:
    """What each of some devices holds and sends, in bytes: see :meth:`Report.at`."""

    devices: int
    held: int
    gradient: int
    units_apart: bool
