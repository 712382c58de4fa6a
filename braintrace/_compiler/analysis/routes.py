"""Where each parameter's gradient comes from, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..equations.equation import is_inexact
from ..graph import OpUse, Relation, Route
from ..program import dataflow as flow
from ..program.program import Program
from .left_out import readers


def find_routes(
    program: Program,
    ops: Sequence[OpUse],
    relations: Iterable[Relation],
    unhidden: Iterable[list[int]],
    lost: Collection[int],
    plain: list[int],
) -> dict[str, Route]:
    """Path -> route of every parameter.

    ``unhidden``: the values of :func:`old_parts`; ``lost``: the equations of ops whose trace to a
    group is lost; ``plain``: :func:`plain_ways`.
    """
    used = flow.backward(program, dict.fromkeys((*program.outputs, *program.new_carry), 1))
    to_state = flow.backward(program, dict.fromkeys(program.new_states, 1), flow.gradients(program))
    traced = {i: rel.op for rel in relations for ps in rel.op.parameters.values() for i in ps}
    routes = {}
    for i, (name, value) in enumerate(zip(program.param_names, program.params, strict=True)):
        uses = [op for op in ops if any(i in ps for ps in op.parameters.values())]
        if i not in program.trainable:
            floating = is_inexact(program.avals[value])
            routes[name] = Route('frozen', 'not_trainable' if floating else 'not_inexact')
        elif i in traced:
            routes[name] = Route('trace', traced[i].primitive.name, traced[i].where)
        elif not used[value]:
            routes[name] = Route('same-step', 'unused')
        elif to_state[value]:
            reasons = [_why_untraced(program, op, lost) for op in uses if to_state[op.y]]
            routes[name] = _untraced_route(program, value, reasons, plain)
        else:
            hidden = not any(ahead[value] for ahead in unhidden)
            where = uses[0].where if uses else ''
            routes[name] = Route('same-step', 'no_hidden_state' if hidden else 'not_hidden', where)
    return routes


def _why_untraced(program: Program, op: OpUse, lost: Collection[int]) -> Route:
    if not op.owned:
        return Route('same-step', 'input_dependent_weight', op.where)
    if op.equation in lost:
        return Route('same-step', 'lost_relation', op.where)
    reached = flow.reach(program, op.y, program.op_set)
    behind_an_op = reached.isdisjoint(program.new_states)
    return Route('same-step', 'weight_then_weight' if behind_an_op else 'mixing_tail', op.where)


def _untraced_route(
    program: Program, value: int, by_ops: Sequence[Route], ways: list[int]
) -> Route:
    """Of several uses, that route counts which says most about the change to make."""
    told = next((route for route in by_ops if route.reason != 'weight_then_weight'), None)
    otherwise = by_ops[0] if by_ops else Route('same-step', 'not_etp_op')
    return told or _plain_route(program, value, ways) or otherwise


def _plain_route(program: Program, value: int, ways: list[int]) -> Route | None:
    """The route of a parameter by a use that is no op's weight."""
    # an op may hide in a function with a derivative rule of its own
    reached = flow.reach(program, value, ())
    for eqn in program.equations:
        if eqn.origin is not None and not reached.isdisjoint(eqn.ins) and eqn.holds_op():
            return Route('same-step', f'opaque_call:{eqn.primitive.name}', eqn.where)
    for i, _ in readers(program, value):
        if i not in program.op_set and flow.union(ways, program.equations[i].outs):
            return Route('same-step', 'not_etp_op', program.equations[i].where)
    return None
