"""From a step function to an :class:`ETraceGraph`."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .._errors import CompileError, NotSupportedError, OptionError, RuleContractError
from . import flow
from . import labels as lb
from .control_flow import MustUnroll, decide, peel, refuse_ops_in_while, unroll
from .copies import forward_copies
from .fixed import fixed_ops, fixed_weights
from .flatten import Decisions, flatten
from .graph import Coordinates, Diagnostic, ETraceGraph, HiddenGroup, OpUse, Relation
from .lanes import carried_lanes
from .losses import USE, name_mixing, op_name, untraced_uses
from .pieces import MustSplit, taken_apart
from .policy import DEFAULT, Policy
from .positions import Positions, find_positions
from .program import Equation, Loop, Program, describe_aval, is_inexact, path_name, trace_step
from .recurrence import reached_groups
from .routes import find_routes, route_notes
from .stacked import split_alike, stacked_notes

__all__ = ['analyse', 'check_learnable']


def analyse(cell: Callable, params, carry, inputs: tuple, *, trainable: Callable = lambda path, leaf: True,
            hidden: Callable = lambda path, leaf: True, policy: Policy = DEFAULT) -> ETraceGraph:
    """Compile one step ``cell(params, carry, *inputs) -> (outputs, carry)``.

    ``params``, ``carry`` and ``inputs`` may be arrays or ``ShapeDtypeStruct``s: only shapes and dtypes are read.
    """
    step, decisions, splits = trace_step(cell, params, carry, inputs), Decisions(), {}
    refuse_ops_in_while(step.jaxpr)
    while True:
        program = forward_copies(flatten(step, policy, decisions, trainable, hidden))
        program = taken_apart(program, splits)
        open_ends = decide(program, policy) or peel(program)
        decisions.update(open_ends)
        if open_ends:
            continue
        try:
            return _graph(program, policy, {k for k, split in splits.items() if split is None})
        except MustUnroll as e:
            decisions.update(unroll(e.loop))
        except MustSplit as e:
            splits.update(e.splits)


def _graph(program: Program, policy: Policy, whole: set[int]) -> ETraceGraph:
    positions, analysis = find_positions(program)
    split_alike(program, positions, whole)
    groups = [_group(program, states) for states in positions.groups]
    ops = _ops(program, flow.forward(program, *_sources_of_weights(program)))
    relations, notes = _relations(program, positions, analysis, groups, ops)
    forgetful = _forgetful(program)
    lost = {note.path for note in notes if note.kind == 'lost-relation'}
    routes = find_routes(program, ops, relations, forgetful, lost)
    cross = _cross_notes(program, positions, groups)
    diagnostics = list(dict.fromkeys([*_mixing_notes(program, positions), *notes, *cross,
                                      *fixed_weights(program, ops),
                                      *_forgetful_notes(program, ops, forgetful), *route_notes(routes)]))
    if ops and groups and not relations and not fixed_ops(program, ops):
        diagnostics.append(Diagnostic('no-relation', 'warning', 'no weight of an ETP op reaches a hidden state position by position: '
                                      'nothing has a trace, and every gradient holds the current step only', location=ops[0].where))
    group_of = {c: g for g, group in enumerate(groups) for c in group.states}
    recurrent = reached_groups(program, group_of, {*program.ops, *positions.mixing})
    diagnostics += stacked_notes(program, positions.mixing, group_of, recurrent)
    lanes = _lanes(program, ops)
    graph = ETraceGraph(program, tuple(groups), tuple(ops), tuple(relations), routes, tuple(diagnostics), positions.mixing, recurrent,
                        _cut_reads(program, groups, group_of, recurrent, ops, relations, cross, forgetful),
                        _direct(program, ops), _colours(positions), lanes, _laned(program, policy, groups, ops, relations, lanes))
    return _with_partial_traces(graph)


def _group(program: Program, states) -> HiddenGroup:
    carry = tuple(program.hidden[s] for s in states)
    paths = tuple(program.carry_names[c] for c in carry)
    aval = program.avals[program.carry[carry[0]]]
    return HiddenGroup(','.join(p.replace(',', '~2') for p in paths), paths, carry, aval.shape, aval.dtype)


def _sources_of_weights(program: Program) -> tuple[dict[int, int], Callable[[int, int], int]]:
    """Facts for :func:`flow.forward`: bit ``i`` for parameter ``i``; above them ``moving`` and ``turning``.

    Moving: it changes from step to step. Turning: it changes from iteration to iteration of an inner loop.
    """
    moving, turning, names = _weight_bits(program)
    start = {v: 1 << i if i in program.trainable else 0 for i, v in enumerate(program.params)}
    start |= dict.fromkeys((*program.carry, *program.inputs), moving)
    for i in program.end_of:
        start |= dict.fromkeys(program.equations[i].outs, turning)

    def keep(i: int, found: int) -> int:
        eqn = program.equations[i]
        return (found | moving if eqn.effects else found) & ~(names if i in program.op_set and found & moving else 0)
    return start, keep


def _weight_bits(program: Program) -> tuple[int, int, int]:
    """``moving``, ``turning``, and the bits of all parameters."""
    n = len(program.params)
    return 1 << n, 1 << n + 1, (1 << n) - 1


def _ops(program: Program, facts: list[int]) -> list[OpUse]:
    uses, seen = [], {}
    moving, turning, names = _weight_bits(program)
    for i in program.ops:
        eqn = program.equations[i]
        p = eqn.primitive
        slots = _trainable_slots(p, eqn)
        trainable = {name: eqn.ins[k] for name, k in slots.items()}
        parameters = {n: tuple(flow.members(facts[v] & names)) for n, v in trainable.items()}
        found = flow.union(facts, trainable.values())
        if found & turning and not found & moving:
            raise MustUnroll(_loop_of_weights(program, eqn, trainable.values()))
        owned = not found & moving and any(parameters.values())
        first = next((program.param_names[ps[0]].replace('#', '~3') for ps in parameters.values() if ps), f'({p.name})')
        seen[first] = seen.get(first, -1) + 1
        key = first if not seen[first] else f'{first}#{seen[first]}'
        x = None if p.x_invar_index is None else eqn.ins[p.x_invar_index]
        y = eqn.outs[p.y_outvar_index]
        uses.append(OpUse(key, i, p, eqn.params, x, y, trainable, parameters, owned, eqn.where, None if x is None else
                          program.avals[x], program.avals[y], {n: program.avals[v] for n, v in trainable.items()}, eqn.repeats,
                          eqn.conditional))
    return uses


def _loop_of_weights(program: Program, eqn: Equation, weights) -> Loop:
    """The loop around an op whose weights change in it, or the one that makes them."""
    around = [r for r in eqn.scope if isinstance(r, Loop)]
    made = [program.equations[i].loop for v in weights for i in flow.slice_behind(program, v, ()) if program.equations[i].loop]
    return (around or made)[-1]


def _trainable_slots(primitive, eqn) -> dict[str, int]:
    slots = dict(primitive.trainable_invars_fn(eqn.params))
    wrong = {n: k for n, k in slots.items() if not 0 <= k < len(eqn.ins)}
    if wrong:
        raise RuleContractError(f'{eqn.where}: trainable_invars_fn of {primitive.name} names inputs {wrong}, but the equation has '
                                f'{len(eqn.ins)} inputs. Return {{name: position}} within them.')
    others = set(range(len(eqn.ins))) - set(slots.values()) - {primitive.x_invar_index}
    if others:
        raise RuleContractError(f'{eqn.where}: inputs {sorted(others)} of {primitive.name} are neither its x nor trainable, and no '
                                'rule sees them. Name them in trainable_invars_fn, or make them static parameters.')
    return slots


def _relations(program, positions: Positions, analysis, groups, ops) -> tuple[list[Relation], list[Diagnostic]]:
    relations, notes = [], []
    near: dict[int, set[int]] = {}
    for s, sweep in enumerate(positions.sweeps):
        for i in sweep.y:
            near.setdefault(i, set()).add(positions.group_of[s])
    for op in ops:
        reached, coords, lost = [], [], False
        for g in sorted(near.get(op.equation, ())):
            states, group = positions.groups[g], groups[g]
            found = _coordinates(program, positions, analysis, op, states, group)
            if isinstance(found, str):
                lost = True
                notes.append(Diagnostic('lost-relation', 'warning', f'{op.key}: no trace to {group.name}: {found}', op.key, op.where))
            elif found is not None:
                reached.append(group)
                coords.append(found)
        if reached and op.owned:
            _refuse_real_weights(op)
            paths = {n: tuple(program.param_names[i] for i in ps) for n, ps in op.parameters.items() if ps}
            through = not lost and _only_through_states(program, op.y, {*program.ops, *positions.mixing})
            relations.append(Relation(op, tuple(reached), tuple(coords), paths, through))
        elif reached and any(op.parameters.values()):
            path = next(program.param_names[i] for ps in op.parameters.values() for i in ps)
            notes.append(Diagnostic('input-dependent-weight', 'warning', f'{path}: the op\'s weight changes from step to step '
                                    '(it depends on an input or a state), so it has no trace', path, op.where))
    return relations, notes


def _refuse_real_weights(op: OpUse) -> None:
    real = [n for n, a in op.weight_avals.items() if not np.issubdtype(a.dtype, np.complexfloating)]
    if real and np.issubdtype(op.y_aval.dtype, np.complexfloating):
        raise NotSupportedError(f'{op.where}: {op.primitive.name} makes complex numbers of real {", ".join(real)}, whose trace would be '
                                'one of real numbers. Make the weight complex, or keep real and imaginary parts as two real hidden states.')


def _only_through_states(program: Program, value: int, cuts: set[int]) -> bool:
    """Whether every path from a value meets a new hidden state before a cut equation or another result."""
    new = {program.new_carry[c] for c in program.hidden}
    results = {*program.outputs, *program.new_carry} - new
    seen, todo = set(), [value]
    while todo:
        v = todo.pop()
        if v in new or v in seen or not is_inexact(program.avals[v]):
            continue
        seen.add(v)
        readers = program.consumers.get(v, ())
        if v in results or not cuts.isdisjoint(readers):
            return False
        todo.extend(o for i in readers for o in program.results(i, v))
    return True


def _coordinates(program, positions: Positions, analysis, op: OpUse, states, group) -> Coordinates | str | None:
    """Coordinates of the relation of one op and one group; None: not related; a text: related, but not representable."""
    labels = [(s, positions.sweeps[s].y.get(op.equation)) for s in states]
    labels = [(s, lab) for s, lab in labels if lb.has(lab)]
    if not labels:
        return None
    if any((lab == lb.MANY).any() for _, lab in labels):
        if op.repeats:
            raise MustUnroll(next(r for r in reversed(program.equations[op.equation].scope) if isinstance(r, Loop)))
        return _expanded(program, analysis, op, [s for s, _ in labels], group)
    total = None
    for _, lab in labels:
        total = lb.merge(total, lab)
    if (total == lb.MANY).any():
        return 'its result reaches different positions in different states of the group'
    if total.shape == group.shape and not (lb.merge(total, lb.identity(total.shape)) == lb.MANY).any():
        return Coordinates(total.shape, group.shape, None)
    return Coordinates(total.shape, group.shape, np.where(total == lb.NONE, _first_of_lane(total.shape, group.shape), total))


def _first_of_lane(shape, group_shape) -> np.ndarray:
    """A position for entries that no state reads, in their own lane where axis 0 may be one."""
    if shape[:1] != group_shape[:1] or not shape:
        return np.zeros(shape, np.int64)
    return (np.arange(shape[0]) * math.prod(group_shape[1:])).reshape(-1, *[1] * (len(shape) - 1))


def _expanded(program, analysis, op: OpUse, states, group) -> Coordinates | str:
    """y lacks axes of the hidden state: entries sit at the group's positions."""
    source = None
    for s in states:
        read = analysis.read_once(op.equation, s)
        source = lb.merge(source, read) if read is not None else np.full(group.shape, lb.MANY)
    y_shape = program.avals[op.y].shape
    try:
        wide = np.broadcast_to(lb.identity(y_shape), group.shape)
    except ValueError:
        wide = None
    if wide is None or (lb.merge(source, wide) == lb.MANY).any():
        return _why_not_expanded(op, source, y_shape, group.shape)
    added = len(group.shape) - len(y_shape)
    if not op.pointwise and group.shape[added:] != y_shape:
        return _why_not_expanded(op, wide, y_shape, group.shape)
    return Coordinates(group.shape, group.shape, None, expanded=True)


