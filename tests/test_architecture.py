"""The house: every import arrow points down, no circle, and no door but the front door; and inside
a file no assert, no override, no sentence that is data. Sources are read, not imported.
"""

import ast
import graphlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.sources import (
    FRONT,
    LAZY,
    MODULES,
    PACKAGE,
    SOURCES,
    VERIFIER,
    Finding,
    Function,
    Source,
    assigned,
    body,
    dotted,
    exports,
    floor_of,
    found_by,
    module_of,
    type_checking_lines,
)

# A floor and the floors that it may import, and no others. A new top-level module adds its row.
GROUND = {'errors', '_tables', '_signatures', '_public_names', '_warnings', '_jax'}
CORE = {*GROUND, '_etrace_op', '_compiler', '_executor', '_rules', '_report', '_windows'}
PUBLIC = {'', 'errors', 'functional', 'rules', '_public_names', '_signatures'}
ARROWS: dict[str, set[str]] = {
    '_version': set(),
    'errors': {'_public_names'},
    '_signatures': {'errors', '_public_names'},
    '_tables': set(),
    '_public_names': set(),
    '_warnings': {'errors'},
    '_jax': {'errors'},
    '_brainstate': {'_jax'},
    '_etrace_op': {'errors', '_jax', '_signatures'},
    'nn': {'errors', '_etrace_op', '_signatures', '_brainstate', '_public_names'},
    '_compiler': {'errors', '_jax', '_etrace_op', '_signatures'},
    '_executor': {'errors', '_jax', '_etrace_op', '_compiler'},
    '_rules': {'errors', '_jax', '_etrace_op', '_compiler', '_executor'},
    'rules': {'errors', '_rules', '_signatures', '_public_names', 'extra._wide'},
    '_report': CORE - {'_report', '_windows'},
    '_windows': CORE - {'_windows'},
    # Beside the core: what a floor above imports, by name, where it is asked for.
    'extra': set(),
    'extra.observed': CORE,
    'extra.sharding': CORE,
    'extra._wide': CORE,
    'extra._sparse_cpu': {'_etrace_op'},
    'extra._unshard': {'errors', '_jax', '_compiler'},
    'extra._filter': {'errors', '_jax', '_compiler', '_rules'},
    'extra._own_diagonal': {'errors', '_compiler', '_rules'},
    'extra.saving': CORE | {'_version'},
    'extra.files': CORE | {'extra.saving'},
    'extra.chunks': CORE | {'extra.saving'},
    'extra.edge': CORE | {'_version', 'extra.saving'},
    'functional': CORE
    | {'extra.observed', 'extra.sharding', 'extra.saving', 'extra.files'}
    | {'extra.chunks', 'extra.edge', 'rules'},
    '_learner': CORE | {'functional', 'rules', '_brainstate', 'extra.saving'},
    'adapters': {'errors', '_warnings', '_etrace_op', '_learner', 'functional', 'nn'}
    | {'_public_names'},
    'tasks': {'errors', '_jax', '_public_names', '_signatures', '_warnings', '_compiler'}
    | {'_brainstate', '_rules', '_windows', '_learner', 'functional'},
    'compat': {'', 'errors', '_brainstate', '_public_names', '_etrace_op', '_compiler', '_rules'}
    | {'_windows', '_learner', 'nn', 'rules'},
    'verify': PUBLIC | {'_tables', '_jax'},
    'kit': PUBLIC | {'verify', '_etrace_op', '_version'},
    'receipts': PUBLIC | {'errors', '_tables', 'verify'},
    '': CORE
    | {'_version', 'functional', 'rules', 'verify', 'extra._filter', 'extra._own_diagonal'}
    | {'extra._sparse_cpu', 'extra._unshard'},
}
# Files and folders of a floor from the lowest to the highest; those that are not named are above.
OF_COMPILER = 'primitives policy equations program stacked_states kinds graph analysis analyse'
ROOMS = {'_compiler': OF_COMPILER.split()}

