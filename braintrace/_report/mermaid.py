"""A compiled graph as a Mermaid flowchart."""

from __future__ import annotations

from collections.abc import Iterable

from .._compiler import ETraceGraph


def to_mermaid(graph: ETraceGraph) -> str:
    return '\n'.join(
        [
            'flowchart LR',
            '  %% a dashed edge: history does not go that way',
            *_Drawing(graph).lines(),
        ]
    )


def label(text: str) -> str:
    """A quoted label, with character codes for syntax of Mermaid or HTML."""
    plain = ' _-./,:=+[]()'
    return f'"{"".join(c if c.isalnum() or c in plain else f"#{ord(c)};" for c in text)}"'


class _Drawing:
    """Nodes are numbered within their kind; edges follow values until they meet the next node."""

    def __init__(self, graph: ETraceGraph):
        self.graph, self.program = graph, graph.program
        group_of = {c: g for g, group in enumerate(graph.hidden_groups) for c in group.carried}
        self.news = {self.program.new_carry[c]: g for c, g in group_of.items()}
        self.olds = {self.program.carry[c]: g for c, g in group_of.items()}
        self.nodes = {op.equation: f'e{i}' for i, op in enumerate(graph.ops)}
        self.nodes.update(
            {i: f'm{k}' for k, i in enumerate(sorted(set(graph.mixing) - set(self.nodes)))}
        )
        self.related = {
            (f'e{i}', f'g{k}')
            for i, op in enumerate(graph.ops)
            for rel in graph.hidden_param_op_relations
            if rel.op is op
            for g in rel.groups
            for k, group in enumerate(graph.hidden_groups)
            if set(group.states) <= set(g.states)
        }
        self.weights = {op.equation: set(op.slots.values()) for op in graph.ops}

    def lines(self) -> list[str]:
        edges = self.edges()
        nodes = self.node_lines(any(end == 'out' for _, end in edges))
        return [
            *(f'  {n}' for n in nodes),
            *(f'  {a} {"-->" if whole else "-.->"} {b}' for (a, b), whole in edges.items()),
        ]

    def node_lines(self, with_outputs: bool) -> Iterable[str]:
        for i, path in enumerate(self.program.param_names):
            yield f'p{i}[{label(f"{path}: {self.graph.routes[path].kind}")}]'
        for i, op in enumerate(self.graph.ops):
            yield f'e{i}([{label(f"{op.primitive.name} {op.key}")}])'
        for i in sorted(set(self.graph.mixing) - {op.equation for op in self.graph.ops}):
            yield f'{self.nodes[i]}{{{{{label(self.program.equations[i].primitive.name)}}}}}'
        for i, group in enumerate(self.graph.hidden_groups):
            yield f'g{i}[({label(f"{group.name} {list(group.shape)} x {group.num_state}")})]'
        if with_outputs:
            yield f'out(({label("outputs")}))'

    def edges(self) -> dict[tuple[str, str], bool]:
        """``(from, to)`` -> whether history goes that way whole."""
        sources: list[tuple[str, Iterable[int], bool]] = [
            (f'p{i}', [v], False) for i, v in enumerate(self.program.params)
        ]
        sources += [(f'e{i}', [op.y], False) for i, op in enumerate(self.graph.ops)]
        sources += [
            (node, self.program.equations[i].outs, False)
            for i, node in self.nodes.items()
            if node[0] == 'm'
        ]
        for g in range(len(self.graph.hidden_groups)):
            sources += [
                (f'g{g}', [v for v, k in states.items() if k == g], states is self.news)
                for states in (self.olds, self.news)
            ]
        found: dict[tuple[str, str], bool] = {}
        for start, values, new in sources:
            for node, whole in self.ends(start, set(values), new):
                found[start, node] = found.get((start, node), True) and whole
        return found

    def ends(self, start: str, first: set[int], new: bool) -> list[tuple[str, bool]]:
        """The nodes that the values in ``first`` meet next; ``new``: they are new states."""
        todo, seen, found = sorted(first), set(first), {}
        while todo:
            v = todo.pop()
            inside = start[0] == 'g' and v in first
            # a result: a path behind a new state starts at the state's own node
            if v in self.program.outputs and (inside or v not in self.news):
                found['out'] = True
            if v in self.news and not inside:
                node = f'g{self.news[v]}'
                if not (new and node == start):
                    found[node] = new or node == start or (start, node) in self.related
                continue
            # an equation with a node, or without: the edge goes on
            for i in self.program.consumers.get(v, ()):
                if i in self.nodes:
                    found[self.nodes[i]] = found.get(self.nodes[i], True) and self.whole(
                        start, i, v
                    )
                else:
                    todo += [o for o in self.program.results(i, v) if o not in seen]
                    seen.update(self.program.results(i, v))
        return sorted(found.items())

    def whole(self, start: str, i: int, value: int) -> bool:
        """Whether history passes into a node: a weight into its traced op, or a value that leads to
        no hidden state.
        """
        eqn = self.program.equations[i]
        as_weight = all(k in self.weights.get(i, ()) for k, v in enumerate(eqn.ins) if v == value)
        traced = any(op == self.nodes[i] for op, _ in self.related)
        return (start[0] == 'p' and as_weight and traced) or not self.graph.recurrent.get(i)
