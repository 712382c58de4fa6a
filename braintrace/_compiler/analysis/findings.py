"""What has no trace, is cut, or left out: found once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ... import _jax
from .. import equations as lb
from ..equations import END, has_linear_rule, is_inexact
from ..graph import Diagnostic, ETraceGraph, Groups, OpUse
from ..program import dataflow as flow
from ..program.leaves import path_name
from ..program.program import Program
from ..stacked_states import MustSplit, chain, read_apart
from .relations import Positions

# stacked ------------------------------------------------------------------------------------------
#
# Several states in one array, once positions are known: which leaves to split too, and which paths
# are lost.


def split_alike(program: Program, positions: Positions, kept: Collection[int]) -> None:
    """Raise :class:`MustSplit` where a whole leaf and a piece of a split leaf of its shape read
    each other: both are split, or, where the whole leaf is in ``kept``, neither is.

    A split leaf in which a row and a block of rows read each other becomes whole again.
    """
    leaf_of = {c: leaf for leaf in range(len(program.splits)) for c in program.pieces(leaf)}
    shape_of = [program.avals[program.carry[c]].shape for c in program.hidden]
    for s, sweep in enumerate(positions.sweeps) if leaf_of else ():
        for r, labels in sweep.old.items():
            states = {program.hidden[s], program.hidden[r]}
            if states <= leaf_of.keys() and lb.has(labels) and shape_of[s] != shape_of[r]:
                pair = leaf_of[program.hidden[s]], leaf_of[program.hidden[r]]
                if pair[0] == pair[1] and len(shape_of[s]) != len(shape_of[r]):
                    raise MustSplit({pair[0]: None})
                for whole, part in (pair, pair[::-1]):
                    aval, split = program.leaf_avals[whole], program.splits[part]
                    if program.splits[whole] is not None or split is None:
                        continue
                    if split.aval.shape == aval.shape:
                        forced = {whole: replace(split, aval=aval)}
                        raise MustSplit({part: None} if whole in kept else forced)


def stacked_states(graph: ETraceGraph) -> list[Diagnostic]:
    """Where old rows move through an array of states, and where a part of a new state is read as an
    old one.
    """
    program, recurrent = graph.program, graph.recurrent
    group_of = {c: g for g, group in enumerate(graph.hidden_groups) for c in group.states}
    past = flow.old_ancestors(program, group_of, recurrent)
    moving = {i for i in graph.mixing if program.equations[i].does.moves is not None}
    read_as_old = _read_as_old(program, group_of, recurrent, past)
    told = dict(read_as_old)
    asked = [c for c in group_of if c not in told and c not in program.virtual_states]
    found = []
    # behind each new state, what moves old rows to another piece of its leaf, or beside rows that
    # an op makes
    for c in asked if moving else ():
        leaf, own = program.leaf_of(c), 1 << group_of[c]
        name = path_name(program.leaf_keys[leaf], 'carry')
        others = flow.bits(group_of[d] for d in program.pieces(leaf) if d in group_of) & ~own
        behind = _behind(program, program.new_carry[c])
        read = {i: flow.union(past, program.equations[i].ins) for i in moving & behind}
        # bit 1: an op made it; bit 2: it holds old rows of this state that were moved
        start = {o: 1 for i in program.ops for o in program.equations[i].outs}
        start |= {o: 2 for i in read if read[i] & own for o in program.equations[i].outs}
        facts = flow.forward(program, start, lambda i, bits: 0 if i in program.blocks else bits)
        for i in sorted(behind):
            eqn = program.equations[i]
            # rows of an op and old rows put side by side
            made = eqn.does.beside and any(facts[v] & 1 for v in eqn.ins)
            kept = [v for v in eqn.ins if not facts[v] & 1]
            old_rows = any(past[v] & own if i in read else facts[v] & 2 for v in kept)
            if read.get(i, 0) & others or made and old_rows:
                found.append((name, i, 'moved'))
                break
    found += [(program.carry_names[c], i, 'read-as-old') for c, i in read_as_old]
    return [
        Diagnostic('stacked-state', name, program.equations[i].where, (i,), reason)
        for name, i, reason in dict.fromkeys(found)
    ]


def _behind(program: Program, value: int) -> set[int]:
    """The equations that make a value, up to ops and blocked equations."""
    behind, todo = set(), [value]
    while todo:
        i = program.producer.get(todo.pop())
        if i is not None and i not in behind and i not in program.op_set | program.blocks:
            behind.add(i)
            todo.extend(program.equations[i].ins)
    return behind


def _read_as_old(
    program: Program, group_of: Mapping[int, int], recurrent: Mapping[int, Groups], past
) -> list[tuple[int, int]]:
    """(position in the carry, equation) where a part of that new state is read as an old one.

    A cut equation holds old states constant. If a new state is not split, or a loop carries it, the
    cut can not see that a value is a part of it, whose past should be kept.
    """
    # where a new state is put together: at the end of the step, and of each iteration of a loop
    new = {program.new_carry[c] for c in group_of}
    ends = [(c, program.new_carry[c]) for c in group_of]
    loops = [(eqn, eqn.loop) for eqn in program.equations if eqn.loop and eqn.primitive is END]
    if loops:
        reached = flow.backward(
            program, {program.new_carry[c]: 1 << c for c in group_of}, flow.gradients(program)
        )
        for eqn, loop in loops:
            ends += [
                (next(flow.members(reached[o])), v)
                for v, o in list(zip(eqn.ins, eqn.outs, strict=True))[: loop.num_carry]
                if reached[o]
            ]
    # its parts, and the past that reaches cut equations from them
    parts = [(c, v, found) for c, v in ends if (found := read_apart(program, v, wide=True))]
    places = set()
    for c, value, values in parts:
        stop = recurrent.keys() | program.blocks | chain(program, value, wide=True)[0]

        def passed(i: int, facts: int, stop=stop) -> int:
            return 0 if i in stop else facts

        read = flow.forward(program, {v: past[v] for v in values}, passed, new)
        places |= {
            (c, i)
            for i, groups in recurrent.items()
            if groups & flow.union(read, set(program.equations[i].ins) - new)
        }
    return sorted(places)


# findings -----------------------------------------------------------------------------------------
#
# All that is known of gradients, as one list: where each parameter's comes from, what a trace
# leaves out, and what the compiler did that changes or limits one.
#
# ``kinds.py`` says what each kind means. Here every kind is found at one place, in the order in
# which findings are told.


# A value is trained or changes; it holds a parameter that is held fixed. Above these two stands a
# bit for each part of the carry.
LIVE, HELD, FIRST = 1, 2, 2


def find_findings(
    graph: ETraceGraph,
    missing: Iterable[Diagnostic],
    cross: Sequence[tuple[int, int]],
    cuts: Collection[int],
) -> tuple[Diagnostic, ...]:
    """The findings of a graph that has none yet.

    ``missing``: why ops have no relation. ``cross``: groups ``(r, s)`` of different shapes where s
    reads the old r by plain paths. ``cuts``: the equations at which history is cut.
    """
    program, ops, missing = graph.program, graph.ops, list(missing)
    plain, unhidden = plain_ways(program, ops), _old_parts(program)
    lost = {i for d in missing if d.kind == 'lost-relation' for i in d.equations}
    origins = _origins(program)
    groups = graph.hidden_groups
    # weights that nothing trains and that no step changes
    constant = []
    for op in ops:
        for slot, value in op.trainable.items():
            if not origins[value] & (LIVE | HELD):
                made_of = flow.members(origins[value] >> FIRST)
                states = tuple(program.carry_names[c] for c in made_of)
                name, place = states[0] if states else '', (op.where, (op.equation,))
                constant.append(
                    Diagnostic('constant-weight', name, *place, slot=slot, states=states)
                )
    # there are ops to train, and none has a trace
    alive = any(origins[v] & LIVE for op in ops for v in op.trainable.values())
    bare = alive and groups and not graph.hidden_param_op_relations
    nothing_traced = [Diagnostic('no-relation', location=ops[0].where)] if bare else []
    reads = list(_cut_reads(graph, cross, unhidden, cuts))
    routes = list(_routes(graph, unhidden, lost, plain))
    uses = list(_uses(graph, plain))
    return (
        # what the compiler did, and what has no trace between states and ops
        *_mixing(program, graph.mixing),
        *_marks(program, ops, plain),
        *missing,
        *(
            Diagnostic(
                'cross-group',
                groups[r].name,
                _made_at(program, program.new_carry[groups[s].states[0]]),
                group=groups[s].name,
            )
            for r, s in cross
        ),
        *constant,
        *_through_unhidden(graph, unhidden, reads),
        # of each parameter, where its gradient comes from
        *routes,
        *nothing_traced,
        *stacked_states(graph),
        # of each parameter with a trace, what that lacks
        *_partial_traces(program, routes, uses),
        *_bent_weights(program, ops),
        # what only the report has
        *reads,
        *uses,
    )


# ---- mixing, and states that reach later steps without a trace ----


def _mixing(program: Program, reasons: Mapping[int, str]) -> Iterator[Diagnostic]:
    def size(values: Iterable[int]) -> int:
        return max((program.avals[v].size for v in values), default=0)

    for i, reason in sorted(reasons.items()):
        eqn = program.equations[i]
        where, seen = eqn.where, set()
        chain: tuple[int, ...] = (i,)
        # A widening equation only broadcasts: the nearest reduction before it is what mixes.
        todo = list(eqn.ins) if size(eqn.outs) > size(eqn.ins) else []
        while todo:
            producer = program.producer.get(todo.pop(0))
            if producer is None or producer in seen:
                continue
            seen.add(producer)
            made = program.equations[producer]
            if made.loop is None and size(made.ins) > size(made.outs):
                chain, where = (producer, i), made.where or where
                break
            todo.extend(u for o in made.outs for u in program.operands(producer, o))
        yield Diagnostic('mixing', '', where, chain, reason)


def _made_at(program: Program, value: int) -> str:
    return program.equations[program.producer[value]].where if value in program.producer else ''


def _old_parts(program: Program) -> dict[int, list[int]]:
    """Parts of the carry that are no hidden states, though later steps read them with a gradient;
    for each, whether a value leads to it.
    """
    kept = {
        c
        for c in range(len(program.carry))
        if c not in program.hidden
        and is_inexact(program.avals[program.carry[c]])
        and program.new_carry[c] != program.carry[c]
    }
    results = {*program.outputs, *program.new_states}
    while True:  # what a part that is read keeps of another part is read as well
        read = flow.backward(program, dict.fromkeys(results, 1), flow.gradients(program))
        later = {program.new_carry[c] for c in kept if read[program.carry[c]]}
        if later <= results:
            break
        results |= later
    return {
        c: flow.backward(program, {program.new_carry[c]: 1}, flow.gradients(program))
        for c in kept
        if read[program.carry[c]]
    }


def _through_unhidden(
    graph: ETraceGraph, parts: Mapping[int, Sequence[int]], reads: Iterable[Diagnostic]
) -> Iterator[Diagnostic]:
    """The parameters that such a part of the carry follows, or whose trace it reads."""
    program, places = graph.program, {}
    for op in reversed(graph.ops):
        places |= dict.fromkeys((i for ps in op.parameters.values() for i in ps), op.where)
    for c, ahead in parts.items():
        name = program.carry_names[c]
        groups = {d.group for d in reads if d.states == (name,)}
        traced = [
            path
            for rel in graph.hidden_param_op_relations
            if groups.intersection(group.name for group in rel.groups)
            for paths in rel.paths.values()
            for path in paths
        ]
        for i in program.trainable:
            path = program.param_names[i]
            if ahead[program.params[i]] or path in traced:
                where = places.get(i, _made_at(program, program.new_carry[c]))
                yield Diagnostic('lost-relation', path, where, reason='not-hidden', states=(name,))


def _cut_reads(
    graph: ETraceGraph,
    cross: Iterable[tuple[int, int]],
    unhidden: Iterable[int],
    cuts: Collection[int],
) -> Iterator[Diagnostic]:
    """The reads of each group that lead to a hidden state and do not carry the group's trace on.

    Where there are none, D_RTRL is exact for the group's traced weights.
    """
    program, groups, recurrent = graph.program, graph.hidden_groups, graph.recurrent
    # for each value, the groups whose states or trace it depends on before a cut
    number = {group.name: g for g, group in enumerate(groups)}
    start = dict.fromkeys(range(len(program.avals)), 0)
    for g, group in enumerate(groups):
        for c in group.carried:
            start[program.carry[c]] |= 1 << g
            start[program.new_carry[c]] |= 1 << g
    for rel in graph.hidden_param_op_relations:
        own = (number[group.name] for group in rel.groups if group.name in number)
        start[rel.op.y] |= flow.bits(own)
    stops = program.blocks.union(cuts)
    behind = flow.forward(program, start, lambda i, found: 0 if i in stops else found)
    elsewhere = {r for r, _ in cross}
    for g, group in enumerate(groups):
        if g in elsewhere:
            yield Diagnostic('cut', group=group.name, reason='other-shape')
        for c in unhidden:
            if behind[program.new_carry[c]] >> g & 1:
                names = (program.carry_names[c],)
                yield Diagnostic('cut', group=group.name, reason='not-hidden', states=names)
        for i, eqn in enumerate(program.equations):
            if recurrent.get(i) and flow.union(behind, eqn.ins) >> g & 1:
                yield Diagnostic('cut', '', eqn.where, (i,), group=group.name)


# ---- what automatic marking did ----


def _marks(program: Program, ops: Sequence[OpUse], plain: list[int]) -> Iterator[Diagnostic]:
    """Ops that it put, equations that it left, constants that look like weights."""
    if program.to_mark is None:
        return
    for op in ops:
        name = program.equations[op.equation].marked
        for i in sorted({i for behind in op.parameters.values() for i in behind} if name else ()):
            yield Diagnostic('marked', program.param_names[i], op.where, (op.equation,), name)
    # a bit for each parameter that a value is made of, and one if it changes
    moving = 1 << len(program.params)
    start = {v: 1 << i for i, v in enumerate(program.params)}
    start |= dict.fromkeys((*program.carry, *program.inputs), moving)

    def keep(i: int, found: int) -> int:
        eqn = program.equations[i]
        return (found if eqn.does.gradient else found & moving) | (moving if eqn.effects else 0)

    origins = flow.forward(program, start, keep)
    for i, eqn in enumerate(program.equations):
        if not flow.union(plain, eqn.outs):
            continue
        if eqn.unmarked:
            held = flow.union(origins, (v for v in eqn.ins if not origins[v] & moving))
            for k in flow.members(held):
                if k in program.to_mark:
                    path = program.param_names[k]
                    yield Diagnostic('unmarked', path, eqn.where, (i,), eqn.unmarked)
        elif eqn.does.op and any(
            is_inexact(program.avals[v]) and program.avals[v].ndim > 1 and not origins[v]
            for v in eqn.ins
        ):
            # it does with a constant array what an op does with a weight
            yield Diagnostic('closed-over', '', eqn.where, (i,))


def _origins(program: Program) -> list[int]:
    """The bits of each value, see ``LIVE``."""
    start = {v: LIVE if i in program.trainable else HELD for i, v in enumerate(program.params)}
    start |= dict.fromkeys(program.inputs, LIVE)
    for c, v in enumerate(program.carry):
        kept = program.new_carry[c] == v and c not in program.hidden
        start[v] = 1 << FIRST + c if kept else LIVE

    def keep(i: int, found: int) -> int:
        return found | LIVE if program.equations[i].effects else found

    return flow.forward(program, start, keep)


# ---- of each parameter, where its gradient comes from ----


def _routes(
    graph: ETraceGraph,
    unhidden: Mapping[int, Sequence[int]],
    lost: Collection[int],
    plain: list[int],
) -> Iterator[Diagnostic]:
    """``lost``: the equations of ops whose trace to a group is lost."""
    program, relations = graph.program, graph.hidden_param_op_relations
    used = flow.backward(program, dict.fromkeys((*program.outputs, *program.new_carry), 1))
    to_state = flow.backward(program, dict.fromkeys(program.new_states, 1), flow.gradients(program))
    traced = {i: rel.op for rel in relations for ps in rel.op.parameters.values() for i in ps}
    for i, (name, value) in enumerate(zip(program.param_names, program.params, strict=True)):
        uses = [op for op in graph.ops if any(i in ps for ps in op.parameters.values())]
        if i not in program.trainable:
            floating = is_inexact(program.avals[value])
            yield Diagnostic('not-trainable' if floating else 'not-inexact', name)
        elif i in traced:
            yield Diagnostic('traced', name, traced[i].where, reason=traced[i].primitive.name)
        elif not used[value]:
            yield Diagnostic('unused', name)
        elif not to_state[value]:
            followed = any(ahead[value] for ahead in unhidden.values())
            where = uses[0].where if uses else ''
            yield Diagnostic('not-hidden' if followed else 'no-hidden-state', name, where)
        else:
            # of several uses that one counts which says most about the change to make
            by_ops = []
            for op in uses:
                if not to_state[op.y]:
                    continue
                if not op.owned:
                    why = 'weight-that-changes'
                elif op.equation in lost:
                    why = 'weight-of-lost-relation'
                else:
                    reached = flow.reach(program, op.y, program.op_set)
                    behind_an_op = reached.isdisjoint(program.new_states)
                    why = 'weight-then-weight' if behind_an_op else 'mixing-tail'
                by_ops.append((why, op.where, ''))
            told = [found for found in by_ops if found[0] != 'weight-then-weight']
            found = [*told[:1], *_plain_use(program, value, plain), *by_ops[:1]]
            kind, where, reason = found[0] if found else ('not-etp-op', '', '')
            yield Diagnostic(kind, name, where, reason=reason)


def _plain_use(program: Program, value: int, ways: list[int]) -> Iterator[tuple[str, str, str]]:
    """Why a parameter has no trace, by a use that is no op's weight."""
    # an op may hide in a function with a derivative rule of its own
    reached = flow.reach(program, value, ())
    for eqn in program.equations:
        if eqn.origin is not None and not reached.isdisjoint(eqn.ins) and eqn.holds_op():
            yield 'opaque-call', eqn.where, eqn.primitive.name
    for i, _ in readers(program, value):
        if i not in program.op_set and flow.union(ways, program.equations[i].outs):
            yield 'not-etp-op', program.equations[i].where, ''


