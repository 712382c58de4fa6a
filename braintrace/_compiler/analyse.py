"""From a step function to an :class:`ETraceGraph`."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .._errors import CompileError, RuleContractError
from . import labels as lb
from .graph import Coordinates, Diagnostic, ETraceGraph, HiddenGroup, OpUse, Relation, Route
from .positions import Positions, find_positions
from .program import Program, is_inexact, path_name, trace_step
from .recurrence import reached_groups

__all__ = ['analyse']


def analyse(cell: Callable, params, carry, inputs: tuple, *, trainable: Callable = lambda path, leaf: True,
            hidden: Callable = lambda path, leaf: True) -> ETraceGraph:
    """Compile one step ``cell(params, carry, *inputs) -> (outputs, carry)``.

    ``params``, ``carry`` and ``inputs`` may be arrays or ``ShapeDtypeStruct``s: only shapes and dtypes are read.
    """
    program = trace_step(cell, params, carry, inputs, trainable=trainable, hidden=hidden)
    positions, analysis = find_positions(program)
    groups = [_group(program, states) for states in positions.groups]
    pure = _pure_values(program)
    ops = _ops(program, pure, _parameters_behind(program))
    relations, notes = _relations(program, positions, analysis, groups, ops)
    routes = _routes(program, ops, relations, analysis)
    diagnostics = [*_mixing_notes(program, positions), *notes, *_cross_notes(positions, groups), *_route_notes(routes)]
    if ops and groups and not relations:
        diagnostics.append(Diagnostic('no-relation', 'warning', 'no weight of an ETP op reaches a hidden state position by position: '
                                      'nothing has a trace, and every gradient holds the current step only', location=ops[0].where))
    group_of = {c: g for g, group in enumerate(groups) for c in group.states}
    recurrent = reached_groups(program, group_of, {*program.ops, *positions.mixing})
    return ETraceGraph(program, tuple(groups), tuple(ops), tuple(relations), routes, tuple(diagnostics), positions.mixing, recurrent,
                       _cut_reads(program, groups, group_of, recurrent, ops, relations, _cross_notes(positions, groups)),
                       _direct(program, ops), _colours(positions), _lanes(program, ops))


def _group(program: Program, states) -> HiddenGroup:
    carry = tuple(program.hidden[s] for s in states)
    paths = tuple(program.carry_names[c] for c in carry)
    aval = program.avals[program.carry[carry[0]]]
    return HiddenGroup(','.join(p.replace(',', '~2') for p in paths), paths, carry, aval.shape, aval.dtype)


def _pure_values(program: Program) -> dict[int, frozenset[int]]:
    """Values that are functions of parameters and constants alone -> the trainable parameters among them."""
    pure = {v: frozenset[int]() for v in program.constants}
    pure.update({v: frozenset([i] if i in program.trainable else []) for i, v in enumerate(program.params)})
    for eqn in program.equations:
        if all(v in pure for v in eqn.ins):
            found = frozenset().union(*(pure[v] for v in eqn.ins))
            pure.update(dict.fromkeys(eqn.outs, found))
    return pure


def _parameters_behind(program: Program) -> dict[int, frozenset[int]]:
    """The trainable parameters that each value depends on without passing an op."""
    behind, ops = {program.params[i]: frozenset([i]) for i in program.trainable}, set(program.ops)
    for i, eqn in enumerate(program.equations):
        if i not in ops:
            found = frozenset().union(*(behind.get(v, ()) for v in eqn.ins))
            behind.update(dict.fromkeys(eqn.outs, found))
    return behind


def _ops(program: Program, pure, behind) -> list[OpUse]:
    uses, seen = [], {}
    for i in program.ops:
        eqn = program.equations[i]
        p = eqn.primitive
        slots = _trainable_slots(p, eqn)
        trainable = {name: eqn.ins[k] for name, k in slots.items()}
        parameters = {n: tuple(sorted(pure.get(v, behind.get(v, ())))) for n, v in trainable.items()}
        owned = all(v in pure for v in trainable.values()) and any(parameters.values())
        first = next((path_name(program.param_keys[ps[0]]).replace('#', '~3') for ps in parameters.values() if ps), f'({p.name})')
        seen[first] = seen.get(first, -1) + 1
        key = first if not seen[first] else f'{first}#{seen[first]}'
        x = None if p.x_invar_index is None else eqn.ins[p.x_invar_index]
        y = eqn.outs[p.y_outvar_index]
        uses.append(OpUse(key, i, p, eqn.params, x, y, trainable, parameters, owned, eqn.where, None if x is None else
                          program.avals[x], program.avals[y], {n: program.avals[v] for n, v in trainable.items()}))
    return uses


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
    for op in ops:
        reached, coords, lost = [], [], False
        for states, group in zip(positions.groups, groups, strict=True):
            found = _coordinates(program, positions, analysis, op, states, group)
            if isinstance(found, str):
                lost = True
                notes.append(Diagnostic('lost-relation', 'warning', f'{op.key}: no trace to {group.name}: {found}', op.key, op.where))
            elif found is not None:
                reached.append(group)
                coords.append(found)
        if reached and op.owned:
            paths = {n: tuple(program.param_names[i] for i in ps) for n, ps in op.parameters.items() if ps}
            through = not lost and _only_through_states(program, op.y, {*program.ops, *positions.mixing})
            relations.append(Relation(op, tuple(reached), tuple(coords), paths, through))
        elif reached and any(op.parameters.values()):
            notes.append(Diagnostic('input-dependent-weight', 'warning', f'{op.key}: the op\'s weight changes from step to step '
                                    '(it depends on an input or a state), so it has no trace', op.key, op.where))
    return relations, notes


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
        todo.extend(o for i in readers for o in program.equations[i].outs)
    return True


def _coordinates(program, positions: Positions, analysis, op: OpUse, states, group) -> Coordinates | str | None:
    """Coordinates of the relation of one op and one group; None: not related; a text: related, but not representable."""
    labels = [(s, positions.sweeps[s].y.get(op.equation)) for s in states]
    labels = [(s, lab) for s, lab in labels if lb.has(lab)]
    if not labels:
        return None
    if any((lab == lb.MANY).any() for _, lab in labels):
        return _expanded(program, analysis, op, [s for s, _ in labels], group)
    total = None
    for _, lab in labels:
        total = lb.merge(total, lab)
    if (total == lb.MANY).any():
        return 'its result reaches different positions in different states of the group'
    if total.shape == group.shape and not (lb.merge(total, lb.identity(total.shape)) == lb.MANY).any():
        return Coordinates(total.shape, group.shape, None)
    return Coordinates(total.shape, group.shape, np.where(total == lb.NONE, 0, total))


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
        return 'a position of the hidden state reads several elements of its result, or reads them in another order'
    added = len(group.shape) - len(y_shape)
    if op.x is not None and group.shape[added:] != y_shape:
        return f'its result {list(y_shape)} is broadcast inside to {list(group.shape)}'
    return Coordinates(group.shape, group.shape, None, expanded=True)


def _routes(program: Program, ops, relations, analysis) -> dict[str, Route]:
    reaches = _reaches(program, {program.new_carry[c] for c in program.hidden})
    used_values = _reaches(program, {*program.outputs, *program.new_carry})
    traced = {i: rel.op for rel in relations for ps in rel.op.parameters.values() for i in ps}
    used = {i: op for op in reversed(ops) for ps in op.parameters.values() for i in ps}
    routes = {}
    for i, name in enumerate(program.param_names):
        if i not in program.trainable:
            routes[name] = Route('frozen', 'not_trainable' if is_inexact(program.avals[program.params[i]]) else 'not_inexact')
        elif i in traced:
            routes[name] = Route('trace', traced[i].primitive.name, traced[i].where)
        elif program.params[i] not in used_values:
            routes[name] = Route('same-step', 'unused')
        elif program.params[i] not in reaches:
            routes[name] = Route('same-step', 'no_hidden_state', used[i].where if i in used else '')
        elif i in used:
            routes[name] = Route('same-step', _why_untraced(program, used[i], analysis), used[i].where)
        else:
            first = program.consumers.get(program.params[i], [None])[0]
            routes[name] = Route('same-step', 'not_etp_op', program.equations[first].where if first is not None else '')
    return routes


def _why_untraced(program: Program, op: OpUse, analysis) -> str:
    if not op.owned:
        return 'input_dependent_weight'
    return 'weight_then_weight' if analysis.descendants([op.y]).isdisjoint(
        program.new_carry[c] for c in program.hidden) else 'mixing_tail'


def _reaches(program: Program, results: set[int]) -> set[int]:
    """Values that reach one of the results by any path."""
    found = set(results)
    for eqn in reversed(program.equations):
        if not found.isdisjoint(eqn.outs):
            found.update(eqn.ins)
    return found


def _direct(program: Program, ops) -> tuple[int, ...]:
    """Trainable parameters that reach a result otherwise than as the weight of an owned op."""
    weights = {op.equation: {op.primitive.trainable_invars_fn(op.params)[n] for n in op.trainable} for op in ops if op.owned}
    live = {*program.outputs, *program.new_carry}
    for i in range(len(program.equations) - 1, -1, -1):
        eqn = program.equations[i]
        if not live.isdisjoint(eqn.outs):
            live.update(v for k, v in enumerate(eqn.ins) if k not in weights.get(i, ()))
    return tuple(i for i in program.trainable if program.params[i] in live)


def _mixing_notes(program: Program, positions: Positions) -> list[Diagnostic]:
    return [Diagnostic('mixing', 'info', f'{program.equations[i].primitive.name} {why} of a hidden state: it carries no trace',
                       location=program.equations[i].where) for i, why in sorted(positions.mixing.items())]


def _cross_notes(positions: Positions, groups) -> list[Diagnostic]:
    pairs = sorted({(positions.group_of[r], positions.group_of[s]) for s, sweep in enumerate(positions.sweeps)
                    for r, labels in sweep.old.items() if lb.has(labels) and positions.group_of[r] != positions.group_of[s]})
    return [Diagnostic('cross-group', 'warning', f'{groups[s].name} reads the old {groups[r].name} by a plain path between different '
                       'shapes: what goes that way has no trace. Give both states one shape to trace it', groups[r].name)
            for r, s in pairs]


def _route_notes(routes: dict[str, Route]) -> list[Diagnostic]:
    texts = {'not_etp_op': 'reaches a hidden state by a plain operation: its gradient holds the current step only. Apply it with a '
                           'braintrace op (matmul, element_wise, ...) to give it a trace',
             'mixing_tail': 'belongs to an op whose result reaches hidden states only through equations that mix its positions: its '
                            'gradient holds the current step only',
             'unused': 'reaches neither an output nor a state: its gradient is zero'}
    return [Diagnostic(r.reason.replace('_', '-'), 'warning', f'parameter {path} {texts[r.reason]}', path, r.location)
            for path, r in routes.items() if r.reason in texts]


def _cut_reads(program: Program, groups, group_of, recurrent, ops, relations, cross) -> dict[str, tuple[str, ...]]:
    """For each group, the cut equations that lead to a hidden state and read something that depends on the group."""
    behind: dict[int, set[int]] = {}
    for c, g in group_of.items():
        for v in (program.carry[c], program.new_carry[c]):
            behind.setdefault(v, set()).add(g)
    for rel in relations:
        behind.setdefault(rel.op.y, set()).update(groups.index(g) for g in rel.groups)
    keys, found = {op.equation: op.key for op in ops}, {g.name: {} for g in groups}
    for note in cross:
        found[note.path]['plain paths to states of another shape'] = None
    for i, eqn in enumerate(program.equations):
        here = set().union(*(behind.get(v, ()) for v in eqn.ins))
        for g in here if recurrent.get(i) else ():
            found[groups[g].name][f'{eqn.primitive.name} ({keys[i]})' if i in keys else f'{eqn.primitive.name} [{eqn.where}]'] = None
        for o in eqn.outs:
            behind[o] = behind.get(o, set()) | here
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
                touched = {('h', r) for r in sweep.old} | {('y', i) for i in sweep.y}
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


def check_learnable(graph: ETraceGraph) -> None:
    """Refuse a model that online learning can do nothing for."""
    if not graph.program.hidden:
        raise CompileError('the model has no hidden state of a floating-point dtype. Keep the recurrent state in a '
                           'brainstate.HiddenState (or in the carry) and initialise it before compiling.')
    if not graph.ops:
        raise CompileError('the step applies no ETP op. Mark trainable operations: braintrace.matmul(x, W) instead of x @ W, or use '
                           'the cells of braintrace.nn.')
