"""What a trace leaves out: the cut equations of a graph by place, and for each parameter the ways that carry no history."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import flow
from .program import Program

if TYPE_CHECKING:
    from .graph import ETraceGraph, OpUse

__all__ = ['USE', 'Cut', 'cuts', 'name_mixing', 'op_name', 'plain_ways', 'readers', 'untraced_uses']


USE = 'its use in '


@dataclass(frozen=True)
class Cut:
    """Equations of one kind at one place where history ends.

    ``reads``: groups whose past arrives there and is not carried on; ``reaches``: groups whose new states the result leads to.
    """
    what: str
    reason: str
    reads: tuple[str, ...]
    reaches: tuple[str, ...]
    location: str

    def __str__(self) -> str:
        return f'{self.what} [{self.location}]' if self.location else self.what


def op_name(op: OpUse) -> str:
    """An op as the report calls it: its primitive and its key."""
    return f'{op.primitive.name} ({op.key})'


def cuts(graph: ETraceGraph) -> tuple[Cut, ...]:
    """Every place where history is cut, in program order; what ``cut_reads`` names without an equation comes last."""
    ops = {op.equation: op for op in graph.ops}
    names = [g.name for g in graph.hidden_groups]
    readers: dict[str, list[str]] = {}
    for group, texts in graph.cut_reads.items():
        for text in texts:
            readers.setdefault(text, []).append(group)
    found: dict[tuple[str, str, str], tuple[set[str], set[str]]] = {}
    known = set()
    for i, reached in sorted(graph.recurrent.items()):
        label = _cut_label(graph.program, ops, i)
        known.add(label)
        if label in readers or i in graph.mixing:
            op = ops.get(i)
            key = name_mixing(graph.program, i, graph.mixing[i]) if op is None else (op_name(op), 'one position reads another', op.where)
            entry = found.setdefault(key, (set(), set()))
            entry[0].update(readers.get(label, ()))
            entry[1].update(names[g] for g in flow.members(reached))
    return tuple([Cut(what, why, _ordered(names, reads), _ordered(names, reaches), where)
                  for (what, why, where), (reads, reaches) in found.items()]
                 + [Cut(text, 'no trace fits both shapes', tuple(groups), (), '') for text, groups in readers.items() if text not in known])


def _ordered(names: list[str], some: set[str]) -> tuple[str, ...]:
    return tuple(n for n in names if n in some)


def _cut_label(program: Program, ops: dict[int, OpUse], i: int) -> str:
    """An equation as ``ETraceGraph.cut_reads`` names it."""
    eqn = program.equations[i]
    return op_name(ops[i]) if i in ops else f'{eqn.primitive.name} [{eqn.where}]'


def name_mixing(program: Program, i: int, why: str) -> tuple[str, str, str]:
    """Name, reason and place of a mixing equation; a broadcast is told as the reduction that it spreads."""
    eqn, why = program.equations[i], f'{why} of a hidden state'
    source = _reduction_behind(program, i)
    if source is None:
        return eqn.primitive.name, why, eqn.where
    made = program.equations[source]
    return f'{made.primitive.name}, spread by {eqn.primitive.name}', why, made.where or eqn.where


def _reduction_behind(program: Program, i: int) -> int | None:
    """The nearest equation behind a widening one whose result is smaller than what it reads."""
    def sizes(values: Iterable[int]) -> int:
        return max((program.avals[v].size for v in values), default=0)
    eqn = program.equations[i]
    if sizes(eqn.outs) <= sizes(eqn.ins):
        return None
    todo, seen = list(eqn.ins), set()
    while todo:
        producer = program.producer.get(todo.pop(0))
        if producer is not None and producer not in seen:
            seen.add(producer)
            made = program.equations[producer]
            if made.loop is None and sizes(made.ins) > sizes(made.outs):
                return producer
            todo.extend(u for o in made.outs for u in program.operands(producer, o))
    return None


def untraced_uses(graph: ETraceGraph) -> dict[str, tuple[str, ...]]:
    """For each trainable parameter, its uses that reach a hidden state without a trace."""
    program, slots = graph.program, weight_slots(graph.ops)
    plain = plain_ways(program, graph.ops)
    found: dict[str, list[str]] = {program.param_names[i]: [] for i in program.trainable}
    for op in graph.ops:
        for path in {program.param_names[i] for ps in op.parameters.values() for i in ps}:
            found[path] += _without_trace(graph, op, plain)
    for i in program.trainable:
        found[program.param_names[i]] += [
            f'{USE}{eqn.primitive.name} [{eqn.where}]' for j, v in readers(program, program.params[i]) for eqn in [program.equations[j]]
            if flow.union(plain, eqn.outs) and any(u == v and k not in slots.get(j, ()) for k, u in enumerate(eqn.ins))]
    for note in graph.diagnostics:
        if note.kind == 'lost-relation' and note.path in found:
            found[note.path].append(f'{note.message} [{note.location}]')
    return {path: tuple(dict.fromkeys(texts)) for path, texts in found.items()}


def weight_slots(ops: Iterable[OpUse]) -> dict[int, set[int]]:
    """The operands of each op's equation that are its weights."""
    return {op.equation: set(op.primitive.trainable_invars_fn(op.params).values()) for op in ops}


def plain_ways(program: Program, ops: Iterable[OpUse]) -> list[int]:
    """For each value, whether a new hidden state sends it a gradient past the weights of ops."""
    new, slots = {program.new_carry[c]: 1 for c in program.hidden}, weight_slots(ops)
    return flow.backward(program, new, flow.gradients(program),
                         skip=lambda i, k: k in slots.get(i, ()))


def readers(program: Program, value: int) -> Iterator[tuple[int, int]]:
    """The equations that read a value, each with what it reads; the boundaries of loops are passed."""
    todo, seen = [value], {value}
    while todo:
        v = todo.pop()
        for i in program.consumers.get(v, ()):
            if program.equations[i].loop is None:
                yield i, v
            else:
                todo += [u for u in program.results(i, v) if u not in seen]
                seen.update(program.results(i, v))


def _without_trace(graph: ETraceGraph, op: OpUse, ahead: list[int]) -> list[str]:
    """The op itself where it has no relation, else the groups to which its trace is lost."""
    if all(rel.op is not op for rel in graph.hidden_param_op_relations):
        return [f'{USE}{op_name(op)} [{op.where}]'] if ahead[op.y] else []
    return [f'{note.message} [{note.location}]' for note in graph.diagnostics if note.kind == 'lost-relation' and note.path == op.key]
