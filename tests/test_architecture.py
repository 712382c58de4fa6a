"""The house: every import arrow points down, and every file keeps the house rules. Sources are read, not imported."""
from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / 'braintrace'
MAX_LINES = 450

# A floor and the floors that it may import. What is not listed is forbidden; a new top-level module adds its row.
CORE = {'_errors', '_tables', '_jax', '_etrace_op', '_compiler', '_executor', '_rules'}
PUBLIC = {'', 'functional', 'rules'}
ARROWS: dict[str, set[str]] = {
    '_version': set(),
    '_errors': set(),
    '_signatures': set(),
    '_tables': set(),
    '_warnings': {'_errors'},
    '_jax': {'_errors'},
    '_brainstate': {'_jax'},
    '_etrace_op': {'_errors', '_jax'},
    'nn': {'_errors', '_etrace_op', '_signatures', '_brainstate'},
    '_compiler': {'_errors', '_tables', '_jax', '_etrace_op'},
    '_executor': {'_errors', '_jax', '_etrace_op', '_compiler'},
    '_rules': CORE - {'_rules'},
    'rules': {'_errors', '_rules'},
    'functional': CORE | {'_warnings'},
    '_learner': CORE | {'functional', 'rules', '_signatures', '_brainstate', '_warnings'},
    'verify': PUBLIC | {'_tables'},
    'kit': PUBLIC | {'verify', '_etrace_op'},
    'receipts': PUBLIC | {'verify'},
    'adapters': PUBLIC | {'verify'},
    '': CORE | {'_version', 'functional', 'rules', 'verify'},
}
# Names of the package itself that are imported on first use, and where from: an import of one is
# an import of that floor.
FRONT = ast.parse((PACKAGE / '__init__.py').read_text(encoding='utf-8'))
LAZY = {name: module.lstrip('.') for node in FRONT.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '_LAZY'
        for name, module in ast.literal_eval(node.value).items()}
RUNTIME = {'jax', 'jaxlib', 'brainstate', 'saiunit', 'numpy'}
BRAINSTATE = {'nn', '_learner', 'adapters'}
PLUGINS = {'kit/pytest_plugin.py': {'pytest'}}        # a module that its host alone imports
INTERNALS = ('jax._src', 'jax.core', 'jax.extend', 'jax.interpreters')
JAXPR_FIELDS = {'eqns', 'invars', 'outvars', 'constvars', 'jaxpr'}


@dataclass(frozen=True)
class Source:
    """A source text and where it stands; ``path`` is relative to the package."""
    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def floor(self) -> str:
        """The first folder or module; ``''`` for the package's own ``__init__``."""
        first = Path(self.path).with_suffix('').parts[0]
        return '' if first == '__init__' else first

    def absolute_base(self, node: ast.ImportFrom) -> str:
        """The dotted name that a ``from ... import`` starts at, relative dots resolved."""
        if not node.level:
            return node.module or ''
        folders = ['braintrace', *Path(self.path).parts[:-1]]
        return '.'.join(folders[:len(folders) - node.level + 1] + ([node.module] if node.module else []))

    def imports(self, nodes: Iterable[ast.AST] | None = None) -> Iterator[tuple[int, str]]:
        """Line and full dotted name of each import; ``from a import b`` gives ``a.b``."""
        for node in ast.walk(self.tree) if nodes is None else nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self.absolute_base(node)
                yield from ((node.lineno, f'{base}.{alias.name}') for alias in node.names)


Check = Callable[[Source], Iterator[tuple[int, str]]]
SOURCES = [Source(p.relative_to(PACKAGE).as_posix(), p.read_text(encoding='utf-8')) for p in sorted(PACKAGE.rglob('*.py'))]