def _why_not_expanded(op: OpUse, source: np.ndarray, y_shape, shape) -> str:
    """Why y can not be expanded to a state whose positions read ``source``, and what to do."""
    if (source == lb.MANY).any():
        return ('a position of the hidden state reads several elements of its result '
                f'{list(y_shape)}, which lacks axes of the state {list(shape)}. Apply an op of its own '
                'to each of them')
    alike = [str(k) for k, n in enumerate(shape) if n > 1 and (source == source.take([0], k)).all()]
    what = f'is repeated, or read in another order, in {list(shape)}'
    if alike:
        what = f'is broadcast inside to {list(shape)}, along axis {", ".join(alike)}'
    instead = ('Repeat the weight instead, so that the result has an element for each position: '
               'matmul(x, jnp.repeat(w, n, -1)) with a reshape; a trace has that size in any case')
    if op.pointwise:
        instead = 'Give the weight an axis of size 1 there, as in element_wise(w[:, None])'
    return (f'its result {list(y_shape)} {what}: each position reads one element, which others '
            f'read too, and a trace is kept where these differ along leading axes alone. {instead}')


def _forgetful(program: Program) -> dict[int, list[int]]:
    """Parts of the carry that are no hidden states, though later steps read them, each with what leads to it by a gradient."""
    kept = {c for c in range(len(program.carry)) if c not in program.hidden and is_inexact(program.avals[program.carry[c]])
            and program.new_carry[c] in program.producer}
    read = flow.backward(program, {v: 1 for v in program.outputs} | {program.new_carry[c]: 1 for c in program.hidden},
                         flow.gradients(program))
    return {c: flow.backward(program, {program.new_carry[c]: 1}, flow.gradients(program)) for c in kept if read[program.carry[c]]}