RUNTIME = {'jax', 'jaxlib', 'brainstate', 'saiunit', 'numpy'}
BRAINSTATE = {'nn', '_learner', 'tasks', 'compat'}
# The package's names on first use, brainstate with its settings, a user's module by its name.
IMPORTERS = {'__init__.py', '_brainstate.py', 'kit/__main__.py'}
INTERNALS = ('jax._src', 'jax.core', 'jax.extend', 'jax.interpreters')
# modules that only those import who have the host
PLUGINS = {'kit/pytest_plugin.py': {'pytest'}, 'adapters/river.py': {'river'}}
DISTRIBUTIONS = {'receipts': {'braintrace_receipts'}}  # a floor that an extra installs


def target_floor(name: str) -> str:
    """The floor that ``braintrace.x.y`` is on; a name that the package has at once: ``''``."""
    first = floor_of(name.split('.')[1:])
    return first if first in ARROWS else LAZY.get(first, '')


def check_arrows(source: Source) -> Iterator[Finding]:
    """Imports in functions and for type checkers count too: they hide an arrow, not remove it."""
    below = ARROWS.get(source.floor, set())
    for line, name in own_imports(source):
        target = target_floor(name)
        if target != source.floor and target not in below:
            allowed = ', '.join(sorted(below - {''})) or 'nothing of the package'
            told = f'{source.floor or "__init__.py"} imports {name}; it may import {allowed}. '
            yield line, told + 'Move the code down, or pass the value in'


def own_imports(source: Source) -> list[Finding]:
    """Imports of the package. Its ``__init__`` shows type checkers the names that it imports on
    first use: those are left out.
    """
    shown = type_checking_lines(source.tree) if source.floor == '' else set()
    return [
        (line, name)
        for line, name in source.own_imports()
        if not (line in shown and name.split('.')[-1] in LAZY)
    ]


def check_rooms(source: Source) -> Iterator[Finding]:
    order = ROOMS.get(source.floor, [])
    room = room_of(source.module)
    for line, name in source.own_imports():
        module = module_of(name) or ''
        if order and module.split('.')[1:2] == [source.floor] and room_of(module) != room:
            if height(order, room_of(module)) >= height(order, room):
                lower = ', '.join(order[: height(order, room)]) or 'nothing of its floor'
                yield line, f'{room} imports {name}; it may import {lower}'


def room_of(module: str) -> str:
    """``program`` of ``braintrace._compiler.program.flatten``."""
    return (module.split('.') + ['', ''])[2] or '__init__'


def height(order: list[str], room: str) -> int:
    """Files that no row names are above, the floor's ``__init__`` above those."""
    return order.index(room) if room in order else len(order) + (room == '__init__')


def check_doors(source: Source) -> Iterator[Finding]:
    """From another floor only names that its ``__init__`` offers, never one of its modules. `nn`
    keeps two cells that `compat` alone offers.
    """
    for line, name in source.uses():
        if source.floor == 'compat' and name.startswith('braintrace.nn._mini.'):
            continue
        first = floor_of(name.split('.')[1:])
        rest = name.split('.')[2 + first.count('.') :]
        floor = f'braintrace.{first}' if first in ARROWS else 'braintrace'
        asked = rest if first in ARROWS else [first]
        if target_floor(name) == source.floor or asked in ([], ['__all__']):
            continue
        if len(asked) > 1 or asked[0] not in exports(floor):
            told = f'{name} is behind the door of {floor}; import what its __init__ offers'
            yield line, f'{told}, or let it offer the name'


def check_offers(source: Source) -> Iterator[Finding]:
    """An ``__init__`` offers names, and no module of its floor: that would be a door again."""
    if source.floor and source.path.endswith('/__init__.py'):
        for line, name in source.own_imports():
            if name in MODULES and name.split('.')[1] == source.floor:
                yield line, f'{name} is a module; offer the names that others need'


