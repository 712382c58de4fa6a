"""The rows of a report as plain data, and findings in sentences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self

import jax.numpy as jnp

from .._compiler import WINDOWS, Diagnostic, ETraceGraph, OpUse
from ..errors import OptionError

# warnings and errors ------------------------------------------------------------------------------
#
# The findings of the compiler in sentences: the words of ``_compiler/kinds.py``, filled in.


# of a traced parameter under a rule that remembers nothing
FORGETS = (
    'its trace remembers no earlier step under this rule: its gradient holds the current step only',
    'Give ES_D_RTRL a decay above 0 (a rank above 1), or use D_RTRL.',
)

# what to do where the op in question reads the hidden state itself, as the reset gate of a GRU does
GATE = (
    'Apply its result behind the other op, as in h = tanh(op1(x) + gate * op2(h)), '
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
    """What stands in the braces of a sentence."""
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
    """One array of the trace; ``batch_axis`` is None where it does not grow with the batch."""

    group: str
    slot: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    batch_axis: int | None

    def at(self, batch_size: int) -> TraceRow:
        if self.batch_axis is None:
            return self
        shape = (*self.shape[: self.batch_axis], batch_size, *self.shape[self.batch_axis + 1 :])
        size = math.prod(shape) * jnp.dtype(self.dtype).itemsize
        return dataclasses.replace(self, shape=shape, bytes=size)


@dataclass(frozen=True)
class RelationRow:
    """An op, the parameters behind each of its weights, the groups that it feeds, and its trace.

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
    """What each of some devices holds and sends, in bytes: see :meth:`ReportData.at`."""

    devices: int
    held: int
    gradient: int
    units_apart: bool


@dataclass(frozen=True, repr=False)
class ReportData:
    """The contents of a report."""

    rule: str
    approximation: str
    axes: tuple[str, ...]
    batch_size: int | None
    groups: tuple[GroupRow, ...]
    relations: tuple[RelationRow, ...]
    parameters: tuple[ParameterRow, ...]
    cuts: tuple[CutRow, ...]
    diagnostics: tuple[DiagnosticRow, ...]
    graph: ETraceGraph = field(compare=False)
    share: Share | None = None
    share_of: Callable | None = field(default=None, compare=False, repr=False)

    @property
    def memory(self) -> int:
        """Bytes of the whole trace; nothing is allocated."""
        return sum(row.bytes for row in self.relations)

    @property
    def memory_of_lane(self) -> int:
        """Bytes of the trace that one more sample in the batch adds."""
        return self.at(1).memory - self.at(0).memory if self.batch_size is not None else 0

    @property
    def memory_of_head(self) -> int:
        """Bytes of one head's gradients that stay apart by sample, and of an eligibility trace of
        them: the batch size times the parameters.
        """
        sizes = (
            math.prod(row.shape) * jnp.dtype(row.dtype).itemsize
            for row in self.parameters
            if jnp.issubdtype(row.dtype, jnp.inexact)
        )
        return (1 if self.batch_size is None else self.batch_size) * sum(sizes)

    @property
    def exact(self) -> bool:
        """Whether every gradient holds the whole past.

        It is False as well where weights of ops are constants, and no parameter has a past.
        """
        if any(row.left_out for row in self.parameters):
            return False
        constant = any(found.kind == 'constant-weight' for found in self.diagnostics)
        return not constant or any(row.history == 'whole' for row in self.parameters)

    def at(self, batch_size: int, *, param_specs=None, batch_axis=None, mesh=None) -> Self:
        """This report at another batch size; shapes of states stay as they were compiled.

        With a ``mesh``, also of no devices (``jax.sharding.AbstractMesh``), it has ``share``: what
        a device holds and sends where ``partition_specs`` of the learner puts the arrays, given
        ``param_specs`` (None: each device has all parameters) and ``batch_axis``. In bytes:
        ``share.held``, its parts of params, carry, trace and t, and ``share.gradient``, what it
        exchanges for each gradient; with ``share.units_apart`` inputs and states at each step,
        which ``gradient`` leaves out.

        >>> import braintrace, jax, jax.numpy as jnp
        >>> model, x = braintrace.nn.MinGRUCell(2, 4), jnp.zeros((3, 2))
        >>> report = braintrace.compile(model, 'D_RTRL', x, batch_size=3).report
        >>> mesh = jax.sharding.AbstractMesh((8,), ('data',))
        >>> report.at(64, batch_axis='data', mesh=mesh).share
        Share(devices=8, held=1024, gradient=96, units_apart=False)
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 0:
            raise OptionError(f'batch_size is {batch_size!r}; give an int >= 0.')
        if self.batch_size is None:
            raise OptionError(
                'the step has no batch axis that its ops share, so its trace has no other batch '
                f'size than {batch_size}: it '
                f'takes {self.memory} bytes as compiled. Under jax.vmap count that for each lane.'
            )
        relations = tuple(
            dataclasses.replace(r, trace=tuple(t.at(batch_size) for t in r.trace))
            for r in self.relations
        )
        share = None
        if mesh is None and (param_specs is not None or batch_axis is not None):
            raise OptionError(
                'param_specs and batch_axis say where arrays lie on a mesh, and mesh is left out. '
                'Give one; a `jax.sharding.AbstractMesh` needs no devices.'
            )
        if mesh is not None:
            if self.share_of is None:
                raise OptionError(
                    'a report of a graph knows no mesh; ask that of a learner: `learner.report.at('
                    'batch_size, param_specs=..., batch_axis=..., mesh=...)`.'
                )
            share = self.share_of(batch_size, param_specs, batch_axis, mesh)
        return dataclasses.replace(self, batch_size=batch_size, relations=relations, share=share)

    def as_dict(self) -> dict:
        """Everything as dicts, lists, strings, numbers and None, as for JSON."""
        return {**_plain(self), 'memory': self.memory, 'exact': self.exact}


def _plain(value):
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if f.name not in ('graph', 'share_of')]
        value = {name: getattr(value, name) for name in names}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value