def _forgetful_notes(program: Program, ops, forgetful) -> list[Diagnostic]:
    places = {i: op.where for op in reversed(ops) for ps in op.parameters.values() for i in ps}
    return [Diagnostic('lost-relation', 'warning', f'parameter {program.param_names[i]}: {program.carry_names[c]} is no hidden state: what '
                       'goes through it to later steps has no gradient. Make it one, or stop the gradient that goes into it',
                       program.param_names[i], places.get(i, _place(program, program.new_carry[c])))
            for c, ahead in forgetful.items() for i in program.trainable if ahead[program.params[i]]]


def _direct(program: Program, ops) -> tuple[int, ...]:
    """Trainable parameters that reach a result otherwise than as the weight of an owned op."""
    weights = {op.equation: set(op.primitive.trainable_invars_fn(op.params).values()) for op in ops if op.owned}
    live = flow.backward(program, dict.fromkeys((*program.outputs, *program.new_carry), 1), skip=lambda i, k: k in weights.get(i, ()))
    return tuple(i for i in program.trainable if live[program.params[i]])


def _mixing_notes(program: Program, positions: Positions) -> list[Diagnostic]:
    named = [name_mixing(program, i, why) for i, why in sorted(positions.mixing.items())]
    return [Diagnostic('mixing', 'info', f'{name} {why}: it carries no trace', location=where) for name, why, where in named]


