"""The docstring of a public callable names its parameters and the errors that its code raises, or
refers to another docstring that does.
"""

import ast
import importlib.util
import inspect
import pkgutil
import re
import sys
import textwrap

import pytest

import braintrace.errors
import braintrace.extra

MODULES = [
    'braintrace',
    'braintrace.functional',
    'braintrace.rules',
    'braintrace.nn',
    'braintrace.nn.surrogate',
    'braintrace.tasks',
    'braintrace.adapters',
    'braintrace.verify',
    'braintrace.kit',
    'braintrace.receipts',
    *(
        f'braintrace.extra.{one.name}'
        for one in pkgutil.iter_modules(braintrace.extra.__path__)
        if not one.name.startswith('_')
    ),
]
LEARNERS = ['braintrace.ETraceLearner', 'braintrace.functional.OnlineLearner']
OF_ITSELF = {'self', 'name'}  # errors and reports show the name; a signature says all of it
REFERENCE = re.compile(r'\b(?:as|for|in|of) :(?:class|func|meth):`~?([\w.]+)`')

ONLINE = 'braintrace.functional.OnlineLearner'


def public() -> dict:
    """The public callables, and the public methods of learners, by their full names."""
    found = {}
    for module in MODULES:
        if module == 'braintrace.receipts' and not importlib.util.find_spec('braintrace_receipts'):
            continue
        members = importlib.import_module(module)
        for name in getattr(members, '__all__', ()):
            if callable(getattr(members, name)):
                found[f'{module}.{name}'] = getattr(members, name)
    for learner in LEARNERS:
        for kind in found[learner].__mro__:
            own = vars(kind) if kind.__module__.startswith('braintrace') else {}
            for name in own.keys() - own.get('__dataclass_fields__', {}).keys():
                if inspect.isfunction(own[name]) and not name.startswith('_'):
                    found.setdefault(f'{learner}.{name}', own[name])
    return found


if compat := sys.modules.get('braintrace.compat'):  # of a test that is collected before
    compat._remove()
PUBLIC = public()
OWNERS = sorted({name.rpartition('.')[0] for name in PUBLIC})  # modules and learners


def parameters(value) -> set[str]:
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    found = inspect.signature(value).parameters.values()
    return {one.name for one in found if one.kind not in variadic} - OF_ITSELF


def functions(value) -> list:
    """The function itself, or those in the body of a class."""
    inside = vars(value).values() if inspect.isclass(value) else [value]
    bare = (getattr(one, '__func__', getattr(one, 'fget', one)) for one in inside)
    return [inspect.unwrap(one) for one in bare if inspect.isfunction(one)]


def raised(value) -> set[str]:
    """The package's errors that the code of a function or class raises by itself."""
    found = set()
    for function in functions(value):
        try:
            source = inspect.getsource(function)
        except OSError:  # dataclasses write some of their methods
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(source))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                found.add(ast.unparse(node.exc.func))
    return found & set(braintrace.errors.__all__)


def prose(name: str, methods: bool) -> str:
    """The docstring of a name, of the class of a method, and with ``methods`` those of a class's
    methods, in one line without the examples.
    """
    value, owner = PUBLIC[name], PUBLIC.get(name.rpartition('.')[0])
    read = [value, owner, *(functions(value) if methods and inspect.isclass(value) else [])]
    lines = '\n'.join(inspect.getdoc(one) or '' for one in read if one is not None).splitlines()
    return ' '.join(line for line in map(str.strip, lines) if not line.startswith(('>>>', '...')))


def unnamed(name: str, wanted: set[str], methods: bool = False, seen=frozenset()) -> set[str]:
    """The words that neither the docstring has nor one that it refers to."""
    text, seen = prose(name, methods), seen | {name}
    wanted = {word for word in wanted if not re.search(rf'\b{word}\b', text)}
    for reference in REFERENCE.findall(text):
        for other in PUBLIC.keys() - seen:
            if f'.{other}'.endswith(f'.{reference}') and wanted:
                wanted = unnamed(other, wanted, methods, seen)
    return wanted


@pytest.mark.parametrize('owner', OWNERS)
def test_docstrings_name_each_parameter_and_the_errors_that_their_code_raises(owner):
    names = {name for name in PUBLIC if name.rpartition('.')[0] == owner}
    assert all(inspect.getdoc(PUBLIC[name]) for name in names)
    asked = {name: unnamed(name, parameters(PUBLIC[name])) for name in names}
    errors = {name: unnamed(name, raised(PUBLIC[name]), methods=True) for name in names}
    missing = {name: asked[name] | errors[name] for name in names}
    assert not {name: words for name, words in missing.items() if words}, 'name them'
