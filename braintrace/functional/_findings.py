"""Findings about a cell that is compiled, as warnings and errors: lost history, other shapes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._compiler import (
    WINDOWS,
    Diagnostic,
    ETraceGraph,
    Policy,
    Program,
    abstract,
    describe_aval,
    path_name,
)
from .._report import make_report, message, placed
from .._rules import Rule, pairs, tree_bytes
from .._warnings import tell
from ..errors import NotSupportedError, StructureError, UntracedParameterError
from ._state import flatten_paths

LARGE = 2**30  # bytes of a trace of which a user is told


def tell_findings(graph: ETraceGraph, rule: Rule | None, earlier: list[ETraceGraph]) -> None:
    """One warning for each thing that the user can mend, at the line that compiles, if it was not
    told of ``earlier`` graphs; without traces nothing is lost behind a readout.
    """
    told = {_place(found) for graph in earlier for found in graph.diagnostics}
    silent = () if rule is not None and rule.remembers else ('leaky-readout',)
    for found in graph.diagnostics:
        if found.level != 'warning' or found.kind in silent or _place(found) in told:
            continue
        told.add(_place(found))
        tell(f'{placed(message(graph, found), found.location)}.')


def _place(found: Diagnostic) -> tuple:
    return found.kind, found.path, found.location


def tell_of_trace(graph: ETraceGraph, rule: Rule) -> None:
    """A warning before a large trace is made, and of hidden states of which it has no entries."""
    trace = jax.eval_shape(lambda: rule.init(graph))
    size = tree_bytes(trace)
    full = {pair.group.name for pair in pairs(graph) if pair.states}
    cuts = {found.group: found for found in graph.found('cut') if found.group not in full}
    losing, through = set(), {}
    for relation in graph.hidden_param_op_relations:
        own = {group.name for group in relation.groups}
        if full.isdisjoint(own) and (lost := own & cuts.keys()):
            losing |= {path for of_weight in relation.paths.values() for path in of_weight}
            through |= {name: placed('weights', cuts[name].location) for name in sorted(lost)}
    if rule.remembers and losing:
        places, weights = ', '.join(dict.fromkeys(through.values())), ', '.join(sorted(losing))
        tell(
            f'{rule.title} keeps nothing of earlier steps of {", ".join(through)}: the next step '
            f'reads these units only through {places}, where this rule cuts, so the gradient of '
            f'{weights} holds the current step only. Let each unit read itself too, as a leak or a '
            f'gate does, or take {WINDOWS}.'
        )
    if size <= LARGE:
        return
    shapes = ', '.join(
        f'{key} {list(e.shape)}'
        for key, slots in trace.items()
        for e in sorted(jax.tree.leaves(slots), key=tree_bytes)[-1:]
    )
    cheaper = (
        'braintrace.rules.es_d_rtrl(...)'
        if graph.scope is None
        else "braintrace.rules.d_rtrl(), also with exact windows (inside='exact')"
    )
    tell(
        f'the trace of {rule.title} takes {size / LARGE:.1f} GiB: {shapes}. A cheaper rule is '
        f'{cheaper}; braintrace.report(graph, rule) tells the size of any rule for a graph of '
        'braintrace.compile_etrace_graph, without a trace.'
    )


def check_strict(graph: ETraceGraph) -> None:
    """Refuse every lost or approximated path, but not what a rule leaves out by its nature: ops
    that read a hidden state.
    """
    report = make_report(graph, None)
    unmarked = {found.path for found in graph.diagnostics if found.kind == 'unmarked'}
    # parameters without a trace that reach later steps
    lost = [
        f'  {placed(f"{row.path} is {row.reason}", row.location)}: {row.meaning}. {row.advice}'
        for row in report.parameters
        if row.route == 'same-step'
        and row.reason != 'no_hidden_state'
        and not (row.reason == 'not_etp_op' and row.path in unmarked)
    ]
    # uses without a trace of parameters that have one
    lost += [
        f'  {row.path} has a trace, but not for {left}.'
        for row in report.parameters
        if row.route == 'trace'
        for left in row.left_out
        if left.kind == 'use'
    ]
    # paths between states, and of ops to states
    refused = {found.kind for found in graph.diagnostics if found.row.strict}
    lost += [f'  {placed(d.message, d.location)}.' for d in report.diagnostics if d.kind in refused]
    if lost:
        raise UntracedParameterError(
            'the policy is strict, and the history of these is lost or incomplete:\n'
            + '\n'.join(lost)
            + '\nChange the model, or compile with policy=braintrace.Policy(strict=False).'
        )


@contextmanager
def seen_from_outside() -> Iterator[None]:
    """Refuse, where values of a cell are asked for, a cell that closes over hidden ones."""
    try:
        yield
    except (jax.errors.UnexpectedTracerError, jax.errors.TracerArrayConversionError) as error:
        raise NotSupportedError(
            'the cell closes over an array of a transformation around the learner (jit, vmap, '
            'grad), and its values are asked for here. Make that array a leaf of params (with '
            '`trainable` to leave it out) or an input of the step, and the learner outside of the '
            'transformation.'
        ) from error


def refuse_shapes(program: Program, params, carry, inputs, recompile: str) -> None:
    """Refuse arguments of other shapes than were compiled: say which, and what to do."""
    lines, differ = [], set()
    known = {
        'params': [program.avals[v] for v in program.params],
        'carry': program.leaf_avals,
        'inputs': [program.avals[v] for v in program.inputs],
    }
    for what, tree in (('params', params), ('carry', carry), ('inputs', inputs)):
        was = jax.tree.unflatten(program.trees[what], known[what])
        old, new = (
            {k: describe_aval(abstract(x)) for k, x in flatten_paths(t).items()}
            for t in (was, tree)
        )
        places = {k: f'{what} {path_name(k, "")}'.strip() for k in {**old, **new}}
        other = [k for k in places if old.get(k) != new.get(k)]
        differ |= {what} if other else set()
        lines += [
            f'  {places[k]}: {old.get(k, "absent")} when compiled, {new.get(k, "absent")} now'
            for k in other
        ]
    time = ''
    if 'inputs' in differ:
        time = (
            '\nA call over a sequence gives one step `xs[t]`: time is axis 0, a batch axis 1; a '
            'tuple xs holds several inputs.'
        )
    batch = next((len(x) for x in jax.tree.leaves(inputs) if jnp.ndim(x) > 1), '...')
    raise StructureError(
        'these arguments are not those that were compiled:\n'
        + '\n'.join(lines or ['  the tree (or a unit in it) differs'])
        + time
        + f'\nPass what was compiled, or compile for these too: {recompile.format(batch=batch)}.'
    )


def shown(value: Any) -> str:
    """A function, a rule or a policy as one reads it: its name, and the options that were given."""
    if value is None:
        return 'no rule'
    if not isinstance(value, Rule | Policy):
        code = getattr(inspect.unwrap(value), '__code__', None)
        name = getattr(value, '__qualname__', type(value).__name__)
        return f'{name} ({code.co_filename}:{code.co_firstlineno})' if code else name
    if isinstance(value, Rule) and value.spelled:
        return value.spelled
    name = value.name if isinstance(value, Rule) else type(value).__name__
    own = fields(value) if is_dataclass(value) else ()
    given = [(f.name, getattr(value, f.name)) for f in own if getattr(value, f.name) != f.default]
    return f'{name}({", ".join(f"{n}={x!r}" for n, x in given)})' if given else name