def check_import_calls(source: Source) -> Iterator[Finding]:
    """A call that imports is an arrow that no rule here sees."""
    if source.path not in IMPORTERS:
        for line, name in source.calls():
            if name.split('.')[-1] in {'import_module', '__import__'}:
                yield line, f'{name} hides an import; write an import statement'


def check_internals(source: Source) -> Iterator[Finding]:
    if source.floor == '_jax':
        return
    used = {*source.imports(), *source.attributes()}
    told = 'is internal to JAX; add what is needed to braintrace/_jax/, with a contract test'
    for line, name in sorted(used):
        if any(name == door or name.startswith(f'{door}.') for door in INTERNALS):
            yield line, f'{name} {told}'


def check_brainstate(source: Source) -> Iterator[Finding]:
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


def check_third_party(source: Source) -> Iterator[Finding]:
    known = RUNTIME | {'braintrace'} | sys.stdlib_module_names
    known |= PLUGINS.get(source.path, set()) | DISTRIBUTIONS.get(source.floor, set())
    told = 'is not a run-time dependency; import it inside the function that needs it'
    for line, name in source.imports(source.outside_functions()):
        package = name.split('.')[0]
        if package not in known:
            yield line, f'{package} {told}'


def check_verifier(source: Source) -> Iterator[Finding]:
    """Whoever is sent a receipt installs NumPy, and nothing of those who wrote it."""
    told = 'the verifier of receipts has NumPy, the standard library and relative imports'
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            outside = isinstance(node, ast.ImportFrom) and not node.level
            names = [node.module] if outside else []
        for name in names:
            if name.split('.')[0] not in {'numpy', *sys.stdlib_module_names}:
                yield node.lineno, f'{name}: {told}'


# -- inside a file --------------------------------------------------------------------------------

Check = Callable[[Source], Iterator[Finding]]
JAXPR_FIELDS = {'eqns', 'invars', 'outvars', 'constvars', 'jaxpr'}
ABOVE_EXECUTOR = {'_rules', '_report', '_windows', 'functional', '_learner', 'nn'}
FROM_COMPILER = {'_compiler', '_executor', '_rules', '_report', '_windows'}


def each(is_wrong: Callable[[ast.AST], bool], told: str, floors: set[str] | None = None) -> Check:
    """A rule that finds such nodes of a source; on some floors, or everywhere."""

    def check(source: Source) -> Iterator[Finding]:
        for node in ast.walk(source.tree):
            if is_wrong(node) and (floors is None or source.floor in floors):
                yield node.lineno, f'{ast.unparse(node)[:60]}: {told}'

    return check


def names_primitive(node: ast.AST) -> bool:
    text = getattr(node, 'value' if isinstance(node, ast.Constant) else 'id', None)
    return isinstance(node, ast.Constant | ast.Name) and str(text).startswith('etp_')


BROAD = {'Exception', 'BaseException'}


def check_excepts(source: Source) -> Iterator[Finding]:
    told = 'name the exception, raise it again, or say on the line why any exception is meant'
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and (not node.type or dotted(node.type) in BROAD):
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            said = '#' in source.text.splitlines()[node.lineno - 1]
            if not node.type or not (raises or said):
                yield node.lineno, told


# -- abstract or final -----------------------------------------------------------------------------

CLASSES: dict[str, list[ast.ClassDef]] = {}
for one in SOURCES:
    for cls in one.classes():
        CLASSES.setdefault(cls.name, []).append(cls)


def check_overrides(source: Source) -> Iterator[Finding]:
    """A method that a base class of the package implements is not defined again; a constructor may
    call its base's, and `compat` is what the public package says that a method is.
    """
    if source.floor == 'compat':
        return
    told = 'is implemented by a base: make the variant a value, or the base abstract'
    own = {cls.name: [cls] for cls in source.classes()}
    for cls in source.classes():
        above = [method for base in bases(cls, CLASSES | own) for method in methods(base)]
        concrete = {method.name for method in above if not is_abstract(method)}
        for method in methods(cls):
            if method.name in concrete and not calls_base_constructor(method):
                yield method.lineno, f'{cls.name}.{method.name} {told}'