def _with_partial_traces(graph: ETraceGraph) -> ETraceGraph:
    """Say which parameters with a trace also reach a hidden state by a plain operation."""
    by_ops = {f'{USE}{op_name(op)} [{op.where}]' for op in graph.ops}
    partial = {p: [t for t in texts if t.startswith(USE) and t not in by_ops] for p, texts in untraced_uses(graph).items()
               if graph.routes[p].kind == 'trace'}
    notes = [Diagnostic('partial-trace', 'warning', f'parameter {p} has a trace, but not for {" and ".join(texts)}, where its gradient '
                        'holds the current step only', p, graph.routes[p].location) for p, texts in partial.items() if texts]
    return replace(graph, diagnostics=(*graph.diagnostics, *notes))


def _cross_notes(program: Program, positions: Positions, groups) -> list[Diagnostic]:
    pairs = sorted({(positions.group_of[r], positions.group_of[s]) for s, sweep in enumerate(positions.sweeps)
                    for r, labels in sweep.old.items() if lb.has(labels) and positions.group_of[r] != positions.group_of[s]})
    return [Diagnostic('cross-group', 'warning', f'{groups[s].name} reads the old {groups[r].name} by a plain path between different '
                       'shapes: what goes that way has no trace. Give both states one shape to trace it', groups[r].name,
                       _place(program, program.new_carry[groups[s].states[0]]))
            for r, s in pairs]


