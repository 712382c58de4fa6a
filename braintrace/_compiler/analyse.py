"""From a step function to an :class:`ETraceGraph`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ..errors import CompileError, OptionError
from .analysis.findings import direct_parameters, find_findings, split_alike
from .analysis.lanes import find_batch
from .analysis.ops import find_ops
from .analysis.relations import (
    Positions,
    find_derived,
    find_positions,
    find_relations,
    split_among_real_states,
)
from .equations import has
from .graph import Derived, ETraceGraph, HiddenGroup
from .policy import DEFAULT, Policy
from .program.control_flow import (
    MustUnroll,
    decide,
    peel,
    refuse_mutable_arrays,
    refuse_ops_in_while,
)
from .program.dataflow import reached_groups
from .program.flatten import Lowering, flatten
from .program.leaves import describe_aval, path_name
from .program.program import Program, forward_copies
from .program.tracing import trace_step
from .stacked_states import MustSplit, taken_apart


def analyse(
    cell: Callable,
    params,
    carry,
    inputs: tuple,
    *,
    trainable: Callable = lambda path, leaf: True,
    hidden: Callable = lambda path, leaf: True,
    policy: Policy = DEFAULT,
) -> ETraceGraph:
    """Compile one step ``cell(params, carry, *inputs) -> (outputs, carry)``.

    Of ``params``, ``carry`` and ``inputs`` only shapes and dtypes are read.
    """
    # trace: the step as JAX sees it
    step, lowering, splits = trace_step(cell, params, carry, inputs), Lowering(policy), {}
    refuse_ops_in_while(step.jaxpr)
    refuse_mutable_arrays(step.jaxpr)
    while True:
        # rewrite: flat equations, copies removed, arrays of several states taken apart
        program = forward_copies(flatten(step, lowering, trainable, hidden))
        program = taken_apart(program, splits)
        # control flow on the way between states is lowered, one level at a time
        open_ends = decide(program, policy) or peel(program)
        lowering.decide(open_ends)
        if open_ends:
            continue
        # analyse: the findings may ask for another rewriting
        try:
            return _graph(program, policy, {k for k, split in splits.items() if split is None})
        except MustUnroll as e:
            lowering.decide(e.decision)
        except MustSplit as e:
            splits.update(e.splits)


def analyse_again(graph: ETraceGraph, program: Program) -> ETraceGraph:
    """The graph of a step into whose program equations were put."""
    return _graph(program, graph.policy, range(len(program.leaf_keys)))


def _graph(program: Program, policy: Policy, whole: Collection[int]) -> ETraceGraph:
    """``whole``: the leaves of the carry that must not be split."""
    # positions: which states form a group, which equations mix positions
    positions = find_positions(program)
    split_alike(program, positions, whole)
    split_among_real_states(program, positions)
    derived = find_derived(positions)
    # the names that the policy gives to groups, by the place in the carry of a state of theirs
    names: dict[int, str] = {}
    for name, path in dict(policy.groups).items():
        names |= dict.fromkeys(_pieces(program, 'groups', path), name)
    groups = tuple(_group(positions, states, derived, names) for states in positions.groups)
    taken = [group.name for group in groups]
    if twice := [name for name in dict.fromkeys(taken) if taken.count(name) > 1]:
        paths = [group.paths for group in groups if group.name == twice[0]]
        raise OptionError(f'groups has {twice[0]!r} for several groups: {paths}; name each.')
    group_of = {c: g for g, group in enumerate(groups) for c in group.carried}
    recurrent = reached_groups(program, group_of, {*program.ops, *positions.mixing})
    # relations: which op feeds which group
    ops = find_ops(program)
    relations, missing = find_relations(positions, groups, ops)
    lanes, batch_axes = find_batch(program, groups, ops, relations, _named(program, policy))
    graph = ETraceGraph(
        program=program,
        hidden_groups=groups,
        derived=derived,
        ops=ops,
        hidden_param_op_relations=relations,
        findings=(),
        mixing=positions.mixing,
        recurrent=recurrent,
        direct=direct_parameters(program, ops),
        colours=_colours(positions, derived),
        lanes=lanes,
        batch_axes=batch_axes,
        policy=policy,
    )
    # groups (r, s) of different shapes where s reads the old r by plain paths
    of = positions.group_of
    reads = ((r, s) for s, sweep in enumerate(positions.sweeps) for r in sweep.old)
    crossing = {
        (of[r], of[s]) for r, s in reads if of[r] != of[s] and has(positions.sweeps[s].old[r])
    }
    # findings: where each parameter's gradient comes from, and what the traces leave out
    findings = find_findings(graph, missing, sorted(crossing), recurrent)
    return replace(graph, findings=findings)


def _group(
    positions: Positions, states: Sequence[int], derived: Derived, names: dict[int, str]
) -> HiddenGroup:
    """``names``: of groups, by the place of a state of theirs in the carry."""
    program = positions.program
    every = [program.hidden[s] for s in states]
    carry = tuple(c for c in every if c not in derived.states)
    own = [s for s in states if program.hidden[s] in carry]
    reads = tuple(tuple(r in _old(positions, s, derived) for r in own) for s in own)
    paths = tuple(program.carry_names[c] for c in carry)
    given = list(dict.fromkeys(names[c] for c in every if c in names))
    if len(given) > 1:
        raise OptionError(
            f'groups names {given}, and their states are one group ({", ".join(paths)}): leave one '
            'of the names.'
        )
    name = given[0] if given else ','.join(p.replace(',', '~2') for p in paths)
    aval = program.avals[program.carry[carry[0]]]
    made = tuple(c for c in every if c in derived.states)
    return HiddenGroup(name, paths, carry, aval.shape, aval.dtype, made, reads)


def _old(positions: Positions, state: int, derived: Derived) -> set[int]:
    """The old states that a new one may read, by number in ``program.hidden``: for a derived one
    all that it may be made of.
    """
    hidden, sweep = positions.program.hidden, positions.sweeps[state]
    read = sweep.clocks.union(sweep.old)
    made = {m for m in read if hidden[m] in derived.states}
    behind = {r for m in made for r in positions.groups[positions.group_of[m]]}
    return read | {r for r in behind if hidden[r] not in derived.states}


def _colours(positions: Positions, derived: Derived) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each state index, sets of groups whose D passes share no y and no old state: one VJP
    serves a set.
    """
    made = {s for s, c in enumerate(positions.program.hidden) if c in derived.states}
    groups = [[s for s in states if s not in made] for states in positions.groups]
    result = []
    for k in range(max(map(len, groups), default=0)):
        sets: list[tuple[list[int], set]] = []
        for g, states in enumerate(groups):
            if k < len(states):
                touched = {('h', r) for r in _old(positions, states[k], derived)}
                touched |= {('y', i) for i in positions.sweeps[states[k]].y}
                # the first set that the group fits in, else one of its own
                home = next((entry for entry in sets if entry[1].isdisjoint(touched)), None)
                if home is None:
                    home = ([], set())
                    sets.append(home)
                home[0].append(g)
                home[1].update(touched)
        result.append(tuple(tuple(members) for members, _ in sets))
    return tuple(result)