def dotted(node: ast.AST) -> str:
    """``jax.core.Jaxpr`` of an attribute chain that starts at a plain name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f'{base}.{node.attr}' if base else ''
    return ''


def target_floor(name: str) -> str:
    """The floor that ``braintrace.x.y`` stands on; a name that the package has at once: ``''``."""
    first = (name.split('.') + [''])[1]
    return first if first in ARROWS else LAZY.get(first, '')


def runs(tree: ast.Module) -> list[ast.AST]:
    """All nodes but those that a type checker alone reads."""
    blocks = [node for node in ast.walk(tree)
              if isinstance(node, ast.If) and dotted(node.test) == 'TYPE_CHECKING']
    unread = {inner for block in blocks for line in block.body for inner in ast.walk(line)}
    return [node for node in ast.walk(tree) if node not in unread]


def check_arrows(source: Source) -> Iterator[tuple[int, str]]:
    below = ARROWS.get(source.floor, set())
    for line, name in source.imports(runs(source.tree)):
        target = target_floor(name)
        if name.split('.')[0] == 'braintrace' and target != source.floor and target not in below:
            allowed = ', '.join(sorted(below - {''})) or 'nothing of the package'
            floor = source.floor or '__init__.py'
            yield line, (f'{floor} imports {name}; it may import {allowed}. '
                         'Move the code down, or pass the value in')


def check_internals(source: Source) -> Iterator[tuple[int, str]]:
    if source.floor == '_jax':
        return
    used = list(source.imports())
    used += [(node.lineno, dotted(node)) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    for line, name in sorted(set(used)):
        if any(name == door or name.startswith(f'{door}.') for door in INTERNALS):
            yield line, f'{name} is internal to JAX; add what is needed to braintrace/_jax.py and a contract test for it'


def check_brainstate(source: Source) -> Iterator[tuple[int, str]]:
    """Only some floors know brainstate; each imports ``_brainstate`` before anything else."""
    if source.floor in BRAINSTATE:
        first = next(source.imports(), (1, ''))
        if source.path == f'{source.floor}/__init__.py' and first[1] != 'braintrace._brainstate':
            yield first[0], 'import .._brainstate first: brainstate by itself changes jax.config'
        return
    for line, name in source.imports():
        if name.split('.')[0] == 'brainstate':
            floors = ', '.join(sorted(BRAINSTATE))
            yield line, f'the functional core does not know brainstate; only {floors} import it'


def check_third_party(source: Source) -> Iterator[tuple[int, str]]:
    tree = source.tree
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {node for function in functions for node in ast.walk(function)}
    for line, name in source.imports(node for node in ast.walk(tree) if node not in inside):
        package = name.split('.')[0]
        if package not in RUNTIME | PLUGINS.get(source.path, set()) | {'braintrace'} and package not in sys.stdlib_module_names:
            yield line, f'{package} is not a run-time dependency; import it inside the function that needs it'


def check_length(source: Source) -> Iterator[tuple[int, str]]:
    lines = len(source.text.splitlines())
    if lines > MAX_LINES:
        yield MAX_LINES, f'{lines} lines; a file is read in one sitting ({MAX_LINES} at most): split it by purpose'


def check_asserts(source: Source) -> Iterator[tuple[int, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, 'assert vanishes under `python -O`; raise an error of braintrace/_errors.py'


def check_excepts(source: Source) -> Iterator[tuple[int, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, 'a bare except hides faults; name the exception'


def check_jaxpr_readers(source: Source) -> Iterator[tuple[int, str]]:
    if source.floor not in {'_rules', 'functional', '_learner', 'nn'}:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in JAXPR_FIELDS:
            yield node.lineno, f'.{node.attr} reads a jaxpr; the floors below do, and hand over factors'


def check_named_primitives(source: Source) -> Iterator[tuple[int, str]]:
    if source.floor not in {'_compiler', '_executor', '_rules'}:
        return
    for node in ast.walk(source.tree):
        text = node.value if isinstance(node, ast.Constant) else node.id if isinstance(node, ast.Name) else None
        if isinstance(text, str) and text.startswith('etp_'):
            yield node.lineno, f'{text!r} names a primitive; ask the rule registry for the property that matters'


def check_module_docstring(source: Source) -> Iterator[tuple[int, str]]:
    if not ast.get_docstring(source.tree):
        yield 1, 'the module has no docstring; say in one sentence what it holds'


RULES: dict[str, Check] = {
    'every import arrow points down': check_arrows,
    'only _jax.py opens the door to the internals of JAX': check_internals,
    'only nn, _learner and adapters know brainstate': check_brainstate,
    'module-level imports are run-time dependencies': check_third_party,
    'no assert statements': check_asserts,
    'no bare except': check_excepts,
    'rules, learner and nn never read a jaxpr': check_jaxpr_readers,
    'the compiler, the executor and the rules name no primitive': check_named_primitives,
    'every module has a docstring': check_module_docstring,
    'a file is read in one sitting': check_length,
}

# For each rule a source that breaks it.
BROKEN = {
    'every import arrow points down': Source('_rules/x.py', 'from .. import functional'),
    'only _jax.py opens the door to the internals of JAX': Source('_compiler/x.py', 'import jax\nf = jax.core.Jaxpr'),
    'only nn, _learner and adapters know brainstate': Source('functional.py', 'import brainstate'),
    'module-level imports are run-time dependencies': Source('_learner/x.py', 'if True:\n    import optax'),
    'no assert statements': Source('_rules/x.py', 'def f(x):\n    assert x'),
    'no bare except': Source('_rules/x.py', 'try:\n    pass\nexcept:\n    pass'),
    'rules, learner and nn never read a jaxpr': Source('_rules/x.py', 'def f(g):\n    return g.jaxpr.eqns'),
    'the compiler, the executor and the rules name no primitive': Source('_compiler/x.py', "special = {'etp_mm'}"),
    'every module has a docstring': Source('_rules/x.py', 'x = 1'),
    'a file is read in one sitting': Source('_rules/x.py', 'x = 1\n' * (MAX_LINES + 1)),
}


@pytest.mark.parametrize('rule', RULES)
def test_the_package_keeps_the_rule(rule):
    found = [f'braintrace/{source.path}:{line}: {text}' for source in SOURCES for line, text in RULES[rule](source)]
    assert not found, f'{rule}:\n' + '\n'.join(found)


@pytest.mark.parametrize('rule', RULES)
def test_a_source_that_breaks_the_rule_is_found(rule):
    assert list(RULES[rule](BROKEN[rule]))


@pytest.mark.parametrize(('path', 'text', 'name'), [
    ('_rules/__init__.py', 'from ._d import f', 'braintrace._rules._d.f'),
    ('_rules/d.py', 'from . import f', 'braintrace._rules.f'),
    ('_rules/d.py', 'from .._jax import f', 'braintrace._jax.f'),
    ('_rules/d.py', 'from braintrace._jax import f', 'braintrace._jax.f'),
    ('functional.py', 'def g():\n    from . import _learner', 'braintrace._learner'),
    ('__init__.py', 'from ._learner import f', 'braintrace._learner.f'),
])
def test_relative_imports_are_resolved(path, text, name):
    assert [found for _, found in Source(path, text).imports()] == [name]


@pytest.mark.parametrize(('path', 'text', 'message'), [
    ('verify/x.py', 'from .. import D_RTRL', 'verify imports braintrace.D_RTRL'),
    ('kit/x.py', 'def f():\n    from .. import nn', 'kit imports braintrace.nn'),
    ('__init__.py', 'from ._learner import D_RTRL', '__init__.py imports braintrace._learner'),
    ('nn/__init__.py', 'from ._base import f\nfrom .. import _brainstate', '.._brainstate first'),
])
def test_an_import_that_would_bring_in_brainstate_is_found(path, text, message):
    source = Source(path, text)
    found, = [*check_arrows(source), *check_brainstate(source)]
    assert message in found[1]


def test_an_import_for_type_checkers_alone_is_no_arrow():
    source = Source('verify/x.py', 'if TYPE_CHECKING:\n    from .. import ETraceLearner')
    assert list(source.imports()) and not list(check_arrows(source))


def test_every_module_stands_on_a_floor():
    strangers = sorted({source.floor for source in SOURCES} - set(ARROWS) - {''})
    assert not strangers, f'{strangers} have no row in ARROWS: say there which floors they may import'


def test_the_arrows_have_no_cycle():
    below: dict[str, set[str]] = {}
    rows = {floor: targets - {''} for floor, targets in ARROWS.items()}
    while rows:
        ready = [floor for floor, targets in rows.items() if targets <= set(below)]
        assert ready, f'the arrows among {sorted(rows)} form a cycle'
        below.update({floor: rows.pop(floor) for floor in ready})


@pytest.mark.parametrize('name', ['braintrace', 'braintrace.nn', 'braintrace.functional', 'braintrace.rules', 'braintrace.verify',
                                  'braintrace.kit'])
def test_every_public_name_has_a_docstring(name):
    module = importlib.import_module(name)
    bare = [public for public in module.__all__ if not is_documented(getattr(module, public))]
    assert not bare, f'public names of {name} without a docstring: {bare}'


def is_documented(value: object) -> bool:
    return isinstance(value, str | tuple | dict | set | frozenset) or bool(getattr(value, '__doc__', None))