# ---- of each parameter, its uses without a trace ----


def _uses(graph: ETraceGraph, plain: list[int]) -> Iterator[Diagnostic]:
    """The uses of each trainable parameter that reach a hidden state without a trace: as a weight
    of an op without a relation, in another equation, as a new state.
    """
    program = graph.program
    traced = {rel.op.equation for rel in graph.hidden_param_op_relations}
    weights = _weights_of(graph.ops)
    for i in program.trainable:
        path, value = program.param_names[i], program.params[i]
        for op in graph.ops:
            own = any(i in behind for behind in op.parameters.values())
            if own and op.equation not in traced and plain[op.y]:
                yield Diagnostic('use', path, op.where, (op.equation,))
        for j, v in readers(program, value):
            eqn = program.equations[j]
            if j in program.blocks:
                continue  # no gradient passes it
            as_operand = any(u == v and k not in weights.get(j, ()) for k, u in enumerate(eqn.ins))
            if as_operand and flow.union(plain, eqn.outs):
                yield Diagnostic('use', path, eqn.where, (j,), 'plain')
        for c in program.hidden:
            if program.new_carry[c] == value:
                yield Diagnostic('use', path, reason='state', states=(program.carry_names[c],))


def _partial_traces(
    program: Program, routes: Iterable[Diagnostic], uses: Iterable[Diagnostic]
) -> Iterator[Diagnostic]:
    """Each traced parameter that also reaches a hidden state by plain equations, or is one."""
    for route in routes:
        own = [use for use in uses if use.path == route.path and use.reason]
        if route.kind == 'traced' and own:
            plain = tuple(i for use in own for i in use.equations)
            states = tuple(name for use in own for name in use.states)
            yield Diagnostic('partial-trace', route.path, route.location, plain, states=states)


