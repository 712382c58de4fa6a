"""Where each parameter's gradient comes from, and why."""
from __future__ import annotations

from . import flow
from .graph import Diagnostic, OpUse, Route
from .losses import plain_ways, readers
from .program import Program, is_inexact

__all__ = ['find_routes', 'route_notes']


def find_routes(program: Program, ops, relations, forgetful, lost: set[str]) -> dict[str, Route]:
    """Path -> route of every parameter; ``forgetful``: what leads to parts of the carry that are no hidden states."""
    used_at_all = flow.backward(program, dict.fromkeys((*program.outputs, *program.new_carry), 1))
    to_state = flow.backward(program, {program.new_carry[c]: 1 for c in program.hidden}, flow.gradients(program))
    plain = plain_ways(program, ops)
    traced = {i: rel.op for rel in relations for ps in rel.op.parameters.values() for i in ps}
    uses = {i: [op for op in ops if any(i in ps for ps in op.parameters.values())] for i in program.trainable}
    routes = {}
    for i, name in enumerate(program.param_names):
        value = program.params[i]
        if i not in program.trainable:
            routes[name] = Route('frozen', 'not_trainable' if is_inexact(program.avals[value]) else 'not_inexact')
        elif i in traced:
            routes[name] = Route('trace', traced[i].primitive.name, traced[i].where)
        elif not used_at_all[value]:
            routes[name] = Route('same-step', 'unused')
        elif not to_state[value]:
            reason = 'not_hidden' if any(ahead[value] for ahead in forgetful.values()) else 'no_hidden_state'
            routes[name] = Route('same-step', reason, uses[i][0].where if uses[i] else '')
        else:
            reasons = [(_why_untraced(program, op, lost), op.where) for op in uses[i]
                       if to_state[op.y]]
            routes[name] = _untraced_route(program, value, reasons, plain)
    return routes


def _why_untraced(program: Program, op: OpUse, lost: set[str]) -> str:
    if not op.owned:
        return 'input_dependent_weight'
    if op.key in lost:
        return 'lost_relation'
    reached = flow.reach(program, op.y, program.op_set)
    return 'weight_then_weight' if reached.isdisjoint(program.new_carry[c] for c in program.hidden) else 'mixing_tail'


def _untraced_route(program: Program, value: int, reasons: list[tuple[str, str]],
                    ways: list[int]) -> Route:
    """The route of a parameter that reaches a hidden state without a trace: the use that says most about what to change."""
    told = next((r for r in reasons if r[0] != 'weight_then_weight'), None)
    plain = _plain_route(program, value, ways)
    if told is None and reasons and plain is None:
        told = reasons[0]
    return Route('same-step', *told) if told else plain or Route('same-step', 'not_etp_op')


def _plain_route(program: Program, value: int, ways: list[int]) -> Route | None:
    """The route of a parameter by a plain use; an op may hide in a function with a rule of its own."""
    reached = flow.reach(program, value, ())
    opaque = next((e for e in program.equations if e.origin is not None and not reached.isdisjoint(e.ins) and e.holds_op()), None)
    if opaque is not None:
        return Route('same-step', f'opaque_call:{opaque.primitive.name}', opaque.where)
    first = next((i for i, _ in readers(program, value)
                  if i not in program.op_set and flow.union(ways, program.equations[i].outs)), None)
    return None if first is None else Route('same-step', 'not_etp_op', program.equations[first].where)


def route_notes(routes: dict[str, Route]) -> list[Diagnostic]:
    """What to tell of parameters without a trace."""
    texts = {'not_etp_op': 'reaches a hidden state by a plain operation: its gradient holds the current step only. Apply it with a '
                           'braintrace op (matmul, element_wise, ...) to give it a trace',
             'mixing_tail': 'belongs to an op whose result reaches hidden states only through equations that mix its positions: its '
                            'gradient holds the current step only. Where a position reads several rows of one '
                            'result, apply the op to each: element_wise(k[0]) and element_wise(k[1])',
             'opaque_call': 'belongs to an op inside a function with a derivative rule of its own: its gradient is what that rule says, '
                            'for the current step only. Apply the op outside of that function to give it a trace',
             'unused': 'reaches neither an output nor a state: its gradient is zero'}
    kinds = {path: r.reason.partition(':')[0] for path, r in routes.items()}
    return [Diagnostic(kinds[path].replace('_', '-'), 'warning', f'parameter {path} {texts[kinds[path]]}', path, r.location)
            for path, r in routes.items() if kinds[path] in texts]