def _named(program: Program, policy: Policy) -> frozenset[int]:
    """Positions in the carry that ``policy.batched`` names, all of one batch size."""
    named: dict[int, str] = {}
    for path in policy.batched:
        named |= dict.fromkeys(_pieces(program, 'batched', path), path)
    avals = {path: program.avals[program.carry[c]] for c, path in named.items()}
    sizes = {aval.shape[:1] for aval in avals.values()}
    if () in sizes or len(sizes) > 1:
        found = ', '.join(f'{path!r} ({describe_aval(aval)})' for path, aval in avals.items())
        raise OptionError(
            f'batched names {found}; name states whose axis 0 is the batch, as long in each.'
        )
    return frozenset(named)


def _pieces(program: Program, option: str, path: str) -> Collection[int]:
    """The places in the carry of the leaf that an option of the policy names."""
    leaves = {path_name(key): program.pieces(leaf) for leaf, key in enumerate(program.leaf_keys)}
    if path not in leaves:
        raise OptionError(
            f'{option} names {path!r}, which is no leaf of the carry; its leaves '
            f'are {list(leaves)}.'
        )
    return leaves[path]


def check_learnable(graph: ETraceGraph) -> None:
    """Refuse a model that online learning can do nothing for."""
    if not graph.program.hidden:
        raise CompileError(
            'there is no hidden state of a floating-point dtype, so no past to learn from: the '
            'model has no brainstate.HiddenState that holds a value, or the carry of the cell no '
            'such leaf. Give the recurrent state as floats: in a HiddenState that is initialised '
            'before compiling, or in the carry.'
        )
    opaque = next((e for e in graph.program.equations if e.holds_op()), None)
    if not graph.ops and opaque is not None:
        raise CompileError(
            f'{opaque.where}: the only ETP ops of the step are inside {opaque.primitive.name}, '
            'where they have no trace. Apply an op outside of it.'
        )
    if graph.ops:
        return
    # automatic marking found nothing to mark: say why
    program, told = graph.program, {'unmarked': 'parameter', 'closed-over': 'a constant'}
    if program.to_mark is None:
        raise CompileError(
            'the step applies no ETP op. Mark trainable operations: braintrace.matmul(x, W) '
            'instead of x @ W, use the cells of braintrace.nn, or let the compiler mark all: '
            "mark='auto'."
        )
    names = [program.param_names[i] for i in program.to_mark]
    lines = [
        f'  {f"{told[d.kind]} {d.path}".strip()} in '
        f'{program.equations[d.equations[0]].primitive.name} [{d.location}]'
        for d in graph.diagnostics
        if d.kind in told
    ]
    found = '\nFound:\n' + '\n'.join(lines) if lines else ''
    if not names and not program.trainable:
        raise CompileError('params has no trainable leaf of a floating-point dtype to mark.')
    if not names:
        raise CompileError(
            'mark chooses none of the parameters '
            f"{[program.param_names[i] for i in program.trainable]}. Give 'auto', or a function "
            f'(path, leaf) -> bool that is True for some.{found}'
        )
    raise CompileError(
        f'nothing could be marked: no equation applies one of the parameters {names} to an input '
        'or a state in a way that an op can. A weight that the cell closes over is a constant: '
        f'keep it in params (a brainstate.ParamState).{found}'
    )
