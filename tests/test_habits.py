"""Inside a file: no assert, no override, no sentence that is data, and the like.

``tests/test_architecture.py`` has the rules for imports. Sources are read, not imported.
"""

import ast
import re
from collections.abc import Callable, Iterator

import pytest

from tests.sources import (
    SOURCES,
    VERIFIER,
    Finding,
    Function,
    Source,
    assigned,
    body,
    dotted,
    found_by,
)

JAXPR_FIELDS = {'eqns', 'invars', 'outvars', 'constvars', 'jaxpr'}


def check_asserts(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert):
            yield (
                node.lineno,
                'assert vanishes under `python -O`; raise an error of braintrace/errors.py',
            )


def check_identities(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and node.id == 'id':
            yield (
                node.lineno,
                'id() names an object only while it lives, and the next one may get its number: '
                'use the object itself as a key, or count',
            )


BROAD = {'Exception', 'BaseException'}


def check_excepts(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and (not node.type or dotted(node.type) in BROAD):
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            said = '#' in source.text.splitlines()[node.lineno - 1]
            if not node.type or not (raises or said):
                yield (
                    node.lineno,
                    'a broad except hides faults; name the exception, raise it again, or say on '
                    'the line why any exception is meant',
                )


def check_jaxpr_readers(source: Source) -> Iterator[Finding]:
    if source.floor in {'_rules', '_report', '_windows', 'functional', '_learner', 'nn'}:
        for line, name in fields(source):
            if name in JAXPR_FIELDS:
                yield line, f'.{name} reads a jaxpr; the floors below do, and hand over factors'


def fields(source: Source) -> Iterator[Finding]:
    nodes = (node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute))
    return ((node.lineno, node.attr) for node in nodes)


def check_named_primitives(source: Source) -> Iterator[Finding]:
    if source.floor not in {'_compiler', '_executor', '_rules', '_report', '_windows'}:
        return
    for node in ast.walk(source.tree):
        text = getattr(node, 'value' if isinstance(node, ast.Constant) else 'id', None)
        if isinstance(node, ast.Constant | ast.Name) and str(text).startswith('etp_'):
            yield (
                node.lineno,
                f'{text!r} names a primitive; ask the rule registry for the property that matters',
            )


def check_module_docstring(source: Source) -> Iterator[Finding]:
    if not ast.get_docstring(source.tree):
        yield 1, 'the module has no docstring; say in one sentence what it holds'


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
    own = {cls.name: [cls] for cls in source.classes()}
    for cls in source.classes():
        above = [method for base in bases(cls, CLASSES | own) for method in methods(base)]
        concrete = {method.name for method in above if not is_abstract(method)}
        for method in methods(cls):
            if method.name in concrete and not calls_base_constructor(method):
                yield (
                    method.lineno,
                    f'{cls.name}.{method.name} overrides what a base implements; a method is '
                    'abstract or final: make the variant a value, or the base abstract',
                )


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
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = [node.func.value, *node.args] if node.func.attr in ASKING else []
        else:
            continue
        if any(speaks(part, SENTENCES | named_sentences(source)) for part in asked):
            yield (
                node.lineno,
                f'`{ast.unparse(node)[:60]}` reads a sentence; give the record a field for what is '
                'asked, and make the sentence where it is printed',
            )


def speaks(node: ast.expr, sentences: set[str]) -> bool:
    """A message, a literal that is a sentence, or the name of one."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(speaks(part, sentences) for part in node.elts)
    if isinstance(node, ast.Attribute):
        return node.attr in SPEAKING | sentences
    return is_sentence(node) or dotted(node) in sentences


# -- the table -------------------------------------------------------------------------------------

Check = Callable[[Source], Iterator[Finding]]
RULES: dict[str, Check] = {
    'no assert statements': check_asserts,
    'no id() of an object': check_identities,
    'no broad except': check_excepts,
    'what stands above the executor never reads a jaxpr': check_jaxpr_readers,
    'the compiler and what stands above it name no primitive': check_named_primitives,
    'every module has a docstring': check_module_docstring,
    'a method is abstract or final': check_overrides,
    'no sentence is data': check_sentences,
}
OWN_BASE = """
class Base:
    def abstract(self):
        \"\"\"What it is.\"\"\"
    def stated(self): raise NotImplementedError
    def dots(self): ...
    @abc.abstractmethod
    def marked(self): return 1
    def final(self): return 1
class Middle(Base): pass
class Sub(Middle):
    value: int = 1
    def __init__(self): super().__init__()
    def {name}(self): return 2
"""
# For each rule sources that break it.
BROKEN = {
    'no assert statements': [Source('_rules/x.py', 'def f(x):\n    assert x')],
    'no id() of an object': [
        Source('_rules/x.py', 'known = {id(x): x}'),
        Source('receipts/x.py', 'keys = tuple(map(id, xs))'),
    ],
    'no broad except': [
        Source('_rules/x.py', 'try:\n    pass\nexcept:\n    raise'),
        Source('_rules/x.py', 'try:\n    pass\nexcept Exception:\n    pass'),
    ],
    'what stands above the executor never reads a jaxpr': [
        Source('_rules/x.py', 'def f(g):\n    return g.jaxpr.eqns')
    ],
    'the compiler and what stands above it name no primitive': [
        Source('_compiler/x.py', "special = {'etp_mm'}"),
        Source('_report/x.py', 'special = etp_mm_p'),
    ],
    'every module has a docstring': [Source('_rules/x.py', 'x = 1')],
    'a method is abstract or final': [
        Source('_rules/x.py', OWN_BASE.format(name='final')),
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
KEPT = {
    'no broad except': [
        Source('_rules/x.py', 'try:\n    pass\nexcept ValueError:\n    pass'),
        Source('_rules/x.py', 'try:\n    pass\nexcept Exception as e:\n    raise f(e) from e'),
    ],
    'a method is abstract or final': [
        Source('_rules/x.py', OWN_BASE.format(name=name))
        for name in ('abstract', 'stated', 'dots', 'marked', 'other')
    ],
    'no sentence is data': [
        Source('_report/x.py', "if note.kind == 'cut' and name.startswith('etp'): pass"),
        Source('_report/x.py', "print(f'{note.text} is left out'); x = ' '.join(names)"),
    ],
}


@pytest.mark.parametrize('rule', RULES)
def test_the_package_keeps_the_rule(rule):
    found = found_by(RULES[rule]) + found_by(RULES[rule], VERIFIER)
    assert not found, f'{rule}:\n' + '\n'.join(found)


@pytest.mark.parametrize('rule', RULES)
def test_a_source_that_breaks_the_rule_is_found(rule):
    unseen = [source for source in BROKEN[rule] if not list(RULES[rule](source))]
    assert not unseen


@pytest.mark.parametrize('rule', KEPT)
def test_a_source_that_keeps_the_rule_passes(rule):
    assert not [found for source in KEPT[rule] for found in RULES[rule](source)]
