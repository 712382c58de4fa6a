"""Whether programs that are not run name what is there: imports, attributes of modules and classes,
and the arguments of functions.
"""

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from types import ModuleType

OWN = ('braintrace', 'braintrace_receipts')


def lost(code: str, beside: tuple[str, ...] = ()) -> list[str]:
    """What this program names and nothing has; ``beside`` are modules that it makes itself. A
    package that is not installed has all names.
    """
    tree = ast.parse(code)
    nodes = list(ast.walk(tree))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and _stores(node)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    names, found = {}, []
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom) and _is_there(node, beside):
            try:
                exec(ast.unparse(node), names)
            except (ImportError, AttributeError) as error:
                found.append(f'{ast.unparse(node)}: {error}')
    known = {name: value for name, value in names.items() if name not in bound}
    return found + [line for node in nodes for line in _wrong(node, known)]


def _stores(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _is_there(node: ast.Import | ast.ImportFrom, beside: tuple[str, ...]) -> bool:
    named = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
    tops = {name.split('.')[0] for name in named}
    return not tops & {*beside} and all(
        top in OWN or importlib.util.find_spec(top) is not None for top in tops
    )


def _value(node: ast.expr, known: dict):
    """What ``a.b.c`` is where ``a`` is imported; KeyError where that is not known."""
    if isinstance(node, ast.Name):
        return known[node.id]
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, known)
        if isinstance(owner, ModuleType | type):
            return getattr(owner, node.attr)
    raise KeyError(node)


def _wrong(node: ast.AST, known: dict) -> Iterator[str]:
    try:
        if isinstance(node, ast.Attribute):
            _value(node, known)
        elif isinstance(node, ast.Call):
            _bind(_value(node.func, known), node)
    except KeyError:
        return
    except (AttributeError, TypeError) as error:
        yield f'{ast.unparse(node)[:80]}: {error}'


def _bind(function, call: ast.Call) -> None:
    """TypeError where the function does not take these arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of C
        return
    given = {word.arg: None for word in call.keywords if word.arg}
    whole = not any(isinstance(a, ast.Starred) for a in call.args)
    if whole and all(word.arg for word in call.keywords):
        signature.bind(*call.args, **given)
    else:
        signature.bind_partial(**given)