def bases(cls: ast.ClassDef, classes: dict[str, list[ast.ClassDef]]) -> list[ast.ClassDef]:
    """The classes of the package above this one, nearest first."""
    found: list[ast.ClassDef] = []
    for base in cls.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base  # Base[T]
        for above in classes.get(dotted(plain).split('.')[-1], []):
            if above is not cls:
                found += [above, *bases(above, classes)]
    return found


def calls_base_constructor(method: Function) -> bool:
    return method.name == '__init__' and 'super().__init__(' in ast.unparse(method)


def methods(cls: ast.ClassDef) -> list[Function]:
    return [node for node in cls.body if isinstance(node, Function)]


def is_abstract(method: Function) -> bool:
    """Nothing but a docstring, ``...``, ``raise NotImplementedError``, or said by a decorator."""
    if any(dotted(mark).endswith('abstractmethod') for mark in method.decorator_list):
        return True
    return all(
        ast.unparse(line).startswith(('...', 'raise NotImplemented')) for line in body(method)
    )


# -- no sentence as data ---------------------------------------------------------------------------

ASKING = {'startswith', 'endswith', 'removeprefix', 'removesuffix', 'find', 'index'}
SPEAKING = {'message', 'text'}


def is_sentence(node: ast.expr) -> bool:
    """A literal that holds a word and a space."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return any(
        isinstance(part, ast.Constant)
        and isinstance(part.value, str)
        and bool(re.search(r'[A-Za-z]{2}.* | .*[A-Za-z]{2}', part.value))
        for part in parts
    )


def named_sentences(source: Source) -> set[str]:
    """Constants of a file that hold one."""
    values = assigned(source.tree).items()
    return {name for name, value in values if name.isupper() and is_sentence(value)}


SENTENCES = set().union(*map(named_sentences, SOURCES))


def check_sentences(source: Source) -> Iterator[Finding]:
    """Sentences are printed; what a program asks is a field of a record."""
    told = 'reads a sentence; give the record a field for what is asked'
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = [node.func.value, *node.args] if node.func.attr in ASKING else []
        else:
            continue
        if any(speaks(part, SENTENCES | named_sentences(source)) for part in asked):
            yield node.lineno, f'`{ast.unparse(node)[:60]}` {told}'


def speaks(node: ast.expr, sentences: set[str]) -> bool:
    """A message, a literal that is a sentence, or the name of one."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(speaks(part, sentences) for part in node.elts)
    if isinstance(node, ast.Attribute):
        return node.attr in SPEAKING | sentences
    return is_sentence(node) or dotted(node) in sentences


# -- the rules -------------------------------------------------------------------------------------

