"""The docstring of every public name has an example; pytest's doctests run them all."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

CONF = Path(__file__).resolve().parents[2] / 'docs' / 'conf.py'
VALUES = {  # without a docstring of their own
    'braintrace.kit.LAWS',
    'braintrace_receipts.RULES',
    'braintrace.tasks.PARTS',
}


def modules() -> list[str]:
    """The public modules, as the site's settings name them."""
    tree = ast.parse(CONF.read_text(encoding='utf-8'))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == 'MODULES'
    )
    return list(names)


@pytest.mark.parametrize('module', [*modules(), 'braintrace.nn.surrogate'])
def test_every_public_name_has_an_example(module):
    found = importlib.import_module(module)
    without = {
        f'{module}.{name}'
        for name in found.__all__
        if '>>> ' not in (inspect.getdoc(getattr(found, name)) or '')
    }
    assert without == {name for name in VALUES if name.rpartition('.')[0] == module}
