"""What has no trace, is cut, or left out: found once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from .. import equations as lb
from ..equations import END, is_bent, is_inexact, rounds
from ..graph import Diagnostic, ETraceGraph, Groups, OpUse
from ..program import dataflow as flow
from ..program.leaves import ComplexParts, Split, path_name
from ..program.program import Program
from ..stacked_states import MustSplit, chain, read_apart
from .leaks import leaks
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
    shape_of = [program.avals[program.carry[c]].shape for c in program.hidden]
    for s, sweep in enumerate(positions.sweeps) if any(program.splits) else ():
        for r, labels in sweep.old.items():
            states = program.hidden[s], program.hidden[r]
            real = not set(program.virtual_states).intersection(states)
            if real and lb.has(labels) and shape_of[s] != shape_of[r]:
                pair = program.leaf_of(states[0]), program.leaf_of(states[1])
                if pair[0] == pair[1] and len(shape_of[s]) != len(shape_of[r]):
                    raise MustSplit({pair[0]: None})
                for whole, part in (pair, pair[::-1]):
                    aval, split = program.leaf_avals[whole], program.splits[part]
                    if program.splits[whole] is not None or split is None:
                        continue
                    if split.aval.shape == aval.shape:
                        alike: Split | ComplexParts = ComplexParts(aval)
                        if isinstance(split, Split):
                            alike = Split(aval, split.places)
                        raise MustSplit({part: None} if whole in kept else {whole: alike})


def stacked_states(facts: Facts) -> list[Diagnostic]:
    """Where old rows move through an array of states, and where a part of a new state is read as an
    old one.
    """
    graph, program, recurrent = facts.graph, facts.program, facts.graph.recurrent
    group_of = {c: g for g, group in enumerate(graph.hidden_groups) for c in group.states}
    past = flow.old_ancestors(program, group_of, recurrent)
    moving = {i for i in graph.mixing if program.equations[i].does.moves is not None}
    read_as_old = _read_as_old(program, group_of, recurrent, past)
    told = dict(read_as_old)
    asked = [c for c in group_of if c not in told and c not in program.virtual_states]
    found = []
    stop = program.op_set | program.blocks
    # behind each new state, what moves old rows to another piece of its leaf, or beside rows that
    # an op makes
    for c in asked if moving else ():
        leaf, own = program.leaf_of(c), 1 << group_of[c]
        name = path_name(program.leaf_keys[leaf], 'carry')
        others = flow.bits(group_of[d] for d in program.pieces(leaf) if d in group_of) & ~own
        behind = flow.slice_behind(program, [program.new_carry[c]], lambda i: i not in stop)
        read = {i: flow.union(past, program.equations[i].ins) for i in moving.intersection(behind)}
        # bit 1: an op made it; bit 2: it holds old rows of this state that were moved
        start = {o: 1 for i in program.ops for o in program.equations[i].outs}
        start |= {o: 2 for i in read if read[i] & own for o in program.equations[i].outs}
        held = flow.forward(program, start, flow.gradients(program))
        for i in behind:
            eqn = program.equations[i]
            # rows of an op and old rows put side by side
            made = eqn.does.beside and any(held[v] & 1 for v in eqn.ins)
            kept = [v for v in eqn.ins if not held[v] & 1]
            old_rows = any(past[v] & own if i in read else held[v] & 2 for v in kept)
            if read.get(i, 0) & others or made and old_rows:
                found.append((name, i, 'moved'))
                break
    found += [(program.carry_names[c], i, 'read-as-old') for c, i in read_as_old]
    return [
        Diagnostic('stacked-state', name, program.equations[i].where, (i,), reason)
        for name, i, reason in dict.fromkeys(found)
    ]


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


class Facts:
    """A graph that has no findings yet, and what several finders ask of it.

    ``missing``: why ops have no relation. ``cross``: groups ``(r, s)`` of different shapes where s
    reads the old r by plain paths. ``cuts``: the equations at which history is cut.
    """

    def __init__(
        self,
        graph: ETraceGraph,
        missing: Iterable[Diagnostic],
        cross: Sequence[tuple[int, int]],
        cuts: Collection[int],
    ):
        self.graph, self.program, self.ops = graph, graph.program, graph.ops
        self.groups, self.relations = graph.hidden_groups, graph.hidden_param_op_relations
        self.missing, self.cross, self.cuts = list(missing), cross, cuts

    @cached_property
    def weights(self) -> dict[int, set[int]]:
        """Of each op, the operands that are its weights."""
        return _weights_of(self.ops)

    @cached_property
    def plain(self) -> list[int]:
        """For each value, whether it reaches a new hidden state other than as a weight of an op."""
        new = dict.fromkeys(self.program.new_states, 1)
        return flow.backward(
            self.program,
            new,
            flow.gradients(self.program),
            skip=lambda i, k: k in self.weights.get(i, ()),
        )

    @cached_property
    def unhidden(self) -> dict[int, list[int]]:
        """Parts of the carry that are no hidden states, though later steps read them with a
        gradient; for each, whether a value leads to it.
        """
        program, passed = self.program, flow.gradients(self.program)
        kept = {
            c
            for c in range(len(program.carry))
            if c not in program.hidden
            and is_inexact(program.avals[program.carry[c]])
            and program.new_carry[c] != program.carry[c]
        }
        # what a part that is read keeps of another part is read as well
        results = dict.fromkeys((*program.outputs, *program.new_states), 1)
        read = flow.over_steps(program, results, kept, ahead=False)
        return {
            c: flow.backward(program, {program.new_carry[c]: 1}, passed)
            for c in kept
            if read[program.carry[c]]
        }

    @cached_property
    def origins(self) -> list[int]:
        """The bits of each value, see ``LIVE``."""
        program = self.program
        start = {v: LIVE if i in program.trainable else HELD for i, v in enumerate(program.params)}
        start |= dict.fromkeys(program.inputs, LIVE)
        for c, v in enumerate(program.carry):
            kept = program.new_carry[c] == v and c not in program.hidden
            start[v] = 1 << FIRST + c if kept else LIVE

        def keep(i: int, found: int) -> int:
            return found | LIVE if program.equations[i].effects else found

        return flow.forward(program, start, keep)

    @cached_property
    def reads(self) -> list[Diagnostic]:
        return list(cut_reads(self))

    @cached_property
    def routes(self) -> list[Diagnostic]:
        return list(find_routes(self))

    @cached_property
    def uses(self) -> list[Diagnostic]:
        return list(find_uses(self))

    def made_at(self, value: int) -> str:
        i = self.program.producer.get(value)
        return '' if i is None else self.program.equations[i].where


# ---- mixing, and states that reach later steps without a trace ----


def find_mixing(facts: Facts) -> Iterator[Diagnostic]:
    program = facts.program

    def size(values: Iterable[int]) -> int:
        return max((program.avals[v].size for v in values), default=0)

    for i, reason in sorted(facts.graph.mixing.items()):
        eqn = program.equations[i]
        if is_bent(eqn, program.avals):
            yield Diagnostic('mixing', '', eqn.where, (i,), 'not-linear')
            continue
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


def cross_groups(facts: Facts) -> Iterator[Diagnostic]:
    for r, s in facts.cross:
        reader = facts.groups[s]
        where = facts.made_at(facts.program.new_carry[reader.states[0]])
        yield Diagnostic('cross-group', facts.groups[r].name, where, group=reader.name)


def through_unhidden(facts: Facts) -> Iterator[Diagnostic]:
    """The parameters that a part of the carry which is no hidden state follows, or whose trace it
    reads.
    """
    program, places = facts.program, {}
    for op in reversed(facts.ops):
        places |= dict.fromkeys((i for ps in op.parameters.values() for i in ps), op.where)
    for c, ahead in facts.unhidden.items():
        name = program.carry_names[c]
        groups = {d.group for d in facts.reads if d.states == (name,)}
        traced = [
            path
            for rel in facts.relations
            if groups.intersection(group.name for group in rel.groups)
            for paths in rel.paths.values()
            for path in paths
        ]
        for i in program.trainable:
            path = program.param_names[i]
            if ahead[program.params[i]] or path in traced:
                where = places.get(i, facts.made_at(program.new_carry[c]))
                yield Diagnostic('lost-relation', path, where, reason='not-hidden', states=(name,))


def cut_reads(facts: Facts) -> Iterator[Diagnostic]:
    """The reads of each group that lead to a hidden state and do not carry the group's trace on.

    Where there are none, D_RTRL is exact for the group's traced weights.
    """
    program, groups, recurrent = facts.program, facts.groups, facts.graph.recurrent
    # for each value, the groups whose states or trace it depends on before a cut
    number = {group.name: g for g, group in enumerate(groups)}
    start = dict.fromkeys(range(len(program.avals)), 0)
    for g, group in enumerate(groups):
        for c in group.carried:
            start[program.carry[c]] |= 1 << g
            start[program.new_carry[c]] |= 1 << g
    for rel in facts.relations:
        own = (number[group.name] for group in rel.groups if group.name in number)
        start[rel.op.y] |= flow.bits(own)
    stops = program.blocks.union(facts.cuts)
    behind = flow.forward(program, start, lambda i, found: 0 if i in stops else found)
    elsewhere = {r for r, _ in facts.cross}
    for g, group in enumerate(groups):
        if g in elsewhere:
            yield Diagnostic('cut', group=group.name, reason='other-shape')
        for c in facts.unhidden:
            if behind[program.new_carry[c]] >> g & 1:
                names = (program.carry_names[c],)
                yield Diagnostic('cut', group=group.name, reason='not-hidden', states=names)
        for i, eqn in enumerate(program.equations):
            if recurrent.get(i) and flow.union(behind, eqn.ins) >> g & 1:
                yield Diagnostic('cut', '', eqn.where, (i,), group=group.name)


def leaky_readouts(facts: Facts) -> Iterator[Diagnostic]:
    """The readouts that leak behind their weights, with each traced group that they read; a filter
    in front of them stands for what they remember.
    """
    program = facts.program
    traced = {group.name for rel in facts.relations for group in rel.groups}
    reads = [d for d in facts.reads if d.group in traced and d.equations]
    for leak in leaks(facts.graph) if reads and not program.virtual else ():
        for read in reads:
            if read.equations == (leak.op.equation,):
                yield Diagnostic(
                    'leaky-readout',
                    leak.op.key,
                    leak.op.where,
                    read.equations,
                    '' if leak.number is not None else 'several',
                    read.group,
                    states=(program.carry_names[leak.state],),
                )


# ---- what automatic marking did ----


def find_marks(facts: Facts) -> Iterator[Diagnostic]:
    """Ops that it put, equations that it left, constants that look like weights."""
    program = facts.program
    if program.to_mark is None:
        return
    for op in facts.ops:
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
        if not flow.union(facts.plain, eqn.outs):
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


# ---- weights that nothing trains ----


def constant_weights(facts: Facts) -> Iterator[Diagnostic]:
    """Weights that nothing trains and that no step changes."""
    for op in facts.ops:
        for slot, value in op.trainable.items():
            if not facts.origins[value] & (LIVE | HELD):
                made_of = flow.members(facts.origins[value] >> FIRST)
                states = tuple(facts.program.carry_names[c] for c in made_of)
                name, place = states[0] if states else '', (op.where, (op.equation,))
                yield Diagnostic('constant-weight', name, *place, slot=slot, states=states)


# ---- of each parameter, where its gradient comes from ----


def find_routes(facts: Facts) -> Iterator[Diagnostic]:
    program = facts.program
    # the equations of ops whose trace to a group is lost
    lost = {i for d in facts.missing if d.kind == 'lost-relation' for i in d.equations}
    used = flow.backward(program, dict.fromkeys((*program.outputs, *program.new_carry), 1))
    to_state = flow.backward(program, dict.fromkeys(program.new_states, 1), flow.gradients(program))
    traced = {i: rel.op for rel in facts.relations for ps in rel.op.parameters.values() for i in ps}
    for i, (name, value) in enumerate(zip(program.param_names, program.params, strict=True)):
        uses = [op for op in facts.ops if any(i in ps for ps in op.parameters.values())]
        if i not in program.trainable:
            floating = is_inexact(program.avals[value])
            yield Diagnostic('not-trainable' if floating else 'not-inexact', name)
        elif i in traced:
            yield Diagnostic('traced', name, traced[i].where, reason=traced[i].primitive.name)
        elif not used[value]:
            yield Diagnostic('unused', name)
        elif not to_state[value]:
            followed = any(ahead[value] for ahead in facts.unhidden.values())
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
            found = [*told[:1], *plain_use(facts, value), *by_ops[:1]]
            kind, where, reason = found[0] if found else ('not-etp-op', '', '')
            yield Diagnostic(kind, name, where, reason=reason)


def plain_use(facts: Facts, value: int) -> Iterator[tuple[str, str, str]]:
    """Why a parameter has no trace, by a use that is no op's weight."""
    program = facts.program
    # an op may hide in a function with a derivative rule of its own
    reached = flow.reach(program, value, ())
    for eqn in program.equations:
        if eqn.origin is not None and not reached.isdisjoint(eqn.ins) and eqn.holds_op():
            yield 'opaque-call', eqn.where, eqn.primitive.name
    for i, _ in readers(program, value):
        if i not in program.op_set and flow.union(facts.plain, program.equations[i].outs):
            yield 'not-etp-op', program.equations[i].where, ''


