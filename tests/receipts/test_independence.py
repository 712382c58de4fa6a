"""Three authorities: observers do not judge, the engine reads no claim, the reconciler decides."""

from __future__ import annotations

import ast
import sys
from functools import cache

import numpy as np
import pytest

from braintrace.receipts.verifier.arrays import array_of, node
from braintrace.receipts.verifier.canonical import parse
from braintrace.receipts.verifier.engine import derive_step
from braintrace.receipts.verifier.golden import GOLDEN_CELLS, generate
from braintrace.receipts.verifier.reconciler import VERDICTS
from braintrace.receipts.verifier.record import Record
from tests.sources import SOURCES

VERIFIER = [one for one in SOURCES if one.path.startswith('receipts/verifier/')]
OBSERVERS = [
    one
    for one in SOURCES
    if one.path.startswith('receipts/') and one not in VERIFIER
    if not one.path.endswith(('__.py', '_audit.py'))  # an audit compares
]
PURE = {'bounds', 'cells', 'engine', 'losses', 'optimizers', 'primitives', 'surrogates'}
RULES = {'claims', 'loss_rules', 'rederivation', 'run_rules', 'step_rules', 'update_rules'}
IO = {'io', 'os', 'pathlib', 'socket', 'subprocess', 'sys', 'urllib', 'zipfile', 'tempfile'}


def name_of(source):
    return source.path.split('/')[-1].removesuffix('.py')


@pytest.mark.parametrize('source', VERIFIER, ids=name_of)
def test_the_verifier_needs_numpy_and_nothing_else(source):
    for one in ast.walk(source.tree):
        if isinstance(one, ast.ImportFrom) and one.level:
            assert one.level == 1 or source.path.count('/') > 2, ast.unparse(one)
        elif isinstance(one, ast.Import | ast.ImportFrom):
            names = [one.module] if isinstance(one, ast.ImportFrom) else [n.name for n in one.names]
            for name in names:
                assert name.split('.')[0] in {*sys.stdlib_module_names, 'numpy'}, name


@pytest.mark.parametrize('source', OBSERVERS, ids=lambda one: one.path.removeprefix('receipts/'))
def test_an_observer_has_no_word_for_a_verdict(source):
    """Its names and strings; a docstring may say who judges."""
    docs = {
        id(one.body[0].value)
        for one in ast.walk(source.tree)
        if isinstance(one, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(one)
    }
    strings = [
        one.value
        for one in ast.walk(source.tree)
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in docs
    ]
    assert not set(strings) & {*VERDICTS, 'verdict', 'ok'}
    if '/extract/' in source.path:
        assert not [name for _, name in source.imports() if name.startswith('braintrace')]


def imports_of(source):
    return {name.split('.')[0] for _, name in source.imports()}


@pytest.mark.parametrize('source', VERIFIER, ids=name_of)
def test_who_decides_touches_no_file_and_no_stream(source):
    name = name_of(source)
    if name in PURE | RULES | {
        'checks',
        'reconciler',
        'record',
        'structure',
        'derivation',
        'rules',
    }:
        assert not imports_of(source) & IO
        calls = {called.split('.')[-1] for _, called in source.calls()}
        assert not calls & {'open', 'print', 'read_bytes', 'write_bytes', 'getenv', 'input'}


def reached(name, modules):
    """The modules of the verifier that a module imports, also by way of others."""
    found, rest = set(), [name]
    while rest:
        source = modules[rest.pop()]
        for one in ast.walk(source.tree):
            if isinstance(one, ast.ImportFrom) and one.level == 1:
                new = {one.module} if one.module else {alias.name for alias in one.names}
                rest += (new & set(modules)) - found
                found |= new & set(modules)
    return found


def test_the_engine_knows_no_rule_and_no_verdict():
    modules = {name_of(one): one for one in VERIFIER if one.path.count('/') == 2}
    for name in PURE:
        above = reached(name, modules) & (RULES | {'checks', 'reconciler', 'rules', 'structure'})
        assert not above, f'{name} imports {above}'
    judges = RULES | {'checks', 'reconciler', 'structure', 'rules'}
    for name in judges:
        assert not reached(name, modules) & {'command', 'printing', 'files', 'sidecar', 'golden'}


# the engine reads what stands before the step -----------------------------------------------------

GIVEN = ('inputs', 'targets', 'params_before/', 'carry_before/', 'traces_before/', 'loss/mask')


class Watched(Record):
    """A record that remembers what was read of it, and has no claim to be read."""

    def __init__(self, raw, read):
        super().__init__(raw)
        self.read = read

    def __getitem__(self, path):
        self.read.add(path)
        return super().__getitem__(path)


@cache
def second(cell):
    return generate(cell, 2).splitlines()[1]


@pytest.mark.parametrize('cell', GOLDEN_CELLS)
def test_the_engine_reads_no_claim(cell):
    read = set()
    derive_step(Watched(parse(second(cell)), read))
    others = {
        path
        for path in read
        if not path.startswith(GIVEN) and not path.startswith('optimizer/state_before/')
    }
    assert read and not others


@pytest.mark.parametrize('cell', GOLDEN_CELLS)
def test_other_claims_make_no_other_step(cell):
    value = parse(second(cell))
    want = derive_step(Record(value)).fields
    for name in ('carry_after', 'gradients', 'params_after'):
        value[name] = {path: shifted(one) for path, one in value[name].items()}
    for name in ('outputs',):
        value[name] = shifted(value[name])
    for factor in value['factors']:
        factor['x'] = shifted(factor['x'])
    value['signals']['err'] = shifted(value['signals']['err'])
    value['loss']['value'] += 1.0
    value['labels'] = {'note': 'x'}
    found = derive_step(Record(value)).fields
    assert set(found) == set(want)
    for path, num in want.items():
        assert (num is None) == (found[path] is None)
        assert num is None or np.array_equal(num.value, found[path].value), path


def shifted(value):
    return node(np.asarray(array_of(value) + 1.0, np.float32))