# ---- reverse rules of the user's own that are not linear ----


def bent_on_the_way(program: Program) -> list[int]:
    """Equations between states or ops and new states whose reverse rule is the user's own and not
    linear: a trace holds derivatives, and what such a rule sends back is no product with one.
    """
    sources = {program.carry[c]: 1 for c in program.hidden}
    sources |= {program.y_of(i): 1 for i in program.ops}
    behind = flow.forward(program, sources, flow.gradients(program))
    ahead = flow.backward(program, dict.fromkeys(program.new_states, 1), flow.gradients(program))
    return list(_bent(program, behind, ahead))


def _bent_weights(program: Program, ops: Iterable[OpUse]) -> Iterator[Diagnostic]:
    """The same between a parameter and the weight of an op, where the gradients of several steps
    come back as one.
    """
    params = {program.params[i]: 1 << i for i in program.trainable}
    origins = flow.forward(program, params, flow.gradients(program))
    weights = (v for op in ops if op.owned for v in op.trainable.values())
    ahead = flow.backward(program, dict.fromkeys(weights, 1), flow.gradients(program))
    for i in _bent(program, origins, ahead):
        eqn = program.equations[i]
        for k in flow.members(flow.union(origins, eqn.ins)):
            path = program.param_names[k]
            yield Diagnostic('nonlinear-rule', path, eqn.where, (i,), 'weight')


