"""A compiled graph as a Mermaid flowchart."""

from __future__ import annotations

from .._compiler import ETraceGraph


def to_mermaid(graph: ETraceGraph) -> str:
    """Nodes are numbered within their kind; edges follow values until they meet the next node."""
    program = graph.program
    group_of = {c: f'g{k}' for k, group in enumerate(graph.hidden_groups) for c in group.carried}
    news = {program.new_carry[c]: g for c, g in group_of.items()}
    olds = {program.carry[c]: g for c, g in group_of.items()}
    ops = {op.equation: f'e{k}' for k, op in enumerate(graph.ops)}
    mixing = {i: f'm{k}' for k, i in enumerate(sorted(set(graph.mixing) - set(ops)))}
    node_of = ops | mixing
    # an op and a group to which it has a trace
    traced = {
        (ops[rel.op.equation], f'g{k}')
        for rel in graph.hidden_param_op_relations
        for of_rel in rel.groups
        for k, group in enumerate(graph.hidden_groups)
        if set(group.states) <= set(of_rel.states)
    }
    edges: dict[tuple[str, str], bool] = {}  # (from, to) -> whether history goes that way whole

    def passes(start: str, i: int, value: int) -> bool:
        """Whether history passes into a node: a weight into its traced op, or a value that leads to
        no hidden state.
        """
        ins, op = program.equations[i].ins, graph.op_at.get(i)
        slots = set() if op is None else set(op.slots.values())
        as_weight = all(k in slots for k, v in enumerate(ins) if v == value)
        own = start[0] == 'p' and as_weight and any(node_of[i] == node for node, _ in traced)
        return own or not graph.recurrent.get(i)

    def follow(start: str, first: set[int], new: bool = False) -> None:
        """The edges to the nodes that values meet next; ``new``: they are new states."""
        todo, seen, found = sorted(first), set(first), {}
        while todo:
            v = todo.pop()
            inside = start[0] == 'g' and v in first
            # a result: a path after a new state starts at the state's own node
            if v in program.outputs and (inside or v not in news):
                found['out'] = True
            if v in news and not inside:
                node = news[v]
                if not (new and node == start):
                    found[node] = new or node == start or (start, node) in traced
                continue
            # an equation with a node, or without: the edge goes on
            for i in program.consumers.get(v, ()):
                if i in node_of:
                    found[node_of[i]] = found.get(node_of[i], True) and passes(start, i, v)
                else:
                    todo += [o for o in program.results(i, v) if o not in seen]
                    seen.update(program.results(i, v))
        for node, whole in sorted(found.items()):
            edges[start, node] = edges.get((start, node), True) and whole

    for k, value in enumerate(program.params):
        follow(f'p{k}', {value})
    for op in graph.ops:
        follow(ops[op.equation], {op.y})
    for i, node in mixing.items():
        follow(node, set(program.equations[i].outs))
    for g in [f'g{k}' for k in range(len(graph.hidden_groups))]:
        follow(g, {v for v, node in olds.items() if node == g})
        follow(g, {v for v, node in news.items() if node == g}, new=True)

    lines = ['flowchart LR', '  %% a dashed edge: history does not go that way']
    for k, path in enumerate(program.param_names):
        lines.append(f'  p{k}[{label(f"{path}: {graph.routes[path].kind}")}]')
    for k, op in enumerate(graph.ops):
        lines.append(f'  e{k}([{label(f"{op.primitive.name} {op.key}")}])')
    for i, node in mixing.items():
        lines.append(f'  {node}{{{{{label(program.equations[i].primitive.name)}}}}}')
    for k, group in enumerate(graph.hidden_groups):
        text = label(f'{group.name} {list(group.shape)} x {group.num_state}')
        lines.append(f'  g{k}[({text})]')
    if any(end == 'out' for _, end in edges):
        lines.append(f'  out(({label("outputs")}))')
    arrows = {True: '-->', False: '-.->'}
    return '\n'.join(lines + [f'  {a} {arrows[whole]} {b}' for (a, b), whole in edges.items()])


def label(text: str) -> str:
    """A quoted label, with character codes for syntax of Mermaid or HTML."""
    plain = ' _-./,:=+[]()'
    return f'"{"".join(c if c.isalnum() or c in plain else f"#{ord(c)};" for c in text)}"'
