"""Groups of hidden states, cuts, and relations of ops to groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from .. import equations as lb
from ..equations import Loop, is_complex, is_inexact
from ..graph import Coordinates, Derived, Diagnostic, HiddenGroup, OpUse, Relation
from ..program import dataflow as flow
from ..program.control_flow import MustUnroll
from ..program.program import Program
from ..program.tracing import is_holomorphic
from ..stacked_states import split_in_parts
from .fan_out import fanned_out, placed_at
from .lanes import Sets
from .pairs import DPass
from .sweeps import MERGES_RESULT, Sweep

# groups and cuts ----------------------------------------------------------------------------------
#
# Which states form a group, which op reaches which group, and which equations mix positions.


class Positions:
    """What sweeps found that agree with each other: the states of each group, and which positions
    each element of a y feeds.

    States are numbered as in ``program.hidden``, ops and cuts as in ``program.equations``.
    """

    def __init__(self, d_pass: DPass, groups: list[tuple[int, ...]], sweeps: list[Sweep]):
        self.d_pass, self.groups, self.sweeps = d_pass, groups, sweeps
        self.program, self.mixing = d_pass.program, d_pass.mixing
        self.group_of = {s: g for g, states in enumerate(groups) for s in states}


def find_positions(program: Program) -> Positions:
    """Sweep from every state until no further equation has to be cut: every round cuts at least
    one.
    """
    d_pass = DPass(program)
    sweeps: list[Sweep | None] = [None] * len(d_pass.new)
    while True:
        for s in range(len(sweeps)):
            while sweeps[s] is None:
                before = len(d_pass.mixing)
                sweep = Sweep(d_pass, s)
                sweeps[s] = sweep if sweep.run() else None
                _forget(sweeps, list(d_pass.mixing)[before:])
        if any(s is None for s in sweeps):
            continue
        # all sweeps agree with the cuts: now look at states and ops together
        before, done = len(d_pass.mixing), [s for s in sweeps if s is not None]
        # states that read each other position by position, directly or by others, are a group
        sets, members = Sets(), {}
        for s, sweep in enumerate(done):
            sets.join((s, r) for r, labels in sweep.old.items() if sweep.couples(r, labels))
        for s in range(len(done)):
            members.setdefault(sets.find(s), []).append(s)
        groups = list(map(tuple, members.values()))
        # a new state must not read another position of its group's old states
        for s, r in ((s, r) for states in groups for s in states for r in states):
            labels = done[s].old.get(r)
            if lb.has(labels) and not done[s].couples(r, labels):
                done[s].cut_what_moves(d_pass.old[r], lb.identity(d_pass.shapes[r]))
        # An equation that combines elements of a y, where each of them feeds several positions, is
        # cut. Where such elements are only moved and read position by position, a trace has an
        # entry for each pair of an element and a position.
        several = [
            (s, op) for s, sweep in enumerate(done) for op in sweep.y if lb.meet(sweep.y[op])
        ]
        for s, op in several if len(d_pass.mixing) == before else ():
            behind = flow.reach(program, program.y_of(op), program.op_set)
            mixing = done[s].way.mixing
            for i in (i for i in mixing if not behind.isdisjoint(program.equations[i].ins)):
                d_pass.mixing[i] = MERGES_RESULT
        if len(d_pass.mixing) == before:
            return Positions(d_pass, groups, done)
        _forget(sweeps, list(d_pass.mixing)[before:])


def _forget(sweeps: list[Sweep | None], cuts: list[int]) -> None:
    """A cut sends back only the sweeps that passed it."""
    for s, sweep in enumerate(sweeps if cuts else ()):
        if sweep is not None and not sweep.visited.isdisjoint(cuts):
            sweeps[s] = None


# complex states -----------------------------------------------------------------------------------
#
# Complex hidden states that have no complex derivative, and so become two real states.
#
# In a group of complex states D is one complex number for each position, and an entry of a trace is
# a complex derivative. So every equation from a complex number to such a state must be holomorphic,
# and complex results must be holomorphic functions of complex weights. A real y may reach complex
# states: its derivative is a complex number as well.


def split_among_real_states(program: Program, positions: Positions) -> None:
    """Raise :class:`MustSplit` for complex states of a group that has real ones too."""
    for states in positions.groups:
        found = [program.hidden[s] for s in states]
        found = [c for c in found if is_complex(program.avals[program.new_carry[c]])]
        if found and len(found) < len(states):
            i = program.producer.get(program.new_carry[found[0]])
            split_in_parts(program, found, '' if i is None else program.equations[i].where)


def split_where_entries_are_real(
    program: Program, op: OpUse, groups: Iterable[HiddenGroup]
) -> None:
    """Raise :class:`MustSplit` where a complex y reaches complex states, and is no holomorphic
    function of complex weights.
    """
    states = [c for g in groups for c in g.states if is_complex(program.avals[program.carry[c]])]
    if not states or not is_complex(op.y_aval):
        return
    avals = op.weight_avals

    def y(values, x):
        return op.impl(x, dict(zip(avals, values, strict=True)))

    # asked of the equations of the op, not of numbers
    if not all(map(is_complex, avals.values())) or not is_holomorphic(
        y, [*avals.values()], op.x_aval
    ):
        split_in_parts(program, states, op.where)


# derived ------------------------------------------------------------------------------------------
#
# Hidden states that are functions of the other new states of their group, as a stored spike is.
#
# Such a state is no state of its own in a trace: with ``z = g(h)`` its part is ``g'(h) e_h``. The
# next step finds ``h`` among its old states, so it has ``g'`` without a number carried for it.


def find_derived(positions: Positions) -> Derived:
    """The derived states. What makes them reads the new carry and constants alone: a parameter or
    an input of the step before is not at hand one step later.
    """
    program, found = positions.program, {}
    # a value of the new carry -> the first position that holds it; derived states are taken out
    holders: dict[int, int] = {}
    for c in (*program.hidden, *range(len(program.carry))):
        holders.setdefault(program.new_carry[c], c)
    # a state comes after those that it may be made of
    order = sorted((program.producer.get(v, -1), s) for s, v in enumerate(program.new_states))
    for _, s in order:
        c, value = program.hidden[s], program.new_states[s]
        first = holders.get(value) == c
        others = {v: h for v, h in holders.items() if v != value} if first else holders
        made = _made_of(program, value, others, positions.mixing)
        if made is None:
            continue
        # all that is traced in it must come from others of its group, each position from its own
        equations, reads = made
        sweep = positions.sweeps[s]
        group = {program.hidden[r] for r in positions.groups[positions.group_of[s]]}
        own = {v for v in reads if others[v] in group}
        totals = [total for v in own if (total := sweep.total(v)) is not None]
        if not own or not all(map(lb.in_place, totals)):
            continue
        traced = {v for v in reads - own if positions.d_pass.depends[v]}
        for i in sorted(equations - program.blocks):
            if not traced.isdisjoint(program.equations[i].ins):
                traced.update(program.equations[i].outs)
        if value not in traced:
            found[c], holders = made, others
    equations = set().union(*(made for made, _ in found.values()))
    reads = set().union(*(read for _, read in found.values()))
    return Derived(
        tuple(sorted(found)), tuple(sorted(equations)), {v: holders[v] for v in sorted(reads)}
    )


def _made_of(
    program: Program, value: int, holders: Mapping[int, int], mixing: Mapping[int, str]
) -> tuple[set[int], set[int]] | None:
    """The equations that make a value of the new carry, and the values of it that they read; None
    where that is not all that it is made of.
    """
    equations: set[int] = set()
    reads: set[int] = set()
    todo = [value]
    while todo:
        v = todo.pop()
        i = program.producer.get(v)
        if v in holders:
            reads.add(v)
        elif i is None or i in mixing:
            if v not in program.constants:
                return None
        elif i not in equations:
            eqn = program.equations[i]
            # It is evaluated once more, at the numbers of a first carry: so it is no op, has no
            # effect, is in no loop, and its derivative is finite.
            barred = i in program.op_set or eqn.effects or eqn.loop is not None or eqn.repeats
            varying = [u not in program.constants for u in eqn.ins]
            linear = eqn.does.linear is not None and eqn.does.linear(varying)
            finite = linear or eqn.does.finite or not eqn.does.gradient
            if not barred and not eqn.holds_op() and finite:
                equations.add(i)
                todo.extend(eqn.ins)
            elif v not in program.constants:
                return None
    return equations, reads


# relations ----------------------------------------------------------------------------------------
#
# Which op feeds which hidden groups, and where the entries of its trace sit.


def find_relations(
    positions: Positions, groups: Sequence[HiddenGroup], ops: Iterable[OpUse]
) -> tuple[tuple[Relation, ...], list[Diagnostic]]:
    """The relations, and why some ops have none although they reach a group."""
    # for each op, the groups with a state that sends a cotangent to y
    near: dict[int, set[int]] = {}
    for s, sweep in enumerate(positions.sweeps):
        for i in sweep.y:
            near.setdefault(i, set()).add(positions.group_of[s])
    program, cuts = positions.program, {*positions.program.ops, *positions.mixing}
    relations: list[Relation] = []
    missing: list[Diagnostic] = []
    for op in ops:
        # coordinates with each group that the op's y reaches, or why there are none
        found = {
            groups[g]: _coordinates(positions, op, positions.groups[g], groups[g])
            for g in sorted(near.get(op.equation, ()))
        }
        lost = [c for c in found.values() if isinstance(c, Diagnostic)]
        reached = {g: c for g, c in found.items() if isinstance(c, Coordinates)}
        missing += lost
        if reached and op.owned:
            split_where_entries_are_real(program, op, reached)
            paths = {
                name: tuple(program.param_names[i] for i in behind)
                for name, behind in op.parameters.items()
                if behind
            }
            through = not lost and _only_through_states(program, op.y, cuts)
            states = {program.hidden[s]: s for s in range(len(positions.sweeps))}
            feeds = tuple(
                tuple(lb.has(positions.sweeps[states[c]].y.get(op.equation)) for c in g.states)
                for g in reached
            )
            where = tuple(reached), tuple(reached.values())
            relations.append(Relation(op, *where, paths, through, feeds))
        elif reached and any(op.parameters.values()):
            first = next(i for behind in op.parameters.values() for i in behind)
            path = program.param_names[first]
            why = '' if op.fixed_structure else 'structure'
            missing.append(
                Diagnostic('input-dependent-weight', path, op.where, (op.equation,), why)
            )
    return tuple(relations), missing


def _only_through_states(program: Program, value: int, cuts: Collection[int]) -> bool:
    """Whether every path from a value meets a new hidden state before a cut or another result."""
    new = set(program.new_states)
    results = {*program.outputs, *program.new_carry} - new
    seen, todo = set(), [value]
    while todo:
        v = todo.pop()
        if v in new or v in seen or not is_inexact(program.avals[v]):
            continue
        seen.add(v)
        readers = program.consumers.get(v, ())
        if v in results or any(i in cuts for i in readers):
            return False
        todo.extend(o for i in readers for o in program.results(i, v))
    return True


# ---- where the entries of a trace sit ----


def _coordinates(
    positions: Positions, op: OpUse, states: Sequence[int], group: HiddenGroup
) -> Coordinates | Diagnostic | None:
    """None where op and group are not related, a diagnostic where no trace fits."""
    # the position of the group that each element of y feeds, as each state of the group sees it
    received = {s: positions.sweeps[s].y.get(op.equation) for s in states}
    labels = {s: found for s, found in received.items() if lb.has(found)}
    total = None
    for found in labels.values():
        total = lb.merge(total, found)
    if total is None:
        return None
    # an element of y feeds one position: entries sit at y
    if not lb.meet(total):
        return placed_at(total, group.shape)
    # an element of y feeds several positions: it has an entry for each
    if op.repeats:
        scope = positions.program.equations[op.equation].scope
        raise MustUnroll(next(r for r in reversed(scope) if isinstance(r, Loop)))
    coords = fanned_out([positions.sweeps[s] for s in labels], op, group.shape)
    if coords is not None:
        return coords
    place = op.where, (op.equation,)
    return Diagnostic('lost-relation', op.key, *place, 'several-elements', group=group.name)
