"""Small faults of the package: one operator, number or condition of it changes, as in
`braintrace/_rules/entries.py: added: a + b -> a - b`.

A fault is put in while the package is imported: no file changes.
"""

import ast
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
# What tells a reader or a type checker something, and the text of errors.
LEFT_ALONE = ('annotation', 'returns', 'decorator_list', 'exc', 'type_params')


class Fault(NamedTuple):
    """The change with this number, of those that :func:`changes` lists for a file. The name tells
    the function and the text, which stay when lines move; of the same ones it counts.
    """

    file: str
    number: int
    line: int
    name: str


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """What a node may become."""
    match node:
        case ast.BinOp(left=a, op=op, right=b) if type(op) in SWAPS:
            yield ast.BinOp(a, SWAPS[type(op)](), b)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(SWAPS[type(op)](), values)
        case ast.Compare(left=a, ops=[op], comparators=others) if type(op) in SWAPS:
            yield ast.Compare(a, [SWAPS[type(op)]()], others)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=a):
            yield a
        case ast.IfExp(test=test, body=a, orelse=b):
            yield ast.IfExp(test, b, a)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.If(test=test, body=body, orelse=orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.AugAssign(target=a, op=op, value=b) if type(op) in SWAPS:
            yield ast.AugAssign(a, SWAPS[type(op)](), b)
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.comprehension(target=a, iter=b, ifs=[test, *tests]):
            yield ast.comprehension(a, b, [ast.UnaryOp(ast.Not(), test), *tests], 0)


def changes(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, list, int]]:
    """``(old, new, where, at)``: the tree with ``new`` has it as ``where[at]``, or as the attribute
    ``where[1]`` of the node ``where[0]`` where ``at`` is -1.
    """
    for name, value in ast.iter_fields(tree):
        if name in LEFT_ALONE or isinstance(tree, ast.JoinedStr):
            continue
        nodes = enumerate(value) if isinstance(value, list) else [(-1, value)]
        for at, node in nodes:
            if isinstance(node, ast.AST):
                where = value if at >= 0 else [tree, name]
                for new in changed(node):
                    yield node, new, where, at
                yield from changes(node)


def faults_of(file: str) -> list[Fault]:
    """Every change of one file of the package, named as from the root of the repository."""
    found, alike = [], Counter()
    tree = ast.parse((ROOT / file).read_text(encoding='utf-8'))
    inside = dict(functions_of(tree))
    for number, (old, new, *_) in enumerate(changes(tree)):
        first = old.target if isinstance(old, ast.comprehension) else old
        shown = (ast.unparse(n).strip().partition('\n')[0][:60] for n in (old, new))
        name = f'{file}: {inside[old]}: {" -> ".join(shown)}'
        alike[name] += 1
        name += f' ({alike[name]})' if alike[name] > 1 else ''
        found.append(Fault(file, number, first.lineno, name))
    return found


def functions_of(tree: ast.AST, name: str = 'module') -> Iterator[tuple[ast.AST, str]]:
    """Each node below with the function or class that it is in."""
    for node in ast.iter_child_nodes(tree):
        yield node, name
        own = getattr(node, 'name', None) if isinstance(node, ast.stmt) else None
        yield from functions_of(node, f'{name}.{own}'.removeprefix('module.') if own else name)


def drawn(seed: int, number: int, lines: Mapping[str, set[int]]) -> list[Fault]:
    """So many faults, no two on one line, each on one of these lines of the files."""
    at = {}
    for file in sorted(lines):
        for fault in faults_of(file):
            if fault.line in lines[file]:
                at.setdefault((file, fault.line), []).append(fault)
    rng = random.Random(seed)
    return [rng.choice(at[place]) for place in rng.sample(sorted(at), min(number, len(at)))]


def put_in(fault: Fault) -> None:
    """From now on the file is imported with the fault; to be called before it is."""
    path, get_code = ROOT / fault.file, SourceFileLoader.get_code

    def with_fault(self, fullname):
        if Path(self.path) != path:
            return get_code(self, fullname)
        tree = ast.parse(path.read_text(encoding='utf-8'))
        for number, (old, new, where, at) in enumerate(changes(tree)):
            if number == fault.number:
                new = ast.fix_missing_locations(ast.copy_location(new, old))
                if at >= 0:
                    where[at] = new
                else:
                    setattr(where[0], where[1], new)
                break
        return compile(tree, str(path), 'exec')

    SourceFileLoader.get_code = with_fault
