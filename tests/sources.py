"""The package as text: its files, their imports, what each floor exports. Nothing is imported."""

import ast
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / 'braintrace'
VERIFIER = ROOT / 'receipts' / 'braintrace_receipts'  # a distribution of its own
Function = ast.FunctionDef | ast.AsyncFunctionDef
Finding = tuple[int, str]  # a line and what is wrong there
BESIDE = ('extra',)  # folders beside the core: each of their modules is a floor


def floor_of(parts: Iterable[str]) -> str:
    """The floor of ``('_rules', 'rule')``, and of the parts of a name behind ``braintrace``."""
    first, *rest = [part for part in parts if part != '__init__'] or ['']
    return f'{first}.{rest[0]}' if first in BESIDE and rest else first


@dataclass(frozen=True)
class Source:
    """A source text and where it stands; ``path`` is relative to the package."""

    path: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def floor(self) -> str:
        """The first folder or module, ``extra.name`` of a folder of :data:`BESIDE`; ``''`` for the
        package's own ``__init__``.
        """
        return floor_of(Path(self.path).with_suffix('').parts)

    @property
    def module(self) -> str:
        """The dotted name under which Python knows this file."""
        parts = ['braintrace', *Path(self.path).with_suffix('').parts]
        return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)

    def absolute_base(self, node: ast.ImportFrom) -> str:
        """The dotted name that a ``from ... import`` starts at, relative dots resolved."""
        if not node.level:
            return node.module or ''
        folders = ['braintrace', *Path(self.path).parts[:-1]]
        return '.'.join(
            folders[: len(folders) - node.level + 1] + ([node.module] if node.module else [])
        )

    def imports(self, nodes: Iterable[ast.AST] | None = None) -> Iterator[tuple[int, str]]:
        """Line and full name of each import, wherever it stands; ``from a import b``: ``a.b``."""
        for node in ast.walk(self.tree) if nodes is None else nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self.absolute_base(node)
                yield from ((node.lineno, f'{base}.{alias.name}') for alias in node.names)

    def own_imports(self) -> Iterator[tuple[int, str]]:
        """Imports of the package itself."""
        return ((line, name) for line, name in self.imports() if name.startswith('braintrace.'))

    def uses(self) -> Iterator[tuple[int, str]]:
        """Imports of the package, and what is read of an imported floor by a dot."""
        yield from self.own_imports()
        bound = {
            alias.asname or alias.name: f'{self.absolute_base(node)}.{alias.name}'
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                whole = bound.get(node.value.id, '')
                if whole in MODULES and whole.count('.') == 1:
                    yield node.lineno, f'{whole}.{node.attr}'

    def attributes(self) -> Iterator[tuple[int, str]]:
        """Line and full name of each ``a.b.c`` that is read."""
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.Attribute))
        return ((node.lineno, dotted(node)) for node in nodes)

    def calls(self) -> Iterator[tuple[int, str]]:
        """Line and full name of each function that is called."""
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        return ((node.lineno, dotted(node.func)) for node in nodes)

    def outside_functions(self) -> list[ast.AST]:
        """The nodes that an import of this file runs."""
        inside = {node for function in self.functions() for node in ast.walk(function)}
        return [node for node in ast.walk(self.tree) if node not in inside]

    def functions(self) -> Iterator[Function]:
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))


def dotted(node: ast.AST) -> str:
    """``jax.core.Jaxpr`` of an attribute chain that starts at a plain name, else ``''``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f'{base}.{node.attr}' if base else ''
    return ''


def body(function: Function) -> list[ast.stmt]:
    """A function's statements without its docstring."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def type_checking_lines(tree: ast.Module) -> set[int]:
    """The lines that a type checker alone reads."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and dotted(node.test).endswith('TYPE_CHECKING')
        for line in range(node.body[0].lineno, node.body[-1].end_lineno + 1)
    }


def read_package(folder: Path) -> list[Source]:
    return [
        Source(path.relative_to(folder).as_posix(), path.read_text(encoding='utf-8'))
        for path in sorted(folder.rglob('*.py'))
    ]


SOURCES = read_package(PACKAGE)
VERIFIER_SOURCES = read_package(VERIFIER)
MODULES = {source.module: source for source in SOURCES}
FRONT = MODULES['braintrace']


def assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """What is behind ``name = ...`` and ``name: type = ...`` at the top of a file."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {dotted(target): node.value for target in node.targets}
        elif isinstance(node, ast.AnnAssign):
            found[dotted(node.target)] = node.value
    return found


# Names of the package itself that are imported on first use, and where from: an import of one is
# an import of that floor.
LAZY = {
    name: module.lstrip('.')
    for name, module in ast.literal_eval(assigned(FRONT.tree)['_LAZY']).items()
}


@functools.cache
def exports(module: str) -> frozenset[str]:
    """The names that a module offers: its ``__all__``, or its public names where it has none, of
    the front door of a floor those that it imports.
    """
    source, own = MODULES[module], assigned(MODULES[module].tree)
    if '__all__' not in own:
        defined = {
            node.name for node in source.tree.body if isinstance(node, Function | ast.ClassDef)
        }
        if source.path.endswith('__init__.py'):
            imports = [node for node in source.tree.body if isinstance(node, ast.ImportFrom)]
            defined |= {alias.asname or alias.name for node in imports for alias in node.names}
        return frozenset(
            name for name in defined | set(own) if not name.startswith('_') or name.endswith('__')
        )
    return frozenset(map(ast.literal_eval, own['__all__'].elts))


@functools.cache
def offered_by(module: str) -> frozenset[str]:
    """The full names of what a module imports and offers."""
    offered = exports(module) if module in MODULES else frozenset()
    imported = MODULES[module].own_imports() if offered else ()
    return frozenset(name for _, name in imported if name.split('.')[-1] in offered)


def module_of(name: str, modules: Iterable[str] = MODULES) -> str | None:
    """The module of ``braintrace.a.b.c``; the package's own names are followed to their floor."""
    parts = name.split('.')
    # `from ._etrace_op import conv` means the function, not the module that is called alike
    hidden = name in modules and f'{name}.{parts[-1]}' in offered_by('.'.join(parts[:-1]))
    for end in range(len(parts) - hidden, 1, -1):
        if '.'.join(parts[:end]) in modules:
            return '.'.join(parts[:end])
    if parts[0] != 'braintrace' or len(parts) == 1:
        return None
    for node in FRONT.tree.body:
        if isinstance(node, ast.ImportFrom):
            base = FRONT.absolute_base(node)
            offered = {alias.asname or alias.name for alias in node.names}
            if parts[1] in offered:
                return base
    return f'braintrace.{LAZY[parts[1]]}' if parts[1] in LAZY else None


def found_by(check: Callable[[Source], Iterator[Finding]], package: Path = PACKAGE) -> list[str]:
    """What a rule finds in the package, or in the verifier, with its place."""
    return [
        f'{package.relative_to(ROOT)}/{source.path}:{line}: {text}'
        for source in (SOURCES if package == PACKAGE else VERIFIER_SOURCES)
        for line, text in check(source)
    ]