# ---- of each parameter, its uses without a trace ----


def no_relation(facts: Facts) -> Iterator[Diagnostic]:
    """There are ops to train, and none has a trace."""
    alive = any(facts.origins[v] & LIVE for op in facts.ops for v in op.trainable.values())
    if alive and facts.groups and not facts.relations:
        yield Diagnostic('no-relation', location=facts.ops[0].where)


def find_uses(facts: Facts) -> Iterator[Diagnostic]:
    """The uses of each trainable parameter that reach a hidden state without a trace: as a weight
    of an op without a relation, in another equation, as a new state.
    """
    program, plain = facts.program, facts.plain
    traced = {rel.op.equation for rel in facts.relations}
    for i in program.trainable:
        path, value = program.param_names[i], program.params[i]
        for op in facts.ops:
            own = any(i in behind for behind in op.parameters.values())
            if own and op.equation not in traced and plain[op.y]:
                yield Diagnostic('use', path, op.where, (op.equation,))
        for j, v in readers(program, value):
            eqn = program.equations[j]
            if j in program.blocks:
                continue  # no gradient passes it
            as_operand = any(
                u == v and k not in facts.weights.get(j, ()) for k, u in enumerate(eqn.ins)
            )
            if as_operand and flow.union(plain, eqn.outs):
                yield Diagnostic('use', path, eqn.where, (j,), 'plain')
        for c in program.hidden:
            if program.new_carry[c] == value:
                yield Diagnostic('use', path, reason='state', states=(program.carry_names[c],))