RULES: dict[str, Check] = {
    'every import arrow points down': check_arrows,
    'the rooms of a floor stand one above the other': check_rooms,
    'another floor is entered by its front door': check_doors,
    'a floor offers names and no modules': check_offers,
    'an import is a statement': check_import_calls,
    'only _jax/ opens the door to the internals of JAX': check_internals,
    'only some floors know brainstate': check_brainstate,
    'module-level imports are run-time dependencies': check_third_party,
}
HABITS: dict[str, Check] = {
    'no assert statements': each(
        lambda node: isinstance(node, ast.Assert),
        'assert vanishes under `python -O`; raise an error of braintrace/errors.py',
    ),
    'no id() of an object': each(
        lambda node: isinstance(node, ast.Name) and node.id == 'id',
        'id() names an object only while it lives, and the next one may get its number: use the '
        'object itself as a key, or count',
    ),
    'no broad except': check_excepts,
    'what is above the executor never reads a jaxpr': each(
        lambda node: isinstance(node, ast.Attribute) and node.attr in JAXPR_FIELDS,
        'reads a jaxpr; the floors below do, and hand over factors',
        ABOVE_EXECUTOR,
    ),
    'the compiler and what is above it name no primitive': each(
        names_primitive,
        'names a primitive; ask the rule registry for the property that matters',
        FROM_COMPILER,
    ),
    'a method is abstract or final': check_overrides,
    'no sentence is data': check_sentences,
}
RULES |= HABITS
OWN_BASE = """
class Base:
    def final(self): return 1
class Middle(Base): pass
class Sub(Middle):
    def final(self): return 2
"""
# For each rule sources that break it.
BROKEN = {
    'every import arrow points down': [
        Source('_rules/x.py', 'from .. import functional'),
        Source('_rules/x.py', 'def f():\n    from .. import functional'),
        Source('_compiler/x.py', 'if TYPE_CHECKING:\n    from .._rules import Rule'),
        Source('verify/x.py', 'if TYPE_CHECKING:\n    from .. import ETraceLearner'),
        Source('__init__.py', 'if TYPE_CHECKING:\n    from ._learner import saving'),
        Source('_report/x.py', 'from braintrace._windows import run_windows'),
        Source('kit/x.py', 'def f():\n    from .. import nn'),
    ],
    'the rooms of a floor stand one above the other': [
        Source('_compiler/program/x.py', 'from ..analysis import labels'),
        Source('_compiler/program/x.py', 'def f():\n    from ..analysis.labels import g'),
        Source('_compiler/policy.py', 'from .program.program import Program'),
    ],
    'another floor is entered by its front door': [
        Source('_executor/x.py', 'from .._compiler.program.program import Program'),
        Source('_learner/x.py', 'from ..functional import _online'),
        Source('_learner/x.py', 'from .. import _jax as jax_\nf = jax_._hidden'),
        Source('kit/x.py', 'from .. import _hidden'),
    ],
    'a floor offers names and no modules': [
        Source('_compiler/__init__.py', 'from .program import dataflow as flow')
    ],
    'an import is a statement': [
        Source('_rules/x.py', "def f():\n    return importlib.import_module('braintrace.nn')")
    ],
    'only _jax/ opens the door to the internals of JAX': [
        Source('_compiler/x.py', 'import jax\nf = jax.core.Jaxpr')
    ],
    'only some floors know brainstate': [
        Source('functional.py', 'import brainstate'),
        Source('nn/__init__.py', 'from ._base import f\nfrom .. import _brainstate'),
    ],
    'module-level imports are run-time dependencies': [
        Source('_learner/x.py', 'if True:\n    import optax')
    ],
    'no assert statements': [Source('_rules/x.py', 'def f(x):\n    assert x')],
    'no id() of an object': [
        Source('_rules/x.py', 'known = {id(x): x}'),
        Source('receipts/x.py', 'keys = tuple(map(id, xs))'),
    ],
    'no broad except': [
        Source('_rules/x.py', 'try:\n    pass\nexcept:\n    raise'),
        Source('_rules/x.py', 'try:\n    pass\nexcept Exception:\n    pass'),
    ],
    'what is above the executor never reads a jaxpr': [
        Source('_rules/x.py', 'def f(g):\n    return g.jaxpr.eqns')
    ],
    'the compiler and what is above it name no primitive': [
        Source('_compiler/x.py', "special = {'etp_mm'}"),
        Source('_report/x.py', 'special = etp_mm_p'),
    ],
    'a method is abstract or final': [
        Source('_rules/x.py', OWN_BASE),
        Source('nn/x.py', 'class C(_base.GatedCell[int]):\n    def update(self, x): return x'),
    ],
    'no sentence is data': [
        Source('_report/x.py', "if note.text.startswith('its'): pass"),
        Source('_report/x.py', "if 'its' in found.message: pass"),
        Source('_report/x.py', "if reason == 'its use in tanh': pass"),
        Source('verify/x.py', "if kind in ('cut', 'no trace'): pass"),
        Source('verify/x.py', "if words.startswith('its use in '): pass"),
        Source('verify/x.py', f'if words == reasons.{min(SENTENCES, default="NONE")}: pass'),
    ],
}


