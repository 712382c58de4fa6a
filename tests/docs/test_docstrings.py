"""The docstring of a public callable names each parameter, or refers to one that does."""

import importlib
import inspect
import pkgutil
import re

import pytest

import braintrace
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
    *(f'braintrace.extra.{found.name}' for found in pkgutil.iter_modules(braintrace.extra.__path__)),
]
LEARNERS = ['braintrace.ETraceLearner', 'braintrace.functional.OnlineLearner']
UNNAMED = {'self', 'cls', 'name'}  # `name` is the same everywhere: it is what errors and reports say
REFERENCE = re.compile(r'\b(?:as|as for|as in|as of|of|as those of) :(?:class|func|meth):`~?([\w.]+)`')
EXEMPT = set()


def public() -> dict:
    """Each public callable by its full name, and the public methods of learners."""
    found = {}
    for module in MODULES:
        try:
            members = importlib.import_module(module)
        except ImportError:
            if module != 'braintrace.receipts':
                raise
            continue
        for name in getattr(members, '__all__', ()):
            value = getattr(members, name)
            if callable(value) and not inspect.ismodule(value):
                found[f'{module}.{name}'] = value
    for learner in LEARNERS:
        for kind in found[learner].__mro__:
            if kind.__module__.startswith('braintrace'):
                for name, value in vars(kind).items():
                    if inspect.isfunction(value) and not name.startswith('_'):
                        found.setdefault(f'{learner}.{name}', value)
    return found


PUBLIC = public()


def parameters(value) -> set[str]:
    try:
        shown = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return set()
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {
        item.name for item in shown if item.kind not in variadic and not item.name.startswith('_')
    } - UNNAMED


def prose(name: str) -> str:
    """The docstring of a name, of its class where it is a method, without the examples."""
    value = PUBLIC[name]
    texts = [inspect.getdoc(value) or '']
    if inspect.isclass(value):
        texts.append(inspect.getdoc(value.__init__) or '')
    owner = PUBLIC.get(name.rpartition('.')[0])
    if inspect.isclass(owner):
        texts.append(inspect.getdoc(owner) or '')
    lines = '\n'.join(texts).splitlines()
    return ' '.join(line.strip() for line in lines if not line.lstrip().startswith(('>>>', '...')))


def unnamed(name: str, seen: frozenset = frozenset()) -> set[str]:
    """Parameters that neither the docstring names nor one that it refers to."""
    text = prose(name)
    left = {item for item in parameters(PUBLIC[name]) if not re.search(rf'\b{item}\b', text)}
    return left - named_by_others(text, left, seen | {name})


def named_by_others(text: str, wanted: set[str], seen: frozenset) -> set[str]:
    found = set()
    for reference in REFERENCE.findall(text):
        others = {other for other in PUBLIC if other == reference or other.endswith('.' + reference)}
        for other in others - seen:
            beyond = prose(other)
            found |= {item for item in wanted if re.search(rf'\b{item}\b', beyond)}
            found |= named_by_others(beyond, wanted - found, seen | others)
    return found


@pytest.mark.parametrize('name', sorted(PUBLIC.keys() - EXEMPT))
def test_a_docstring_names_each_parameter(name):
    assert not unnamed(name), f'{name}: the docstring says nothing of {sorted(unnamed(name))}'