def partial_traces(facts: Facts) -> Iterator[Diagnostic]:
    """Each traced parameter that also reaches a hidden state by plain equations, or is one."""
    for route in facts.routes:
        own = [use for use in facts.uses if use.path == route.path and use.reason]
        if route.kind == 'traced' and own:
            plain = tuple(i for use in own for i in use.equations)
            states = tuple(name for use in own for name in use.states)
            yield Diagnostic('partial-trace', route.path, route.location, plain, states=states)


# ---- reverse rules of the user's own that are not linear ----


def bent_states(facts: Facts) -> Iterator[Diagnostic]:
    """Equations between ops or states and new states whose reverse rule is not linear: a trace
    holds derivatives, and what such a rule sends back is no product with one. Those that are cut
    are told of there.
    """
    program = facts.program
    ops = {program.y_of(i): 1 << n for n, i in enumerate(program.ops)}
    behind = flow.over_steps(program, ops, program.hidden)
    ahead = flow.backward(program, dict.fromkeys(program.new_states, 1), flow.gradients(program))
    for i in _bent(program, behind, ahead):
        if i not in facts.graph.mixing:
            eqn = program.equations[i]
            passed = (program.ops[n] for n in flow.members(flow.union(behind, eqn.ins)))
            reason = 'rounds' if rounds(eqn) else ''
            yield Diagnostic('nonlinear-rule', '', eqn.where, (i, *passed), reason)