@pytest.mark.tier(quick=3)
@pytest.mark.parametrize('rule', RULES)
def test_the_package_keeps_the_rule(rule):
    found = found_by(RULES[rule]) + (found_by(RULES[rule], VERIFIER) if rule in HABITS else [])
    assert not found, f'{rule}:\n' + '\n'.join(found)


def test_the_verifier_of_receipts_imports_numpy_and_the_standard_library_alone():
    assert not found_by(check_verifier, VERIFIER)
    wrong = ('import jax', 'from braintrace import verify', 'def f():\n    import scipy.linalg')
    for text in wrong:
        assert list(check_verifier(Source('engine.py', text)))


@pytest.mark.parametrize('rule', RULES)
def test_a_source_that_breaks_the_rule_is_found(rule):
    assert all(list(RULES[rule](source)) for source in BROKEN[rule])


# -- circles ---------------------------------------------------------------------------------------


def circle(sources: Iterable[Source]) -> list[str]:
    """Files that import each other, the last one again the first: what a file imports of the
    package itself is followed to the floor that it comes from.
    """
    modules = {source.module: source for source in sources}
    imports = {
        module: {module_of(name, modules) for _, name in own_imports(source)} & set(modules)
        for module, source in modules.items()
    }
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other():
    assert not circle(SOURCES), 'move what both need into a file below them'


def test_a_circle_is_found_however_it_is_hidden():
    three = [
        Source('_rules/a.py', 'from .b import f'),
        Source('_rules/b.py', 'def g():\n    from . import c'),
        Source('_rules/c.py', 'if TYPE_CHECKING:\n    from .a import h'),
    ]
    other = [Source('_rules/d.py', 'from .a import f'), Source('_rules/e.py', 'from . import d')]
    assert {*circle([*three, *other])} == {f'braintrace._rules.{name}' for name in 'abc'}
    assert not circle([*three[:2], *other])


def test_names_of_the_package_itself_lead_to_their_floor():
    assert module_of('braintrace.errors.OptionError') == 'braintrace.errors'
    assert module_of('braintrace.D_RTRL') == 'braintrace._learner'
    assert module_of('braintrace.functional') == 'braintrace.functional'
    assert module_of('braintrace._rules.Rule') == 'braintrace._rules'
    assert module_of('braintrace._etrace_op.conv') == 'braintrace._etrace_op'
    assert module_of('braintrace._etrace_op.conv.conv') == 'braintrace._etrace_op.conv'
    assert module_of('braintrace._compiler.graph') == 'braintrace._compiler.graph'
    assert module_of('jax.numpy') is None


# -- the table -------------------------------------------------------------------------------------


def test_each_floor_has_a_row_that_says_which_floors_it_may_import():
    floors = {source.floor for source in SOURCES}
    assert set(ARROWS) == floors and set(ROOMS) <= floors
    assert {LAZY[name] for name in LAZY} <= floors and FRONT.floor == ''


def test_the_map_of_the_house_shows_every_floor_and_room():
    house = (PACKAGE.parent / 'CONTRIBUTING.md').read_text(encoding='utf-8')
    folders = [f for f in ARROWS if (PACKAGE / f).is_dir()]
    rooms = [r for floor in ROOMS for r in ROOMS[floor] if (PACKAGE / floor / r).is_dir()]
    missing = [name for name in (*folders, *rooms) if f'{name}/' not in house]
    assert not missing, f'CONTRIBUTING.md does not say what is in {missing}'


def test_the_arrows_have_no_cycle():
    graphlib.TopologicalSorter({f: targets - {''} for f, targets in ARROWS.items()}).prepare()