def _bent(program: Program, behind: list[int], ahead: list[int]) -> Iterator[int]:
    for i, eqn in enumerate(program.equations):
        between = flow.union(behind, eqn.ins) and flow.union(ahead, eqn.outs)
        if between and eqn.loop is None and i not in program.op_set:
            own = _jax.holds_call(eqn, {'custom_vjp_call'})
            if own and not has_linear_rule(eqn, program.avals):
                yield i


# ---- how values reach states ----


def _weights_of(ops: Iterable[OpUse]) -> dict[int, set[int]]:
    return {op.equation: set(op.slots.values()) for op in ops}


def plain_ways(program: Program, ops: Iterable[OpUse]) -> list[int]:
    """For each value, whether it reaches a new hidden state other than as a weight of an op."""
    new, weights = dict.fromkeys(program.new_states, 1), _weights_of(ops)
    return flow.backward(
        program, new, flow.gradients(program), skip=lambda i, k: k in weights.get(i, ())
    )


def direct_parameters(program: Program, ops: Iterable[OpUse]) -> tuple[int, ...]:
    """Trainable parameters that reach a result otherwise than as the weight of an owned op."""
    weights = _weights_of(op for op in ops if op.owned)
    results = dict.fromkeys((*program.outputs, *program.new_carry), 1)
    live = flow.backward(program, results, skip=lambda i, k: k in weights.get(i, ()))
    return tuple(i for i in program.trainable if live[program.params[i]])


def readers(program: Program, value: int) -> Iterator[tuple[int, int]]:
    """The equations that read a value, and under which number: in a loop it has another one."""
    todo, seen = [value], {value}
    while todo:
        v = todo.pop()
        for i in program.consumers.get(v, ()):
            if program.equations[i].loop is None:
                yield i, v
            else:
                todo += [u for u in program.results(i, v) if u not in seen]
                seen.update(program.results(i, v))