def bent_weights(facts: Facts) -> Iterator[Diagnostic]:
    """The same between a parameter and the weight of an op, where the gradients of several steps
    come back as one.
    """
    program = facts.program
    params = {program.params[i]: 1 << i for i in program.trainable}
    origins = flow.forward(program, params, flow.gradients(program))
    weights = (v for op in facts.ops if op.owned for v in op.trainable.values())
    ahead = flow.backward(program, dict.fromkeys(weights, 1), flow.gradients(program))
    for i in _bent(program, origins, ahead):
        eqn = program.equations[i]
        for k in flow.members(flow.union(origins, eqn.ins)):
            path = program.param_names[k]
            yield Diagnostic('nonlinear-rule', path, eqn.where, (i,), 'weight')


def _bent(program: Program, behind: list[int], ahead: list[int]) -> Iterator[int]:
    for i, eqn in enumerate(program.equations):
        between = flow.union(behind, eqn.ins) and flow.union(ahead, eqn.outs)
        inside = eqn.loop is None and i not in program.op_set
        if between and inside and (rounds(eqn) or is_bent(eqn, program.avals)):
            yield i


# ---- how values reach states ----


def _weights_of(ops: Iterable[OpUse]) -> dict[int, set[int]]:
    return {op.equation: set(op.slots.values()) for op in ops}


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


# ---- the list ----

# Every finder, in the order in which its findings are told.
FINDERS: tuple[Callable[[Facts], Iterable[Diagnostic]], ...] = (
    # what the compiler did, and what has no trace between states and ops
    find_mixing,
    find_marks,
    lambda facts: facts.missing,
    cross_groups,
    leaky_readouts,
    constant_weights,
    through_unhidden,
    # of each parameter, where its gradient comes from
    lambda facts: facts.routes,
    no_relation,
    stacked_states,
    # of each parameter with a trace, what that lacks
    partial_traces,
    bent_states,
    bent_weights,
    # what only the report has
    lambda facts: facts.reads,
    lambda facts: facts.uses,
)


def find_findings(
    graph: ETraceGraph,
    missing: Iterable[Diagnostic],
    cross: Sequence[tuple[int, int]],
    cuts: Collection[int],
) -> tuple[Diagnostic, ...]:
    """The findings of a graph that has none yet; see :class:`Facts`."""
    facts = Facts(graph, missing, cross, cuts)
    return tuple(found for finder in FINDERS for found in finder(facts))
