"""Three authorities: observers do not judge, the engine reads no claim, the reconciler decides."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import braintrace_receipts
from braintrace_receipts.arrays import array_of, node
from braintrace_receipts.canonical import parse
from braintrace_receipts.engine import before, derive_step
from braintrace_receipts.record import Record
from braintrace_receipts.rederivation import MADE
from braintrace_receipts.schema import with_arrays
from golden import GOLDEN_CELLS, generate

FOLDER = Path(braintrace_receipts.__file__).parent
MODULES = {path.stem: ast.parse(path.read_text('utf-8')) for path in FOLDER.glob('*.py')}
PURE = {'bounds', 'cells', 'engine', 'equations', 'losses', 'optimizers', 'primitives'}
PURE |= {'surrogates'}
RULES = {'claims', 'rederivation', 'run_rules', 'step_rules', 'update_rules'}
JUDGES = RULES | {'checks', 'reconciler', 'rules', 'structure'}
IO = {'io', 'os', 'pathlib', 'socket', 'subprocess', 'sys', 'urllib', 'zipfile', 'tempfile'}


def imported(name):
    """The modules that a module imports: of the verifier, and of others."""
    own, others = set(), set()
    for one in ast.walk(MODULES[name]):
        if isinstance(one, ast.Import):
            others |= {alias.name.split('.')[0] for alias in one.names}
        elif isinstance(one, ast.ImportFrom) and not one.level:
            others.add(one.module.split('.')[0])
        elif isinstance(one, ast.ImportFrom):
            own |= {one.module} if one.module else {alias.name for alias in one.names}
    return own & set(MODULES), others


def reached(name):
    """The modules of the verifier that a module imports, also by way of others."""
    found, rest = set(), [name]
    while rest:
        new, _ = imported(rest.pop())
        rest += new - found
        found |= new
    return found


@pytest.mark.parametrize('name', sorted(PURE | JUDGES | {'record', 'derivation'}))
def test_who_decides_touches_no_file_and_no_stream(name):
    assert not imported(name)[1] & IO
    nodes = [node for node in ast.walk(MODULES[name]) if isinstance(node, ast.Call)]
    calls = {ast.unparse(node.func).split('.')[-1] for node in nodes}
    assert not calls & {'open', 'print', 'read_bytes', 'write_bytes', 'getenv', 'input'}


def test_the_engine_knows_no_rule_and_no_verdict():
    for name in PURE:
        assert not reached(name) & JUDGES, name
    for name in JUDGES:
        assert not reached(name) & {'command', 'printing', 'files'}, name


# the engine reads what is before the step -----------------------------------------------------

GIVEN = ('inputs', 'targets', 'params_before/', 'carry_before/', 'traces_before/', 'loss/mask')


@cache
def second(cell):
    return generate(cell, 2).splitlines()[1]


@pytest.mark.parametrize('cell', GOLDEN_CELLS)
def test_the_engine_has_no_claim_to_read(cell):
    given = set(before(Record(parse(second(cell)))).fields)
    others = {path for path in given if not path.startswith((*GIVEN, 'optimizer/state_before/'))}
    assert given and not others


@pytest.mark.parametrize('cell', GOLDEN_CELLS)
def test_other_claims_make_no_other_step(cell):
    value = parse(second(cell))
    want = derive_step(Record(value)).fields

    def shifted(path, one):
        made = one is not None and path.startswith(MADE)
        return node(np.float32(array_of(one) + 1.0)) if made else one

    value = with_arrays(value, shifted) | {'labels': {'note': 'x'}}
    value['loss']['value'] += 1.0
    found = derive_step(Record(value)).fields
    assert set(found) == set(want)
    for path, num in want.items():
        assert (num is None) == (found[path] is None)
        assert num is None or np.array_equal(num.value, found[path].value), path
