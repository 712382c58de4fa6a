"""What a trace leaves out: reads of a group that do not carry it on, uses of a parameter without
it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ... import _jax
from ..equations import labels as lb
from ..equations.backward import has_linear_rule
from ..equations.equation import is_inexact
from ..graph import CutRead, Groups, HiddenGroup, OpUse, Relation, Use
from ..program import dataflow as flow
from ..program.program import Program
from .groups_and_cuts import Positions


def cross_pairs(positions: Positions) -> list[tuple[int, int]]:
    """Groups ``(r, s)`` of different shapes where s reads the old r by plain paths."""
    group_of = positions.group_of
    return sorted(
        {
            (group_of[r], group_of[s])
            for s, sweep in enumerate(positions.sweeps)
            for r, labels in sweep.old.items()
            if lb.has(labels) and group_of[r] != group_of[s]
        }
    )


def old_parts(program: Program) -> dict[int, list[int]]:
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


def cut_reads(
    program: Program,
    groups: Sequence[HiddenGroup],
    relations: Iterable[Relation],
    recurrent: Mapping[int, Groups],
    cross: Iterable[tuple[int, int]],
    unhidden: Iterable[int],
) -> dict[str, tuple[CutRead, ...]]:
    """The reads of each group that lead to a hidden state and do not carry the group's trace on.

    ``cross``, ``unhidden``: the results of :func:`cross_pairs` and :func:`old_parts`.
    """
    behind = _groups_behind(program, groups, relations, recurrent)
    found: list[list[CutRead]] = [[] for _ in groups]
    for r in dict.fromkeys(r for r, _ in cross):
        found[r].append(CutRead('other-shape'))
    for c in unhidden:
        for g in flow.members(behind[program.new_carry[c]]):
            found[g].append(CutRead('not-hidden', state=program.carry_names[c]))
    for i, eqn in enumerate(program.equations):
        for g in flow.members(flow.union(behind, eqn.ins)) if recurrent.get(i) else ():
            found[g].append(CutRead('equation', i))
    return {group.name: tuple(reads) for group, reads in zip(groups, found, strict=True)}


def _groups_behind(
    program: Program,
    groups: Sequence[HiddenGroup],
    relations: Iterable[Relation],
    recurrent: Collection[int],
) -> list[Groups]:
    """For each value, the groups whose states or trace it depends on before a cut."""
    number = {group.name: g for g, group in enumerate(groups)}
    start = dict.fromkeys(range(len(program.avals)), 0)
    for g, group in enumerate(groups):
        for c in group.carried:
            start[program.carry[c]] |= 1 << g
            start[program.new_carry[c]] |= 1 << g
    for rel in relations:
        start[rel.op.y] |= flow.bits(number[group.name] for group in rel.groups)

    def keep(i: int, found: Groups) -> Groups:
        return 0 if i in recurrent or i in program.blocks else found

    return flow.forward(program, start, keep)


def untraced_uses(
    program: Program,
    ops: Sequence[OpUse],
    relations: Iterable[Relation],
    lost: Collection[int],
    plain: list[int],
) -> dict[str, tuple[Use, ...]]:
    """The uses of each trainable parameter that reach a hidden state without a trace.

    ``lost``: the equations of ops whose trace to a group is lost; ``plain``: :func:`plain_ways`.
    """
    traced = {rel.op.equation for rel in relations}
    weights = _weights_of(ops)
    found: dict[int, list[Use]] = {i: [] for i in program.trainable}
    for op in ops:
        for i in {i for behind in op.parameters.values() for i in behind}:
            if op.equation not in traced and plain[op.y]:
                found[i].append(Use('op', op.equation))
            elif op.equation in traced and op.equation in lost:
                found[i].append(Use('lost', op.equation))
    for i, uses in found.items():
        for j, v in readers(program, program.params[i]):
            eqn = program.equations[j]
            if j in program.blocks:
                continue  # no gradient passes it
            as_operand = any(u == v and k not in weights.get(j, ()) for k, u in enumerate(eqn.ins))
            if as_operand and flow.union(plain, eqn.outs):
                uses.append(Use('plain', j))
        states = [c for c in program.hidden if program.new_carry[c] == program.params[i]]
        uses += [Use('state', state=program.carry_names[c]) for c in states]
    return {program.param_names[i]: tuple(uses) for i, uses in found.items()}


def bent_on_the_way(program: Program) -> list[int]:
    """Equations between states or ops and new states whose reverse rule is the user's own and not
    linear: a trace holds derivatives, and what such a rule sends back is no product with one.
    """
    sources = {program.carry[c]: 1 for c in program.hidden}
    sources |= {program.y_of(i): 1 for i in program.ops}
    behind = flow.forward(program, sources, flow.gradients(program))
    ahead = flow.backward(program, dict.fromkeys(program.new_states, 1), flow.gradients(program))
    return list(_bent(program, behind, ahead))


def bent_weights(program: Program, ops: Iterable[OpUse]) -> dict[int, list[int]]:
    """The same between a parameter and the weight of an op, where the gradients of several steps
    come back as one: for each equation the parameters.
    """
    origins = flow.forward(
        program, {program.params[i]: 1 << i for i in program.trainable}, flow.gradients(program)
    )
    weights = (v for op in ops if op.owned for v in op.trainable.values())
    ahead = flow.backward(program, dict.fromkeys(weights, 1), flow.gradients(program))
    return {
        i: list(flow.members(flow.union(origins, program.equations[i].ins)))
        for i in _bent(program, origins, ahead)
    }


def _bent(program: Program, behind: list[int], ahead: list[int]) -> Iterator[int]:
    for i, eqn in enumerate(program.equations):
        between = flow.union(behind, eqn.ins) and flow.union(ahead, eqn.outs)
        if between and eqn.loop is None and i not in program.op_set:
            if _jax.holds_call(eqn, {'custom_vjp_call'}) and not has_linear_rule(
                eqn, program.avals
            ):
                yield i


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