def _place(program: Program, value: int) -> str:
    return program.equations[program.producer[value]].where if value in program.producer else ''


def _cut_reads(program: Program, groups, group_of, recurrent, ops, relations, cross, forgetful) -> dict[str, tuple[str, ...]]:
    """For each group, the first cut equations that read something that depends on it and lead to a hidden state."""
    start: dict[int, int] = {}
    for c, g in group_of.items():
        for v in (program.carry[c], program.new_carry[c]):
            start[v] = start.get(v, 0) | 1 << g
    number = {g.name: k for k, g in enumerate(groups)}
    for rel in relations:
        start[rel.op.y] = start.get(rel.op.y, 0) | flow.bits(number[g.name] for g in rel.groups)
    behind = flow.forward(program, start, lambda i, found: 0 if i in recurrent or i in program.blocks else found)
    keys, found = {op.equation: op.key for op in ops}, {g.name: {} for g in groups}
    for note in cross:
        found[note.path]['plain paths to states of another shape'] = None
    for c in forgetful:
        for g in flow.members(behind[program.new_carry[c]]):
            found[groups[g].name][f'{program.carry_names[c]}, which is no hidden state'] = None
    for i, eqn in enumerate(program.equations):
        for g in flow.members(flow.union(behind, eqn.ins)) if recurrent.get(i) else ():
            found[groups[g].name][f'{eqn.primitive.name} ({keys[i]})' if i in keys else f'{eqn.primitive.name} [{eqn.where}]'] = None
    return {name: tuple(places) for name, places in found.items()}


def _colours(positions: Positions) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each state index, sets of groups whose D passes share no y and no old state, so that one VJP serves a set."""
    most = max(map(len, positions.groups), default=0)
    result = []
    for k in range(most):
        sets: list[tuple[list[int], set]] = []
        for g, states in enumerate(positions.groups):
            if k < len(states):
                sweep = positions.sweeps[states[k]]
                touched = {('h', r) for r in sweep.clocks.union(sweep.old)}
                touched |= {('y', i) for i in sweep.y}
                home = next((entry for entry in sets if entry[1].isdisjoint(touched)), None)
                if home is None:
                    home = ([], set())
                    sets.append(home)
                home[0].append(g)
                home[1].update(touched)
        result.append(tuple(tuple(members) for members, _ in sets))
    return tuple(result)


def _lanes(program: Program, ops) -> int | None:
    """The batch size that all batched ops share, else None."""
    sizes = {program.avals[op.x].shape[0] for op in ops if op.primitive.batched and op.x is not None}
    return sizes.pop() if len(sizes) == 1 else None


def _laned(program: Program, policy: Policy, groups, ops, relations, lanes: int | None) -> frozenset[int]:
    """Positions in the carry whose axis 0 is the batch: as the step shows it, and as the policy says."""
    named: set[int] = set()
    leaves = {path_name(key): program.pieces(leaf) for leaf, key in enumerate(program.leaf_keys)}
    for path in policy.lanes:
        if path not in leaves:
            raise OptionError(f'lanes names {path!r}, which is no leaf of the carry; its leaves '
                              f'are {list(leaves)}.')
        for c in leaves[path]:
            aval = program.avals[program.carry[c]]
            if lanes is None or aval.shape[:1] != (lanes,):
                raise OptionError(f'lanes names {path!r}, {describe_aval(aval)}, but the batch of '
                                  f'the step\'s ops is {lanes}: its axis 0 is not the batch.')
        named.update(leaves[path])
    return carried_lanes(program, groups, ops, relations, lanes) | named


def check_learnable(graph: ETraceGraph) -> None:
    """Refuse a model that online learning can do nothing for."""
    if not graph.program.hidden:
        raise CompileError('the model has no hidden state of a floating-point dtype. Keep the recurrent state in a '
                           'brainstate.HiddenState (or in the carry) and initialise it before compiling.')
    opaque = next((e for e in graph.program.equations if e.holds_op()), None)
    if not graph.ops and opaque is not None:
        raise CompileError(f'{opaque.where}: the only ETP ops of the step stand inside {opaque.primitive.name}, where they have no trace. '
                           'Apply an op outside of it.')
    if not graph.ops:
        raise CompileError('the step applies no ETP op. Mark trainable operations: braintrace.matmul(x, W) instead of x @ W, or use '
                           'the cells of braintrace.nn.')
